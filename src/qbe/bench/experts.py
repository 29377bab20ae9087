"""The routed experts of mixture-of-experts layers, beside torch's two ways to multiply by them in bfloat16."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from qbe.bench.expert_layers import QWEN3_30B, SMOLLM2_EXPERTS, ExpertShape, Layers, random_layers, rows_of
from qbe.bench.machine import Roofline
from qbe.bench.measure import Failed, Outcome, Sample, attempt, take_turns
from qbe.bench.passes import WHOLE, check, whole
from qbe.bench.report import Row, rows_beside
from qbe.progress import bar

OWN_16, ALL_HIGH = "own 16 bits", "all rows at 8"
LOOP, GROUPED = "a loop in bf16", "grouped_mm bf16"
MIXED = "4+6+8"  # in turn, by row
# How the rows show it -> the bits of row r for expert e.
CASES: Mapping[float | str, Callable[[int, int], int]] = {
    4: lambda r, e: 4,
    4.5: lambda r, e: 6 if e % 4 == 3 else 4,
    6: lambda r, e: 6,
    8: lambda r, e: 8,
    MIXED: lambda r, e: (4, 6, 8)[r % 3],
    16: lambda r, e: 16,
}


@dataclass(frozen=True)
class ExpertSizes:
    """What is measured.

    Attributes:
        shapes: of layers.
        tokens: of a step.
        rounds: per shape and number of tokens.
        activation_bits: 16 or 8; rows at 16 bits keep 16.
    """

    shapes: tuple[ExpertShape, ...] = (SMOLLM2_EXPERTS, QWEN3_30B)
    tokens: tuple[int, ...] = (1, 8, 32, 64)
    rounds: int = 15
    activation_bits: tuple[int, ...] = (16,)


def sizes_for(device: torch.device) -> ExpertSizes:
    return ExpertSizes(activation_bits=(16,) if device.type == "cuda" else (16, 8))


def run(device: torch.device, limits: Roofline, sizes: ExpertSizes, progress: bool = False) -> list[Row]:
    """Measures every mixture of bits and the peers on the same experts, tokens and routing.

    Returns:
        For each shape, number of tokens, activation bits and mixture a row per peer: milliseconds of one layer. On a
        CPU with one thread it is that thread's CPU time, else wall time.
    """
    found: list[Row] = []
    each = len(sizes.tokens) * len(sizes.activation_bits) * (sizes.rounds + 1)
    with bar("experts", len(sizes.shapes) * each, progress) as tick:
        for shape in sizes.shapes:
            layers = random_layers(shape, device)
            for tokens in sizes.tokens:
                for activation_bits in sizes.activation_bits:
                    found += _measured(layers, tokens, activation_bits, limits, sizes.rounds, tick)
            del layers
    return found


def _measured(
    layers: Layers, tokens: int, activation_bits: int, limits: Roofline, rounds: int, tick: Callable[[], None]
) -> list[Row]:
    given = rows_of(layers, tokens)
    cases = {case: bits for case, bits in CASES.items() if case != MIXED or tokens >= 3}
    plan = {case: layers.precision(tokens, bits, activation_bits) for case, bits in cases.items()}
    expected = layers.loop(given, 0)
    for precision in plan.values():
        check(layers.nested(given, 0, precision), expected)
    ours = {case: _sample(layers, partial(_nested, layers, given, precision)) for case, precision in plan.items()}
    peers: dict[str, Sample | Failed] = {LOOP: _sample(layers, partial(layers.loop, given))}
    peers[GROUPED] = attempt(partial(_grouped, layers, given, expected))
    mine, theirs = take_turns(ours, peers, rounds, tick)
    wall_clock = layers.device.type == "cuda" or torch.get_num_threads() > 1
    clock = "" if wall_clock else "CPU time of one thread; the limit is wall time"
    rows: list[Row] = []
    for case in cases:
        beside: dict[str, Outcome] = dict(theirs)
        if case != 16:
            beside[OWN_16] = mine[16]
        if case == MIXED:
            beside[ALL_HIGH] = mine[8]
        shape = layers.shape
        moved, multiplied = layers.bytes_read(given, plan[case]), layers.products(given)
        rows += rows_beside(
            beside, WHOLE, 1e3 / shape.copies, what=shape.model,
            size=f"{shape.experts} experts {shape.inner}x{shape.hidden}, top {shape.top}",
            case=f"M {tokens}, {activation_bits}-bit activations", bits=case, ours=mine[case][WHOLE],
            unit="ms", limit=limits.seconds(moved, 2.0 * multiplied) * 1e3, notes=dict.fromkeys(beside, clock),
        )  # fmt: skip
    return rows


def _nested(layers: Layers, given: dict[str, torch.Tensor], precision: torch.Tensor, layer: int) -> torch.Tensor:
    return layers.nested(given, layer, precision)


def _grouped(layers: Layers, given: dict[str, torch.Tensor], expected: torch.Tensor) -> Sample:
    check(layers.grouped(given, 0), expected)
    return _sample(layers, partial(layers.grouped, given))


def _sample(layers: Layers, one: Callable[[int], torch.Tensor]) -> Sample:
    """`WHOLE` -> seconds of all copies of a layer, each called with its number."""

    def every() -> None:
        for layer in range(layers.shape.copies):
            one(layer)

    if layers.device.type == "cuda" or torch.get_num_threads() > 1:
        return whole(every, layers.device)

    def on_one_thread() -> dict[str, float]:
        with torch.inference_mode():
            begun = time.thread_time()
            every()
            return {WHOLE: time.thread_time() - begun}

    return on_one_thread
