"""The core tells its extensions of the five moments, and changes nothing for who asks for nothing special."""

from __future__ import annotations

import pytest

from engine_models import NO_SITES, build, request, run
from qbe.engine.core import Core
from qbe.engine.extensions.extension import Extension
from qbe.engine.sampling.sampler import Scores
from qbe.engine.scheduling.scheduler import ScheduledTokens
from qbe.engine.scheduling.sequence import Sequence
from qbe.errors import QBEError


class Told(Extension):
    """Keeps what it is told of."""

    def __init__(self) -> None:
        self.moments: list[str] = []
        self.computed: list[tuple[int, int]] = []  # before a step, and where the model has run it

    def admit(self, sequence: Sequence) -> None:
        self.moments.append("admit")

    def extend(self, work: list[ScheduledTokens]) -> list[ScheduledTokens]:
        self.moments.append("extend")
        self.computed.append((work[0].sequence.computed, -1))
        return work

    def observe(self, work: list[ScheduledTokens], scores: Scores) -> None:
        self.moments.append("observe")
        self.computed[-1] = self.computed[-1][0], work[0].sequence.computed
        assert len(scores.best) == sum(w.samples for w in work)

    def advance(self, sequence: Sequence, token: int | None) -> None:
        assert token is not None
        assert len(sequence.token_ids) == sequence.computed, "it does not have the token yet"
        self.moments.append("advance")

    def finish(self, work: list[ScheduledTokens]) -> None:
        self.moments.append("finish")


def core() -> Core:
    return Core(build("llama"), NO_SITES)


def test_an_extension_is_told_of_every_request_step_and_token_in_order() -> None:
    made, told = core(), Told()
    made.extensions.append(told)
    run(made, request("r", [5, 6, 7], max_tokens=3))
    step = ["extend", "observe", "advance", "finish"]
    assert told.moments == ["admit"] + step * 3
    assert told.computed == [(0, 3), (3, 4), (4, 5)]


def test_one_that_refuses_a_request_keeps_it_out() -> None:
    class Refusing(Extension):
        def admit(self, sequence: Sequence) -> None:
            raise QBEError("not this one")

    made = core()
    made.extensions.append(Refusing())
    with pytest.raises(QBEError, match="not this one"):
        made.add(request("r", [5, 6, 7], max_tokens=3))
    assert not made.has_work()


def test_one_that_fails_ends_the_sequences_of_its_step_only() -> None:
    class Failing(Extension):
        def observe(self, work: list[ScheduledTokens], scores: Scores) -> None:
            raise RuntimeError("broken")

    made = core()
    free = made.scheduler.allocator.free
    made.extensions.append(Failing())
    failed = request("r", [5, 6, 7], max_tokens=3)
    made.add(failed)
    with pytest.raises(RuntimeError, match="broken"):
        made.step()
    assert (failed.finish_reason, made.has_work(), made.scheduler.allocator.free) == ("error", False, free)
    made.extensions.pop()
    (ids,) = run(made, request("r", [5, 6, 7], max_tokens=3))
    assert len(ids) == 3


def test_the_base_does_nothing() -> None:
    made = core()
    expected = run(made, request("a", [5, 6, 7], max_tokens=3))
    made.extensions.append(Extension())
    assert run(made, request("b", [5, 6, 7], max_tokens=3)) == expected
