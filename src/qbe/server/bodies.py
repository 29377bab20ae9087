"""From the bytes of a body to a checked request, at a cost that whoever sends it cannot choose.

A body is bounded before it is parsed: three megabytes of `[{},{},…` are a million objects, and as many errors. The
schemas of `qbe.server.protocol` are bounded, too, and stop at the first wrong item of a list. Large bodies are parsed
in another thread; what is in memory at once is bounded for all clients and for each.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Any

from pydantic import BaseModel, ValidationError

from qbe.server.errors import APIError

MOST_PARTS = 1 << 16  # objects and arrays in a body, and as many members of its objects
MOST_VALUES = 1 << 20  # in all: token ids are many
MOST_STRINGS = 1 << 18
MOST_MEMBERS = 1024  # of one object
HELD_BYTES = 64 << 20  # of bodies in memory that are not parsed yet,
KEY_BYTES = 16 << 20  # and of one client
_INLINE_BYTES = 64 * 1024  # parsed in the event loop: less than the way to another thread takes
_REST = bytes(set(range(256)) - set(b'"[{:,'))  # what does not count
_STRING = re.compile(rb'"[^"]*+"?')
_FORMAT = "response_format"
_TEXTS = ("str", "constrained-str")  # what pydantic calls a text among the forms of a field


class Bodies:
    """Parses bodies and counts what is held of them.

    Args:
        kinds: what the body of each path is.
    """

    def __init__(self, kinds: Mapping[str, type[BaseModel]]) -> None:
        self.kinds = kinds
        self._held: Counter[str] = Counter()
        self._thread = ThreadPoolExecutor(1, "qbe-bodies")  # one after the other, so that they do not add up

    def hold(self, key: str, count: int) -> None:
        """So many more bytes of this client's come into memory; `free` them.

        Raises:
            APIError: there are too many already.
        """
        if self._held[key] + count > KEY_BYTES or self._held.total() + count > HELD_BYTES:
            raise APIError(429, "too many large bodies are being read: send one after the other", code="bodies_full",
                           retry_after=1)  # fmt: skip
        self._held[key] += count

    def free(self, key: str, count: int) -> None:
        """They are gone."""
        self._held[key] -= count
        if not self._held[key]:
            del self._held[key]

    async def parse(self, path: str, content_type: str, raw: bytes) -> BaseModel:
        """A checked body. Raises APIError, which says what is wrong and where."""
        kind = self.kinds[path]
        if not _is_json(content_type):
            raise _not_an_object()
        if len(raw) <= _INLINE_BYTES:
            return parse(kind, raw)
        return await asyncio.get_running_loop().run_in_executor(self._thread, parse, kind, raw)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def checked(kind: type[BaseModel], found: Any) -> BaseModel:
    """A checked body, of JSON that is parsed. Raises APIError."""
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        raise wrong_body(error) from None


def parse(kind: type[BaseModel], raw: bytes) -> BaseModel:
    """A checked body. Raises APIError."""
    check_size(raw)
    try:
        body = json.loads(raw, object_pairs_hook=_object)
    except RecursionError:
        raise APIError(400, "the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:  # also UnicodeDecodeError, and a number with thousands of digits
        raise APIError(400, f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from None
    return checked(kind, body)


def check_size(raw: bytes) -> None:
    """Raises APIError for a body with more parts than are taken. Takes milliseconds for each megabyte."""
    if not _too_many(raw):
        return
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _REST)
    if bare.count(b'"') > 2 * MOST_STRINGS or _too_many(_STRING.sub(b"", bare)):
        raise APIError(400, f"the body has more than {MOST_PARTS} objects, arrays or members, {MOST_STRINGS} texts or "
                       f"{MOST_VALUES} values: send less at once", code="body_too_complex")  # fmt: skip


def _too_many(raw: bytes) -> bool:
    parts = max(raw.count(b"[") + raw.count(b"{"), raw.count(b":"))
    return parts > MOST_PARTS or raw.count(b",") >= MOST_VALUES


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MOST_MEMBERS:
        raise APIError(400, f"an object in the body has {len(pairs)} members, but at most {MOST_MEMBERS} are taken",
                       code="body_too_complex")  # fmt: skip
    return dict(pairs)


def _is_json(content_type: str) -> bool:
    kind, _, sub = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (sub == "json" or sub.endswith("+json"))


def _not_an_object() -> APIError:
    said = "it must be a JSON object, sent with 'Content-Type: application/json'"
    return APIError(400, f"the body is wrong: {said}", code="invalid_json")


def _first(errors: Sequence[Any]) -> Any:
    """The first thing that is wrong; where a field may be a text or a list, and is a list, what is wrong with that."""
    first = errors[0]
    if first["type"] != "string_type" or first["loc"][-1] not in _TEXTS:
        return first
    field = first["loc"][:-1]
    return next((e for e in errors[1:] if e["loc"][: len(field)] == field and e["type"] != "list_type"), first)


def wrong_body(error: ValidationError) -> APIError:
    """What is wrong with a body, and in which field. Of several things the first."""
    first = _first(error.errors(include_url=False, include_context=False, include_input=False))
    said = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] in ("model_type", "model_attributes_type"):  # its own words name a class of ours
        said = "it must be an object"
    # Pydantic's names for the members of a union are no fields.
    parts = [str(part) for part in first["loc"]]
    if parts[:1] == [_FORMAT]:
        del parts[1:2]
    is_field: Callable[[str], Any] = re.compile("(?!str$)[a-z_]+|[0-9]+").fullmatch
    field = ".".join(takewhile(is_field, parts))
    if first["type"] == "extra_forbidden":
        field = ".".join(parts)[:200]
        return APIError(400, f"{field}: there is no such field", param=field, code="unknown_parameter")
    if not field:
        return _not_an_object()
    if parts[:1] == ["prompt"] and first["type"] != "missing":  # pydantic tells of one of the forms that it may have
        field, said = "prompt", "it must be a text, token ids from 0 on, or a list of such, and none of them empty"
    return APIError(400, f"{field}: {said}", param=field, code="invalid_value")
