"""Activations as float16, for the products of the batch kernel.

Every `BLOCK` inputs of a row have a scale of their own, a power of two that brings the largest of them near 2**8: so
nothing is lost of bfloat16's 8 bits but in what is 2**-17 of the largest and below. The converter does not know which
rows have 8-bit activations: several weights of one launch, each with its own words, read the same buffer.

The result is one buffer of `half_bytes`: float16 [2, M, kp], zero past K, first as they are and then rounded to 8 bits
(`qbe.kernels.reference.activations`), in the order of `place`; and float32 [kp/BLOCK, M], the scales. A block with an
infinity or a NaN has NaN as its scale, so that it reaches every output of its row and no other.
"""

# Triton's language is not Python's: its arguments carry no types, and a branch on a constant must stand alone.
# mypy: disable-error-code="no-untyped-def, assignment, operator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qbe.kernels.triton.tiled_quantise import fixed_point, high_byte

BLOCK = tl.constexpr(256)  # the smallest unit of a layout
LARGEST = tl.constexpr(8)  # exponent of a block's largest element


def half_bytes(m: int, kp: int) -> int:
    """Size of the buffer."""
    return 4 * m * kp + 4 * m * (kp // 256)


@triton.jit
def place(k):
    """where input k is: of every 16, number 4l + 2i + j is at 8i + 2l + j (as the batch kernel makes its weights)"""
    return k // 16 * 16 + k % 4 // 2 * 8 + k % 16 // 4 * 2 + k % 2


@triton.jit
def scales_of(half_ptr, M, kp):
    """where the scales begin"""
    return (half_ptr.to(tl.pointer_type(tl.float16)) + 2 * M.to(tl.int64) * kp).to(tl.pointer_type(tl.float32))


@triton.jit
def store_half(x, out_ptr, m, g, k, M, kp, GROUP: tl.constexpr):
    """float32 x [n, GROUP], the groups g [n] of row m, which begin at inputs k; n groups are whole blocks. Those past
    the padding are left out."""
    BLOCKS: tl.constexpr = x.shape[0] * GROUP // BLOCK
    blocks = tl.reshape(x, (BLOCKS, BLOCK))
    top = tl.max(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1, keep_dims=True)  # integers order floats
    largest = tl.maximum(top, 0x08800000)  # at least 2**-110: no scale overflows
    finite = largest < 0x7F800000
    scale = tl.where(finite, (largest & 0x7F800000) - (LARGEST << 23), 0x3F800000)
    inverse = ((254 << 23) - scale).to(tl.float32, bitcast=True)
    x = tl.reshape(tl.where(finite, blocks * inverse, 0.0), (x.shape[0], GROUP))
    step, q = fixed_point(x, 1)
    out = out_ptr.to(tl.pointer_type(tl.float16)) + m.to(tl.int64) * kp + place(k)
    ok = k < kp
    tl.store(out, x.to(tl.float16), mask=ok)
    tl.store(out + M.to(tl.int64) * kp, (high_byte(q).to(tl.float32) * (step * 256)).to(tl.float16), mask=ok)
    first = tl.min(tl.min(k, 1), 0)
    block = first // BLOCK + tl.arange(0, BLOCKS)[:, None]
    scale = tl.where(finite, scale.to(tl.float32, bitcast=True), float("nan"))
    tl.store(scales_of(out_ptr, M, kp) + block * M + m, scale, mask=block < kp // BLOCK)


@triton.jit(do_not_specialize=["M"])
def half_kernel(x_ptr, out_ptr, M, K, kp, GROUP: tl.constexpr, GROUPS: tl.constexpr, EARLY: tl.constexpr):
    """GROUPS groups of one row"""
    m = tl.program_id(0)
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + m.to(tl.int64) * K + k, mask=k < K, other=0.0)
    store_half(x.to(tl.float32), out_ptr, m, g, k, M, kp, GROUP)
