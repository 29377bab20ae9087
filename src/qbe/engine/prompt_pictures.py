"""Pictures in the messages of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from qbe.engine.scheduling.sequence import Sequence as EngineSequence
from qbe.errors import QBEError
from qbe.pictures import Picture
from qbe.pictures.picture import MOST_PICTURES
from qbe.pictures.placed import RotaryPositions, place
from qbe.pictures.tower import PictureTower


def with_pictures(prompt: Any) -> Any:
    """A prompt whose pictures are `Picture`s, in parts `{"type": "image", "image": Picture}` of the user's messages.

    They may be given as such parts, with a path, bytes or an image of Pillow, or as OpenAI's `image_url` with a `data:`
    URI. Anything else is left as it is.

    Raises:
        QBEError: a picture that is none of these, would have to be fetched or is too large; too many; another role.
    """
    if not pictured(prompt):
        return prompt
    found: list[Any] = []
    count = 0
    for message in prompt:
        if not _has_some(message):
            found.append(message)
            continue
        if message.get("role") != "user":
            raise QBEError(
                f"a message of '{message.get('role')}' has a picture: give it in one of the user", field="prompt"
            )
        parts = []
        for part in message["content"]:
            if _is_picture(part):
                count += 1
                if count > MOST_PICTURES:
                    raise QBEError(f"the prompt has more than {MOST_PICTURES} pictures: give fewer", field="prompt")
                part = {"type": "image", "image": _picture(part, f"picture {count}")}
            parts.append(part)
        found.append({**message, "content": parts})
    return found


def read(prompt: Any, tower: PictureTower | str) -> Any:
    """A prompt with pictures, decoded and prepared, so that choosing its blueprint does not wait for that.

    Args:
        tower: of the model; why it has none, in words.

    Raises:
        QBEError: a picture that cannot be read, or a model that reads none.
    """
    if not isinstance(tower, PictureTower):
        raise QBEError(f"{tower}: leave them out", field="prompt")
    prompt = with_pictures(prompt)
    for picture in pictures_of(prompt):
        tower.token_ids(picture)
    return prompt


def place_in(sequence: EngineSequence, prompt: Any, tower: PictureTower | str) -> None:
    """Tell a sequence of its prompt's pictures: where their rows go, and which positions a rotary embedding takes."""
    pictures = pictures_of(prompt)
    if pictures and isinstance(tower, PictureTower):
        sequence.pictures = place(pictures, sequence.prompt_ids, tower)
        positions = tower.positions(sequence.prompt_ids, pictures)
        sequence.mrope = None if positions is None else RotaryPositions.of_prompt(positions)


def pictured(prompt: Any) -> bool:
    """Whether a prompt has pictures."""
    conversation = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
    return conversation and any(map(_has_some, prompt))


def pictures_of(prompt: Any) -> list[Picture]:
    """Those of a prompt, in their order."""
    if not pictured(prompt):
        return []
    return [part["image"] for m in prompt if _has_some(m) for part in m["content"] if _is_picture(part)]


def has_pictures(content: Any) -> bool:
    """Whether a message's content has any."""
    return isinstance(content, list) and any(map(_is_picture, content))


def parts_of(content: Any) -> Iterator[dict[str, Any]]:
    """Content as parts for a chat template: text in a row is one part, and of pictures only their place is left."""
    text = ""
    for part in content if isinstance(content, list) else [{"type": "text", "text": content or ""}]:
        if _is_picture(part):
            if text:
                yield {"type": "text", "text": text}
            yield {"type": "image"}
            text = ""
        else:
            text += part["text"]
    if text:
        yield {"type": "text", "text": text}


def joined(contents: Sequence[Any], between: str) -> Any:
    """Several messages' content as one: text, or parts where any has a picture."""
    if not any(map(has_pictures, contents)):
        return between.join("".join(part["text"] for part in parts_of(c)) for c in contents)
    parts: list[dict[str, Any]] = []
    for content in contents:
        parts += [{"type": "text", "text": between}] * bool(parts)
        parts += parts_of(content)
    return list(parts_of(parts))


def _is_picture(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image", "image_url")


def _has_some(message: Any) -> bool:
    return isinstance(message, dict) and has_pictures(message.get("content"))


def _picture(part: dict[str, Any], name: str) -> Picture:
    if part["type"] == "image":
        return Picture.of(part.get("image"), name)
    given = part.get("image_url")
    uri = given.get("url") if isinstance(given, dict) else given
    if not isinstance(uri, str):
        raise QBEError(f"{name} has no 'url' in its 'image_url': give a data: URI", field="prompt")
    return Picture.of_uri(uri, name)
