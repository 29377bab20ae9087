"""Few rows (decode): one launch serves every precision and every mixture, on the tiled layout (`layout`).

A program makes a tile y[BN outputs, BM rows] by integer products. Codes enter the tensor cores as signed bytes: the
bits that a precision has, left-aligned, less 128. Activations are 16-bit fixed point in two bytes (`quantise`).
The sum of a group is an exact integer; then y += s * sx * (sum + o * sum(x)). A row of 8-bit activations has the high
byte alone: its low byte reads as zero, and where all rows are such it is not multiplied.

In a mixed batch every part is multiplied once. A row adds the sums of the bits it asks for, exact integers, and takes
the scale and offset of its precision. Each highest precision has loops of its own, for a uniform tile, one of 8-bit
activations alone and a mixed one, which load what they need and nothing else. The bits are read at run time. Up to four
rows of one precision have loops of their own (`row_loop`).

A row comes out the same, bit for bit, however many there are and whatever they ask for: every loop adds the products of
64 inputs in the same order, and how a sum is split is a matter of the weight's shape alone (`configs`).
"""

# Triton's language is not Python's: its arguments carry no types, and a branch on a constant must stand alone.
# mypy: disable-error-code="no-untyped-def, var-annotated, assignment, operator, index, misc, attr-defined"
# ruff: noqa: SIM102

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qbe.kernels.triton.linear.tiled.codes import codes_of, left_aligned_scales, load_parts, tile_and_rows
from qbe.kernels.triton.linear.tiled.common import (
    choose,
    counter,
    exact_eight,
    exact_product,
    finish,
    has_eight,
    load_bias,
    load_precision_words,
    serving,
)
from qbe.kernels.triton.linear.tiled.quantise import scale_of, scale_pairs
from qbe.kernels.triton.linear.tiled.row_loop import row_loop, sum_of_runs


@triton.jit
def _prefetch(address):
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], tl.int32, False, 1)


@triton.jit
def _prefetch_runs(
    part_ptr, kp, n0, BN: tl.constexpr, u0, WIDTH: tl.constexpr, UNIT: tl.constexpr, AHEAD: tl.constexpr
):
    """AHEAD units of a part, 128-byte lines of BN outputs, of which 32 lie in a tile of 64"""
    line = tl.arange(0, AHEAD * UNIT * WIDTH // 512 * BN // 2)
    place = line % (BN // 2)
    run = (n0 // 64 + place // 32) * (kp * WIDTH // 512) + u0 * (UNIT * WIDTH // 512) + line // (BN // 2)
    _prefetch(part_ptr + run.to(tl.int64) * 4096 + n0 % 64 * 64 + place % 32 * 128)


@triton.jit
def prefetch_ahead(
    packed_ptr, bits_ptr, np_, kp, n0, BN: tl.constexpr, m, m_ok, u0, PRECISIONS: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, UNIT: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The first AHEAD units into the L2. The bits may still change: they only hint at the parts that will be read."""
    P: tl.constexpr = len(PRECISIONS)
    hint = tl.maximum(tl.max(tl.load(bits_ptr + m, mask=m_ok, other=0) & 255, 0), PRECISIONS[0])
    plane = np_.to(tl.int64) * kp // 8
    for i in tl.static_range(len(PARTS)):
        if hint >= PRECISIONS[PARTS[i][2]]:
            _prefetch_runs(packed_ptr + plane * PARTS[i][0], kp, n0, BN, u0, PARTS[i][1], UNIT, AHEAD)
    line = tl.arange(0, AHEAD * UNIT // 256 * (256 // GROUP))  # of the 64 outputs of a tile
    for p in tl.static_range(P):
        word = (np_.to(tl.int64) * p + n0 // 64 * 64) * (kp // 256) + u0 * (UNIT // 256) * 64
        _prefetch(packed_ptr + plane * PRECISIONS[P - 1] + word * (512 // GROUP) + line * 128)


@triton.jit
def _loop(
    x_ptr, packed_ptr, exponent, M, np_, kp, n0, BN: tl.constexpr, m, serves, eight, u0, UNITS,
    PRECISIONS: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, TOP: tl.constexpr,
    MIXED: tl.constexpr, EIGHT: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """W @ x.T, float32 [BN, BM], every row at its own precision up to TOP (not MIXED: all at TOP; EIGHT: of 8 bits)"""
    TOTAL: tl.constexpr = PRECISIONS[len(PRECISIONS) - 1]
    METAS: tl.constexpr = UNIT // 256
    LOWEST: tl.constexpr = 0 if MIXED else TOP
    WORD: tl.constexpr = tl.int64 if GROUP == 64 else tl.int32
    ru = tl.arange(0, 64)
    tile, row = tile_and_rows(n0, BN)
    plane = np_.to(tl.int64) * kp // 8  # bytes of one bit of all codes
    scale_words = (packed_ptr + plane * TOTAL).to(tl.pointer_type(WORD))
    word_plane = (np_ * (kp // 256)).to(tl.int64)
    pm = scale_words + tile.to(tl.int64) * ((kp // 256) * 64)
    m_in = tl.minimum(m, M - 1)
    high = x_ptr.to(tl.pointer_type(tl.int8))
    low = high + M * kp
    x_at = m_in[None, :] * kp + ru[:, None]
    pairs = scale_pairs(x_ptr, M, kp, m_in, eight, GROUP)
    zero = tl.zeros((BN, m.shape[0]), tl.int32)
    acc0 = tl.zeros((BN, m.shape[0]), tl.float32)
    acc1 = tl.zeros((BN, m.shape[0]), tl.float32)
    acc2 = tl.zeros((BN, m.shape[0]), tl.float32)
    acc3 = tl.zeros((BN, m.shape[0]), tl.float32)
    for step in tl.range(0, UNITS, num_stages=STAGES):
        u = u0 + step
        tiles = load_parts(packed_ptr, plane, tile, row, kp, u, PARTS, UNIT, TOP)
        bases = ()
        lows = ()
        for q in tl.static_range(METAS):
            bases += (tl.load(pm + (u * METAS + q) * 64 + row),)
        for p in tl.static_range(LOWEST, TOP + 1):
            if PRECISIONS[p] < TOTAL:
                for q in tl.static_range(METAS):
                    lows += (tl.load(pm + (p + 1) * word_plane + (u * METAS + q) * 64 + row),)
        for c in tl.static_range(UNIT // 64):
            k = u * UNIT + c * 64
            x_high = tl.load(high + k + x_at)
            if not EIGHT:
                x_low = tl.load(low + k + x_at, mask=(eight == 0)[None, :], other=0)
            if c * 64 % GROUP == 0:
                pair = tl.load(pairs + (k // GROUP) * M)
                sx = scale_of(pair)[None, :]
                sum_x = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)[None, :]
                base = (bases[c * 64 // 256] >> (c * 64 % 256 // GROUP * 16)).to(tl.int32)
            for p in tl.static_range(LOWEST, TOP + 1):
                w = codes_of(tiles, c, p, BN, PARTS, MIXED, ASM)
                sum_p = tl.dot(w, x_high, zero, out_dtype=tl.int32) * 256
                if not EIGHT:
                    sum_p += tl.dot(w, x_low, zero, out_dtype=tl.int32)
                if c * 64 % GROUP == 0:
                    lower = base
                    if PRECISIONS[p] < TOTAL:
                        lower = (lows[(p - LOWEST) * METAS + c * 64 // 256] >> (c * 64 % 256 // GROUP * 16)).to(
                            tl.int32
                        )
                    s_p, o_p = left_aligned_scales(base, lower, exponent, TOTAL - PRECISIONS[p], 8 - TOTAL)
                if p == LOWEST:
                    total = sum_p
                    if c * 64 % GROUP == 0:
                        s = s_p[:, None]
                        o = o_p[:, None]
                else:
                    wanted = (serves >= p)[None, :]
                    total += tl.where(wanted, sum_p, 0)
                    if c * 64 % GROUP == 0:
                        s = tl.where(wanted, s_p[:, None], s)
                        o = tl.where(wanted, o_p[:, None], o)
            scaled = total.to(tl.float32)
            if c * 64 % GROUP == 0:
                scaled = tl.fma(o, sum_x, scaled)
            scaled *= sx
            if c % 4 == 0:
                acc0 = tl.fma(scaled, s, acc0)
            elif c % 4 == 1:
                acc1 = tl.fma(scaled, s, acc1)
            elif c % 4 == 2:
                acc2 = tl.fma(scaled, s, acc2)
            else:
                acc3 = tl.fma(scaled, s, acc3)
    return sum_of_runs(acc0, acc1, acc2, acc3) * (1.0 / (1 << (8 - TOTAL)))


@triton.jit
def decode_tile(
    x_ptr, quantised_ptr, packed_ptr, bits_ptr, original_ptr, bias_ptr, y_ptr, parts_ptr, M, N, K, np_, kp, exponent,
    units, tile, column, columns, PRECISIONS: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
    UNIT: tl.constexpr, SPLIT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """the tile of that number of one matrix, whose first output is `column` of y's `columns`"""
    P: tl.constexpr = len(PRECISIONS)
    TOTAL: tl.constexpr = PRECISIONS[P - 1]
    row_tiles = tl.cdiv(M, BM)
    n0 = tile // row_tiles * BN
    n = n0 + tl.arange(0, BN)
    m = tile % row_tiles * BM + tl.arange(0, BM)
    m_ok = m < M
    n_ok = n < N
    u0 = tl.program_id(1) * units
    count_ptr = counter(packed_ptr, np_, kp, tile, P, TOTAL, GROUP)
    if EARLY:
        # Programmatic dependent launch (Hopper and later): this program may run while the kernels before it drain.
        # Until they are complete it uses nothing but weights: it brings its first AHEAD units to the L2. It lets the
        # next kernel begin at its own end only (below), or the next linear's programs would take the places of this
        # one's that end first, and crowd on some processors (16 rows of an 8B model: 10 % of a step on an H200).
        prefetch_ahead(packed_ptr, bits_ptr, np_, kp, n0, BN, m, m_ok, u0, PRECISIONS, PARTS, GROUP, UNIT, AHEAD)
        if SPLIT:
            _prefetch(count_ptr)
        gdc_wait()
    scale_words = load_precision_words(bits_ptr, m, m_ok)
    serves = serving(scale_words, original_ptr, m_ok, PRECISIONS)
    eight = has_eight(scale_words)
    highest = tl.max(tl.where(serves < P, serves, -1), 0)
    lowest = tl.min(tl.where(m_ok, serves, P), 0)
    acc = tl.zeros((BN, BM), tl.float32)
    # 0: rows of one precision, 1: all of them with 8-bit activations, 2: mixed
    kind = tl.where(lowest < highest, 2, tl.min(tl.where(m_ok, eight.to(tl.int32), 1), 0))
    for top in tl.static_range(P):
        for k in tl.static_range(3):
            # A store of many precisions has one mixed loop for all, or the code would grow with their number.
            if k < 2 or (top == P - 1 if P > 3 else top > 0):
                runs = (kind == k) & ((highest == top) | (k == 2 and P > 3))
                if ROWS > 0:
                    if k != 1 and (k == 0 or ROWS > 1):
                        if (highest == top) & (kind < 2) if k == 0 else runs:
                            rows = row_loop(
                                quantised_ptr, packed_ptr, bits_ptr, original_ptr, exponent, M, np_, kp, n0, BN, u0,
                                units, ROWS, PRECISIONS, PARTS, GROUP, UNIT, top, k == 2, STAGES, ASM,
                            )  # fmt: skip
                            acc = tl.reshape(tl.broadcast_to(rows[:, None, :], (BN, BM // ROWS, ROWS)), (BN, BM))
                elif P <= 3 or k == 2:
                    if runs if P <= 3 else highest >= 0:
                        acc = _loop(
                            quantised_ptr, packed_ptr, exponent, M, np_, kp, n0, BN, m, serves, eight, u0, units,
                            PRECISIONS, PARTS, GROUP, UNIT, top, k == 2, k == 1, STAGES, ASM,
                        )  # fmt: skip
    if original_ptr is not None:
        if tl.max(serves, 0) == P:
            exact = exact_product(original_ptr, x_ptr, K, n, n_ok, m, m_ok, u0 * UNIT, units * (UNIT // 64))
            if tl.max(((serves == P) & eight).to(tl.int32), 0) > 0:
                rounded = exact_eight(
                    original_ptr, quantised_ptr, K, M, kp, n, n_ok, m, eight, u0 * UNIT, units * (UNIT // 64), GROUP,
                    x_ptr.dtype.element_ty,
                )  # fmt: skip
                exact = tl.where(eight[None, :], rounded, exact)
            acc = tl.where((serves == P)[None, :], exact, acc)
    if EARLY:
        gdc_launch_dependents()
    offsets = m[None, :] * columns + (column + n)[:, None]
    bias = load_bias(bias_ptr, n, n_ok)[:, None]
    finish(acc, bias, y_ptr, parts_ptr, count_ptr, offsets, n_ok[:, None] & m_ok[None, :], M * columns, SPLIT)


@triton.jit(do_not_specialize=["M", "exponent", "units"], do_not_specialize_on_alignment=["bits_ptr"])
def decode_kernel(
    x_ptr, quantised_ptr, packed_ptr, bits_ptr, original_ptr, bias_ptr, y_ptr, parts_ptr, M, N, K, np_, kp, exponent,
    units, PRECISIONS: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr,
    SPLIT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
    AHEAD: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """one matrix"""
    decode_tile(
        x_ptr, quantised_ptr, packed_ptr, bits_ptr, original_ptr, bias_ptr, y_ptr, parts_ptr, M, N, K, np_, kp,
        exponent, units, tl.program_id(0), 0, N, PRECISIONS, PARTS, GROUP, UNIT, SPLIT, BN, BM, STAGES, EARLY,
        AHEAD, ROWS, ASM,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["M", "N0", "N1", "N2", "exponent0", "exponent1", "exponent2", "units"],
    do_not_specialize_on_alignment=["bits0_ptr", "bits1_ptr", "bits2_ptr"],
)
def decode_three_kernel(
    x_ptr, quantised_ptr, packed0_ptr, packed1_ptr, packed2_ptr, bits0_ptr, bits1_ptr, bits2_ptr, original0_ptr,
    original1_ptr, original2_ptr, bias0_ptr, bias1_ptr, bias2_ptr, y_ptr, parts_ptr, M, N0, N1, N2, K, kp, exponent0,
    exponent1, exponent2, units, PRECISIONS: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
    UNIT: tl.constexpr, SPLIT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
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
    original_ptr = original0_ptr
    if original0_ptr is not None:
        original_ptr = choose(tile, second, third, original0_ptr, original1_ptr, original2_ptr)
    bias_ptr = bias0_ptr
    if bias0_ptr is not None:
        bias_ptr = choose(tile, second, third, bias0_ptr, bias1_ptr, bias2_ptr)
    decode_tile(
        x_ptr, quantised_ptr, packed_ptr, bits_ptr, original_ptr, bias_ptr, y_ptr, parts_ptr, M, N, K,
        tl.cdiv(N, 64) * 64, kp, exponent, units, tile - before, column, N0 + N1 + N2, PRECISIONS, PARTS, GROUP, UNIT,
        SPLIT, BN, BM, STAGES, EARLY, AHEAD, ROWS, ASM,
    )  # fmt: skip
