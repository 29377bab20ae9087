"""Launch of `dense.cu`: fragments back to rows of numbers, for products of so many rows that a library has them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from qbe.kernels.cuda.fragments import BLOCK, TILE, group_size_of, regions
from qbe.kernels.cuda.launch import launch
from qbe.kernels.cuda.linear import source
from qbe.kernels.cuda.nvrtc import loaded_kernel

THREADS = 256
SOURCES = "device.cuh", "linear_codes.cuh", "dense.cu"
KINDS = {
    torch.bfloat16: "BF16", torch.float16: "HALF", torch.float32: "FLOAT", torch.float8_e4m3fn: "E4M3",
    torch.int8: "INT8",
}  # fmt: skip
EIGHT_BITS = (torch.float8_e4m3fn, torch.int8)


class Arguments(ctypes.Structure):
    """`Dense` of dense.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "words", "out", "largest", "scales")),
        *((name, ctypes.c_longlong) for name in ("plane2", "plane1", "pairs")),
        *((name, ctypes.c_int) for name in (
            "rows", "low", "high", "inputs", "group", "count", "precision", "exponent", "first",
        )),
    )  # fmt: skip


def arguments_of(
    fragments: torch.Tensor, n: int, k: int, exponent: int, precision: int, first: int, precisions: Sequence[int]
) -> Arguments:
    """Of a weight [n, k] at the precision of that index, from output `first` on; the tensors are for the caller."""
    group = group_size_of(fragments, n, k, precisions)
    layout = regions(n, k, group, precisions)
    planes = (*layout.planes[1:], 0, 0)
    return Arguments(
        codes=fragments.data_ptr(), plane2=planes[0], plane1=planes[1], pairs=layout.scales, inputs=layout.inputs,
        group=group, count=layout.pairs, precision=precision, exponent=exponent, first=first // TILE,
    )  # fmt: skip


def blocks_of(given: Arguments, outputs: int) -> int:
    """Of a launch of `dequantise`."""
    return outputs // TILE * (-(-given.inputs // BLOCK // 2))


def dequantise(
    fragments: torch.Tensor,
    n: int,
    k: int,
    exponent: int,
    precision: int,
    dtype: torch.dtype,
    first: int = 0,
    count: int | None = None,
    wanted: tuple[torch.Tensor, int, int] | None = None,
    out: torch.Tensor | None = None,
    precisions: Sequence[int] = (4, 6, 8),
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Outputs of a weight at the precision of that index, padded to 64 outputs and whole groups.

    Args:
        fragments: uint8 [1, 1, bytes], of a weight [n, k].
        dtype: a 16-bit float or float32, or float8_e4m3fn or int8 with a scale for each output.
        first, count: which outputs, multiples of 64; by itself all of them and the padding.
        wanted: words of precision, int32 [M] on the device, and bounds: nothing is written unless some row has
            bits in low <= bits < high.
        out: dtype [count, kp], to be written.

    Returns:
        dtype [count, kp], whose first k inputs are the weight and the rest finite, and of 8 bits the scales, float32
        [count].
    """
    given = arguments_of(fragments, n, k, exponent, precision, first, precisions)
    count = -(-n // TILE) * TILE - first if count is None else count
    device = fragments.device
    out = torch.empty(count, given.inputs, dtype=dtype, device=device) if out is None else out
    scales = None
    if dtype in EIGHT_BITS:
        largest, scales = torch.empty(2, count, dtype=torch.float32, device=device)
        given.rows, given.scales = count, largest.data_ptr()
        _launch(device, "bounds", -(-count // THREADS), given)
        given.rows, given.scales, given.largest = 0, scales.data_ptr(), largest.data_ptr()
    given.out = out.data_ptr()
    if wanted is not None:
        words, given.low, given.high = wanted
        given.words, given.rows = words.data_ptr(), words.numel()
    _launch(device, f"dequantise<{KINDS[dtype]}>", blocks_of(given, count), given)
    return out, scales


def _launch(device: torch.device, name: str, blocks: int, given: Arguments) -> None:
    kernel = loaded_kernel(device, source(SOURCES), name, 0)
    assert kernel is not None, "`linear.serves` was asked"
    with torch.cuda.device(device):
        launch(kernel, blocks, THREADS, [given])
