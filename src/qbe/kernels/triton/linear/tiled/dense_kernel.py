"""Prefill: W at one precision into a scratch matrix, then an ordinary product for the rows of that precision.

The pair runs once per precision; where no row wants it both return at once.
"""

# Triton's language is not Python's: its arguments carry no types, and a branch on a constant must stand alone.
# mypy: disable-error-code="no-untyped-def, assignment, operator, index, misc, return-value"

from __future__ import annotations

import triton
import triton.language as tl

from qbe.kernels.triton.linear.eight_bit_rows import to_eight
from qbe.kernels.triton.linear.tiled.codes import append_at, as_float, first_at, scale_offset


@triton.jit(do_not_specialize=["M", "exponent", "LOW", "HIGH", "FIRST"], do_not_specialize_on_alignment=["bits_ptr"])
def dequantise_kernel(
    packed_ptr, bits_ptr, w_ptr, largest_ptr, scales_ptr, M, np_, kp, exponent, LOW, HIGH, FIRST,
    ROWS: tl.constexpr, PRECISIONS: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, TOP: tl.constexpr,
    LARGEST: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """W at precision TOP from tile FIRST on into w, rows of kp, if any row wants bits in LOW <= b < HIGH

    With LARGEST, the largest value of w's 8-bit format, every output is scaled from its bound to that, and its scale
    written.
    """
    P: tl.constexpr = len(PRECISIONS)
    TOTAL: tl.constexpr = PRECISIONS[P - 1]
    WORD: tl.constexpr = tl.int64 if GROUP == 64 else tl.int32
    m = tl.arange(0, ROWS)
    b = tl.where(m < M, tl.load(bits_ptr + m, mask=m < M, other=0) & 255, -(2**31))
    if tl.max(((b >= LOW) & (b < HIGH)).to(tl.int32), 0) > 0:
        out = tl.program_id(0)
        tile = FIRST + out
        unit_ = tl.program_id(1)
        row = tl.arange(0, 64)
        ru = tl.arange(0, 64)
        plane = np_.to(tl.int64) * kp // 8
        scale_words = (packed_ptr + plane * TOTAL).to(tl.pointer_type(WORD))
        word_plane = (np_ * (kp // 256)).to(tl.int64)
        pm = scale_words + tile.to(tl.int64) * ((kp // 256) * 64) + unit_ * 64 + row
        base64 = tl.load(pm)
        low64 = base64
        if PRECISIONS[TOP] < TOTAL:
            low64 = tl.load(pm + (TOP + 1) * word_plane)
        if LARGEST is not None:
            largest = tl.maximum(tl.load(largest_ptr + out * 64 + row), 1e-30)  # no division by zero
            factor = tl.div_rn(tl.full(largest.shape, LARGEST, tl.float32), largest)
            if unit_ == 0:
                tl.store(scales_ptr + out * 64 + row, largest * (1.0 / LARGEST))
        for c in tl.static_range(4):
            code = tl.zeros((64, 64), tl.uint8)
            block = unit_ * 4 + c
            for i in tl.static_range(len(PARTS)):
                if PARTS[i][2] <= TOP:
                    run = (
                        packed_ptr
                        + plane * PARTS[i][0]
                        + (tile * (kp * PARTS[i][1] // 512)).to(tl.int64) * 4096
                        + (row * 64)[:, None]
                        + ru[None, :]
                    )
                    w = tl.load(run + block * PARTS[i][1] // 8 * 4096)
                    shift = tl.zeros((64, 64), tl.int32) + block % (8 // PARTS[i][1]) * PARTS[i][1]
                    if i == 0:
                        code = first_at(w, shift, PARTS[i][1], ASM)
                    else:
                        code = append_at(code, w, shift, PARTS[i][1], ASM)
            s, o = scale_offset(
                (base64 >> (c * 64 // GROUP * 16)).to(tl.int32),
                (low64 >> (c * 64 // GROUP * 16)).to(tl.int32),
                exponent,
                TOTAL - PRECISIONS[TOP],
            )
            f = as_float(code, PRECISIONS[TOP], ASM) - (128.0 if PRECISIONS[TOP] < 8 else 32768.0)
            w = (f - o[:, None]) * s[:, None]
            if LARGEST is not None:
                w = to_eight(w * factor[:, None], w_ptr.dtype.element_ty)
            else:
                w = w.to(w_ptr.dtype.element_ty)
            tl.store(w_ptr + (out * 64 + row).to(tl.int64)[:, None] * kp + (block * 64 + ru)[None, :], w)


@triton.jit(do_not_specialize=["M", "LOW", "HIGH"], do_not_specialize_on_alignment=["bits_ptr"])
def dense_kernel(
    x_ptr, w_ptr, bits_ptr, bias_ptr, y_ptr, M, N, K, stride, LOW, HIGH, EVEN: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, KSTEPS: tl.constexpr,
):  # fmt: skip
    """y of the rows whose bits lie in LOW <= b < HIGH: x @ w.T"""
    row_tiles = tl.cdiv(M, BM)
    col_tiles = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    per = 8 * row_tiles
    first = pid // per * 8
    size = tl.minimum(col_tiles - first, 8)
    n = (first + pid % per % size) * BN + tl.arange(0, BN)
    m = pid % per // size * BM + tl.arange(0, BM)
    m_ok = m < M
    n_ok = n < N
    bits = tl.load(bits_ptr + m, mask=m_ok, other=0) & 255
    in_range = m_ok & (bits >= LOW) & (bits < HIGH)
    if tl.max(in_range.to(tl.int32), 0) > 0:
        k0 = tl.arange(0, BK)
        px = x_ptr + tl.where(m_ok, m, 0).to(tl.int64)[:, None] * K + k0[None, :]
        pw = w_ptr + tl.where(n_ok, n, 0).to(tl.int64)[:, None] * stride + k0[None, :]
        acc = tl.zeros((BM, BN), tl.float32)
        for step in tl.range(0, KSTEPS, num_stages=STAGES):
            if EVEN:
                x = tl.load(px + step * BK)
                w = tl.load(pw + step * BK)
            else:
                ok = (step * BK + k0 < K)[None, :]
                x = tl.load(px + step * BK, mask=ok, other=0.0)
                w = tl.load(pw + step * BK, mask=ok, other=0.0)
            acc = tl.dot(x, tl.trans(w), acc)
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + n, mask=n_ok, other=0.0).to(tl.float32)[None, :]
        tl.store(
            y_ptr + m.to(tl.int64)[:, None] * N + n[None, :],
            acc.to(y_ptr.dtype.element_ty),
            mask=n_ok[None, :] & in_range[:, None],
        )
