"""What a walk over pages notes of each for bounded attention; names as in `qbe.kernels.reference.bounded_attention`.

Of each page and query head: the logarithm (to base 2) of its sum of weights, e, h and a. NOTES rows of floats, one
number a page, and in the last column those of the step's own token.
"""

# mypy: disable-error-code="no-untyped-def, assignment, operator, index"

from __future__ import annotations

import triton
import triton.language as tl

from qbe.kernels.triton.kv_cache.blocks import PAGE, bits_of, centre, fields_of, numbers_of, value_scales

NOTES = tl.constexpr(4)


@triton.jit
def number_errors(scale, low, BITS: tl.constexpr):
    """eps of the numbers with these scales and lows; infinite where they may have been cut to float16's range."""
    LEVELS: tl.constexpr = 2.0**BITS
    high = low + scale * (LEVELS - 1)
    inside = (tl.abs(low) < 65504.0) & (tl.abs(high) < 65504.0)
    error = scale * (0.5 + LEVELS * 2.0**-21) + tl.abs(low) * 2.0**-11 + LEVELS * 2.0**-25
    return tl.where(inside, error, float("inf"))


@triton.jit
def store_notes(notes_ptr, row, page, REPEAT: tl.constexpr, log, e, h, a):
    """Notes [BM] of a page; those past REPEAT belong to nobody. `row` numbers lie between two notes of a query head."""
    m = tl.arange(0, log.shape[0])
    to = notes_ptr + m * NOTES * row + page
    tl.store(to, log, mask=m < REPEAT)
    tl.store(to + row, e, mask=m < REPEAT)
    tl.store(to + 2 * row, h, mask=m < REPEAT)
    tl.store(to + 3 * row, a, mask=m < REPEAT)


@triton.jit
def note_full(notes_ptr, row, page, REPEAT: tl.constexpr, weights, top, v):
    """A page of 16 bits: weights [PAGE, BM] are powers of two less `top` [BM]; v [BV, PAGE]."""
    v = v.to(tl.float32)
    norms = tl.sqrt(tl.sum(v * v, 0))
    total = tl.sum(weights, 0)
    mean = tl.sum(weights * norms[:, None], 0) / tl.where(total > 0, total, 1.0)
    store_notes(notes_ptr, row, page, REPEAT, top + tl.log2(total), total * 0, total * 0, mean)


@triton.jit
def note_quantised(
    notes_ptr, row, page, REPEAT: tl.constexpr, weights, top, e, packed, memory_ptr, block, KIND: tl.constexpr,
    DTYPE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A quantised page: weights and `top` as above, e [BM], and the bytes [BV, R] of the values of its block."""
    BITS: tl.constexpr = bits_of(KIND)
    FIELDS: tl.constexpr = 8 // BITS
    ROW: tl.constexpr = PAGE * BITS // 8
    inside = (tl.arange(0, packed.shape[0]) < VALUE_DIM)[:, None]
    parts = fields_of(weights, FIELDS)
    h = e * 0
    a = e * 0
    for i in tl.static_range(FIELDS):
        scale, low = value_scales(memory_ptr, block, i * ROW + tl.arange(0, ROW), KIND, KEY_DIM, VALUE_DIM)
        moved = number_errors(scale, low, BITS) * VALUE_DIM**0.5
        codes = numbers_of(packed, i, BITS, DTYPE, ASM).to(tl.float32) + centre(BITS)
        v = tl.where(inside, codes * scale[None, :] + low[None, :], 0.0)
        norms = tl.sqrt(tl.sum(v * v, 0)) + moved
        h += tl.sum(parts[i] * moved[:, None], 0)
        a += tl.sum(parts[i] * norms[:, None], 0)
    total = tl.sum(weights, 0)
    some = tl.where(total > 0, total, 1.0)
    store_notes(notes_ptr, row, page, REPEAT, top + tl.log2(total), e, h / some, a / some)
