"""A batch of rows: float16 products of dequantised weights, on the tiled layout (`layout`).

A program makes a tile y[BN outputs, BM rows]. The weight is the left operand, so that it goes from packed bytes to the
tensor cores through registers alone: a mask, a byte permutation and a fused multiply-add make two weights. A code in
the low byte of a float16 is the subnormal number code * 2**-24; the scale carries the 2**24. That rounds the shift
(offset times scale) to float16, which is fine beside bfloat16 inputs. For float16 ones (EXACT) the high byte is 0x64:
1024 + code; the offset's whole part goes by an addition of its own, where nothing is rounded, a tenth slower.

Range: scales keep the exponent range of their byte and lose the matrix's own exponent, rows of x lose theirs
(`half`); both come back in float32 at the end. A weight has 11 bits of precision then, x all of bfloat16's.

Each precision that some row of a tile asks for is one pass over the inputs; a row takes the sums of its own.
"""

# Triton's language is not Python's: its arguments carry no types, and a branch on a constant must stand alone.
# mypy: disable-error-code="no-untyped-def, var-annotated, assignment, operator, index, misc, attr-defined"
# ruff: noqa: RUF005, SIM102, SIM108

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qbe.kernels.triton.linear.tiled.common import (
    choose,
    counter,
    exact_product,
    finish,
    has_eight,
    load_bias,
    load_precision_words,
    serving,
)
from qbe.kernels.triton.linear.tiled.decode_kernel import prefetch_ahead
from qbe.kernels.triton.linear.tiled.half import place

EXPONENT = tl.constexpr(118)  # of the scales here: the largest weight is just a float16, the smallest scale is normal
LIFT = tl.constexpr(2.0**9)  # 127 - EXPONENT


@triton.constexpr_function
def _weights_asm(c, parts, top, exact):
    """four weights: fields of chunk c of the parts that precision `top` has, left-aligned, times scale plus shift"""
    used = [(i, first, width) for i, (first, width, needed) in enumerate(parts) if needed <= top]
    lines = [".reg .b32 t, a, p;"]
    for i, first, width in used:
        source, shift = f"${4 + i}", 8 - first - width - c % (8 // width) * width
        mask = (((1 << width) - 1) << (8 - first - width)) * 0x01010101
        if shift:
            lines.append(f"{'shl' if shift > 0 else 'shr'}.b32 t, {source}, {abs(shift)};")
            source = "t"
        lines.append(
            f"and.b32 a, {source}, 0x{mask:08X};" if i == 0 else f"lop3.b32 a, {source}, 0x{mask:08X}, a, 0xEA;"
        )
    n = 4 + len(used)
    for i in range(2):
        lines.append(f"prmt.b32 p, a, {'0x64646464' if exact else '0'}, {('0x4140', '0x4342')[i]};")
        if exact:
            lines.append(f"add.rn.f16x2 p, p, ${n};")
        lines.append(f"fma.rn.f16x2 p, p, ${n + 1}, ${n + 2}; mov.b32 {{${2 * i}, ${2 * i + 1}}}, p;")
    return "{" + " ".join(lines) + "}"


@triton.constexpr_function
def _weights_constraints(parts, top):
    return ",".join(["=h"] * 4 + ["r"] * (3 + sum(needed <= top for _, _, needed in parts)))


@triton.jit
def _low_half(pair):
    return pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _weight(code, o, s, b, EXACT: tl.constexpr):
    c = code.to(tl.float32)
    if EXACT:
        c = 1024.0 + c + _low_half(o)
    else:
        c = c * (1.0 / (1 << 24))
    return (c * _low_half(s) + _low_half(b)).to(tl.float16)


@triton.jit
def _twice(f, ASM: tl.constexpr):
    """float32 -> the same float16 in both halves of an int32"""
    if ASM:
        return tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $1;", "=r,r", [f], tl.int32, True, 1)
    else:
        return (f.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 0x10001


@triton.jit
def _weights(
    tiles, o, s, b, C: tl.constexpr, PARTS: tl.constexpr, TOP: tl.constexpr, EXACT: tl.constexpr, ASM: tl.constexpr
):
    """chunk C of the parts' tiles (int32 [BN, 16]) and `_offset_scale_shift` ([BN, 1]) -> float16 [BN, 64]"""
    w0 = tiles[0][C * PARTS[0][1] // 8]
    o = tl.broadcast_to(o, w0.shape)
    s = tl.broadcast_to(s, w0.shape)
    b = tl.broadcast_to(b, w0.shape)
    if ASM:
        ASSEMBLY: tl.constexpr = _weights_asm(C, PARTS, TOP, EXACT)
        CONSTRAINTS: tl.constexpr = _weights_constraints(PARTS, TOP)
        args = ()
        for i in tl.static_range(len(PARTS)):
            if PARTS[i][2] <= TOP:
                args += (tiles[i][C * PARTS[i][1] // 8],)
        f0, f1, f2, f3 = tl.inline_asm_elementwise(
            ASSEMBLY, CONSTRAINTS, args + (o, s, b), (tl.float16, tl.float16, tl.float16, tl.float16), True, 1
        )
    else:
        code = tl.zeros(w0.shape, tl.int32)
        for i in tl.static_range(len(PARTS)):
            if PARTS[i][2] <= TOP:
                field = tiles[i][C * PARTS[i][1] // 8] >> (C % (8 // PARTS[i][1]) * PARTS[i][1])
                code |= (field & (((1 << PARTS[i][1]) - 1) * 0x01010101)) << (8 - PARTS[i][0] - PARTS[i][1])
        f0 = _weight(code & 255, o, s, b, EXACT)
        f1 = _weight(code >> 8 & 255, o, s, b, EXACT)
        f2 = _weight(code >> 16 & 255, o, s, b, EXACT)
        f3 = _weight(code >> 24 & 255, o, s, b, EXACT)
    w = tl.join(tl.join(f0, f2), tl.join(f1, f3))
    w = w.reshape(w0.shape[0], 4, 4, 2, 2).permute(0, 1, 3, 2, 4)
    return w.reshape(w0.shape[0], 64)


@triton.jit
def _offset_scale_shift(base, low, SHIFT: tl.constexpr, LEFT: tl.constexpr, EXACT: tl.constexpr, ASM: tl.constexpr):
    """uint16 pairs (int32 holding) -> what `_weights` adds to a left-aligned code, multiplies with and adds then

    Each as two equal float16 in an int32. Weights that are not EXACT are smaller by 2**16.
    """
    s = (((base & 255) << 19) + (EXPONENT << 23)).to(tl.float32, bitcast=True)
    o = ((base >> 8) & 255).to(tl.float32)
    if SHIFT > 0:
        s = tl.fma(s, ((low << 24) >> 24).to(tl.float32) * (1.0 / 256), s)
        d = ((low << 16) >> 24).to(tl.float32)
        o = tl.fma(d, (1 << SHIFT) / 64.0, o - ((1 << SHIFT) - 1) / 2.0)
    o = o * (1 << LEFT)
    if EXACT:
        whole = tl.floor(o)
        return _twice(-1024.0 - whole, ASM), _twice(s, ASM), _twice((whole - o) * s, ASM)
    else:
        return tl.zeros(o.shape, tl.int32), _twice(s * 256.0, ASM), _twice(o * s * (-1.0 / (1 << 16)), ASM)


@triton.jit
def _batch_loop(
    x_ptr, packed_ptr, np_, kp, n, m, m_ok, u0, UNITS, PRECISIONS: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, UNIT: tl.constexpr, TOP: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """W @ x.T at precision TOP, float32 [BN, BM], without the exponents of the matrix and of the rows"""
    TOTAL: tl.constexpr = PRECISIONS[len(PRECISIONS) - 1]
    METAS: tl.constexpr = UNIT // 256
    LOWER: tl.constexpr = PRECISIONS[TOP] < TOTAL
    WORD: tl.constexpr = tl.int64 if GROUP == 64 else tl.int32
    ru = tl.arange(0, 64)
    rw = tl.arange(0, 16)
    tile = n // 64
    plane = np_.to(tl.int64) * kp // 8  # bytes of one bit of all codes
    scale_words = (packed_ptr + plane * TOTAL).to(tl.pointer_type(WORD))
    word_plane = (np_ * (kp // 256)).to(tl.int64)
    pm = scale_words + tile.to(tl.int64) * ((kp // 256) * 64) + n % 64
    px = x_ptr + m.to(tl.int64)[None, :] * kp + ru[:, None]
    acc = tl.zeros((n.shape[0], m.shape[0]), tl.float32)
    for step in tl.range(0, UNITS, num_stages=STAGES):
        u = u0 + step
        tiles = ()
        for i in tl.static_range(len(PARTS)):
            if PARTS[i][2] <= TOP:
                run = (
                    (packed_ptr + plane * PARTS[i][0]).to(tl.pointer_type(tl.int32))
                    + (tile * (kp * PARTS[i][1] // 512)).to(tl.int64)[:, None] * 1024
                    + (n % 64 * 16)[:, None]
                    + rw[None, :]
                )
                codes = ()
                for t in tl.static_range(UNIT * PARTS[i][1] // 512):
                    codes += (tl.load(run + (u * (UNIT * PARTS[i][1] // 512) + t) * 1024),)
                tiles += (codes,)
        bases = ()
        lows = ()
        for q in tl.static_range(METAS):
            bases += (tl.load(pm + (u * METAS + q) * 64),)
            if LOWER:
                lows += (tl.load(pm + (TOP + 1) * word_plane + (u * METAS + q) * 64),)
        for c in tl.static_range(UNIT // 64):
            x = tl.load(px + (u * UNIT + c * 64), mask=m_ok[None, :], other=0.0)
            if c * 64 % GROUP == 0:
                base = (bases[c * 64 // 256] >> (c * 64 % 256 // GROUP * 16)).to(tl.int32)
                low = base
                if LOWER:
                    low = (lows[c * 64 // 256] >> (c * 64 % 256 // GROUP * 16)).to(tl.int32)
                o, s, b = _offset_scale_shift(base, low, TOTAL - PRECISIONS[TOP], 8 - TOTAL, EXACT, ASM)
            acc = tl.dot(_weights(tiles, o[:, None], s[:, None], b[:, None], c, PARTS, TOP, EXACT, ASM), x, acc)
    return acc


@triton.jit
def _exact_eight(
    original_ptr, half, rows, K, kp, n, n_ok, m, eight, k0, STEPS, DTYPE: tl.constexpr
):  # fmt: skip
    """original[n] @ x[m].T of the rows of 8-bit activations, rounded to DTYPE; zero for the other rows"""
    SAME: tl.constexpr = original_ptr.dtype.element_ty == DTYPE
    WIDE: tl.constexpr = DTYPE if SAME else tl.float32
    acc = tl.zeros((n.shape[0], m.shape[0]), tl.float32)
    for step in range(STEPS):
        k = k0 + step * 64 + tl.arange(0, 64)
        pa = original_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
        a = tl.load(pa, mask=n_ok[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(half + m.to(tl.int64)[None, :] * kp + place(k)[:, None], mask=eight[None, :], other=0.0)
        b = (b.to(tl.float32) * rows[None, :]).to(DTYPE)
        acc = tl.dot(a.to(WIDE), b.to(WIDE), acc, input_precision="ieee")
    return acc


@triton.jit
def batch_tile(
    x_ptr, half_ptr, packed_ptr, bits_ptr, original_ptr, bias_ptr, y_ptr, parts_ptr, M, N, K, np_, kp, exponent, units,
    tile, column, columns, PRECISIONS: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr,
    SPLIT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """the tile of that number of one matrix, whose first output is `column` of y's `columns`"""
    P: tl.constexpr = len(PRECISIONS)
    TOTAL: tl.constexpr = PRECISIONS[P - 1]
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float16
    row_tiles = tl.cdiv(M, BM)
    n0 = tile // row_tiles * BN
    n = n0 + tl.arange(0, BN)
    m = tile % row_tiles * BM + tl.arange(0, BM)
    m_ok = m < M
    n_ok = n < N
    n_in = tl.where(n < np_, n, 0)  # a wide tile may reach past the padding
    m_in = tl.minimum(m, M - 1)
    u0 = tl.program_id(1) * units
    if EARLY:
        if n0 + BN <= np_:
            prefetch_ahead(packed_ptr, bits_ptr, np_, kp, n0, BN, m, m_ok, u0, PRECISIONS, PARTS, GROUP, UNIT, 1)
        gdc_wait()
    wanted = load_precision_words(bits_ptr, m, m_ok)
    serves = serving(wanted, original_ptr, m_ok, PRECISIONS)
    half = half_ptr.to(tl.pointer_type(tl.float16))
    acc = tl.zeros((BN, BM), tl.float32)
    for p in tl.static_range(P):
        if tl.max((serves == p).to(tl.int32), 0) > 0:
            part = _batch_loop(
                half, packed_ptr, np_, kp, n_in, m, m_ok, u0, units, PRECISIONS, PARTS, GROUP, UNIT, p, STAGES, EXACT,
                ASM,
            )  # fmt: skip
            acc = tl.where((serves == p)[None, :], part, acc)
    row = tl.load((half + M.to(tl.int64) * kp).to(tl.pointer_type(tl.float32)) + m_in)
    matrix = (exponent << 23).to(tl.float32, bitcast=True)
    FACTOR: tl.constexpr = (1.0 if EXACT else 65536.0) / (1 << (8 - TOTAL))
    acc = acc * (LIFT * FACTOR * matrix) * row[None, :]
    if original_ptr is not None:
        if tl.max(serves, 0) == P:
            exact = exact_product(original_ptr, x_ptr, K, n, n_ok, m, m_ok, u0 * UNIT, units * (UNIT // 64))
            eight = has_eight(wanted) & (serves == P)
            if tl.max(eight.to(tl.int32), 0) > 0:
                rounded = _exact_eight(
                    original_ptr, half, row, K, kp, n, n_ok, m, eight, u0 * UNIT, units * (UNIT // 64),
                    x_ptr.dtype.element_ty,
                )  # fmt: skip
                exact = tl.where(eight[None, :], rounded, exact)
            acc = tl.where((serves == P)[None, :], exact, acc)
    if EARLY:
        gdc_launch_dependents()
    offsets = m.to(tl.int64)[None, :] * columns + (column + n)[:, None]
    bias = load_bias(bias_ptr, n, n_ok)[:, None]
    count_ptr = counter(packed_ptr, np_, kp, tile, P, TOTAL, GROUP)
    finish(
        acc, bias, y_ptr, parts_ptr, count_ptr, offsets, n_ok[:, None] & m_ok[None, :], M.to(tl.int64) * columns, SPLIT
    )


@triton.jit(do_not_specialize=["M", "exponent", "units"], do_not_specialize_on_alignment=["bits_ptr"])
def batch_kernel(
    x_ptr, half_ptr, packed_ptr, bits_ptr, original_ptr, bias_ptr, y_ptr, parts_ptr, M, N, K, np_, kp, exponent, units,
    PRECISIONS: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, SPLIT: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """one matrix"""
    batch_tile(
        x_ptr, half_ptr, packed_ptr, bits_ptr, original_ptr, bias_ptr, y_ptr, parts_ptr, M, N, K, np_, kp, exponent,
        units, tl.program_id(0), 0, N, PRECISIONS, PARTS, GROUP, UNIT, SPLIT, BN, BM, STAGES, EARLY, ASM,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["M", "N0", "N1", "N2", "exponent0", "exponent1", "exponent2", "units", "half_size"],
    do_not_specialize_on_alignment=["bits0_ptr", "bits1_ptr", "bits2_ptr"],
)
def batch_three_kernel(
    x_ptr, half_ptr, half_size, packed0_ptr, packed1_ptr, packed2_ptr, bits0_ptr, bits1_ptr, bits2_ptr, original0_ptr,
    original1_ptr, original2_ptr, bias0_ptr, bias1_ptr, bias2_ptr, y_ptr, parts_ptr, M, N0, N1, N2, K, kp, exponent0,
    exponent1, exponent2, units, PRECISIONS: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
    UNIT: tl.constexpr, SPLIT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """up to three matrices that read the same x, their results side by side; of two, N2 is 0"""
    row_tiles = tl.cdiv(M, BM)
    tile = tl.program_id(0)
    second = tl.cdiv(N0, BN) * row_tiles
    third = second + tl.cdiv(N1, BN) * row_tiles
    packed_ptr = choose(tile, second, third, packed0_ptr, packed1_ptr, packed2_ptr)
    bits_ptr = choose(tile, second, third, bits0_ptr, bits1_ptr, bits2_ptr)
    N = choose(tile, second, third, N0, N1, N2)
    exponent = choose(tile, second, third, exponent0, exponent1, exponent2)
    column = choose(tile, second, third, N0 * 0, N0, N0 + N1)
    before = choose(tile, second, third, second * 0, second, third)
    half_ptr += choose(tile, second, third, half_size * 0, half_size, 2 * half_size)
    half_ptr = tl.multiple_of(half_ptr, 16)
    original_ptr = original0_ptr
    if original0_ptr is not None:
        original_ptr = choose(tile, second, third, original0_ptr, original1_ptr, original2_ptr)
    bias_ptr = bias0_ptr
    if bias0_ptr is not None:
        bias_ptr = choose(tile, second, third, bias0_ptr, bias1_ptr, bias2_ptr)
    batch_tile(
        x_ptr, half_ptr, packed_ptr, bits_ptr, original_ptr, bias_ptr, y_ptr, parts_ptr, M, N, K,
        tl.cdiv(N, 64) * 64, kp, exponent, units, tile - before, column, N0 + N1 + N2, PRECISIONS, PARTS, GROUP, UNIT,
        SPLIT, BN, BM, STAGES, EARLY, ASM,
    )  # fmt: skip
