"""Time that a change of blueprint between two steps adds.

`seen`: the columns of the blueprints are on the device already; `new`: they go there for the first time. Measured
alone (`Plan.write`, device work included) and as part of decode steps of a model so thin that its steps are nearly all
launches: what the change adds to the host's or the device's work cannot hide there. Each change stands beside the same
write or step once more with the same blueprints, so that nothing but the change differs.
"""

from __future__ import annotations

import collections.abc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from qbe.bench.decode import random_llama
from qbe.bench.engines import core_of, random_prompt
from qbe.bench.machine import Roofline
from qbe.bench.measure import Failed, Sample, Timing, take_turns
from qbe.bench.report import COUNT, Row
from qbe.blueprint import Blueprint
from qbe.engine.core import Core
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.engine.scheduling.sequence import Sequence
from qbe.progress import bar
from qbe.sites import SiteTable
from qbe.store.plan import Plan

CHANGED, UNCHANGED, ADDED = "change", "no change", "added"
THIN: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class SwitchSizes:
    """What is measured.

    Attributes:
        model: fields of a LlamaConfig; by default thin, with the 225 sites of Llama-3.1-8B.
        rows: sequences in a step, all of which change.
        writes: changes of the plan a sample.
        steps: decode steps a sample.
        rounds: samples.
    """

    model: dict[str, Any]
    rows: tuple[int, ...] = (1, 16)
    writes: int = 20
    steps: int = 10
    rounds: int = 20


def sizes_for(device: torch.device) -> SwitchSizes:
    return SwitchSizes(THIN) if device.type == "cuda" else SwitchSizes(THIN, steps=5, rounds=12)


def run(device: torch.device, limits: Roofline, sizes: SwitchSizes, progress: bool = False) -> list[Row]:
    """Rows in microseconds beside the same write or step without a change, and how many graphs were captured.

    `added` is what a change adds: the median of the differences. There is no physical limit beside it, since a change
    moves kilobytes.
    """
    length = 4 * sizes.steps * (sizes.rounds + 1) + 64
    core = core_of(random_llama(sizes.model, device), device, max(sizes.rows) * length, progress, max(sizes.rows))
    sites = f"{len(core.table.nested)} sites"
    timed: list[Row] = []
    captured: list[int | None] = []
    with bar("switch", 2 * len(sizes.rows) * (sizes.rounds + 1), progress) as tick:
        for rows in sizes.rows:
            blueprints = Random(core.table, rows)
            case = "1 row" if rows == 1 else f"{rows} rows"
            writes = Writes(Plan(core.table, rows, device), device).run
            steps = SwitchingSteps(core, blueprints.draw(), length).run
            before = captures(core)
            for work, change, count in (("Plan.write", writes, sizes.writes), ("decode step", steps, sizes.steps)):
                mine, _ = take_turns(
                    {k: pairs(change, blueprints, count, k) for k in ("seen", "new")}, {}, sizes.rounds, tick
                )
                for kind, parts in mine.items():
                    us = {part: value.times(1e6) for part, value in parts.items()}
                    timed.append(Row(f"{work}, {kind}", sites, case, "any", us[CHANGED], UNCHANGED, us[UNCHANGED], "us",
                                     added=us[ADDED]))  # fmt: skip
            after = captures(core)
            captured.append(None if before is None or after is None else after - before)
    changes = 2 * len(sizes.rows) * (sizes.rounds + 1) * sizes.steps
    return [*timed, _recaptured(captured, changes, sites)]


class Random:
    """Random blueprints, one for each row of a batch: so many that no two draws are alike."""

    def __init__(self, table: SiteTable, rows: int) -> None:
        self.table, self.rows, self.random = table, rows, random.Random(0)

    def draw(self) -> list[Blueprint]:
        choices = [tuple(self.random.choice(s.gears) for s in self.table.nested) for _ in range(self.rows)]
        return [Blueprint.of("bench", self.table, bits) for bits in choices]


def pairs(
    change: Callable[[collections.abc.Sequence[Blueprint]], float], blueprints: Random, count: int, kind: str
) -> Sample:
    """A sample of `count` changes, each beside the same action repeated with the same blueprints.

    Args:
        change: acts with these blueprints and returns the seconds it took.
    """
    known = [blueprints.draw(), blueprints.draw()]

    def run() -> dict[str, float]:
        turns = [known[i % 2] if kind == "seen" else blueprints.draw() for i in range(count)]
        for warm in known:
            change(warm)
        changed = again = 0.0
        for turn in turns:
            changed += change(turn)
            again += change(turn)
        return {CHANGED: changed / count, UNCHANGED: again / count, ADDED: (changed - again) / count}

    return run


class Writes:
    """`Plan.write` alone, until the device has done it."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan, self.device = plan, device

    def run(self, blueprints: collections.abc.Sequence[Blueprint]) -> float:
        begin = time.perf_counter()
        self.plan.write([(b, 1) for b in blueprints], blueprints)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begin


class SwitchingSteps:
    """Decode steps of a core whose sequences get other blueprints between two steps."""

    def __init__(self, core: Core, blueprints: collections.abc.Sequence[Blueprint], length: int) -> None:
        params = SamplingParams(max_tokens=length - 32, ignore_eos=True)
        prompt = random_prompt(4, core.vocabulary)
        self.core = core
        self.sequences = [Sequence(f"{len(blueprints)}-{i}", prompt, params, b) for i, b in enumerate(blueprints)]
        for sequence in self.sequences:
            core.add(sequence)
        for _ in range(4):  # reads the prompts; a runner that captures a graph for this batch size does so here
            core.step()

    def run(self, blueprints: collections.abc.Sequence[Blueprint]) -> float:
        for sequence, blueprint in zip(self.sequences, blueprints, strict=True):
            sequence.blueprint = blueprint
        begin = time.perf_counter()
        self.core.step()
        return time.perf_counter() - begin


def captures(core: Core) -> int | None:
    """How many CUDA graphs the core's runner has captured so far; None when it keeps no count."""
    for holder in (core.runner, getattr(core.runner, "decode", None)):
        count = getattr(holder, "captures", None)
        if isinstance(count, int):
            return count
    return None


def _recaptured(captured: list[int | None], changes: int, sites: str) -> Row:
    """A row that counts graphs rather than time."""
    counts = [c for c in captured if c is not None]
    if not counts:
        reason = "the runner keeps no count of captured graphs"
        return Row("graphs captured", sites, "all steps", "any", None, "none expected", Failed(reason), COUNT)
    count, none = Timing.of([float(sum(counts))]), Timing.of([0.0])
    note = f"during {changes} decode steps after a change"
    return Row("graphs captured", sites, "all steps", "any", count, "none expected", none, COUNT, note=note)
