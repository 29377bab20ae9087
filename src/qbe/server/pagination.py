"""Lists in pages, as OpenAI's clients go through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends

from qbe.server.errors import APIError

MOST_LISTED = 10_000  # in one page


@dataclass(frozen=True)
class PageOptions:
    """Which part of a list.

    Attributes:
        after: id of the last one of the page before.
        limit: how many.
        order: by age, `asc` or `desc`; None: as the list has it.
    """

    after: str | None = None
    limit: int = 100
    order: str | None = None


def _options(after: str | None = None, limit: str = "100", order: str | None = None) -> PageOptions:
    if not (limit.isdecimal() and limit.isascii() and len(limit) < 6 and 1 <= int(limit) <= MOST_LISTED):
        raise APIError(400, f"limit: it is from 1 to {MOST_LISTED}", param="limit", code="invalid_value")
    if order not in (None, "asc", "desc"):
        raise APIError(400, "order: it is 'asc' or 'desc'", param="order", code="invalid_value")
    return PageOptions(after, int(limit), order)


Page = Annotated[PageOptions, Depends(_options)]


def page_of(objects: Sequence[dict[str, Any]], page: PageOptions, newest_first: bool = True) -> dict[str, Any]:
    """One page of objects that have ids.

    Args:
        objects: all of them, the oldest first.
        newest_first: where `page` does not say.

    Raises:
        APIError: none of them is the one to go on after.
    """
    descending = newest_first if page.order is None else page.order == "desc"
    ordered = list(reversed(objects)) if descending else list(objects)
    start = 0
    if page.after is not None:
        start = 1 + next((i for i, one in enumerate(ordered) if one["id"] == page.after), len(ordered))
        if start > len(ordered):
            raise APIError(400, f"after: there is no '{page.after[:200]}' in this list", param="after",
                           code="invalid_value")  # fmt: skip
    part = ordered[start : start + page.limit]
    first, last = (part[0]["id"], part[-1]["id"]) if part else (None, None)
    return {"object": "list", "data": part, "first_id": first, "last_id": last,
            "has_more": start + len(part) < len(ordered)}  # fmt: skip
