"""From packed bytes to the operands of a matrix product: device functions of the tiled kernels.

On a GPU four packed bytes are handled as one 32-bit word (inline PTX; the compiler on its own works byte by byte). ASM
is false in the interpreter, which runs the plain form beside it.
"""

# Triton's language is not Python's: its arguments carry no types, and a branch on a constant must stand alone.
# mypy: disable-error-code="no-untyped-def, assignment, operator, index, misc, return-value"

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _place_asm(j, width, first, source):
    """t = field j of `source`, moved to the bits that lie `first` below the top of each byte"""
    shift = 8 - first - width - j * width
    move = f"shl.b32 t,{source},{shift};" if shift > 0 else f"shr.b32 t,{source},{-shift};"
    mask = (((1 << width) - 1) << (8 - first - width)) * 0x01010101
    return "{.reg .b32 t; " + (move if shift else f"mov.b32 t,{source};"), f"0x{mask:08X}"


@triton.constexpr_function
def _left_aligned_asm(j, width):
    place, mask = _place_asm(j, width, 0, "$1")
    return place + f" lop3.b32 $0,t,{mask},0x80808080,0x6A;}}"  # (t & mask) ^ 0x80 a byte


@triton.constexpr_function
def _with_bits_asm(j, width, first):
    place, mask = _place_asm(j, width, first, "$2")
    return place + f" lop3.b32 $0,t,{mask},$1,0xEA;}}"  # (t & mask) | $1


@triton.jit
def left_aligned(w, J: tl.constexpr, WIDTH: tl.constexpr, ASM: tl.constexpr):
    """field J of a first part as the top bits of a byte less 128: int8"""
    if ASM:
        return tl.inline_asm_elementwise(_left_aligned_asm(J, WIDTH), "=r,r", [w], tl.int8, True, 4)
    else:
        field = (w >> (J * WIDTH)) & ((1 << WIDTH) - 1)
        return ((field << (8 - WIDTH)) ^ 0x80).to(tl.int8, bitcast=True)


@triton.jit
def with_bits(c, w, J: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, ASM: tl.constexpr):
    """c with field J of a part put FIRST bits below the top: int8"""
    if ASM:
        return tl.inline_asm_elementwise(_with_bits_asm(J, WIDTH, FIRST), "=r,r,r", [c, w], tl.int8, True, 4)
    else:
        field = (w >> (J * WIDTH)) & ((1 << WIDTH) - 1)
        return c | (field << (8 - FIRST - WIDTH)).to(tl.int8, bitcast=True)


@triton.jit
def tile_and_rows(n0, BN: tl.constexpr):
    """of outputs n0 .. n0 + BN - 1: tile of 64, one number where they lie in the same one, and place in it [BN]

    Addresses of one tile are a number and small offsets. What runs outside of the loop counts: at few rows every
    hundred instructions there take a third of a microsecond.
    """
    if BN == 64:
        return n0 // 64, tl.arange(0, BN)  # constants apart, which the addresses of a thread then are, too
    elif BN < 64:
        return n0 // 64, n0 % 64 + tl.arange(0, BN)
    else:
        n = n0 + tl.arange(0, BN)
        return n // 64, n % 64


@triton.jit
def load_parts(packed_ptr, plane, tile, row, kp, u, PARTS: tl.constexpr, UNIT: tl.constexpr, TOP: tl.constexpr):
    """unit u of the parts that precision TOP needs: for each a tuple of runs uint8 [BN, 64]; `plane`: bytes of a bit"""
    tiles = ()
    for i in tl.static_range(len(PARTS)):
        if PARTS[i][2] <= TOP:
            run = packed_ptr + plane * PARTS[i][0] + (tile * (kp * PARTS[i][1] // 512)).to(tl.int64) * 4096
            codes = ()
            for t in tl.static_range(UNIT * PARTS[i][1] // 512):
                begin = run + (u * (UNIT * PARTS[i][1] // 512) + t) * 4096
                if len(tile.shape) == 1:
                    begin = begin[:, None]
                codes += (tl.load(begin + ((row * 64)[:, None] + tl.arange(0, 64)[None, :])),)
            tiles += (codes,)
    return tiles


@triton.jit
def codes_of(
    tiles, C: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr, MIXED: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """run C of 64 inputs of `load_parts` as codes of precision P, left-aligned: int8 [BN, 64]

    MIXED: only the bits that it has more than the precision below, so that what these give can be added to its product.
    """
    if P == 0 or not MIXED:
        w = left_aligned(tiles[0][C * PARTS[0][1] // 8], C % (8 // PARTS[0][1]), PARTS[0][1], ASM)
    else:
        w = tl.zeros((BN, 64), tl.int8)
    for i in tl.static_range(1, len(PARTS)):
        if PARTS[i][2] == P or (not MIXED and PARTS[i][2] < P):
            w = with_bits(w, tiles[i][C * PARTS[i][1] // 8], C % (8 // PARTS[i][1]), PARTS[i][1], PARTS[i][0], ASM)
    return w


@triton.jit
def left_aligned_scales(base, low, exponent, SHIFT: tl.constexpr, LEFT: tl.constexpr):
    """uint16 pairs (int32 holding) -> scale and 128 - offset of left-aligned codes of SHIFT bits below the widest"""
    s = (((base & 255) << 19) + (exponent << 23)).to(tl.float32, bitcast=True)
    o = ((base >> 8) & 255).to(tl.float32)
    if SHIFT > 0:
        s = tl.fma(s, ((low << 24) >> 24).to(tl.float32) * (1.0 / 256), s)
        d = ((low << 16) >> 24).to(tl.float32)
        o = tl.fma(d, (1 << SHIFT) / 64.0, o - ((1 << SHIFT) - 1) / 2.0)
    return s, tl.fma(o, -1.0 * (1 << LEFT), 128.0)


@triton.constexpr_function
def _float_asm(wide):
    sel = "0x74{}4" if wide else "0x7{}44"
    const = "0x47000000" if wide else "0x43000000"
    return "".join(f"prmt.b32 ${i},$4,{const},{sel.format(i)}; " for i in range(4))


@triton.jit
def as_float(c, BITS: tl.constexpr, ASM: tl.constexpr):
    """uint8 -> float32 code + 128 (below 8 bits) or + 32768"""
    if ASM:
        if BITS < 8:
            return tl.inline_asm_elementwise(_float_asm(False), "=r,=r,=r,=r,r", [c], tl.float32, True, 4)
        else:
            return tl.inline_asm_elementwise(_float_asm(True), "=r,=r,=r,=r,r", [c], tl.float32, True, 4)
    else:
        return c.to(tl.float32) + (128.0 if BITS < 8 else 32768.0)


@triton.jit
def scale_offset(base, low, exponent, SHIFT: tl.constexpr):
    """uint16 pairs (int32 holding) -> scale, offset"""
    s = (((base & 255) << 19) + (exponent << 23)).to(tl.float32, bitcast=True)
    o = ((base >> 8) & 255).to(tl.float32)
    if SHIFT > 0:
        STEP: tl.constexpr = 1 << SHIFT
        r = ((low << 24) >> 24).to(tl.float32)
        d = ((low << 16) >> 24).to(tl.float32)
        s = s * tl.fma(r, STEP / 256.0, STEP + 0.0)
        o = tl.fma(o, 1.0 / STEP, -(STEP - 1) / 2 / STEP) + d * (1.0 / 64)
    return s, o


@triton.constexpr_function
def _step_asm(width, first):
    mask = f"0x{((1 << width) - 1) * 0x01010101:08X}"
    if first:
        return "{.reg .b32 t; shr.b32 t,$1,$2; and.b32 $0,t," + mask + ";}"
    return "{.reg .b32 t,a; shr.b32 t,$2,$3; and.b32 t,t," + mask + f"; shl.b32 a,$1,{width}; or.b32 $0,a,t;" + "}"


@triton.jit
def first_at(w, shift, WIDTH: tl.constexpr, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise(_step_asm(WIDTH, True), "=r,r,r,r,r,r", [w, shift], tl.uint8, True, 4)
    else:
        return ((w >> shift.to(tl.uint8)) & ((1 << WIDTH) - 1)).to(tl.uint8)


@triton.jit
def append_at(c, w, shift, WIDTH: tl.constexpr, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise(_step_asm(WIDTH, False), "=r,r,r,r,r,r,r", [c, w, shift], tl.uint8, True, 4)
    else:
        return ((c << WIDTH) | ((w >> shift.to(tl.uint8)) & ((1 << WIDTH) - 1))).to(tl.uint8)
