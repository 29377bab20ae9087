"""Answers of `/v1/responses` that later requests go on from, in memory: they do not outlive the server.

Each key has so many, and so many bytes of them; all keys together are bounded, too. The answers that were used least
recently go first. The bytes of an answer count all of its conversation, though answers of one conversation share most.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qbe.server.errors import APIError
from qbe.server.responses.protocol import InputItem
from qbe.server.wire import dumps

MOST_KEPT = 1024  # answers of each key,
KEY_BYTES = 16 << 20  # bytes of them,
ALL_BYTES = 64 << 20  # and of everybody's


@dataclass(frozen=True)
class Kept:
    """An answer and what led to it.

    Attributes:
        response: as its client got it.
        items: the conversation up to it, and it.
        given: how many of `items` it does not have itself.
        bytes: of all of it as JSON.
    """

    response: dict[str, Any]
    items: tuple[InputItem, ...]
    given: int
    bytes: int


class ResponseStore:
    """Answers by key; used in the event loop."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], Kept] = OrderedDict()  # of a key's name and an answer's id
        self._items: dict[tuple[str, str], InputItem] = {}  # what answers have, by its id
        self._count: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def put(self, key: str, response: dict[str, Any], conversation: Sequence[InputItem]) -> None:
        """Keep an answer, unless it is larger than all that its key may have."""
        own = [InputItem.model_validate(item) for item in response["output"]]
        items = (*conversation, *own)
        size = len(dumps(response)) + sum(len(item.model_dump_json(exclude_none=True)) for item in items)
        if size > KEY_BYTES:
            return
        self._kept[key, response["id"]] = Kept(response, items, len(conversation), size)
        self._count[key] += 1
        self._bytes[key] += size
        self._items |= {(key, item.id): item for item in own if item.id is not None}
        while self._count[key] > MOST_KEPT or self._bytes[key] > KEY_BYTES:
            self._drop(next(k for k in self._kept if k[0] == key))
        while self._bytes.total() > ALL_BYTES:
            self._drop(next(iter(self._kept)))

    def get(self, key: str, id: str) -> Kept:
        """Raises APIError for an answer that is not there or not this key's."""
        kept = self._kept.get((key, id))
        if kept is None:
            raise APIError(404, f"there is no response '{id[:200]}' here: it was not stored, or had to make room",
                           code="response_not_found")  # fmt: skip
        self._kept.move_to_end((key, id))
        return kept

    def delete(self, key: str, id: str) -> None:
        """Raises APIError likewise."""
        self.get(key, id)
        self._drop((key, id))

    def conversation(self, key: str, previous: str | None, items: Sequence[InputItem]) -> list[InputItem]:
        """All of it, with what is only named.

        Raises:
            APIError: that is not kept any more.
        """
        earlier: tuple[InputItem, ...] = ()
        if previous is not None:
            try:
                earlier = self.get(key, previous).items
            except APIError:
                raise _gone("previous_response_id", "response", previous, "previous_response_not_found") from None
        whole = [*earlier]
        for item in items:
            if item.type == "item_reference":
                known = self._items.get((key, item.id or ""))
                if known is None:
                    raise _gone("input", "item", item.id or "", "item_not_found")
                item = known
            whole.append(item)
        return whole

    def _drop(self, place: tuple[str, str]) -> None:
        kept, key = self._kept.pop(place), place[0]
        self._count[key] -= 1
        self._bytes[key] -= kept.bytes
        for item in kept.items[kept.given :]:
            self._items.pop((key, item.id or ""), None)


def _gone(param: str, what: str, id: str, code: str) -> APIError:
    return APIError(400, f"{param}: there is no {what} '{id[:200]}' here any more: send the whole conversation",
                    param=param, code=code)  # fmt: skip
