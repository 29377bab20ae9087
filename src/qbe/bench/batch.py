"""Rows of one batch at different precisions, beside the same batch at its highest and beside one launch a precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from qbe.bench.linears import passes_at, random_inputs
from qbe.bench.machine import Roofline
from qbe.bench.measure import Failed, Sample, attempt, take_turns
from qbe.bench.passes import one_pass, pass_rows
from qbe.bench.report import Row
from qbe.bench.weights import LinearGroup, Token, Weights, call, random_weights, token_for
from qbe.progress import bar

MIXED = "in turn"
ONE_HIGH = "one high"
SPLIT = "a launch per precision"


@dataclass(frozen=True)
class BatchSizes:
    """What is measured.

    Attributes:
        token: whose linear layers.
        rows: batch sizes.
        widths: precisions that a batch mixes, ascending.
        groups: group sizes of the nested store.
        rounds: per batch size and group size.
    """

    token: Token
    rows: tuple[int, ...] = (8, 16)
    widths: tuple[int, ...] = (4, 6, 8)
    groups: tuple[int, ...] = (64,)
    rounds: int = 15


def sizes_for(device: torch.device) -> BatchSizes:
    return BatchSizes(token_for(device), groups=(64, 128) if device.type == "cuda" else (64,))


def run(device: torch.device, limits: Roofline, sizes: BatchSizes, progress: bool = False) -> list[Row]:
    """Two mixtures for each batch size: the precisions in turn, and one row at the highest beside rows at the lowest.

    Returns:
        For each mixture a row per peer and part, as in `qbe.bench.linears`. The peer that takes a launch per precision
        is not charged for sorting the rows before and after.
    """
    low, high = min(sizes.widths), max(sizes.widths)
    total = len(sizes.token.all_parts) + len(sizes.groups) * len(sizes.rows) * (sizes.rounds + 1)
    rows: list[Row] = []
    with bar("batch", total, progress) as tick:
        weights = random_weights(sizes.token, device, sizes.groups, tick)
        for group in sizes.groups:
            for m in sizes.rows:
                x = random_inputs(sizes.token, m, device)
                batches = {
                    MIXED: [sizes.widths[r % len(sizes.widths)] for r in range(m)],
                    ONE_HIGH: [high] + [low] * (m - 1),
                }
                highest = f"all rows at {high}"
                passes = passes_at(weights, x, {**batches, highest: [high] * m}, group)
                peers: dict[str, Sample | Failed] = {highest: passes.pop(highest)}
                for name, batch in batches.items():
                    peers[f"{name}/{SPLIT}"] = attempt(lambda b=batch, x=x, g=group: split(weights, x, b, g))  # type: ignore[misc]
                mine, theirs = take_turns(passes, peers, sizes.rounds, tick)
                for name, batch in batches.items():
                    label = "+".join(map(str, sizes.widths)) if name == MIXED else f"1x{high}, {m - 1}x{low}"
                    rows += pass_rows(
                        weights, limits, mine[name], {highest: theirs[highest], SPLIT: theirs[f"{name}/{SPLIT}"]},
                        rows=m, group=group, widths=tuple(sorted(set(batch))), bits=label, notes={},
                    )  # fmt: skip
                del passes, peers
    return rows


def split(weights: Weights, x: Mapping[int, torch.Tensor], batch: list[int], group: int) -> Sample:
    """A pass that serves a mixed batch as a system would whose kernels know one precision a launch."""
    rows_by_bits = {
        b: torch.tensor([r for r, c in enumerate(batch) if c == b], device=weights.device) for b in set(batch)
    }
    inputs = {b: {k: v[rows] for k, v in x.items()} for b, rows in rows_by_bits.items()}
    bits = {
        b: torch.full((len(rows),), b, dtype=torch.int32, device=weights.device) for b, rows in rows_by_bits.items()
    }
    nested = weights.nested[group]

    def launches(part: LinearGroup, i: int) -> None:
        for b in sorted(rows_by_bits):
            call(inputs[b][part.k], nested[part.name][i], bits[b])

    return one_pass(weights.token, launches, weights.device)
