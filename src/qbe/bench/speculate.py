"""Answers with and without speculation: speed, what was accepted of each drafter, whether the tokens are the same."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from qbe.bench.decode import LLAMA_8B, random_llama
from qbe.bench.engines import random_prompt
from qbe.bench.machine import Limits
from qbe.bench.measure import Failed, Sample, take_turns
from qbe.bench.report import Row, rows_beside
from qbe.blueprint import Blueprint
from qbe.engine.core import Core
from qbe.engine.guesses import TEXT, Costs, Speculation
from qbe.engine.sampling_params import SamplingParams
from qbe.engine.sequence import Sequence as Running
from qbe.engine.speculation import ROWS, Speculator
from qbe.engine.tokenize import encode
from qbe.models import DEFAULT_MODEL
from qbe.progress import bar
from qbe.store.nested_tensor import NestedWeightConfig
from qbe.store.nesting import nest_model
from qbe.store.placement import place
from qbe.store.prepare import prepare

WITHOUT = "without"
CHOSEN = "as it chooses"
READ = "the text"
TOKEN = "token"
PROMPTS = (
    "Write a short story about a dog who learns to fly.",
    "Explain how photosynthesis works.",
    "Write a Python function that returns the n-th Fibonacci number, and explain each line.",
    "Repeat this text and correct its spelling: The quik brown fox jumpd over the lazy dog, wich was sleeping in the "
    "sun. The dog woke up and lookd at the fox. The fox ran away into the forrest, were it met a bear.",
    "Summarise in three sentences: The water cycle describes how water evaporates from the surface of the earth, rises "
    "into the atmosphere, cools and condenses into rain or snow in clouds, and falls again to the surface.",
    "List ten countries of Europe with their capitals, one a line.",
    "What is the difference between a virus and a bacterium?",
    "Translate into French: Good morning, where is the railway station?",
)


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        model: a checkpoint with a chat template, or the fields of a LlamaConfig to be filled with random weights.
        prompts: messages, answered greedily.
        tokens: of each answer.
        targets: bits of the weights.
        batches: answers at once.
        rates: of a random model, whose own guesses would tell nothing: target -> bits of a draft -> part of its guesses
            that are right, as measured with the default model; of every gear below the target. Nobody reads the text
            then.
        guesses: checked at once where a drafter is given.
        compile: compile the steps of one sequence.
        rounds: samples.
    """

    model: str | Path | dict[str, Any] = DEFAULT_MODEL
    prompts: tuple[str, ...] = PROMPTS
    tokens: int = 64
    targets: tuple[int, ...] = (8, 16)
    batches: tuple[int, ...] = (1,)
    rates: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    guesses: int = 3
    compile: bool = True
    rounds: int = 3


# How often the likeliest token at fewer bits is that at 8 bits: the default model, teacher-forced over 449 tokens.
RATES = {8: {4: 0.80, 6: 0.92}}


def sizes_for(device: torch.device) -> Sizes:
    if device.type == "cuda":
        return Sizes(LLAMA_8B, PROMPTS[:4], 128, targets=(8,), batches=(1, 4), rates=RATES, compile=False, rounds=5)
    return Sizes()


class Free(Costs):
    """Costs by which guessing always pays, whatever a step really takes."""

    def __init__(self, target: int) -> None:
        super().__init__()
        self._target = target

    def of(self, rows: int, bits: float) -> float:
        return 1.0 if round(bits) == self._target else 1e-3


class Replayed(Speculation):
    """Guesses are made and checked as always; whether one is right is drawn, as often as was measured elsewhere.

    The tokens are the model's own. After a guess that counts as right the cache holds the guess, whose row has run.

    Args:
        rates: bits of a draft -> part of its guesses that are right.
        draws: what decides.
    """

    def __init__(self, rates: Mapping[int, float], draws: random.Random) -> None:
        super().__init__()
        self._rates, self._draws = rates, draws

    def right(self, at: int, token: int | None) -> bool:
        return at < len(self.guesses) and self._draws.random() < self._rates[self.source]


@dataclass
class Told:
    """What the answers of one case were."""

    answers: list[list[int]] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    def note(self, plain: list[list[int]], replayed: Mapping[int, float] | None) -> str:
        """Of guesses and answers. Args: the answers without speculation; the rates of guesses where they were drawn."""
        part = f"{self.accepted / self.drafted:.1%} of {self.drafted}" if self.drafted else "no"
        if replayed is not None:
            rates = ", ".join(f"{rate:.0%} at {bits} bits" for bits, rate in replayed.items())
            return f"accepted {part} guesses, replayed: drawn with {rates}, whatever the model writes"
        same = sum(a == b for a, b in zip(self.answers, plain, strict=True))
        return f"accepted {part} guesses; {same} of {len(plain)} answers the same"


def run(device: torch.device, limits: Limits, sizes: Sizes, progress: bool = False) -> list[Row]:
    """For each batch and target a row per drafter, in tokens per second of all answers; the peer is no speculation.

    Raises:
        QBEError: whatever is wrong with the model.
    """
    core, prompts = _core(device, sizes, progress)
    speculator = core.speculator
    if speculator is None:
        raise RuntimeError("this engine has no steps of several rows")
    name = "Llama, random, replayed" if isinstance(sizes.model, dict) else str(sizes.model)
    found: list[Row] = []
    for batch in sizes.batches:
        for target in sizes.targets:
            told: dict[str, Told] = {}
            with bar(f"speculate, batch {batch}, {target} bits", sizes.rounds + 1, progress) as tick:
                samples = _samples(core, speculator, prompts, sizes, batch, target, told)
                peer = samples.pop(WITHOUT)
                mine, theirs = take_turns(samples, {WITHOUT: peer}, sizes.rounds, tick)
            plain = told[WITHOUT].answers
            rates = {n: o if isinstance(o, Failed) else {TOKEN: o[TOKEN].rate(1)} for n, o in theirs.items()}
            for case, parts in mine.items():
                note = told[case].note(plain, sizes.rates.get(target))
                found += rows_beside(
                    rates, TOKEN, 1.0, what="speculate", size=name, case=f"batch {batch}, {case}", bits=target,
                    ours=parts[TOKEN].rate(1), unit="tokens/s", limit=None,
                    notes={WITHOUT: note},
                )  # fmt: skip
    return found


def _samples(
    core: Core, speculator: Speculator, prompts: Sequence[list[int]], sizes: Sizes, batch: int, target: int,
    told: dict[str, Told],
) -> dict[str, Sample]:  # fmt: skip
    """All ways of answering, each by name; `told` gets what the last answers were."""
    drafters = {f"drafts at {g} bits": g for g in core.table.gears() if g < target} | (
        {} if sizes.rates else {READ: TEXT}
    )
    everyone = {*core.table.gears()} | (set() if sizes.rates else {TEXT})
    draws = random.Random(0)
    ways: dict[str, tuple[Costs, int, set[int]]] = {CHOSEN: (Costs(), ROWS[core.device.type], everyone)}
    ways |= {name: (Free(target), batch * (sizes.guesses + 1), {g}) for name, g in drafters.items()}

    def sample(name: str) -> Mapping[str, float]:
        if name in ways:
            speculator.costs, speculator.rows, speculator.drafters = ways[name]
        replayed = functools.partial(Replayed, sizes.rates[target], draws) if sizes.rates and name in ways else None
        own = told.setdefault(name, Told())
        return _answer(core, prompts, target, batch, sizes.tokens, name in ways, own, replayed)

    return {name: (lambda n=name: sample(n)) for name in (*ways, WITHOUT)}  # type: ignore[misc]


def _answer(
    core: Core, prompts: Sequence[list[int]], target: int, batch: int, tokens: int, speculate: bool, told: Told,
    guesses: Callable[[], Speculation] | None = None,
) -> Mapping[str, float]:  # fmt: skip
    """Seconds of a token after the first ones of each batch; the last sample's answers are kept in `told`.

    `guesses` makes what is kept of a sequence's guesses in place of the core's own.
    """
    blueprint = Blueprint.of("bench", core.table, (target,) * len(core.table.nested))
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, speculate=speculate)
    told.answers, told.drafted, told.accepted = [], 0, 0
    seconds, written = 0.0, 0
    for at in range(0, len(prompts), batch):
        asked = [Running(str(i), p, params, blueprint) for i, p in enumerate(prompts[at : at + batch])]
        for s in asked:
            core.add(s)
            if guesses is not None:
                s.speculation = guesses()
        while not all(s.output_ids for s in asked):
            core.step()
        before, begin = sum(len(s.output_ids) for s in asked), time.perf_counter()
        while core.has_work():
            core.step()
        seconds += time.perf_counter() - begin
        written += sum(len(s.output_ids) for s in asked) - before
        for s in asked:
            if s.finish_reason != "length":
                raise RuntimeError(f"the core ended a sequence early: {s.finish_reason}, {s.error}")
            told.answers.append(s.output_ids)
            if s.speculation is not None:
                told.drafted, told.accepted = (
                    told.drafted + s.speculation.drafted,
                    told.accepted + s.speculation.accepted,
                )
    return {TOKEN: seconds / written}


def _core(device: torch.device, sizes: Sizes, progress: bool) -> tuple[Core, list[list[int]]]:
    """The core and the token ids of the prompts."""
    most = max(sizes.batches)
    room: dict[str, Any] = {
        "kv_tokens": most * (sizes.tokens + 512), "max_sequences": most, "device": device, "compile": sizes.compile,
        "speculate": True, "progress": progress,
    }  # fmt: skip
    if not isinstance(sizes.model, dict):
        prepared = prepare(sizes.model, device=device, need_sensitivity=False, progress=progress)
        chats = [[{"role": "user", "content": text}] for text in sizes.prompts]
        ids = [encode(chat, prepared.tokenizer, prepared.name)[2] for chat in chats]
        return Core(prepared.model, prepared.table, **room), ids
    model = random_llama(sizes.model, device).requires_grad_(False)
    table = nest_model(model, "random", NestedWeightConfig(), progress=progress)
    place(model, device, "device")
    core = Core(model, table, **room)
    return core, [[i + 1, *random_prompt(32, core.vocabulary)] for i in range(len(sizes.prompts))]
