"""What clients tell of answers afterwards: whether they were of use."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from qbe.server.errors import APIError
from qbe.server.keys import Client
from qbe.server.rollout.arms import Arm

KEPT = 4096  # requests that can be told of


class FeedbackRequest(BaseModel):
    """What became of an answer.

    Attributes:
        id: of the answer, as it came.
        success: whether it did what it was for; left out, that is not known.
        overridden: whether a person had to correct it, which counts as a failure.
        retries: how often it was asked for again.
    """

    model_config = ConfigDict(extra="forbid")

    id: Annotated[str, Field(min_length=1, max_length=128)]
    success: StrictBool | None = None
    overridden: StrictBool = False
    retries: Annotated[int, Field(strict=True, ge=0, le=1000)] = 0

    @property
    def failed(self) -> bool | None:
        """None where it is not known."""
        return True if self.overridden else None if self.success is None else not self.success


@dataclass
class Told:
    """A request that can be told of.

    Attributes:
        key: name of the client's.
        epoch: of the ladder when it began.
        arm: of a rollout.
        told: whether it has been.
    """

    key: str
    tier: str
    structured: bool
    cost: float
    currency: str
    epoch: int
    arm: Arm | None = None
    told: bool = False


class Answered:
    """The last requests that were answered. Threads may share it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Told] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, id: str, told: Told) -> None:
        """One has ended."""
        with self._lock:
            self._kept[id] = told
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)

    def tell(self, client: Client, body: FeedbackRequest) -> Told:
        """The request that a client tells of, once. Raises APIError."""
        if body.failed is None and not body.retries:
            raise APIError(400, "nothing is told: give success, overridden or retries", param="success")
        if body.success and body.overridden:
            raise APIError(400, "overridden: an answer that had to be corrected is no success", param="overridden")
        with self._lock:
            found = self._kept.get(body.id)
            if found is None or not (client.oversees or found.key == client.name):
                raise APIError(404, f"id: there is no answer '{body.id}' of this key among the last {KEPT}", param="id",
                               code="answer_not_found")  # fmt: skip
            if found.told:
                raise APIError(409, f"id: '{body.id}' was told of already", param="id", code="told_already")
            found.told = True
            return found
