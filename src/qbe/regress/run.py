"""A whole comparison: serve both, ask both, judge."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from qbe.errors import QBEError
from qbe.regress import identity, sources, weights
from qbe.regress.gate import Gate
from qbe.regress.gates import Seen, judge
from qbe.regress.laws import Laws, speculates
from qbe.regress.observe import kept, observe, steps
from qbe.regress.suite import Suite
from qbe.regress.target import Target
from qbe.regress.task import Task
from qbe.store.prepare import store_folder


@dataclass
class Outcome:
    """What came of it.

    Attributes:
        seen: of both sides. gates: what each decided.
        baseline, candidate: as they were asked.
        started: UTC, ISO 8601. seconds: it took.
    """

    seen: Seen
    gates: list[Gate]
    baseline: Target
    candidate: Target
    started: str
    seconds: float

    @property
    def verdict(self) -> str:
        """`fail` before `anomalous` before `inconclusive` before `pass`."""
        found = {gate.status for gate in self.gates}
        return next((v for v in ("fail", "anomalous", "inconclusive") if v in found), "pass")


class Regression:
    """Prepares a comparison; `run` makes it. One side is served at a time.

    Args:
        baseline, candidate: the two sides.
        suite: what is asked.

    Raises:
        QBEError: here and in `run`: a model or file is missing, a server does not start or does not answer.
    """

    def __init__(self, baseline: Target, candidate: Target, suite: Suite) -> None:
        self.baseline, self.candidate, self.suite = baseline, candidate, suite
        self.tasks, self.changed = sources.read(suite)
        for target in (baseline, candidate):
            _ = target.path  # a name that is none is said before minutes of work
        if not self.tasks and not suite.probes.passages:
            raise QBEError(
                f"the suite '{suite.name}' has neither items nor probes.passages: there is nothing to compare"
            )

    @property
    def steps(self) -> int:
        """How often `run` calls `tick`."""
        laws = Laws.steps(speculates(self.candidate.request)) if self.suite.probes.prompts else 0
        asked = sum(steps(self.suite, self.tasks, each) for each in (0, laws))
        return asked + (weights.steps if self._weighs else 0)

    @property
    def _weighs(self) -> bool:
        return self.suite.probes.weights and not self.candidate.is_url

    def run(self, tick: Callable[[], None] = lambda: None) -> Outcome:
        """Asks both sides and judges."""
        started, began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), time.monotonic()
        before_path, now_path = self.baseline.path, self.candidate.path
        here = before_path is not None and now_path is not None
        differences = identity.differences(before_path, now_path) if here else None  # type: ignore[arg-type]
        seeds = self.suite.sampling.seeds
        before = observe(self.baseline, self.suite, self.tasks, seeds[0], tick, laws=False)
        now = observe(self.candidate, self.suite, self.tasks, seeds[1], tick)
        if broken := [law.name for law in now.laws if law.kept is False]:  # by the baseline, too? It is served again
            before.laws = kept(self.baseline, self.suite, broken)
        found = weights.check(now_path, self._store(), before_path, tick) if now_path and self._weighs else None
        slow = "" if now_path is None else weights.on_this_machine(self.candidate.device)
        seen = Seen(self.suite, self.tasks, before, now, differences, found, self.changed, slow)
        return Outcome(seen, judge(seen), self.baseline, self.candidate, started, time.monotonic() - began)

    def _store(self) -> Path:
        """The nested store that the candidate was served from."""
        return store_folder(self.candidate.where, progress=False)


def flip_of(task: Task, seen: Seen) -> str:
    """`lost`, `gained` or "" where nothing changed or one side was not asked."""
    before, now = seen.before.grades.get(task.name), seen.now.grades.get(task.name)
    if before is None or now is None or before.right == now.right:
        return ""
    return "gained" if now.right else "lost"
