"""The decode kernel's loop for one, two or four rows.

Tensor cores multiply by 8 columns at least. Here those are the high and the low bytes of a row's inputs in 4 places: of
a single row 4 runs of 64 inputs, each zero where the others are not, of two rows 2 runs each, of four rows one. The
sums of so many runs then take scale and offset at once for each output and place. With 8 columns of which one is used,
these took eight times as many instructions, half of the loop.
"""

# Triton's language is not Python's: its arguments carry no types, and a branch on a constant must stand alone.
# mypy: disable-error-code="no-untyped-def, var-annotated, assignment, operator, index, misc, attr-defined"
# ruff: noqa: B007

from __future__ import annotations

import triton
import triton.language as tl

from qbe.kernels.triton.linear.tiled.codes import codes_of, left_aligned_scales, load_parts, tile_and_rows
from qbe.kernels.triton.linear.tiled.common import has_eight, load_precision_words, serving
from qbe.kernels.triton.linear.tiled.quantise import scale_of, scale_pairs

PACKED_ROWS = 4  # at most


def packed_rows(m: int) -> int:
    """Rows that a loop has places for when there are m: 1, 2 or 4; 0 where there are more than these."""
    return next((rows for rows in (1, 2, PACKED_ROWS) if m <= rows), 0)


@triton.jit
def sum_of_runs(acc0, acc1, acc2, acc3):
    """The sum of a row, of its runs 0, 4, 8, ..., its runs 1, 5, 9, ... and so on: in this order for any rows."""
    return (acc0 + acc1) + (acc2 + acc3)


@triton.jit
def _neighbours(x):
    """The sums of columns 0 and 1, 2 and 3, ..."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return even + odd


@triton.jit
def row_loop(
    x_ptr, packed_ptr, bits_ptr, original_ptr, exponent, M, np_, kp, n0, BN: tl.constexpr, u0, UNITS,
    ROWS: tl.constexpr, PRECISIONS: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr,
    TOP: tl.constexpr, MIXED: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """W @ x.T of rows 0 to ROWS - 1, float32 [BN, ROWS], those past M any: at precision TOP, MIXED up to it"""
    TOTAL: tl.constexpr = PRECISIONS[len(PRECISIONS) - 1]
    WORD: tl.constexpr = tl.int64 if GROUP == 64 else tl.int32
    LOWEST: tl.constexpr = 0 if MIXED else TOP
    RUNS: tl.constexpr = 4 // ROWS  # of a row at once
    column = tl.arange(0, 8)
    place = tl.arange(0, 4)
    plane = np_.to(tl.int64) * kp // 8
    scale_words = (packed_ptr + plane * TOTAL).to(tl.pointer_type(WORD))
    word_plane = (np_ * (kp // 256)).to(tl.int64)
    tile, row = tile_and_rows(n0, BN)
    pm = scale_words + tile.to(tl.int64) * ((kp // 256) * 64)
    m8 = tl.minimum(column // 2 // RUNS, M - 1)
    run8 = column // 2 % RUNS
    x_at = x_ptr.to(tl.pointer_type(tl.int8)) + ((column % 2 * M + m8) * kp)[None, :] + tl.arange(0, 64)[:, None]
    live = (column % 2 == 0) | (has_eight(load_precision_words(bits_ptr, m8, m8 < M)) == 0)
    m4 = tl.minimum(place // RUNS, M - 1)
    run4 = place % RUNS
    words4 = load_precision_words(bits_ptr, m4, m4 < M)
    serves = serving(words4, original_ptr, m4 < M, PRECISIONS)
    pairs = scale_pairs(x_ptr, M, kp, m4, has_eight(words4), GROUP) + run4 * 64 // GROUP * M
    acc0 = tl.zeros((BN, 4), tl.float32)
    acc1 = tl.zeros((BN, 4), tl.float32)
    acc2 = tl.zeros((BN, 4), tl.float32)
    acc3 = tl.zeros((BN, 4), tl.float32)
    for step in tl.range(0, UNITS, num_stages=STAGES):
        u = u0 + step
        tiles = load_parts(packed_ptr, plane, tile, row, kp, u, PARTS, UNIT, TOP)
        for c in tl.static_range(UNIT // 64):
            if c % 4 == 0:
                base_words = tl.load(pm + (u * (UNIT // 256) + c // 4) * 64 + row)
                lows = ()
                for p in tl.static_range(LOWEST, TOP + 1):
                    if PRECISIONS[p] < TOTAL:
                        lows += (tl.load(pm + (p + 1) * word_plane + (u * (UNIT // 256) + c // 4) * 64 + row),)
            if c % RUNS == 0:
                pair = tl.load(pairs + (u * UNIT + c * 64) // GROUP * M)
                sums = ()
                for p in tl.static_range(LOWEST, TOP + 1):
                    sums += (tl.zeros((BN, 8), tl.int32),)
            x = tl.load(x_at + (u * UNIT + c * 64), mask=((run8 == c % RUNS) & live)[None, :], other=0)
            new = ()
            for p in tl.static_range(LOWEST, TOP + 1):
                w = codes_of(tiles, c, p, BN, PARTS, MIXED, ASM)
                new += (tl.dot(w, x, sums[p - LOWEST], out_dtype=tl.int32),)
            sums = new
            if (c + 1) % RUNS == 0:
                shift = ((c + 1 - RUNS) % 4 * 64 // GROUP * 16 + run4 * 64 // GROUP * 16)[None, :]
                base = (base_words[:, None] >> shift).to(tl.int32)
                for p in tl.static_range(LOWEST, TOP + 1):
                    high, low = tl.split(tl.reshape(sums[p - LOWEST], (BN, 4, 2)))
                    lower = base
                    if PRECISIONS[p] < TOTAL:
                        lower = (lows[p - LOWEST][:, None] >> shift).to(tl.int32)
                    s_p, o_p = left_aligned_scales(base, lower, exponent, TOTAL - PRECISIONS[p], 8 - TOTAL)
                    if p == LOWEST:
                        total = high * 256 + low
                        s = s_p
                        o = o_p
                    else:
                        wanted = (serves >= p)[None, :]
                        total += tl.where(wanted, high * 256 + low, 0)
                        s = tl.where(wanted, s_p, s)
                        o = tl.where(wanted, o_p, o)
                # A run that begins a group counts the sum of the group's inputs.
                begins = ((c + 1 - RUNS) * 64 + run4 * 64) % GROUP == 0
                sum_x = tl.where(begins, (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True), 0.0)
                scaled = tl.fma(o, sum_x[None, :], total.to(tl.float32)) * scale_of(pair)[None, :]
                if c % 4 // RUNS == 0:
                    acc0 = tl.fma(scaled, s, acc0)
                elif c % 4 // RUNS == 1:
                    acc1 = tl.fma(scaled, s, acc1)
                elif c % 4 // RUNS == 2:
                    acc2 = tl.fma(scaled, s, acc2)
                else:
                    acc3 = tl.fma(scaled, s, acc3)
    if ROWS == 4:
        acc = sum_of_runs(acc0, acc1, acc2, acc3)
    elif ROWS == 2:
        acc = _neighbours(acc0) + _neighbours(acc1)
    else:
        acc = _neighbours(_neighbours(acc0))
    return acc * (1.0 / (1 << (8 - TOTAL)))
