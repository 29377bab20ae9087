"""Launch of `linear.cu`: y = x W^T for 1 to 32 rows, each at its own precision, compiled where it runs, by NVRTC.

Weights are the 16-row operand of `mma`, in the order of its fragments (`fragments`), x is the 8-column one.
No code is rounded: a plane's product is exact in x's dtype, and scales and zero points multiply its float32 sums.
Each plane is multiplied for itself, so rows of any mix of precisions share all that is read and multiplied, and a row
comes out the same, bit for bit, in any batch: how sums are cut depends on the weight and on the GPU alone.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qbe.kernels.cuda.fragments import GROUPS, group_size_of, regions
from qbe.kernels.cuda.launch import launch

MOST_ROWS = 32
MOST_WEIGHTS = 3  # of a launch
OUTPUTS = 256  # of a tile
LEAST_UNITS = 2  # of a block
THREADS = 256
HALF_SHARED = 113 << 10  # two blocks fit on a processor: the next kernel's weights come while this one ends
ALL_SHARED = 227 << 10
CAPABILITY = (9, 0)
FOLDER = Path(__file__).parent
SOURCES = (  # compiled as one
    "device.cuh", "linear_work.cuh", "linear_ring.cuh", "linear_codes.cuh", "linear_sums.cuh", "linear.cu",
)  # fmt: skip

log = logging.getLogger(__name__)


class _Weight(ctypes.Structure):
    """`Weight` of linear_work.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "words", "original", "bias")),
        *((name, ctypes.c_longlong) for name in ("plane2", "plane1", "scales", "counts")),
        *((name, ctypes.c_int) for name in ("outputs", "exponent", "first_tile", "column")),
    )


class Arguments(ctypes.Structure):
    """`Linear` of linear_work.cuh."""

    _fields_ = (
        ("weights", _Weight * MOST_WEIGHTS),
        *((name, ctypes.c_void_p) for name in ("x", "y", "sums")),
        *((name, ctypes.c_int) for name in (
            "count", "rows", "inputs", "x_row", "y_row", "chunks", "units", "present", "ring", "wide",
        )),
    )  # fmt: skip


class Shape(NamedTuple):
    """How a product is launched; all but `tiles` and `shared` depends on the weights and the GPU alone.

    Attributes:
        tiles: of 8 rows, that the kernel is made for: 1, 2 or 4.
        blocks: of a launch.
        units: groups of inputs of all tiles of outputs, that are shared out between them.
        ring: bytes of shared memory for each warp's weights.
        shared: bytes of shared memory of a block.
    """

    tiles: int
    blocks: int
    units: int
    ring: int
    shared: int


@cache
def shape_of(rows: int, outputs: tuple[int, ...], inputs: int, group_size: int, processors: int) -> Shape:
    """Of so many rows and weights with so many outputs each."""
    tiles = next(n for n in (1, 2, 4) if rows <= 8 * n)
    units = sum(-(-n // OUTPUTS) for n in outputs) * -(-inputs // group_size)
    blocks = max(1, min(processors, units // LEAST_UNITS))
    shared = HALF_SHARED if tiles == 1 else ALL_SHARED
    # Room of linear_ring.cuh: barriers, sums of four warps, three slots of x for each half.
    before = 768 + 4 * 64 * 8 * tiles * 4 + 6 * 8 * tiles * (2 * group_size + 16)
    return Shape(tiles, blocks, units, (shared - before) // 8 // 128 * 128, shared)


def arguments_of(
    x: torch.Tensor,
    packed: Sequence[torch.Tensor],
    words: Sequence[torch.Tensor],
    originals: Sequence[torch.Tensor | None],
    biases: Sequence[torch.Tensor | None],
    outputs: Sequence[int],
    exponents: Sequence[int],
    y: torch.Tensor,
    sums: torch.Tensor,
    shape: Shape,
    group_size: int,
    inputs: int,
    precisions: Sequence[int],
) -> Arguments:
    """What the kernel is given; the tensors are `linears`' own."""
    given = Arguments()
    tile = column = 0
    for i, n in enumerate(outputs):
        layout = regions(n, inputs, group_size, precisions)
        planes = (*layout.planes[1:], 0, 0)
        given.weights[i] = _Weight(
            packed[i].data_ptr(), words[i].data_ptr(), _address(originals[i]), _address(biases[i]), planes[0],
            planes[1], layout.scales, layout.counts, n, exponents[i], tile, column,
        )  # fmt: skip
        tile, column = tile + -(-n // OUTPUTS), column + n
    given.x, given.y, given.sums = x.data_ptr(), y.data_ptr(), sums.data_ptr()
    given.count, given.rows, given.inputs = len(outputs), x.shape[0], inputs
    given.x_row, given.y_row = x.stride(0), y.stride(0)
    given.chunks, given.units, given.present = -(-inputs // group_size), shape.units, len(precisions)
    given.ring, given.wide = shape.ring, y.dtype == torch.float32
    return given


def sums_of(shape: Shape, device: torch.device) -> torch.Tensor:
    """Room for the sums of cut tiles, float32."""
    return torch.empty(2 * shape.blocks * OUTPUTS * 8 * shape.tiles, dtype=torch.float32, device=device)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """x [M, K], contiguous, so that copies of 16 bytes can read its rows; K may become more, by zeros."""
    more = -x.shape[1] % 8
    if more:
        return torch.nn.functional.pad(x, (0, more))
    return x if x.data_ptr() % 16 == 0 else x.clone()


def linears(
    x: torch.Tensor,
    packed: Sequence[torch.Tensor],
    words: Sequence[torch.Tensor],
    originals: Sequence[torch.Tensor | None],
    biases: Sequence[torch.Tensor | None],
    outputs: Sequence[int],
    exponents: Sequence[int],
    y: torch.Tensor,
    precisions: Sequence[int] = (4, 6, 8),
) -> None:
    """y = [x @ W1(words[0]).T + bias, …] for one to three weights in one launch.

    Args:
        x: float16 or bfloat16 [M, K], contiguous, M from 1 to 32.
        packed: uint8 [1, 1, bytes], fragments.
        words: int32 [M] each, contiguous; read by the kernel only.
        originals: [N, K] in x's dtype, for rows at 16 bits; None serves them by the widest precision.
        biases: [N] in x's dtype, or None.
        outputs: N of each.
        y: [M, sum of N] in x's dtype or float32, whose rows may lie apart; written.
        precisions: that all of them have.
    """
    inputs = x.shape[1]
    group_size = group_size_of(packed[0], outputs[0], inputs, precisions)
    processors = _processors(x.device)
    shape = shape_of(x.shape[0], tuple(outputs), inputs, group_size, processors)
    sums = sums_of(shape, x.device)
    x = aligned_rows(x)
    given = arguments_of(
        x, packed, words, originals, biases, outputs, exponents, y, sums, shape, group_size, inputs, precisions
    )
    kernel = _kernel(x.device, shape.tiles, group_size, x.dtype == torch.float16)
    assert kernel is not None, "`serves` was asked"
    with torch.cuda.device(x.device):
        launch(kernel, shape.blocks, THREADS, [given], shape.shared)


def serves(device: torch.device, dtype: torch.dtype, group_size: int) -> bool:
    """Whether weights of such a model lie in fragments on this device: the one place that decides it."""
    if device.type != "cuda" or torch.version.hip is not None or dtype not in (torch.float16, torch.bfloat16):
        return False
    return (
        torch.cuda.get_device_capability(device) == CAPABILITY
        and group_size in GROUPS
        and _kernel(device, 1, group_size, dtype == torch.float16) is not None
    )


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def source(names: Sequence[str] = SOURCES) -> str:
    """What is compiled."""
    return "".join((FOLDER / name).read_text() for name in names)


@cache
def _kernel(device: torch.device, tiles: int, group_size: int, float16: bool) -> Any:
    from qbe.kernels.cuda.nvrtc import loaded_kernel

    shared = HALF_SHARED if tiles == 1 else ALL_SHARED
    return loaded_kernel(device, source(), f"linear<{tiles}, {group_size}, {str(float16).lower()}>", shared)
