"""Rows as the batch kernel reads them: float16 times a power of two for each row, so that its largest is below 512.

A bfloat16 keeps all its bits then, or is too small beside the row's largest to matter. A row whose word asks for 8-bit
activations is rounded to those first. The words are each weight's own, so there is a part of `half_bytes` for every
weight of a launch: float16 [M, kp], zero past K, in the order of `place`, and a float32 scale for each row. A row with
an infinity or a NaN has a NaN there, which reaches all its outputs and no other row.
"""

# Triton's language is not Python's: its arguments carry no types, and a branch on a constant must stand alone.
# mypy: disable-error-code="no-untyped-def, assignment, operator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qbe.kernels.triton.linear.tiled.common import choose, has_eight
from qbe.kernels.triton.linear.tiled.quantise import fixed_point, high_byte

ROW_MAX = tl.constexpr(8)  # exponent of a row's largest element


def half_bytes(m: int, kp: int) -> int:
    """Size of the part of one weight, a multiple of 16."""
    return -(-(2 * m * kp + 4 * m) // 16) * 16


@triton.jit
def place(k):
    """where input k goes: of every 16, number 4l + 2i + j goes to 8i + 2l + j (`batch_kernel._weights`)"""
    return k // 16 * 16 + k % 4 // 2 * 8 + k % 16 // 4 * 2 + k % 2


@triton.jit
def magnitude(x):
    """the bits of |x|, float32: integers order them as floats, NaN above infinity"""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def row_scale(largest):
    """`magnitude` of a row's largest -> bits of its scale, the scale's inverse, and whether the row is finite"""
    largest = tl.maximum(largest, 0x08800000)  # at least 2**-110: no scale overflows
    finite = largest < 0x7F800000
    scale = tl.where(finite, (largest & 0x7F800000) - (ROW_MAX << 23), 0x3F800000)
    return scale, ((254 << 23) - scale).to(tl.float32, bitcast=True), finite


@triton.jit
def store_half(x, inverse, finite, eight, out_ptr, m, k, kp):
    """float32 x [n, GROUP], inputs k of row m, into the part of one weight"""
    x = tl.where(finite, x * inverse, 0.0)
    if eight:
        step, q = fixed_point(x, 1)
        x = high_byte(q).to(tl.float32) * (step * 256)
    # As `place` says: stored to where that points they would take several times as long.
    x = x.to(tl.float16).reshape(x.shape[0], x.shape[1] // 16, 4, 2, 2).permute(0, 1, 3, 2, 4).reshape(x.shape)
    tl.store(out_ptr.to(tl.pointer_type(tl.float16)) + m.to(tl.int64) * kp + k, x, mask=k < kp)


@triton.jit
def store_scale(scale, finite, out_ptr, m, M, kp):
    """the scale of row m, likewise"""
    scales = (out_ptr.to(tl.pointer_type(tl.float16)) + M.to(tl.int64) * kp).to(tl.pointer_type(tl.float32))
    tl.store(scales + m, tl.where(finite, scale.to(tl.float32, bitcast=True), float("nan")))


@triton.jit
def store_whole_row(
    x, out_ptr, bits0_ptr, bits1_ptr, bits2_ptr, size, m, k, M, kp, WEIGHTS: tl.constexpr
):  # fmt: skip
    """float32 x [n, GROUP], the whole of row m, zero past its inputs, for each of the weights with these words"""
    scale, inverse, finite = row_scale(tl.max(tl.max(magnitude(x), 1), 0))
    for w in tl.static_range(WEIGHTS):
        bits_ptr = choose(w, 1, 2, bits0_ptr, bits1_ptr, bits2_ptr)
        part = tl.multiple_of(out_ptr + w * size, 16)
        store_half(x, inverse, finite, has_eight(tl.load(bits_ptr + m, cache_modifier=".cg")), part, m, k, kp)
        store_scale(scale, finite, part, m, M, kp)


@triton.jit(do_not_specialize=["M", "size"], do_not_specialize_on_alignment=["bits0_ptr", "bits1_ptr", "bits2_ptr"])
def half_rows_kernel(
    x_ptr, bits0_ptr, bits1_ptr, bits2_ptr, out_ptr, size, M, K, kp, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """one row of x, BLOCK inputs at a time, for one of up to three weights, whose parts are `size` bytes apart"""
    m = tl.program_id(0)
    bits_ptr = choose(tl.program_id(1), 1, 2, bits0_ptr, bits1_ptr, bits2_ptr)
    out_ptr = tl.multiple_of(out_ptr + tl.program_id(1) * size, 16)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    px = x_ptr + m.to(tl.int64) * K
    column = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    eight = has_eight(tl.load(bits_ptr + m, cache_modifier=".cg"))
    top = tl.zeros((BLOCK // GROUP, GROUP), tl.int32)
    for first in range(0, K, BLOCK):
        k = first + column
        top = tl.maximum(top, magnitude(tl.load(px + k, mask=k < K, other=0.0).to(tl.float32)))
    scale, inverse, finite = row_scale(tl.max(tl.max(top, 1), 0))
    for first in range(0, kp, BLOCK):
        k = first + column
        x = tl.load(px + k, mask=k < K, other=0.0).to(tl.float32)
        store_half(x, inverse, finite, eight, out_ptr, m, k, kp)
    store_scale(scale, finite, out_ptr, m, M, kp)
