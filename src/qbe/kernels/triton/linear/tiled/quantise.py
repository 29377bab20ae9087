"""Activations as fixed point in two signed bytes, for the integer products of the decode kernel.

Each group of a row has a scale of its own: q = round(x / s), s = max|x| / 32512, and q = 256 * high + low with both
bytes signed. The error is at most max|x| * 2**-16 of the group, less than bfloat16's own rounding of its large values.
A row of 8-bit activations is the high byte alone (`qbe.kernels.reference.activations`). The quantiser does not know
which rows those are: several weights of one launch, each with its own words, read the same buffer.

The result is one buffer of `quantised_bytes`: high and low, int8 [2, M, kp], zero past K, and then for each group and
row a pair of float32, [2, kp/GROUP, M, 2]: first (s, sum of q) for rows of 16 bits, then (s, sum of 256 * high) for
rows of 8. A group with an infinity or a NaN has that as its scale, so that it reaches every output of its row and no
other.
"""

# Triton's language is not Python's: its arguments carry no types, and a branch on a constant must stand alone.
# mypy: disable-error-code="no-untyped-def, assignment, operator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def quantised_bytes(m: int, kp: int, group: int) -> int:
    """Size of the buffer."""
    return 2 * m * kp + 2 * (kp // group * m * 8)


@triton.jit
def fixed_point(x, AXIS: tl.constexpr):
    """float32 -> scale and the int32 q of it, over AXIS; integers order floats by magnitude, NaN above infinity."""
    magnitude = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS, keep_dims=True)
    largest = tl.maximum(magnitude, 0x08A6274C).to(tl.float32, bitcast=True)  # at least 1e-33: no division by zero
    q = x * (32512.0 / largest)
    q = tl.where(magnitude < 0x7F800000, q + tl.where(q >= 0, 0.5, -0.5), 0.0)
    return largest * (1.0 / 32512), q.to(tl.int32)


@triton.jit
def high_byte(q):
    return ((q + 128) >> 8).to(tl.int8)


@triton.jit
def store_quantised(x, out_ptr, m, g, k, M, kp, GROUP: tl.constexpr):
    """float32 x [n, GROUP], the groups g [n] of row m, which begin at inputs k; those past the padding are left out."""
    ok = (g < kp // GROUP)[:, None]
    scale, q = fixed_point(x, 1)
    out = out_ptr.to(tl.pointer_type(tl.int8))
    plane = M.to(tl.int64) * kp
    high = high_byte(q)
    tl.store(out + m.to(tl.int64) * kp + k, high, mask=ok)
    tl.store(out + plane + m.to(tl.int64) * kp + k, q.to(tl.int8), mask=ok)
    pairs = (out + 2 * plane).to(tl.pointer_type(tl.float32)) + (g * M + m)[:, None] * 2
    tl.store(pairs, scale, mask=ok)
    tl.store(pairs + 1, tl.sum(q, 1, keep_dims=True).to(tl.float32), mask=ok)
    pairs += kp // GROUP * M * 2
    tl.store(pairs, scale, mask=ok)
    tl.store(pairs + 1, tl.sum(high.to(tl.int32) * 256, 1, keep_dims=True).to(tl.float32), mask=ok)


@triton.jit(do_not_specialize=["M"])
def quantise_kernel(x_ptr, out_ptr, M, K, kp, GROUP: tl.constexpr, GROUPS: tl.constexpr, EARLY: tl.constexpr):
    """GROUPS groups of one row"""
    m = tl.program_id(0)
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + m.to(tl.int64) * K + k, mask=k < K, other=0.0)
    store_quantised(x.to(tl.float32), out_ptr, m, g, k, M, kp, GROUP)


@triton.jit
def scale_pairs(x_ptr, M, kp, m, eight, GROUP: tl.constexpr):
    """where the pairs of each row's groups begin in a quantised buffer, M apart: those of its activations' width"""
    pairs = (x_ptr + 2 * (M.to(tl.int64) * kp)).to(tl.pointer_type(tl.int64))
    return pairs + m + tl.where(eight, kp // GROUP * M, 0)


@triton.jit
def scale_of(pair):
    """the scale of a pair"""
    return pair.to(tl.int32).to(tl.float32, bitcast=True)
