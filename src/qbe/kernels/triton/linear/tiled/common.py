"""What the tiled kernels share: which precision serves a row, the product with the 16-bit original, and the end."""

# Triton's language is not Python's: its arguments carry no types, and a branch on a constant must stand alone.
# mypy: disable-error-code="no-untyped-def, var-annotated, assignment, operator, index, misc, return-value"

from __future__ import annotations

import triton
import triton.language as tl

from qbe.kernels.triton.linear.tiled.quantise import scale_of, scale_pairs


@triton.jit
def load_precision_words(bits_ptr, m, m_ok):
    """each row's word of precision, 0 past the end"""
    # Past the L1 cache, which may hold what the words were before the kernel ahead of this one had ended.
    return tl.load(bits_ptr + m, mask=m_ok, other=0, cache_modifier=".cg")


@triton.jit
def has_eight(precision_words):
    """whether the activations of a row with this word have 8 bits"""
    return (precision_words >> 8) == 8


@triton.jit
def serving(precision_words, original_ptr, m_ok, PRECISIONS: tl.constexpr):
    """index of the precision that serves each row; their number for the original, -1 for a row past the end"""
    P: tl.constexpr = len(PRECISIONS)
    bits = precision_words & 255
    serves = tl.zeros(precision_words.shape, tl.int32)
    for p in tl.static_range(1, P):
        serves += (bits >= PRECISIONS[p]).to(tl.int32)
    if original_ptr is not None:
        serves = tl.where(bits >= 16, P, serves)
    return tl.where(m_ok, serves, -1)


@triton.jit
def exact_product(a_ptr, b_ptr, K, i, i_ok, j, j_ok, k0, STEPS):
    """a[i] @ b[j].T over 64 * STEPS inputs from k0, float32; in float32 if the dtypes differ"""
    SAME: tl.constexpr = a_ptr.dtype.element_ty == b_ptr.dtype.element_ty
    DTYPE: tl.constexpr = a_ptr.dtype.element_ty if SAME else tl.float32
    acc = tl.zeros((i.shape[0], j.shape[0]), tl.float32)
    pa = a_ptr + i.to(tl.int64) * K
    pb = b_ptr + j.to(tl.int64) * K
    for step in tl.range(0, STEPS, num_stages=3):
        k = k0 + step * 64 + tl.arange(0, 64)
        a = tl.load(pa[:, None] + k[None, :], mask=i_ok[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(pb[None, :] + k[:, None], mask=j_ok[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(a.to(DTYPE), b.to(DTYPE), acc, input_precision="ieee")
    return acc


@triton.jit
def exact_eight(
    original_ptr, quantised_ptr, K, M, kp, n, n_ok, m, eight, k0, STEPS, GROUP: tl.constexpr, DTYPE: tl.constexpr
):
    """original[n] @ x[m].T of the rows of 8-bit activations, those rounded to DTYPE; zero for the other rows"""
    m_in = tl.minimum(m, M - 1)
    SAME: tl.constexpr = original_ptr.dtype.element_ty == DTYPE
    WIDE: tl.constexpr = DTYPE if SAME else tl.float32
    high = quantised_ptr.to(tl.pointer_type(tl.int8)) + m_in.to(tl.int64) * kp
    pairs = scale_pairs(quantised_ptr, M, kp, m_in, eight, GROUP)
    acc = tl.zeros((n.shape[0], m.shape[0]), tl.float32)
    for step in range(STEPS):
        k = k0 + step * 64 + tl.arange(0, 64)
        a = tl.load(
            original_ptr + n.to(tl.int64)[:, None] * K + k[None, :], mask=n_ok[:, None] & (k < K)[None, :], other=0.0
        )
        byte = tl.load(high[None, :] + k[:, None], mask=eight[None, :], other=0)
        scale = tl.where(eight, scale_of(tl.load(pairs + (k0 + step * 64) // GROUP * M)), 0.0)
        b = (byte.to(tl.float32) * (scale * 256)[None, :]).to(DTYPE)
        acc = tl.dot(a.to(WIDE), b.to(WIDE), acc, input_precision="ieee")
    return acc


@triton.jit
def finish(acc, bias, y_ptr, parts_ptr, count_ptr, offsets, ok, size, SPLIT: tl.constexpr):
    """Writes a tile, with the bias (broadcast to it) if there is one.

    The last program of a tile to arrive adds the parts of a split sum in fixed order: deterministic, and no second
    launch.
    """
    if SPLIT:
        tl.store(parts_ptr + tl.program_id(1) * size + offsets, acc, mask=ok)
        tl.debug_barrier()
        if tl.atomic_add(count_ptr, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            tl.debug_barrier()
            acc = tl.zeros(acc.shape, tl.float32)
            for i in range(tl.num_programs(1)):
                acc += tl.load(parts_ptr + i * size + offsets, mask=ok, other=0.0, cache_modifier=".cg")
            tl.store(y_ptr + offsets, (acc + bias).to(y_ptr.dtype.element_ty), mask=ok)
            tl.store(count_ptr, 0)
    else:
        tl.store(y_ptr + offsets, (acc + bias).to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit
def choose(tile, second, third, a, b, c):
    """of three matrices' a, b and c that of the one which has this tile; theirs begin at 0, `second` and `third`"""
    if tile >= third:
        a = c
    elif tile >= second:
        a = b
    return a


@triton.jit
def load_bias(bias_ptr, n, n_ok):
    if bias_ptr is not None:
        return tl.load(bias_ptr + n, mask=n_ok, other=0.0).to(tl.float32)
    else:
        return tl.zeros(n.shape, tl.float32)


@triton.jit
def counter(packed_ptr, np_, kp, tile, P: tl.constexpr, TOTAL: tl.constexpr, GROUP: tl.constexpr):
    """where the weight keeps how many parts of a tile have arrived"""
    begin = np_.to(tl.int64) * kp // 8 * TOTAL + np_.to(tl.int64) * kp // GROUP * 2 * P + np_ * (4 * P)
    return (packed_ptr + begin).to(tl.pointer_type(tl.int32)) + tile
