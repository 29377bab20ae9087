"""Launch of `many_rows.cu` and `dense_rows.cu`: products of more rows than a few, on Hopper, by register-source wgmma.

Weights are in fragments (`qbe.kernels.cuda.fragments`), converted in registers and never written. Up to 256 rows the
inputs are shared out between all processors (stream-K); beyond, a block has whole sums.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from qbe.kernels.cuda import fragments
from qbe.kernels.cuda.launch import Argument, launch
from qbe.kernels.cuda.tensor_map import tensor_map
from qbe.kernels.cuda.wgmma import wgmma

STEP = 128  # inputs, as in many_rows.cu
OUTPUTS = {64: 192, 128: 192, 256: 128}  # of a tile of so many rows
SPLIT_ROWS = 256  # up to here inputs are shared out
SHARED = 227 << 10  # bytes of a block
EXCHANGE, BARRIERS = 24 << 10, 3 * 8 * 8 + 12 * 16 + 16
ROOM = (SHARED - 1024 - EXCHANGE - BARRIERS) // 1024 * 1024  # of the stages of many_rows.cu
DENSE_ROWS, DENSE_OUTPUTS, DENSE_THREADS = 256, 128, 384  # as in dense_rows.cu
DENSE_ROOM = (SHARED - 1024 - 3 * 8 * 8) // 1024 * 1024
MOST_PARTS = 15  # of a tile: a field of four bits counts them
SCALE_EXPONENT = 117  # as which kernels decode scales, so that float16 has room for them (`scale_of` in many_rows.cuh)
PRECISIONS = (4, 6, 8)
FOLDER = Path(__file__).parent


def source(kernel: str, rows: int, group: int, float16: bool, float32_output: bool = False, eight: bool = False) -> str:
    """What is compiled.

    Args:
        kernel: many_rows, dense_rows or eight_bit_rows.
        rows: of a tile.
        float16: x is float16, not bfloat16.
        float32_output: y is float32.
        eight: x is int8.
    """
    device, hopper, codes, text = (
        (FOLDER / name).read_text() for name in ("device.cuh", "hopper.cuh", "many_rows.cuh", f"{kernel}.cu")
    )
    flags = {"F16": float16, "WIDE": float32_output, "EIGHT": eight}
    constants = (
        f"constexpr int ROWS = {rows}, GROUP = {group};\n"
        f"constexpr bool {', '.join(f'{name} = {str(flag).lower()}' for name, flag in flags.items())};\n"
        f"using Number = {'int' if eight else 'float'};\n"
    )
    return device + hopper + constants + codes + wgmma(rows, "int8" if eight else "f16" if float16 else "bf16") + text


@cache
def pairs_for(n: int, inputs: int, processors: int, outputs: int) -> int:
    """Pairs of blocks that share out the work. Nothing else may decide it: a row's sums then have one order, whatever
    rows are beside it.

    Args:
        n, inputs: the weight's, padded.
        outputs: of a tile.
    """
    tiles, steps = -(-n // outputs), -(-inputs // STEP)
    return max(1, min(processors // 2, tiles * steps // 2, tiles * (MOST_PARTS - 1)))


def tile_rows(rows: int) -> int:
    """Rows of a tile of `many_rows.cu` for so many."""
    return next((tile for tile in OUTPUTS if rows <= tile), max(OUTPUTS))


@cache
def _loaded(device: torch.device, text: str, name: str, shared: int) -> Any:
    from torch.cuda._utils import _cuda_load_module

    from qbe.kernels.cuda.nvrtc import compiled_kernel

    with torch.cuda.device(device):
        binary, symbol = compiled_kernel(text, name, "90a")  # wgmma is Hopper's own
        kernel = _cuda_load_module(binary, [symbol])[symbol]  # type: ignore[index]
        if shared:
            kernel.set_shared_memory_config(shared)
    return kernel


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def multiply(
    x: torch.Tensor,
    packed: torch.Tensor,
    bits: torch.Tensor,
    bias: torch.Tensor | None,
    exponent: int,
    y: torch.Tensor,
    order: torch.Tensor | None = None,
    eight: bool = False,
    precisions: tuple[int, ...] = PRECISIONS,
) -> None:
    """y = x @ W(bits).T + bias; every row is read at the highest of `bits`, or where x is sorted, at its own.

    Args:
        x: float16 or bfloat16 [M, K], contiguous, at a multiple of 16 bytes, K a multiple of 8.
        packed: uint8 [1, 1, bytes], fragments of a weight [N, K].
        bits: int32 [R], precision words, on the device and read by the kernel only. 16 is the widest precision. No
            kernel that writes them may let the next one begin before its own end.
        bias: [N] in x's dtype, or None.
        y: [R, N] in x's dtype or float32, contiguous; written.
        order: int32 [M], which row of y each row of x is, -1 for none; rows of a tile have the same precision
            (`qbe.kernels.cuda.row_order`). None: they are y's.
        eight: both sides in int8 with a scale per row (`qbe.kernels.reference.eight_bit_rows`); not with `order`.
        precisions: that the weight has.
    """
    (m, k), (rows, n) = x.shape, y.shape
    group = fragments.group_size_of(packed, n, k, precisions)
    layout = fragments.regions(n, k, group, precisions)
    planes = (*layout.planes, 0, 0)
    float16, float32_output, processors = x.dtype == torch.float16, y.dtype != x.dtype, _processors(x.device)
    given, x_scales, bounds = _eight_bit_sides(x, packed, bits, layout, group, precisions) if eight else (x, None, None)
    before = [packed, bits, order, y, bias, x_scales, bounds]
    after = [
        planes[1] // 16, planes[2] // 16, layout.scales // 16, bits.numel(), rows, m, n, layout.inputs // 64,
        len(precisions), layout.pairs,
    ]  # fmt: skip
    factor = 2.0 ** (exponent - SCALE_EXPONENT)
    columns = 128 if eight else 64
    split = rows <= SPLIT_ROWS
    # Tiles of sorted rows are of 128: four of them hold 256 rows of three precisions, and the kernel counts four.
    tile = DENSE_ROWS if not split else 128 if order is not None else tile_rows(m)
    text = source("many_rows" if split else "dense_rows", tile, group, float16, float32_output, eight)
    with torch.cuda.device(x.device):
        if split:
            outputs = OUTPUTS[tile]
            pairs = pairs_for(layout.rows, layout.inputs, processors, outputs)
            parts = torch.empty(2 * pairs * -(-m // tile) * tile * outputs, dtype=torch.int32, device=x.device)
            arguments = [
                tensor_map(given, columns, tile), *before, parts, packed.view(-1)[layout.counts :], *after,
                ROOM, factor,
            ]  # fmt: skip
            launch(_loaded(x.device, text, "many_rows", SHARED), 2 * pairs, 2 * outputs + 128, arguments, SHARED, 2)
        else:
            work = -(-n // (2 * DENSE_OUTPUTS)) * -(-m // DENSE_ROWS)
            arguments = [tensor_map(given, columns, DENSE_ROWS // 2), *before, *after, DENSE_ROOM, factor]
            kernel = _loaded(x.device, text, "dense_rows", SHARED)
            launch(kernel, 2 * min(work, processors // 2), DENSE_THREADS, arguments, SHARED, 2)


def _eight_bit_sides(
    x: torch.Tensor,
    packed: torch.Tensor,
    bits: torch.Tensor,
    layout: fragments.Regions,
    group: int,
    precisions: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x in int8 and its scales, [M, K padded] and float32 [M]; bounds of the weight's rows, float32 [N padded]."""
    m, k = x.shape
    given = torch.empty(m, layout.inputs, dtype=torch.int8, device=x.device)
    x_scales = torch.empty(m, dtype=torch.float32, device=x.device)
    bounds = torch.empty(layout.rows, dtype=torch.float32, device=x.device)
    text = source("eight_bit_rows", 64, group, x.dtype == torch.float16)
    with torch.cuda.device(x.device):
        arguments: list[Argument] = [
            packed,
            bits,
            bounds,
            layout.scales // 16,
            bits.numel(),
            layout.inputs // group,
            layout.pairs,
            len(precisions),
        ]
        launch(_loaded(x.device, text, "row_bounds", 0), layout.rows // 64, 256, arguments)
        launch(_loaded(x.device, text, "eight_bit_rows", 0), m, 256, [x, given, x_scales, k, layout.inputs])
    return given, x_scales, bounds
