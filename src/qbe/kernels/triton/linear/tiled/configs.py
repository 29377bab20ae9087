"""How the tiled kernels are launched where nothing was tuned yet: tile, split of the sum, pipeline and warps."""

from __future__ import annotations

from functools import cache

import torch

from qbe.format.layout import SliceLayout
from qbe.kernels.triton.linear import candidates
from qbe.kernels.triton.linear.candidates import even_tiles
from qbe.kernels.triton.linear.tiled.layout import padded_shape, unit
from qbe.kernels.triton.linear.tiled.row_loop import packed_rows
from qbe.kernels.tuning.tunable import Config, Problem, Tunable, processors

MOST_ROW_TILES = 4  # of a split sum: a weight has counters for so many (`layout`)


def _splits(units: int, most: int, least_units: int) -> int:
    """The largest number of equal parts, at most `most` and 8, that have at least `least_units` units each."""
    return max((s for s in range(1, 9) if units % s == 0 and s <= most and units // s >= least_units), default=1)


@cache
def decode_config(m: int, outputs: tuple[int, ...], units: int, parts: int, processors: int) -> dict[str, int]:
    """Of `decode_kernel`, from sweeps on an H200 and an H100 (docs/performance.md).

    Wide tiles share x between more outputs, which pays for two rows and more; narrow ones and splits give a small
    matrix enough programs. 16 rows need more registers, so that a matrix with few tiles rather takes twice the warps
    than twice the programs. A single row needs half of them, and gains from one more unit in flight.

    How the sum is split depends on the weight alone, so that a row comes out the same whatever rows are beside it.
    """
    n = sum(outputs)
    many = -(-n // 64) >= 2 * processors
    warps = 2 if m <= 8 or many else 4
    block_n, tiles = 64, -(-n // 64)
    splits = _splits(units, 4 * processors // tiles, 4)
    if tiles * splits < processors:
        splits = _splits(units, 4 * processors // -(-n // 32), 4)
        block_n = 32 if warps == 2 else 64
    stages = 2 if parts > 4 else 4 if m == 1 else 3
    if 1 < m <= 8 and parts <= 4 and even_tiles(outputs):
        block_n, warps, stages = 128, 4, 3 if packed_rows(m) else 2
    return {
        "BM": 8 if m <= 8 else 16, "BN": block_n, "SPLITS": splits, "SPLIT_UNITS": units // splits,
        "STAGES": stages, "AHEAD": 2 if units // splits >= 2 else 1, "num_warps": warps,
    }  # fmt: skip


@cache
def batch_config(
    m: int, outputs: tuple[int, ...], units: int, width: int, processors: int, shared: int
) -> dict[str, int]:  # fmt: skip
    """Of `batch_kernel`, likewise.

    A program keeps its x in shared memory, so that one or two of them fit on a processor: one wave of them is best, of
    wide tiles if those are enough.

    Args:
        width: inputs of a unit.
        shared: bytes of shared memory that a program can have.
    """
    block_m = 16 if m <= 16 else 32 if m <= 32 or width > 256 else 64
    row_tiles = -(-m // block_m)
    most = 8 if row_tiles <= MOST_ROW_TILES else 1

    def tiles_of(block_n: int) -> int:
        return sum(-(-n // block_n) for n in outputs) * row_tiles

    block_n, tiles = 128, tiles_of(128)
    splits = _splits(units, min(most, processors // tiles), 12)
    warps = 4 if block_m <= 32 and tiles * splits > processors else 8
    if 10 * tiles * splits < 7 * processors:
        block_n, tiles, warps = 64, tiles_of(64), 4
        waves, least = {16: (4, 2), 32: (3, 2)}.get(block_m, (1, 4))
        splits = _splits(units, min(most, waves * processors // tiles), least)
    stages = next((s for s in (3, 2) if s * width * (2 * block_m + block_n) <= shared), 1)
    return {
        "BM": block_m, "BN": block_n, "SPLITS": splits, "SPLIT_UNITS": units // splits, "STAGES": stages,
        "num_warps": warps,
    }  # fmt: skip


def _units(problem: Problem) -> tuple[int, int]:
    """Units of the inputs and their width."""
    layout = SliceLayout.of(problem.slices)
    width = unit(layout)
    return padded_shape(problem.outputs[0], problem.inputs, layout)[1] // width, width


def _generic_decode(problem: Problem, device: torch.device) -> Config:
    parts = len(SliceLayout.of(problem.slices).parts)
    return decode_config(problem.rows, problem.outputs, _units(problem)[0], parts, processors(device))


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that one program can have; those of an H200 for a CPU."""
    if device.type != "cuda":
        return 227 << 10
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def _generic_batch(problem: Problem, device: torch.device) -> Config:
    return batch_config(problem.rows, problem.outputs, *_units(problem), processors(device), _shared_memory(device))


DECODE = Tunable("decode", _generic_decode, candidates.decode, candidates.valid_decode)
BATCH = Tunable("batch", _generic_batch, candidates.batch, candidates.valid_batch)
