"""The lines of a batch: those of its file, and those of its answers and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qbe.server.bodies import check_size
from qbe.server.errors import APIError

MOST_ERRORS = 100  # of a file, that are told
_ID_CHARACTERS = 512


@dataclass(frozen=True)
class Line:
    """A request of a file.

    Attributes:
        number: of the line, from 1.
    """

    number: int
    custom_id: str
    body: dict[str, Any]


@dataclass
class Written:
    """What a batch has come to so far.

    Attributes:
        done: `custom_id` of what was answered or has failed.
        usage: tokens of the answers.
    """

    done: set[str] = field(default_factory=set)
    completed: int = 0
    failed: int = 0
    usage: dict[str, int] = field(default_factory=dict)

    def add(self, custom_id: str, body: dict[str, Any] | None) -> None:
        """One more; `body` of an answer, None of an error."""
        self.done.add(custom_id)
        if body is None:
            self.failed += 1
            return
        self.completed += 1
        for name, count in tokens_of(body.get("usage") or {}).items():
            self.usage[name] = self.usage.get(name, 0) + count


def lines(path: Path, endpoint: str, most_bytes: int) -> Iterator[Line | dict[str, Any]]:
    """The requests of a file; for a line that is none, what is wrong with it, as OpenAI tells it.

    Args:
        endpoint: where all of them must go.
        most_bytes: of a line.
    """
    seen: set[str] = set()
    with open(path, "rb") as file:
        number = 0
        while raw := file.readline(most_bytes + 1):
            number += 1
            if len(raw) > most_bytes:
                yield _wrong(number, "line_too_long", f"it has more than {most_bytes} bytes")
                return
            if not raw.strip():
                continue
            try:
                line = _line(number, raw, endpoint)
                if line.custom_id in seen:
                    raise _Wrong("duplicate_custom_id", "custom_id: another line has it", "custom_id")
            except _Wrong as error:
                yield _wrong(number, *error.args)
                continue
            seen.add(line.custom_id)
            yield line


class _Wrong(Exception):
    """Code, message, field."""


def _line(number: int, raw: bytes, endpoint: str) -> Line:
    try:
        check_size(raw)
        parsed = json.loads(raw)
    except APIError as error:
        raise _Wrong("invalid_json_line", error.message) from None
    except (ValueError, RecursionError) as error:
        raise _Wrong("invalid_json_line", f"it is not JSON: {str(error)[:200]}") from None
    if not isinstance(parsed, dict):
        raise _Wrong("invalid_json_line", "it is no JSON object")
    custom_id, body = parsed.get("custom_id"), parsed.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _ID_CHARACTERS:
        raise _Wrong(
            "missing_required_parameter", f"custom_id: a text of up to {_ID_CHARACTERS} characters", "custom_id"
        )
    if str(parsed.get("method", "POST")).upper() != "POST":
        raise _Wrong("invalid_method", "method: it must be POST", "method")
    if parsed.get("url", endpoint) != endpoint:
        raise _Wrong("invalid_url", f"url: it must be the batch's endpoint, '{endpoint}'", "url")
    if not isinstance(body, dict):
        raise _Wrong("missing_required_parameter", "body: it must be an object", "body")
    return Line(number, custom_id, body)


def _wrong(number: int, code: str, message: str, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "message": f"line {number}: {message}", "line": number, "param": param}


def check(path: Path, endpoint: str, most_lines: int, most_bytes: int) -> tuple[int, list[dict[str, Any]]]:
    """How many requests a file has, and what is wrong with it."""
    count, errors = 0, list[dict[str, Any]]()
    for line in lines(path, endpoint, most_bytes):
        if isinstance(line, Line):
            count += 1
        else:
            errors.append(line)
        if count > most_lines or len(errors) >= MOST_ERRORS:
            break
    if count > most_lines:
        errors.append({"code": "too_many_requests", "message": f"the file has more than {most_lines} requests: send "
                       "several", "line": None, "param": "input_file_id"})  # fmt: skip
    if not count and not errors:
        errors.append({"code": "empty_file", "message": "the file has no requests", "line": None,
                       "param": "input_file_id"})  # fmt: skip
    return count, errors


def written(output: Path, errors: Path) -> Written:
    """What is in the files of a batch that was interrupted; a line that was cut off is removed."""
    so_far = Written()
    for path, good in ((output, True), (errors, False)):
        if not path.exists():
            continue
        with open(path, "r+b") as file:
            end = 0
            for raw in file:
                if not raw.endswith(b"\n"):
                    break
                end += len(raw)
                line = json.loads(raw)
                so_far.add(line["custom_id"], line["response"]["body"] if good else None)
            file.truncate(end)
    return so_far


def tokens_of(usage: dict[str, Any]) -> dict[str, int]:
    """The tokens in any endpoint's usage, as a batch counts them."""
    cached = usage.get("cache_read_input_tokens", 0)  # which Anthropic counts apart
    for details in ("prompt_tokens_details", "input_tokens_details"):
        cached += (usage.get(details) or {}).get("cached_tokens", 0)
    read = usage.get("prompt_tokens", usage.get("input_tokens", 0)) + usage.get("cache_read_input_tokens", 0)
    wrote = usage.get("completion_tokens", usage.get("output_tokens", 0))
    return {"input_tokens": read, "cached_tokens": cached, "output_tokens": wrote, "total_tokens": read + wrote}
