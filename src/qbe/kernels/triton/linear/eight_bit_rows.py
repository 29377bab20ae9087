"""Both sides of a long product in 8 bits with a scale per row: E4M3 or int8, as the tensor cores take them.

The scale of a row takes its largest value to the format's largest. Activations: the largest is looked for here, in the
launch that converts. Weights: the tiled layout holds a bound for each output and precision (`tiled.layout`).
"""

# Triton's language is not Python's: its arguments carry no types, and a branch on a constant must stand alone.
# mypy: disable-error-code="no-untyped-def, assignment, operator"
# ruff: noqa: SIM300

from __future__ import annotations

import torch
import triton
import triton.language as tl

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


@triton.jit
def to_eight(x, DTYPE: tl.constexpr):
    """float32 within the format's range -> DTYPE, to nearest"""
    if DTYPE == tl.int8:
        return tl.floor(x + 0.5).to(DTYPE)
    else:
        return x.to(DTYPE)


@triton.jit
def eight_bit_rows_kernel(x_ptr, out_ptr, scales_ptr, K, kp, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """one row; an infinity or a NaN in it becomes its scale, and its values zero"""
    m = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    magnitude = tl.zeros((BLOCK,), tl.int32)  # integers order floats by magnitude, NaN above infinity
    for begin in range(0, K, BLOCK):
        x = tl.load(x_ptr + m * K + begin + k, mask=begin + k < K, other=0.0).to(tl.float32)
        magnitude = tl.maximum(magnitude, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    most = tl.max(magnitude, 0)
    largest = tl.maximum(most, 0x0DA24260).to(tl.float32, bitcast=True)  # at least 1e-30: no division by zero
    tl.store(scales_ptr + m, largest * (1.0 / LARGEST))
    factor = tl.div_rn(tl.full((), LARGEST, tl.float32), largest)
    for begin in range(0, kp, BLOCK):
        x = tl.load(x_ptr + m * K + begin + k, mask=begin + k < K, other=0.0).to(tl.float32)
        x = tl.where(most < 0x7F800000, x * factor, 0.0)
        tl.store(out_ptr + m * kp + begin + k, to_eight(x, out_ptr.dtype.element_ty), mask=begin + k < kp)


def eight_bit_rows(x: torch.Tensor, kp: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x in 8 bits with a scale per row.

    Args:
        x: float16, bfloat16 or float32 [M, K], contiguous.
        kp: inputs of the result, K or more.
        dtype: float8_e4m3fn or int8.

    Returns:
        dtype [M, kp], zero past K, and float32 [M, 1]: their product is x.
    """
    m, k = x.shape
    out = torch.empty(m, kp, dtype=dtype, device=x.device)
    scales = torch.empty(m, 1, dtype=torch.float32, device=x.device)
    eight_bit_rows_kernel[(m,)](x, out, scales, k, kp, LARGEST=LARGEST[dtype], BLOCK=2048, num_warps=4)
    return out, scales
