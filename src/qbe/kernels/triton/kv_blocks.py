"""Blocks of the KV cache in Triton: device functions that load, unpack and pack them (`qbe.kernels.kv_blocks`).

Addresses are in bytes. The same memory is given as uint8, as the model's dtype (numbers) and as float16 (halves).
"""

# mypy: disable-error-code="no-untyped-def, assignment, operator, index, misc, return-value"

from __future__ import annotations

import triton
import triton.language as tl

from qbe.kernels.kv_blocks import PAGE_SIZE, Block

PAGE = tl.constexpr(PAGE_SIZE)


@triton.constexpr_function
def part(name, bits, key_dim, value_dim, item):
    """A part of `qbe.kernels.kv_blocks.Block`; Triton refuses kernels that refer to a cached function."""
    return getattr(Block(bits, key_dim, value_dim, item), name)


@triton.jit
def unpack(packed, BITS: tl.constexpr):
    """uint8 [n, m] of packed codes -> [n, m * 8 / BITS] of codes"""
    if BITS == 8:
        return packed
    elif BITS == 4:
        return tl.interleave(packed & 15, packed >> 4)
    else:
        even = tl.interleave(packed & 3, (packed >> 4) & 3)
        odd = tl.interleave((packed >> 2) & 3, packed >> 6)
        return tl.interleave(even, odd)


@triton.constexpr_function
def origin(dtype, bits):
    """What `as_numbers` adds to a code."""
    if dtype == tl.float16:
        return 1024.0
    return 128.0 if dtype == tl.bfloat16 and bits < 8 else 0.0


@triton.jit
def as_numbers(codes, DTYPE: tl.constexpr, BITS: tl.constexpr):
    """Codes + `origin` in this dtype, exactly.

    In half precision a code goes below the leading one of 1024 (float16) or 128 (bfloat16), which spares a conversion;
    bfloat16 has no room for 8 bits there.
    """
    if DTYPE == tl.float16:  # noqa: SIM300
        return (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
    elif (DTYPE == tl.bfloat16) and (BITS < 8):  # noqa: SIM300
        return (codes.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
    else:
        return codes.to(tl.float32).to(DTYPE)


@triton.jit
def full_keys(numbers_ptr, at, ok, KEY_DIM: tl.constexpr, BK: tl.constexpr, ITEM: tl.constexpr):
    """Keys [BK, PAGE] of the block of 16 bits at this address; 0 for tokens that are not `ok`."""
    d = tl.arange(0, BK)
    t = tl.arange(0, PAGE)
    mask = ok[None, :] & (d < KEY_DIM)[:, None]
    return tl.load(numbers_ptr + at // ITEM + t[None, :] * KEY_DIM + d[:, None], mask=mask, other=0.0)


@triton.jit
def full_values(
    numbers_ptr, at, ok, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BV: tl.constexpr, ITEM: tl.constexpr
):  # fmt: skip
    """Values [PAGE, BV] of the block of 16 bits at this address; 0 for tokens that are not `ok`."""
    d = tl.arange(0, BV)
    t = tl.arange(0, PAGE)
    mask = ok[:, None] & (d < VALUE_DIM)[None, :]
    return tl.load(
        numbers_ptr + at // ITEM + PAGE * KEY_DIM + t[:, None] * VALUE_DIM + d[None, :], mask=mask, other=0.0
    )


@triton.jit
def sealed_keys(
    memory_ptr, halves_ptr, at, BITS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Codes uint8 [BK, PAGE], scale and low float32 [BK] of the keys of the block at this address."""
    ROW: tl.constexpr = PAGE * BITS // 8
    SCALES: tl.constexpr = part("key_scales", BITS, KEY_DIM, VALUE_DIM, 2)
    d = tl.arange(0, BK)
    ok = d < KEY_DIM
    packed = tl.load(memory_ptr + at + d[:, None] * ROW + tl.arange(0, ROW)[None, :], mask=ok[:, None], other=0)
    scale = tl.load(halves_ptr + (at + SCALES) // 2 + d, mask=ok, other=0.0).to(tl.float32)
    low = tl.load(halves_ptr + (at + SCALES) // 2 + KEY_DIM + d, mask=ok, other=0.0).to(tl.float32)
    return unpack(packed, BITS), scale, low


@triton.jit
def sealed_values(
    memory_ptr, halves_ptr, at, BITS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BV: tl.constexpr
):  # fmt: skip
    """Codes uint8 [PAGE, BV], scale and low float32 [PAGE] of the values of the block at this address."""
    ROW: tl.constexpr = part("value_row", BITS, KEY_DIM, VALUE_DIM, 2)
    VALUES: tl.constexpr = part("values", BITS, KEY_DIM, VALUE_DIM, 2)
    SCALES: tl.constexpr = part("value_scales", BITS, KEY_DIM, VALUE_DIM, 2)
    t = tl.arange(0, PAGE)
    j = tl.arange(0, BV * BITS // 8)
    packed = tl.load(memory_ptr + at + VALUES + t[:, None] * ROW + j[None, :], mask=(j < ROW)[None, :], other=0)
    scale = tl.load(halves_ptr + (at + SCALES) // 2 + t).to(tl.float32)
    low = tl.load(halves_ptr + (at + SCALES) // 2 + PAGE + t).to(tl.float32)
    return unpack(packed, BITS), scale, low
