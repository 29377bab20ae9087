"""Launch of `qbe::nested_linear` on a weight in the tiled layout (`qbe.kernels.triton.layout`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton

from qbe.kernels.triton import candidates
from qbe.kernels.triton.layout import TILE, group_size_of, padded_shape, unit
from qbe.kernels.triton.round_rows import round_rows
from qbe.kernels.triton.tiled_decode_kernel import decode_kernel
from qbe.kernels.triton.tiled_quantise import quantise_kernel, quantised_bytes
from qbe.kernels.triton.tiled_rows_kernel import dense_kernel, dequantise_kernel, rows_kernel
from qbe.kernels.tuning.tunable import Config, Problem, Tunable
from qbe.store.layout import SliceLayout

DECODE_ROWS = 16  # up to here codes are multiplied undequantised
SPLIT_ROWS = 64  # up to here one tile holds all rows, and the sum over inputs may be split
PREFILL_ROWS = 256  # from here the weight is dequantised once for all rows
CHUNK_ROWS = 8192  # rows of one prefill launch


@cache
def _parts(layout: SliceLayout) -> tuple[tuple[int, int, int], ...]:
    """PARTS of the kernels: first bit, width and the lowest precision that needs the part."""
    return tuple((f, w, next(i for i, p in enumerate(layout.precisions) if p > f)) for f, w in layout.parts)


@cache
def _device(device: torch.device) -> tuple[int, bool]:
    """Multiprocessors, and whether a kernel may be launched before the one ahead of it has ended."""
    if device.type != "cuda":
        return 132, False
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major >= 9 and torch.version.hip is None


def _splits(units: int, most: int, least_units: int) -> int:
    """The largest number of equal parts, at most `most` and 8, that have at least `least_units` units each."""
    return max((s for s in range(1, 9) if units % s == 0 and s <= most and units // s >= least_units), default=1)


@cache
def decode_config(m: int, n: int, units: int, parts: int, processors: int) -> dict[str, int]:
    """Tile, split and pipeline of the decode kernel, from a sweep on an H200 (docs/performance.md).

    Wide tiles share x between more outputs; narrow ones and splits give a small matrix enough programs. 16 rows need
    more registers, so that a matrix with few tiles rather takes twice the warps than twice the programs.
    """
    block_m = 8 if m <= 8 else 16
    many = -(-n // 64) >= 2 * processors
    warps = 2 if block_m == 8 or many else 4
    most = (4 if warps == 2 else 2) * processors
    block_n, tiles = 64, -(-n // 64)
    splits = _splits(units, most // tiles, 4)
    if warps == 2 and tiles * splits < processors:
        block_n, tiles = 32, -(-n // 32)
        splits = _splits(units, most // tiles, 4)
    return {
        "BM": block_m, "BN": block_n, "SPLITS": splits, "SPLIT_UNITS": units // splits,
        "STAGES": 3 if parts <= 4 else 2, "AHEAD": 2 if units // splits >= 2 else 1, "num_warps": warps,
    }  # fmt: skip


@cache
def rows_config(m: int, n: int, steps: int, parts: int, dtype: torch.dtype, processors: int) -> dict[str, int]:
    """The same of the kernel that dequantises a tile at a time."""
    if dtype == torch.float32:
        return {"BM": 32, "BN": 32, "SPLITS": 1, "STEPS": steps, "STAGES": 2, "num_warps": 4}
    block_m = 64 if m <= SPLIT_ROWS else 128
    block_n = 128 if parts <= 4 else 64
    tiles = -(-n // block_n)
    splits = _splits(steps, 2 * processors // tiles, 8) if m <= SPLIT_ROWS else 1
    return {
        "BM": block_m, "BN": block_n, "SPLITS": splits, "STEPS": steps // splits,
        "STAGES": 3 if parts <= 4 else 2, "num_warps": 4,
    }  # fmt: skip


def _generic_decode(problem: Problem, device: torch.device) -> Config:
    layout, inputs = SliceLayout.of(problem.slices), _inputs(problem)
    n = sum(problem.outputs)
    return decode_config(problem.rows, n, inputs // unit(layout), len(layout.parts), _device(device)[0])


def _generic_rows(problem: Problem, device: torch.device) -> Config:
    parts, (n,) = len(SliceLayout.of(problem.slices).parts), problem.outputs
    return rows_config(problem.rows, n, _inputs(problem) // 64, parts, problem.dtype, _device(device)[0])


def _inputs(problem: Problem) -> int:
    return padded_shape(problem.outputs[0], problem.inputs, SliceLayout.of(problem.slices))[1]


DECODE = Tunable("decode", _generic_decode, candidates.decode, candidates.valid_decode)
ROWS = Tunable("rows", _generic_rows, candidates.rows, candidates.valid_rows)


def tiled_linear(
    x: torch.Tensor,
    tiled: torch.Tensor,
    bits: torch.Tensor,
    original: torch.Tensor | None,
    bias: torch.Tensor | None,
    layout: SliceLayout,
    exponent: int,
    y: torch.Tensor,
    config: Config | None = None,
) -> None:
    """y = x @ W(bits).T + bias, every row at its own bits.

    Args:
        x: float16, bfloat16 or float32 [M, K], contiguous, M at least 1.
        tiled: uint8 [bytes], the weight.
        bits: int32 [M], words of precision, contiguous, on the device; read by the kernels only.
        original: [N, K] for rows at 16 bits; None serves them by the widest slice.
        y: [M, N] in x's dtype, contiguous; written.
        config: to launch with, for a trial; by itself the best one known.
    """
    m, k = x.shape
    n = y.shape[1]
    group_size = group_size_of(tiled, n, k, layout)
    rows, inputs = padded_shape(n, k, layout)
    problem = (x.device, m, (n,), k, layout.slices, group_size, x.dtype, original is not None, bias is not None)
    common = {
        "PRECISIONS": layout.precisions, "PARTS": _parts(layout), "GROUP": group_size, "ASM": x.device.type == "cuda",
    }  # fmt: skip
    if m > DECODE_ROWS or x.dtype == torch.float32:  # the others read the quantised x and its words
        x = round_rows(x, bits, group_size)
    same = original is None or original.dtype == x.dtype
    if m >= PREFILL_ROWS and x.dtype != torch.float32 and same:
        for at in range(0, m, CHUNK_ROWS):
            to = slice(at, at + CHUNK_ROWS)
            _prefill(x[to], tiled, bits[to], original, bias, layout, exponent, y[to], rows, inputs, common)
        return
    if m <= DECODE_ROWS and x.dtype != torch.float32:
        config = config or DECODE.config(*problem)
        grid, units, constants, sums = decode_launch(y, (n,), group_size, layout, config)
        decode_kernel[grid](
            x, quantised(x, inputs, group_size), tiled, bits, original, bias, y, sums, m, n, k, rows, inputs, exponent,
            units, **constants,
        )  # fmt: skip
        return
    config = config or ROWS.config(*problem)
    rows_kernel[_grid(m, n, config)](
        x, tiled, bits, original, bias, y, _sums(y, config), m, n, k, rows, inputs, exponent,
        EVEN=k == inputs, **common, **config,
    )  # fmt: skip


def _grid(m: int, n: int, config: Config) -> tuple[int, int]:
    return -(-n // config["BN"]) * -(-m // config["BM"]), config["SPLITS"]


def _sums(y: torch.Tensor, config: Config) -> torch.Tensor:
    """Where the parts of a split sum go."""
    return y if config["SPLITS"] == 1 else torch.empty(config["SPLITS"], *y.shape, dtype=torch.float32, device=y.device)


def quantised(x: torch.Tensor, inputs: int, group: int) -> torch.Tensor:
    """x [M, K] as the decode kernels read it (`qbe.kernels.triton.tiled_quantise`)."""
    m, k = x.shape
    out = torch.empty(quantised_bytes(m, inputs, group), dtype=torch.uint8, device=x.device)
    quantise_kernel[(m, -(-inputs // 1024))](
        x, out, m, k, inputs, GROUP=group, GROUPS=1024 // group, num_warps=4, **_early(x.device)
    )
    return out


def _early(device: torch.device) -> dict[str, bool]:
    early = _device(device)[1]
    return {"EARLY": early, **({"launch_pdl": True} if early else {})}


def decode_launch(
    y: torch.Tensor, outputs: Sequence[int], group: int, layout: SliceLayout, config: Config
) -> tuple[tuple[int, int], int, dict[str, Any], torch.Tensor]:
    """Grid, units of a part, the kernel's constants and the memory of split sums, for weights of these many outputs.

    How a sum is split is no constant of the kernel: one compilation then serves matrices of many shapes.
    """
    tile = dict(config)
    sums = _sums(y, config)
    splits, units = tile.pop("SPLITS"), tile.pop("SPLIT_UNITS")
    tiles = sum(-(-o // tile["BN"]) for o in outputs)
    constants = {
        "PRECISIONS": layout.precisions, "PARTS": _parts(layout), "GROUP": group, "UNIT": unit(layout),
        "SPLIT": splits > 1, "ASM": y.device.type == "cuda", **tile, **_early(y.device),
    }  # fmt: skip
    return (tiles * -(-y.shape[0] // tile["BM"]), splits), units, constants, sums


def _prefill(
    x: torch.Tensor,
    tiled: torch.Tensor,
    bits: torch.Tensor,
    original: torch.Tensor | None,
    bias: torch.Tensor | None,
    layout: SliceLayout,
    exponent: int,
    y: torch.Tensor,
    rows: int,
    inputs: int,
    common: dict[str, object],
) -> None:
    """Dequantise once and multiply, for each precision that some row asks for; the launches do not depend on which."""
    m, k = x.shape
    n = y.shape[1]
    weight = torch.empty(rows, inputs, dtype=x.dtype, device=x.device)
    grid = (-(-n // 256) * -(-m // 128),)
    tile = {"BM": 128, "BN": 256, "BK": 64, "STAGES": 3, "EVEN": k % 64 == 0, "KSTEPS": -(-k // 64), "num_warps": 8}
    top = 16 if original is not None else 2**30
    bounds = (-(2**30), *layout.precisions[1:], top)
    for p in range(len(layout.precisions)):
        low, high = bounds[p], bounds[p + 1]
        dequantise_kernel[(rows // TILE, inputs // 256)](
            tiled, bits, weight, None, None, m, rows, inputs, exponent, low, high, ROWS=triton.next_power_of_2(m),
            TOP=p, LARGEST=None, **common,
        )  # fmt: skip
        dense_kernel[grid](x, weight, bits, bias, y, m, n, k, inputs, low, high, **tile)
    if original is not None:
        dense_kernel[grid](x, original, bits, bias, y, m, n, k, k, top, 2**30, **tile)
