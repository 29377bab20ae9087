"""Answers with and without speculation: speed, what was accepted of each drafter, whether the tokens are the same."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from qbe.bench.decode import LLAMA_8B, random_llama
from qbe.bench.engines import random_prompt
from qbe.bench.machine import Roofline
from qbe.bench.measure import Failed, Sample, take_turns
from qbe.bench.replayed import Recorded, Replayed
from qbe.bench.report import Row, rows_beside
from qbe.blueprint import Blueprint
from qbe.datasets.questions import PROMPTS, questions
from qbe.engine.core import Core
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.engine.speculation.acceptance_statistics import NGRAM_DRAFTER, Costs
from qbe.engine.speculation.ngram_proposer import NgramProposer
from qbe.engine.speculation.speculator import ROWS
from qbe.engine.tokenize import encode
from qbe.models import DEFAULT_MODEL
from qbe.progress import bar
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.nesting import nest_model
from qbe.store.placement import place
from qbe.store.prepare import PreparedModel, prepare

WITHOUT = "without"
CHOSEN = "as it chooses"
READ = "the text"
TOKEN = "token"


@dataclass(frozen=True)
class SpeculateSizes:
    """What is measured.

    Attributes:
        model: a checkpoint with a chat template, or the fields of a LlamaConfig to be filled with random weights.
        prompts: messages, answered greedily.
        tokens: of each answer.
        targets: bits of the weights.
        batches: answers at once.
        rates: of a random model, whose own draft tokens would tell nothing: target -> bits of a draft -> part of its
            draft tokens that are right, as measured with the default model; of every gear below the target.
        recorded: a checkpoint that gives a random model its prompts and its answers, so that there is as much to read
            as for that checkpoint. Without it nobody reads what a random model writes.
        traffic: the prompts are many: only what the engine chooses is measured.
        draft_tokens: checked at once where a drafter is given.
        compile: compile the steps of one sequence.
        rounds: samples.
    """

    model: str | Path | dict[str, Any] = DEFAULT_MODEL
    prompts: tuple[str, ...] = PROMPTS
    tokens: int = 64
    targets: tuple[int, ...] = (8, 16)
    batches: tuple[int, ...] = (1,)
    rates: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    recorded: str | Path | None = None
    traffic: bool = False
    draft_tokens: int = 3
    compile: bool = True
    rounds: int = 3


# How often the likeliest token at fewer bits is that at 8 bits: the default model, teacher-forced over 449 tokens.
RATES = {8: {4: 0.80, 6: 0.92}}


def sizes_for(device: torch.device) -> SpeculateSizes:
    if device.type == "cuda":
        return SpeculateSizes(LLAMA_8B, PROMPTS[:4], 128, (8,), (1, 4), RATES, DEFAULT_MODEL, compile=False, rounds=5)
    return SpeculateSizes()


def with_traffic(sizes: SpeculateSizes, data: Path) -> SpeculateSizes:
    """The same with prompts of data sets, too, one after the other, and 128 tokens of each answer.

    Raises:
        QBEError: a file of the data sets is missing, or not what its name says.
    """
    return replace(sizes, prompts=tuple(questions(data, 16)), tokens=128, traffic=True, rounds=3, batches=(1,))


class FreeDrafts(Costs):
    """Costs by which drafting always pays, whatever a step really takes."""

    def __init__(self, target: int) -> None:
        super().__init__()
        self._target = target

    def of(self, rows: int, bits: float) -> float:
        return 1.0 if round(bits) == self._target else 1e-3


@dataclass
class TimedAnswers:
    """What the answers of one case were."""

    answers: list[list[int]] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    def note(self, plain: list[list[int]], replayed: Mapping[int, float] | None) -> str:
        """Of draft tokens and answers. Args: the answers without speculation; the rates of draft tokens where they were
        drawn."""
        part = f"{self.accepted / self.drafted:.1%} of {self.drafted}" if self.drafted else "no"
        if replayed is not None:
            rates = ", ".join(f"{rate:.0%} at {bits} bits" for bits, rate in replayed.items())
            return f"accepted {part} draft tokens, replayed: of drafts drawn with {rates}, whatever the model writes"
        same = sum(a == b for a, b in zip(self.answers, plain, strict=True))
        return f"accepted {part} draft tokens; {same} of {len(plain)} answers the same"


def run(device: torch.device, limits: Roofline, sizes: SpeculateSizes, progress: bool = False) -> list[Row]:
    """For each batch and target a row per drafter, in tokens per second of all answers; the peer is no speculation.

    Raises:
        QBEError: whatever is wrong with the model.
    """
    prompts, scripts = _recorded(device, sizes, progress)
    core, prompts = _core(device, sizes, prompts, progress)
    if core.speculator is None:
        raise RuntimeError("this engine has no steps of several rows")
    name = "Llama, random, replayed" if isinstance(sizes.model, dict) else str(sizes.model)
    rows: list[Row] = []
    for batch in sizes.batches:
        for target in sizes.targets:
            case = SpeculateCase(core, prompts, sizes, batch, target, scripts.get(target, {}))
            timed: dict[str, TimedAnswers] = {}
            with bar(f"speculate, batch {batch}, {target} bits", sizes.rounds + 1, progress) as tick:
                samples = _samples(case, timed)
                peer = samples.pop(WITHOUT)
                mine, theirs = take_turns(samples, {WITHOUT: peer}, sizes.rounds, tick)
            plain = timed[WITHOUT].answers
            rates = {n: o if isinstance(o, Failed) else {TOKEN: o[TOKEN].rate(1)} for n, o in theirs.items()}
            for way, parts in mine.items():
                note = timed[way].note(plain, sizes.rates.get(target))
                rows += rows_beside(
                    rates, TOKEN, 1.0, what="speculate", size=name, case=f"batch {batch}, {way}", bits=target,
                    ours=parts[TOKEN].rate(1), unit="tokens/s", limit=None,
                    notes={WITHOUT: note},
                )  # fmt: skip
    return rows


@dataclass(frozen=True)
class SpeculateCase:
    """What is answered, and how.

    scripts: prompt's number -> what a random model writes in place of its own answer.
    """

    core: Core
    prompts: Sequence[list[int]]
    sizes: SpeculateSizes
    batch: int
    target: int
    scripts: Mapping[int, list[int]]


def _samples(case: SpeculateCase, timed: dict[str, TimedAnswers]) -> dict[str, Sample]:
    """All ways of answering, each by name; `timed` gets what the last answers were."""
    sizes, core, speculator = case.sizes, case.core, case.core.speculator
    assert speculator is not None
    drafters = {f"drafts at {g} bits": g for g in core.table.gears() if g < case.target}
    everyone = {*core.table.gears()}
    if not sizes.rates or case.scripts:  # there is something to read
        drafters[READ] = NGRAM_DRAFTER
        everyone.add(NGRAM_DRAFTER)
    ways: dict[str, tuple[Costs, int, set[int]]] = {CHOSEN: (Costs(), ROWS[core.device.type], everyone)}
    if not sizes.traffic:
        rows = case.batch * (sizes.draft_tokens + 1)
        ways |= {name: (FreeDrafts(case.target), rows, {g}) for name, g in drafters.items()}
    draws = random.Random(0)

    def sample(name: str) -> Mapping[str, float]:
        if name in ways:
            speculator.costs, speculator.rows, speculator.drafters = ways[name]
            speculator.reader = NgramProposer()  # no sample knows the answers of the one before it
            speculator.acceptance.clear()
        return answer(case, name in ways, timed.setdefault(name, TimedAnswers()), draws)

    return {name: (lambda n=name: sample(n)) for name in (*ways, WITHOUT)}  # type: ignore[misc]


def answer(case: SpeculateCase, speculate: bool, timed: TimedAnswers, draws: random.Random) -> Mapping[str, float]:
    """Seconds of a token after the first ones of each batch; the answers are kept in `timed`.

    `draws`: what decides whether the draft tokens of a random model are right.
    """
    core, sizes = case.core, case.sizes
    blueprint = Blueprint.of("bench", core.table, (case.target,) * len(core.table.nested))
    params = SamplingParams(max_tokens=sizes.tokens, ignore_eos=True, speculate=speculate)
    timed.answers, timed.drafted, timed.accepted = [], 0, 0
    seconds, written = 0.0, 0
    for offset in range(0, len(case.prompts), case.batch):
        asked = [
            Recorded(str(i), p, params, blueprint, script=case.scripts.get(offset + i, []))
            for i, p in enumerate(case.prompts[offset : offset + case.batch])
        ]
        for s in asked:
            core.add(s)
            if speculate and sizes.rates:
                s.speculation = Replayed(sizes.rates[case.target], draws, s)
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
            timed.answers.append(s.output_ids)
            if s.speculation is not None:
                timed.drafted, timed.accepted = (
                    timed.drafted + s.speculation.drafted,
                    timed.accepted + s.speculation.accepted,
                )
    return {TOKEN: seconds / written}


def _core(
    device: torch.device, sizes: SpeculateSizes, prompts: list[list[int]], progress: bool
) -> tuple[Core, list[list[int]]]:
    """The core, and the token ids of the prompts: the recorded ones, if there are any."""
    most = max(sizes.batches)
    if isinstance(sizes.model, dict):
        model = random_llama(sizes.model, device).requires_grad_(False)
        table = nest_model(model, "random", NestedWeightConfig(), progress=progress)
        place(model, device, "device")
        vocabulary = sizes.model["vocab_size"]
        prompts = prompts or [[i + 1, *random_prompt(32, vocabulary)] for i in range(len(sizes.prompts))]
    else:
        prepared = prepare(sizes.model, device=device, originals="device", need_sensitivity=False, progress=progress)
        model, table, prompts = prepared.model, prepared.table, _encoded(prepared, sizes)
    room = _room(device, sizes, prompts, most)
    return Core(model, table, compile=sizes.compile, speculate=True, progress=progress, **room), prompts


def _room(device: torch.device, sizes: SpeculateSizes, prompts: list[list[int]], most: int) -> dict[str, Any]:
    """For so many sequences."""
    return {"kv_tokens": most * (max(map(len, prompts)) + sizes.tokens + 128), "max_sequences": most, "device": device}


def _encoded(prepared: PreparedModel, sizes: SpeculateSizes) -> list[list[int]]:
    chats = [[{"role": "user", "content": text}] for text in sizes.prompts]
    return [encode(chat, prepared.tokenizer, prepared.name)[2] for chat in chats]


def _recorded(
    device: torch.device, sizes: SpeculateSizes, progress: bool
) -> tuple[list[list[int]], dict[int, dict[int, list[int]]]]:
    """The prompts of `sizes.recorded`, and target -> prompt's number -> its answer; nothing where there is none."""
    if sizes.recorded is None:
        return [], {}
    prepared = prepare(sizes.recorded, device=device, originals="device", need_sensitivity=False, progress=progress)
    prompts = _encoded(prepared, sizes)
    batch = min(16, len(prompts))
    core = Core(prepared.model, prepared.table, **_room(device, sizes, prompts, batch))
    scripts = {}
    for target in sizes.targets:
        timed = TimedAnswers()
        answer(
            SpeculateCase(core, prompts, replace(sizes, rates={}), batch, target, {}), False, timed, random.Random(0)
        )
        scripts[target] = dict(enumerate(timed.answers))
    return prompts, scripts
