"""Pictures of a prompt are made rows before the first step that needs them."""

from __future__ import annotations

import logging

from qbe.engine.extensions.extension import Extension
from qbe.engine.scheduling.scheduler import ScheduledTokens, Scheduler
from qbe.engine.scheduling.sequence import Sequence, Status
from qbe.errors import QBEError
from qbe.pictures.tower import PictureTower

log = logging.getLogger(__name__)


class PictureRows(Extension):
    """Runs the tower, outside of steps: what fails there ends one request, and not those it shares a step with.

    Args:
        tower: of the model.
        scheduler: is told of requests that end so.
    """

    def __init__(self, tower: PictureTower, scheduler: Scheduler) -> None:
        self._tower, self._scheduler = tower, scheduler

    def extend(self, work: list[ScheduledTokens]) -> list[ScheduledTokens]:
        for w in work:
            if w.sequence.pictures:
                self._make(w)
        return [w for w in work if w.sequence.status is Status.RUNNING]

    def _make(self, w: ScheduledTokens) -> None:
        try:
            for placed in w.sequence.pictures:
                if placed.rows is None and placed.within(w.start, w.start + w.count):
                    placed.rows = self._tower.features(placed.picture)
        except Exception as error:  # the model's own code, on what somebody sent
            if not isinstance(error, QBEError):
                log.exception("a picture could not be read")
            why = str(error) if isinstance(error, QBEError) else f"the model fails on it ({type(error).__name__})"
            self._end(w.sequence, why)

    def _end(self, sequence: Sequence, why: str) -> None:
        sequence.error = f"a picture could not be read: {why}"
        self._scheduler.oversized.append(sequence)
        self._scheduler.finish(sequence, "error")

    def finish(self, work: list[ScheduledTokens]) -> None:
        for w in work:
            for placed in w.sequence.pictures:
                if w.sequence.status is not Status.RUNNING or w.sequence.computed > placed.places[-1]:
                    placed.rows = None
