"""Blocks of the KV cache in Triton: device functions that load and unpack them (`qbe.format.kv_blocks`).

Addresses are in bytes. The same memory is given as uint8 and as the model's dtype (numbers).
"""

# mypy: disable-error-code="no-untyped-def, assignment, operator, index, misc, return-value"
# ruff: noqa: SIM300

from __future__ import annotations

import triton
import triton.language as tl

from qbe.format.kv_blocks import LEVELS, PAGE_SIZE, TURBO, HeadLayout

PAGE = tl.constexpr(PAGE_SIZE)
TURBO4 = tl.constexpr(TURBO | 4)
TURBO2 = tl.constexpr(TURBO | 2)
QUANTISED_KINDS = tl.constexpr(5)
MAGNITUDES = tl.constexpr(sum(level << 8 * i for i, level in enumerate(LEVELS[4])))


@triton.constexpr_function
def part(name, kind, key_dim, value_dim, item):
    """A part of `qbe.format.kv_blocks.HeadLayout`; Triton refuses kernels that refer to a cached function."""
    return getattr(HeadLayout(kind, key_dim, value_dim, item), name)


@triton.constexpr_function
def quantised_kind(i):
    """Of the QUANTISED_KINDS of blocks that are not at 16 bits."""
    return (8, 4, 2, TURBO | 4, TURBO | 2)[i]


@triton.constexpr_function
def is_turbo(kind):
    return kind > TURBO


@triton.constexpr_function
def bits_of(kind):
    return kind % TURBO


@triton.constexpr_function
def row_bytes(count, bits):
    """Bytes of a row of so many codes."""
    return -(-count * bits // 8)


@triton.constexpr_function
def block_of(count):
    """The power of two that holds so many, 16 at least."""
    size = 16
    while size < count:
        size *= 2
    return size


@triton.constexpr_function
def centre(bits):
    """The code that `numbers_of` makes 0."""
    return 2.0 ** (bits - 1)


@triton.constexpr_function
def _numbers_asm(float16, bits, field):
    """Four bytes -> a field of each less `centre` as four 16-bit floats, exactly.

    A code goes below the leading one of 1024 (float16) or 128 (bfloat16), which spares a conversion. bfloat16 has room
    for 7 bits there: of 8 bits, 128 or 256 are taken off, by the highest bit.
    """
    shift = f"shr.b32 t,$2,{bits * field};" if field else "mov.b32 t,$2;"
    mask = f"0x{(2 ** min(bits, 7 if not float16 else 8) - 1) * 0x01010101:08X}"
    code = "{.reg .b32 t,u,a,c,o; " + shift + (f" and.b32 u,t,{mask};" if mask != "0xFFFFFFFF" else " mov.b32 u,t;")
    base = "0x64646464" if float16 else "0x43434343"
    if float16 or bits < 8:
        off = (0xE400 if float16 else 0xC300) + 2 ** (bits - 1)  # -1024 - centre, -128 - centre
        kind = "f16x2" if float16 else "bf16x2"
        code += f" mov.b32 o,0x{off:04X}{off:04X}; mov.b32 c,{'0x3C003C00' if float16 else '0x3F803F80'};"
        for i, select in ((0, "0x4140"), (1, "0x4342")):
            code += f" prmt.b32 a,u,{base},{select}; fma.rn.{kind} ${i},a,c,o;"
        return code + "}"
    # ~t & 0x80: 256 (0x4380) is taken off where the bit is clear, else 128
    code += " mov.b32 o,0x3F803F80; lop3.b32 t,t,0x80808080,0,0x0C;"
    for i, select in ((0, "0x4140"), (1, "0x4342")):
        code += f" prmt.b32 a,u,{base},{select}; prmt.b32 c,t,0xC3C3C3C3,{select};"
        code += f" fma.rn.bf16x2 ${i},a,o,c;"
    return code + "}"


@triton.jit
def numbers_of(packed, FIELD: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """A field of each byte less `centre` in this dtype."""
    if ASM and DTYPE == tl.float16:
        return tl.inline_asm_elementwise(_numbers_asm(True, BITS, FIELD), "=r,=r,r", [packed], tl.float16, True, 4)
    elif ASM and DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(_numbers_asm(False, BITS, FIELD), "=r,=r,r", [packed], tl.bfloat16, True, 4)
    else:
        code = (packed >> (BITS * FIELD)) & (2**BITS - 1)
        return (code.to(tl.float32) - centre(BITS)).to(DTYPE)


@triton.jit
def turbo_levels(codes, BITS: tl.constexpr):
    """int32 levels of turbo keys' codes, int32"""
    sign = ((codes >> (BITS - 2)) & 1) * 2 - 1
    if BITS == 2:
        return sign
    else:
        return sign * ((tl.full(codes.shape, MAGNITUDES, tl.int32) >> ((codes & 3) * 8)) & 255)


@triton.jit
def turbo_signs(codes, BITS: tl.constexpr):
    """int32 signs of turbo keys' sketches"""
    return ((codes >> (BITS - 1)) & 1) * 2 - 1


@triton.jit
def full_keys(numbers_ptr, page_head, ok, KEY_DIM: tl.constexpr, BK: tl.constexpr, ITEM: tl.constexpr):
    """Keys [PAGE, BK] of the block of 16 bits at this address; 0 for tokens that are not `ok`."""
    d = tl.arange(0, BK)
    t = tl.arange(0, PAGE)
    mask = ok[:, None] & (d < KEY_DIM)[None, :]
    return tl.load(numbers_ptr + page_head // ITEM + t[:, None] * KEY_DIM + d[None, :], mask=mask, other=0.0)


@triton.jit
def full_values(
    numbers_ptr, page_head, ok, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BV: tl.constexpr, ITEM: tl.constexpr
):  # fmt: skip
    """Values [PAGE, BV] of the block of 16 bits at this address; 0 for tokens that are not `ok`."""
    d = tl.arange(0, BV)
    t = tl.arange(0, PAGE)
    mask = ok[:, None] & (d < VALUE_DIM)[None, :]
    return tl.load(
        numbers_ptr + page_head // ITEM + PAGE * KEY_DIM + t[:, None] * VALUE_DIM + d[None, :], mask=mask, other=0.0
    )


@triton.jit
def quantised_keys(memory_ptr, page_head, BITS: tl.constexpr, KEY_DIM: tl.constexpr):
    """Bytes uint8 [PAGE, block_of(R)] of the keys of the block at this address."""
    ROW: tl.constexpr = row_bytes(KEY_DIM, BITS)
    u = tl.arange(0, block_of(ROW))
    address = memory_ptr + page_head + tl.arange(0, PAGE)[:, None] * ROW + u[None, :]
    if block_of(ROW) == ROW:
        return tl.load(address)
    else:
        return tl.load(address, mask=(u < ROW)[None, :], other=0)


@triton.jit
def _scale_low(pairs):
    """uint32 pairs of float16 -> scale and low, float32"""
    scale = (pairs & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, (pairs >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def key_scales(
    memory_ptr, page_head, FIELD: tl.constexpr, BITS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr
):
    """Scale and low float32 [block_of(R)] of the channels of a field; 0 past the end."""
    ROW: tl.constexpr = row_bytes(KEY_DIM, BITS)
    u = tl.arange(0, block_of(ROW))
    d = FIELD * ROW + u
    # Words of 32 bits, because shorter loads cannot be made ahead of time.
    pairs = (memory_ptr + page_head + part("key_scales", BITS, KEY_DIM, VALUE_DIM, 2)).to(tl.pointer_type(tl.uint32))
    return _scale_low(tl.load(pairs + d, mask=(u < ROW) & (d < KEY_DIM), other=0))


@triton.jit
def turbo_mean(memory_ptr, page_head, d, ok, KIND: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Mean float32 of these channels of turbo keys; 0 where not `ok`."""
    begin = memory_ptr + page_head + part("key_scales", KIND, KEY_DIM, VALUE_DIM, 2) + 4 * PAGE
    return tl.load(begin.to(tl.pointer_type(tl.float16)) + d, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def turbo_scales(memory_ptr, page_head, token, KIND: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Scale and sketch scale float32 of these tokens' turbo keys."""
    pairs = (memory_ptr + page_head + part("key_scales", KIND, KEY_DIM, VALUE_DIM, 2)).to(tl.pointer_type(tl.uint32))
    return _scale_low(tl.load(pairs + token))


@triton.jit
def quantised_values(
    memory_ptr, page_head, BITS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BV: tl.constexpr
):  # fmt: skip
    """Bytes uint8 [BV, R] of the values of the block at this address."""
    ROW: tl.constexpr = PAGE * BITS // 8
    VALUES: tl.constexpr = part("values", BITS, KEY_DIM, VALUE_DIM, 2)
    d = tl.arange(0, BV)
    address = memory_ptr + page_head + VALUES + d[:, None] * ROW + tl.arange(0, ROW)[None, :]
    if BV == VALUE_DIM:
        return tl.load(address)
    else:
        return tl.load(address, mask=(d < VALUE_DIM)[:, None], other=0)


@triton.jit
def value_scales(memory_ptr, page_head, token, KIND: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Scale and low float32 of these tokens' values."""
    pairs = (memory_ptr + page_head + part("value_scales", KIND, KEY_DIM, VALUE_DIM, 2)).to(tl.pointer_type(tl.uint32))
    return _scale_low(tl.load(pairs + token))


@triton.jit
def _halves(x):
    """The first and the second half of the rows of x [n, m]."""
    return tl.split(tl.permute(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), (1, 2, 0)))


@triton.jit
def fields_of(x, FIELDS: tl.constexpr):
    """The rows of x [n, m] in FIELDS parts, one after the other: a tuple of [n / FIELDS, m]; FIELDS is 1, 2 or 4."""
    if FIELDS == 1:
        return (x,)
    elif FIELDS == 2:
        return _halves(x)
    else:
        first, second = _halves(x)
        a, b = _halves(first)
        c, d = _halves(second)
        return (a, b, c, d)
