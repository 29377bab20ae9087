"""float32 inputs: every program dequantises its tile of W at each precision that its rows ask for and multiplies.

Exact up to the rounding of the sums, and slow: it is for comparing, not for serving. A row takes the sums of its own
precision.
"""

# Triton's language is not Python's: its arguments carry no types, and a branch on a constant must stand alone.
# mypy: disable-error-code="no-untyped-def, assignment, operator, index, misc, return-value"
# ruff: noqa: SIM102, SIM108

from __future__ import annotations

import triton
import triton.language as tl

from qbe.kernels.triton.linear.tiled.codes import append_at, as_float, first_at, scale_offset
from qbe.kernels.triton.linear.tiled.common import exact_product, load_bias, load_precision_words, serving


@triton.jit
def _float32_loop(
    x_ptr, packed_ptr, exponent, K, np_, kp, n, m, m_ok, STEPS: tl.constexpr, PRECISIONS: tl.constexpr,
    PARTS: tl.constexpr, GROUP: tl.constexpr, TOP: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    P: tl.constexpr = len(PRECISIONS)
    TOTAL: tl.constexpr = PRECISIONS[P - 1]
    WORD: tl.constexpr = tl.int64 if GROUP == 64 else tl.int32
    ru = tl.arange(0, 64)
    tile = n // 64
    row = n % 64
    plane = np_.to(tl.int64) * kp // 8
    scale_words = (packed_ptr + plane * TOTAL).to(tl.pointer_type(WORD))
    word_plane = (np_ * (kp // 256)).to(tl.int64)
    pm = scale_words + tile.to(tl.int64) * ((kp // 256) * 64) + row
    px = x_ptr + m.to(tl.int64)[:, None] * K + ru[None, :]
    zero = tl.zeros((n.shape[0], 64), tl.int32)
    acc = tl.zeros((m.shape[0], n.shape[0]), tl.float32)
    for b in tl.range(0, STEPS, num_stages=STAGES):
        if EVEN:
            x = tl.load(px + b * 64, mask=m_ok[:, None], other=0.0)
        else:
            x = tl.load(px + b * 64, mask=m_ok[:, None] & (b * 64 + ru < K)[None, :], other=0.0)
        base = (tl.load(pm + b // 4 * 64) >> (b % 4 * 64 // GROUP * 16)).to(tl.int32)
        low = base
        if PRECISIONS[TOP] < TOTAL:
            low = (tl.load(pm + (TOP + 1) * word_plane + b // 4 * 64) >> (b % 4 * 64 // GROUP * 16)).to(tl.int32)
        code = tl.zeros((n.shape[0], 64), tl.uint8)
        for i in tl.static_range(len(PARTS)):
            if PARTS[i][2] <= TOP:
                begin = (
                    packed_ptr
                    + plane * PARTS[i][0]
                    + (tile * (kp * PARTS[i][1] // 512)).to(tl.int64)[:, None] * 4096
                    + (row * 64)[:, None]
                    + ru[None, :]
                )
                w = tl.load(begin + b * PARTS[i][1] // 8 * 4096)
                shift = zero + b % (8 // PARTS[i][1]) * PARTS[i][1]
                if i == 0:
                    code = first_at(w, shift, PARTS[i][1], ASM)
                else:
                    code = append_at(code, w, shift, PARTS[i][1], ASM)
        s, o = scale_offset(base, low, exponent, TOTAL - PRECISIONS[TOP])
        f = as_float(code, PRECISIONS[TOP], ASM) - (128.0 if PRECISIONS[TOP] < 8 else 32768.0)
        w = (f - o[:, None]) * s[:, None]
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["M", "exponent"], do_not_specialize_on_alignment=["bits_ptr"])
def float32_kernel(
    x_ptr, packed_ptr, bits_ptr, original_ptr, bias_ptr, y_ptr, M, N, K, np_, kp, exponent, PRECISIONS: tl.constexpr,
    PARTS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, STEPS: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    P: tl.constexpr = len(PRECISIONS)
    row_tiles = tl.cdiv(M, BM)
    n = tl.program_id(0) // row_tiles * BN + tl.arange(0, BN)
    m = tl.program_id(0) % row_tiles * BM + tl.arange(0, BM)
    m_ok = m < M
    n_ok = n < N
    n_in = tl.where(n < np_, n, 0)  # a wide tile may reach past the padding
    serves = serving(load_precision_words(bits_ptr, m, m_ok), original_ptr, m_ok, PRECISIONS)
    acc = tl.zeros((BM, BN), tl.float32)
    for p in tl.static_range(P):
        if tl.max((serves == p).to(tl.int32), 0) > 0:
            part = _float32_loop(
                x_ptr, packed_ptr, exponent, K, np_, kp, n_in, m, m_ok, STEPS, PRECISIONS, PARTS, GROUP, p, EVEN,
                STAGES, ASM,
            )  # fmt: skip
            acc = tl.where((serves == p)[:, None], part, acc)
    if original_ptr is not None:
        if tl.max(serves, 0) == P:
            exact = exact_product(x_ptr, original_ptr, K, m, m_ok, n, n_ok, 0, STEPS)
            acc = tl.where((serves == P)[:, None], exact, acc)
    offsets = m.to(tl.int64)[:, None] * N + n[None, :]
    bias = load_bias(bias_ptr, n, n_ok)[None, :]
    tl.store(y_ptr + offsets, acc + bias, mask=n_ok[None, :] & m_ok[:, None])
