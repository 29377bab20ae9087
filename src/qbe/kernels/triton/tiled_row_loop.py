"""The decode kernel's loop for a single row.

Tensor cores multiply by 8 columns at least. Here those are the high and the low bytes of 4 runs of 64 inputs, each zero
where the others are not. The sums of 256 inputs then take scale and offset once for each output and run. With 8 columns
of which one is used, these took eight times as many instructions, half of the loop.
"""

# Triton's language is not Python's: its arguments carry no types, and a branch on a constant must stand alone.
# mypy: disable-error-code="no-untyped-def, var-annotated, assignment, operator, index, misc, attr-defined"

from __future__ import annotations

import triton
import triton.language as tl

from qbe.kernels.triton.tiled_codes import left_aligned, left_aligned_scales, load_parts, tile_and_rows, with_bits
from qbe.kernels.triton.tiled_quantise import scale_of


@triton.jit
def row_loop(
    x_ptr, packed_ptr, exponent, np_, kp, n0, BN: tl.constexpr, eight, u0, UNITS, PRECISIONS: tl.constexpr,
    PARTS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, TOP: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """W @ x, float32 [BN, 4], to be added up: column i has the runs i, i + 4, ... of 64 inputs."""
    TOTAL: tl.constexpr = PRECISIONS[len(PRECISIONS) - 1]
    WORD: tl.constexpr = tl.int64 if GROUP == 64 else tl.int32
    column = tl.arange(0, 8)
    run4 = tl.arange(0, 4)
    plane = np_.to(tl.int64) * kp // 8
    words = (packed_ptr + plane * TOTAL).to(tl.pointer_type(WORD))
    word_plane = (np_ * (kp // 256)).to(tl.int64)
    tile, row = tile_and_rows(n0, BN)
    pm = words + tile.to(tl.int64) * ((kp // 256) * 64)
    x_at = x_ptr.to(tl.pointer_type(tl.int8)) + (column % 2 * kp)[None, :] + tl.arange(0, 64)[:, None]
    live = (column % 2 == 0) | (eight == 0)
    pairs = (x_ptr + 2 * kp).to(tl.pointer_type(tl.int64)) + run4 * 64 // GROUP + tl.where(eight != 0, kp // GROUP, 0)
    shift = (run4 * 64 // GROUP * 16)[None, :]
    first = run4 * 64 % GROUP == 0  # runs that count the sum of their group's inputs
    acc = tl.zeros((BN, 4), tl.float32)
    for step in tl.range(0, UNITS, num_stages=STAGES):
        u = u0 + step
        tiles = load_parts(packed_ptr, plane, tile, row, kp, u, PARTS, UNIT, TOP)
        for c in tl.static_range(UNIT // 64):
            if c % 4 == 0:
                base_words = tl.load(pm + (u * (UNIT // 256) + c // 4) * 64 + row)
                if PRECISIONS[TOP] < TOTAL:
                    low_words = tl.load(pm + (TOP + 1) * word_plane + (u * (UNIT // 256) + c // 4) * 64 + row)
                pair = tl.load(pairs + (u * UNIT + c * 64) // GROUP)
                sums = tl.zeros((BN, 8), tl.int32)
            x = tl.load(x_at + (u * UNIT + c * 64), mask=((column // 2 == c % 4) & live)[None, :], other=0)
            w = left_aligned(tiles[0][c * PARTS[0][1] // 8], c % (8 // PARTS[0][1]), PARTS[0][1], ASM)
            for i in tl.static_range(1, len(PARTS)):
                if PARTS[i][2] <= TOP:
                    w = with_bits(
                        w, tiles[i][c * PARTS[i][1] // 8], c % (8 // PARTS[i][1]), PARTS[i][1], PARTS[i][0], ASM
                    )
            sums = tl.dot(w, x, sums, out_dtype=tl.int32)
            if c % 4 == 3:
                high, low = tl.split(tl.reshape(sums, (BN, 4, 2)))
                base = (base_words[:, None] >> shift).to(tl.int32)
                lower = base
                if PRECISIONS[TOP] < TOTAL:
                    lower = (low_words[:, None] >> shift).to(tl.int32)
                s, o = left_aligned_scales(base, lower, exponent, TOTAL - PRECISIONS[TOP], 8 - TOTAL)
                sum_x = tl.where(first, (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True), 0.0)
                total = (high * 256 + low).to(tl.float32)
                acc = tl.fma(tl.fma(o, sum_x[None, :], total) * scale_of(pair)[None, :], s, acc)
    return acc * (1.0 / (1 << (8 - TOTAL)))
