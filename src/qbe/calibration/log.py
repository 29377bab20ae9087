"""Logs in OpenAI's form: JSON lines, a request each, with the response beside it where it was kept.

A line is a request itself; or has it in `request` or `body` (OpenAI's batch files), and the response in `response`, or
`choices` at its top. Chat requests have `messages`, completions `prompt`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qbe.errors import QBEError
from qbe.files import reason

UNSTATED = "unstated"  # licence
_NOT_TEXT = frozenset({"image_url", "input_image", "image", "input_audio", "audio", "video_url", "file", "input_file"})


@dataclass(frozen=True)
class Exchange:
    """One request, and what was answered.

    Attributes:
        place: file and line, for messages.
        request: body of a chat request, or of a completion with one prompt.
        answer: the message of a chat, the text of a completion; None where the log has none.
        source: name of the log. licence: as its line says, else as the log.
    """

    place: str
    request: Mapping[str, Any]
    answer: Any
    source: str
    licence: str

    @property
    def only_text(self) -> bool:
        """Whether no message has images, sounds or files in it."""
        contents = (m.get("content") for m in self.request.get("messages") or () if isinstance(m, dict))
        parts = (part for content in contents if isinstance(content, list) for part in content)
        return not any(isinstance(part, dict) and part.get("type") in _NOT_TEXT for part in parts)


def read(path: Path, licence: str | None) -> Iterator[list[Exchange]]:
    """What each line of a log holds: one exchange, or one for each prompt of a completion with several.

    Args:
        licence: of lines that name none.

    Raises:
        QBEError: the file cannot be read, or a line is no request; it names the line.
    """
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                place = f"{path}, line {number}"
                yield _exchanges(_object(line, place), place, path.name, licence) if line.strip() else []
    except OSError as error:
        raise QBEError(f"the log {path} cannot be read: {reason(error)}") from error
    except UnicodeDecodeError as error:
        raise QBEError(f"the log {path} is not valid UTF-8 ({error.reason}); convert it") from None


def count_lines(path: Path) -> int:
    """For a progress bar. Raises QBEError for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b"")) + 1
    except OSError as error:
        raise QBEError(f"the log {path} cannot be read: {reason(error)}") from error


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise QBEError(f"{place}: this is not JSON ({error}); a log has one JSON object a line") from None
    if not isinstance(found, dict):
        raise QBEError(f"{place}: a line is a JSON object, this is none")
    return found


def _exchanges(row: dict[str, Any], place: str, source: str, licence: str | None) -> list[Exchange]:
    request = row.get("request", row.get("body", row))
    if isinstance(request, dict) and isinstance(request.get("body"), dict):
        request = request["body"]
    if not isinstance(request, dict) or not ("messages" in request or "prompt" in request):
        what = "the Responses API's 'input' is not read" if isinstance(request, dict) and "input" in request else (
            "there are neither 'messages' nor a 'prompt'")  # fmt: skip
        raise QBEError(f"{place}: {what}; a log has requests of OpenAI's chat or completions")
    said = row.get("licence") or row.get("license") or licence or UNSTATED
    if not isinstance(said, str):
        raise QBEError(f"{place}: 'licence' is {json.dumps(said)[:40]}; give its name, such as \"MIT\"")
    licence = said
    choices = _choices(row)
    if "messages" in request:
        answer = choices[0].get("message") if choices else None
        return [Exchange(place, request, answer, source, licence)]
    prompts = request["prompt"]
    if isinstance(prompts, str) or not isinstance(prompts, list) or all(isinstance(t, int) for t in prompts):
        prompts = [prompts]
    answers = [choice.get("text") for choice in choices] + [None] * len(prompts)
    each = zip(prompts, answers, strict=False)
    return [Exchange(place, {**request, "prompt": prompt}, answer, source, licence) for prompt, answer in each]


def _choices(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the response; none of an error, or where there is no response."""
    response = row.get("response", row)
    if isinstance(response, str):
        return [{"text": response, "message": {"role": "assistant", "content": response}}]
    if isinstance(response, dict) and isinstance(response.get("body"), dict) and "choices" not in response:
        response = response["body"]
    choices = response.get("choices") if isinstance(response, dict) else None
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
