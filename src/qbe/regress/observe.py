"""One side, asked everything that a suite asks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from qbe.errors import QBEError
from qbe.regress.client import Client, Reply, ScoredText
from qbe.regress.grading import Grade
from qbe.regress.laws import Law, Laws
from qbe.regress.passages import long_passage, passages
from qbe.regress.suite import Suite
from qbe.regress.target import Target, digest_of, serve
from qbe.regress.task import Task


@dataclass
class Observed:
    """What was seen.

    Attributes:
        where, digest, model: what it is.
        chats: whether it has a chat template.
        replies, grades: by item; items that it cannot be asked are missing.
        passages: likelihoods of texts. long: of the long one.
        unscored: why there are none.
        laws: of its sampler.
        memory: bytes when all was answered; started_s: seconds until it was ready. None where it is not served here.
    """

    where: str
    digest: str = ""
    model: str = ""
    chats: bool = False
    replies: dict[str, Reply] = field(default_factory=dict)
    grades: dict[str, Grade] = field(default_factory=dict)
    passages: list[ScoredText] = field(default_factory=list)
    long: ScoredText | None = None
    unscored: str = ""
    laws: list[Law] = field(default_factory=list)
    memory: int | None = None
    started_s: float | None = None


def steps(suite: Suite, tasks: Sequence[Task], laws: int) -> int:
    """How often `observe` calls `tick`, where it tries so many laws."""
    return len(tasks) + len(passages(suite.probes.passages)) + bool(suite.probes.long_characters) + laws


def observe(
    target: Target, suite: Suite, tasks: Sequence[Task], seed: int, tick: Callable[[], None], laws: bool = True
) -> Observed:
    """Serves it where it is to be served, and asks.

    Args:
        laws: whether the laws of its sampler are tried.

    Raises:
        QBEError: it does not start, or does not answer at all.
    """
    with serve(target) as served:
        client = served.client
        seen = Observed(target.where, digest_of(target, client), client.model, started_s=served.started_s)
        seen.chats = client.chats()
        _score(client, suite, seen, tick)
        if laws and suite.probes.prompts:
            seen.laws = Laws(client, seen.chats, suite.probes.prompts).run(tick)
        _answer(client, suite, tasks, seed, seen, tick)
        seen.memory = served.memory()
    return seen


def kept(target: Target, suite: Suite, names: Collection[str]) -> list[Law]:
    """Whether it keeps some laws of its sampler. Raises as `observe`."""
    with serve(target) as served:
        client = served.client
        return Laws(client, client.chats(), suite.probes.prompts).run(lambda: None, names)


def _score(client: Client, suite: Suite, seen: Observed, tick: Callable[[], None]) -> None:
    texts = passages(suite.probes.passages)
    characters = suite.probes.long_characters
    for text in texts + ([long_passage(characters)] if characters else []):
        if not seen.unscored:
            try:
                seen.passages.append(client.score(text))
            except QBEError as error:
                seen.unscored = str(error)
        tick()
    if characters and not seen.unscored:
        seen.long = seen.passages.pop()


def _answer(
    client: Client, suite: Suite, tasks: Sequence[Task], seed: int, seen: Observed, tick: Callable[[], None]
) -> None:  # fmt: skip
    requests = [t.request(seen.chats, suite.sampling.temperature, seed + i) for i, t in enumerate(tasks)]
    able = [(task, request) for task, request in zip(tasks, requests, strict=True) if request is not None]
    for _ in range(len(tasks) - len(able)):
        tick()
    replies = client.ask_all([request for _, request in able], suite.together, tick)
    for (task, _), reply in zip(able, replies, strict=True):
        seen.replies[task.name], seen.grades[task.name] = reply, task.grade(reply)
