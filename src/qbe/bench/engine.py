"""Decode steps of the whole engine by batch and mix of precisions, exact and shared, beside all its rows at 16 bits."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qbe.bench.decode import LLAMA_8B, SAME, random_llama
from qbe.bench.engines import STEP, core_of, random_prompt
from qbe.bench.machine import Roofline
from qbe.bench.measure import Sample, Timing, take_turns
from qbe.bench.report import Row
from qbe.blueprint import Blueprint
from qbe.engine.core import Core
from qbe.engine.memory import of_engine
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.engine.scheduling.sequence import Sequence
from qbe.models import DEFAULT_MODEL
from qbe.progress import bar
from qbe.sites import FULL_BITS
from qbe.store.shared_rows import ROWS, SharedRows

BF16 = "all weights at 16 bits"


@dataclass(frozen=True)
class EngineSizes:
    """What is measured.

    Attributes:
        model: a checkpoint, or the fields of a LlamaConfig to be filled with random weights.
        batches: rows of a step.
        uniform: bits that all rows of a batch have; 16, the peer, is measured in any case.
        mixes: bits that rows of a batch have in turn, exact and shared.
        prompt: tokens read before the steps that count.
        steps: decode steps a sample.
        rounds: samples.
    """

    model: str | Path | dict[str, Any] = DEFAULT_MODEL
    batches: tuple[int, ...] = (1, 4, 8, 16)
    uniform: tuple[int, ...] = (4, 8)
    mixes: tuple[tuple[int, ...], ...] = ((4, 6, 8), (4, 6, 8, 16))
    prompt: int = 16
    steps: int = 8
    rounds: int = 7


def sizes_for(device: torch.device) -> EngineSizes:
    if device.type != "cuda":
        return EngineSizes()
    return EngineSizes({**LLAMA_8B, "vocab_size": 8192}, (1, 8, 16, 32, 64), steps=32, rounds=10)


def run(device: torch.device, limits: Roofline, sizes: EngineSizes, progress: bool = False) -> list[Row]:
    """For each batch a row per uniform precision, and two per mix: each row's own bits, and shared ones, in tokens a
    second of all sequences; then the bytes on the device.

    The limit is that of memory: each site read once at the highest bits of any row. The KV cache is not counted.

    Raises:
        QBEError: whatever is wrong with the model.
    """
    model = random_llama(sizes.model, device) if isinstance(sizes.model, dict) else sizes.model
    most = max(sizes.batches)
    core = core_of(model, device, most * (sizes.prompt + sizes.steps + 64), progress, most, shared_rows=True)
    parameters = sum(s.parameters for s in core.table)
    name = f"Llama of {parameters / 1e9:.2f} G, random" if isinstance(sizes.model, dict) else str(sizes.model)
    shared = core.plan.shared or SharedRows(core.table)
    rows: list[Row] = []
    turns = sum(len(ROWS) if batch > 1 else 1 for batch in sizes.batches)
    with bar("engine", turns * (sizes.rounds + 1), progress) as tick:
        for batch in sizes.batches:
            for kind in ROWS[::-1] if batch > 1 else ("shared",):
                _let_share(core, shared if kind == "shared" else None)
                uniform = {FULL_BITS, *(sizes.uniform if kind == "shared" else ())}
                ways: dict[int | str, tuple[int, ...]] = {b: (b,) * batch for b in sorted(uniform)}
                for mix in sizes.mixes if batch > 1 else ():
                    bits = tuple(mix[i % len(mix)] for i in range(batch))
                    ways["+".join(map(str, sorted(set(bits))))] = bits
                samples: dict[int | str, Sample] = {
                    label: MixedSteps(core, bits, sizes).sample for label, bits in ways.items()
                }
                found, _ = take_turns(samples, {}, sizes.rounds, tick)
                theirs = found[FULL_BITS][STEP].rate(batch)
                del ways[FULL_BITS]
                for label, bits in ways.items():
                    read = Blueprint.of("bench", core.table, (max(bits),) * len(core.table.nested))
                    case = f"batch {batch}, {kind}" if isinstance(label, str) else f"batch {batch}"
                    limit = batch * limits.bandwidth / read.bytes_per_token(core.table)
                    rate = found[label][STEP].rate(batch)
                    rows.append(Row("decode", name, case, label, rate, SAME, theirs, "tokens/s", limit))
    return [*rows, *memory_rows(core, name, parameters)]


def _let_share(core: Core, shared: SharedRows | None) -> None:
    """Rows of steps share what they read from now on, or (None) read their own bits; captured steps are made anew."""
    if (core.plan.shared is None) != (shared is None):
        core.plan.share(shared)
        if core.runner.decode is not None and core.device.type == "cuda":
            core.runner.decode.renew()


def memory_rows(core: Core, name: str, parameters: int) -> list[Row]:
    """Bytes of the weights, without and with the 16-bit originals beside them."""
    memory = of_engine(core)
    note = f"on {core.device.type}: {memory.line()}"

    def once(size: int) -> Timing:
        return Timing(size / 1e6, size / 1e6, size / 1e6, 1)

    return [
        Row("memory", name, case, "any", once(size), BF16, once(2 * parameters), "MB", note=note)
        for case, size in (
            ("weights", memory.weights),
            ("weights and originals", memory.weights + memory.originals),
        )
    ]


class MixedSteps:
    """Decode steps with a row of each of these bits, shared or not as the core's plan is; each has a prompt of its own,
    so that experts are chosen by each."""

    def __init__(self, core: Core, bits: tuple[int, ...], sizes: EngineSizes) -> None:
        self._core, self._steps = core, sizes.steps
        self._prompts = [random_prompt(sizes.prompt, core.vocabulary, row) for row in range(len(bits))]
        self._params = SamplingParams(max_tokens=sizes.steps + 8, ignore_eos=True)
        self._blueprints = [Blueprint.of("bench", core.table, (b,) * len(core.table.nested)) for b in bits]

    def sample(self) -> Mapping[str, float]:
        """`STEP` -> seconds, the mean; every step waits for its tokens."""
        core = self._core
        rows = enumerate(zip(self._prompts, self._blueprints, strict=True))
        running = [Sequence(f"bench {i}", prompt, self._params, b) for i, (prompt, b) in rows]
        for sequence in running:
            core.add(sequence)
        while not all(s.output_ids for s in running):
            core.step()
        core.step()
        first = [len(s.output_ids) for s in running]
        began = time.perf_counter()
        for _ in range(self._steps):
            core.step()
        spent = time.perf_counter() - began
        made = [len(s.output_ids) - n for s, n in zip(running, first, strict=True)]
        for sequence in running:
            core.cancel(sequence.request_id)
        if made != [self._steps] * len(running):
            raise RuntimeError(f"the steps gave {made} tokens, not {self._steps} to each of {len(running)} sequences")
        return {STEP: spent / self._steps}
