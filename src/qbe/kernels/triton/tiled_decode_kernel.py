"""Few rows (decode): one launch serves every precision and every mixture, on the tiled layout (`layout`).

A program makes a tile y[BN outputs, BM rows]. Codes go to the tensor cores as integers, exact in 16-bit floats: 128 +
code in bfloat16, the subnormal code * 2**-24 in float16. A product with ones gives sum(x) in the same registers; scale
and offset are applied to each group's sums: y += s * (codes @ x - o * sum(x)). A precision is a sum of products of
parts, so those of a mixed batch share them. Each has accumulators of its own and a row picks its own at the end: its
sums are the same, bit for bit, whatever the other rows ask for.

Each highest precision has a loop of its own, which loads what it needs and nothing else. The bits are read at run time.
"""

# Triton's language is not Python's: its arguments carry no types, and a branch on a constant must stand alone.
# mypy: disable-error-code="no-untyped-def, var-annotated, assignment, operator, index, misc, return-value"
# ruff: noqa: B007, SIM102, SIM114, SIM300

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qbe.kernels.triton.tiled_codes import merge, ones, operand, scale_offset, six


@triton.jit
def _loop(
    x_ptr,
    packed_ptr,
    exponent,
    K,
    np_,
    kp,
    n,
    m,
    m_ok,
    u0,
    UNITS: tl.constexpr,
    PRECISIONS: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    TOP: tl.constexpr,
    ONLY: tl.constexpr,
    EVEN: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """accumulators of every precision up to TOP (ONLY: of TOP alone), float32 [BN, BM] each"""
    P: tl.constexpr = len(PRECISIONS)
    TOTAL: tl.constexpr = PRECISIONS[P - 1]
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    CHUNKS: tl.constexpr = UNIT // 64
    WORD: tl.constexpr = tl.int64 if GROUP == 64 else tl.int32
    ru = tl.arange(0, 64)
    tile = n // 64
    row = n % 64
    plane = np_.to(tl.int64) * kp // 8  # bytes of one bit of all codes
    words = (packed_ptr + plane * TOTAL).to(tl.pointer_type(WORD))
    word_plane = (np_ * (kp // 256)).to(tl.int64)
    pm = words + tile.to(tl.int64) * ((kp // 256) * 64) + row
    px = x_ptr + m.to(tl.int64)[None, :] * K + ru[:, None]
    accs = ()
    for p in tl.static_range(TOP + 1):
        accs += (tl.zeros((BN, BM), tl.float32),)
    for step in tl.range(0, UNITS, num_stages=STAGES):
        u = u0 + step
        # ---- loads
        tiles = ()
        for i in tl.static_range(len(PARTS)):
            if PARTS[i][2] <= TOP:
                base = (
                    packed_ptr
                    + plane * PARTS[i][0]
                    + (tile * (kp * PARTS[i][1] // 512)).to(tl.int64)[:, None] * 4096
                    + (row * 64)[:, None]
                    + ru[None, :]
                )
                got = ()
                for t in tl.static_range(UNIT * PARTS[i][1] // 512):
                    got += (tl.load(base + (u * (UNIT * PARTS[i][1] // 512) + t) * 4096),)
                tiles += (got,)
        METAS: tl.constexpr = UNIT // 256
        bases = ()
        lows = ()
        for q in tl.static_range(METAS):
            bases += (tl.load(pm + (u * METAS + q) * 64),)
        for p in tl.static_range(TOP + 1):
            got = ()
            if PRECISIONS[p] < TOTAL and (p == TOP or not ONLY):
                for q in tl.static_range(METAS):
                    got += (tl.load(pm + (p + 1) * word_plane + (u * METAS + q) * 64),)
            lows += (got,)
        LASTP: tl.constexpr = len(PARTS) - 1
        MERGE: tl.constexpr = (
            TOP == P - 1 and TOTAL == 8 and P > 1 and PARTS[LASTP][1] == 2 and PARTS[LASTP - 1][1] == 2
        )
        SIX: tl.constexpr = P > 1 and PARTS[0][1] == 4 and PARTS[1][1] == 2 and PARTS[0][2] == 0 and PARTS[1][2] == 1
        merged = ()
        if MERGE:
            for t in tl.static_range(UNIT // 256):
                merged += (
                    (
                        merge(tiles[LASTP - 1][t], tiles[LASTP][t], False, ASM),
                        merge(tiles[LASTP - 1][t], tiles[LASTP][t], True, ASM),
                    ),
                )
        # ---- products
        for c in tl.static_range(CHUNKS):
            k = u * UNIT + c * 64
            if EVEN:
                x = tl.load(px + k, mask=m_ok[None, :], other=0.0)
            else:
                x = tl.load(px + k, mask=m_ok[None, :] & (k + ru < K)[:, None], other=0.0)
            if c * 64 % GROUP == 0:
                dots = ()
                for i in tl.static_range(len(PARTS)):
                    if PARTS[i][2] <= TOP:
                        dots += (tl.zeros((BN, BM), tl.float32),)
                total = tl.zeros((BN, BM), tl.float32)
            total = tl.dot(ones(tiles[0][c * PARTS[0][1] // 8], DTYPE, ASM), x, total)
            new = ()
            for i in tl.static_range(len(PARTS)):
                if PARTS[i][2] <= TOP:
                    if MERGE and i == LASTP:
                        w = operand(merged[c // 4][c % 2], c % 4 // 2, 4, DTYPE, ASM)
                        new += (tl.dot(w, x, dots[i]),)
                    elif MERGE and ONLY and i == LASTP - 1:
                        new += (dots[i],)
                    elif SIX and ONLY and TOP == 1 and i == 0:
                        new += (dots[i],)
                    elif SIX and i == 1:
                        w = six(tiles[0][c // 2], tiles[1][c // 4], c, DTYPE, ASM)
                        new += (tl.dot(w, x, dots[i]),)
                    else:
                        w = operand(tiles[i][c * PARTS[i][1] // 8], c % (8 // PARTS[i][1]), PARTS[i][1], DTYPE, ASM)
                        new += (tl.dot(w, x, dots[i]),)
            dots = new
            if (c + 1) * 64 % GROUP == 0:
                base = (bases[c * 64 // 256] >> (c * 64 % 256 // GROUP * 16)).to(tl.int32)
                new = ()
                f = tl.zeros((BN, BM), tl.float32)
                bias = 0.0
                for p in tl.static_range(TOP + 1):
                    for i in tl.static_range(len(PARTS)):
                        if PARTS[i][2] == p:
                            if i == 0:
                                f = dots[i]
                                bias = 128.0
                                f_before = f
                                bias_before = bias
                            elif MERGE and i == LASTP:
                                f = f_before * 16 + dots[i]
                                bias = bias_before * 16 + 128.0
                            else:
                                if i == LASTP - 1:
                                    f_before = f
                                    bias_before = bias
                                if SIX and i == 1:
                                    f = dots[i]
                                    bias = 128.0
                                else:
                                    f = f * (1 << PARTS[i][1]) + dots[i]
                                    bias = bias * (1 << PARTS[i][1]) + 128.0
                    if p == TOP or not ONLY:
                        low = base
                        if PRECISIONS[p] < TOTAL:
                            low = (lows[p][c * 64 // 256] >> (c * 64 % 256 // GROUP * 16)).to(tl.int32)
                        s, o = scale_offset(base, low, exponent, TOTAL - PRECISIONS[p])
                        if DTYPE == tl.bfloat16:
                            t = tl.fma(total, (-o - bias)[:, None], f)
                        else:
                            t = tl.fma(total, (-o * 5.9604644775390625e-08)[:, None], f)
                        new += (tl.fma(t, s[:, None], accs[p]),)
                    else:
                        new += (accs[p],)
                accs = new
    if DTYPE == tl.float16:
        new = ()
        for p in tl.static_range(TOP + 1):
            new += (accs[p] * 16777216.0,)
        accs = new
    return accs


@triton.jit
def _select(accs, serves, acc, TOP: tl.constexpr, ONLY: tl.constexpr):
    for p in tl.static_range(TOP + 1):
        if p == TOP or not ONLY:
            acc = tl.where((serves == p)[None, :], accs[p], acc)
    return acc


@triton.jit(do_not_specialize=["M", "exponent"])
def decode_kernel(
    x_ptr,
    packed_ptr,
    bits_ptr,
    original_ptr,
    bias_ptr,
    y_ptr,
    parts_ptr,
    M,
    N,
    K,
    np_,
    kp,
    exponent,
    PRECISIONS: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_UNITS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    ASM: tl.constexpr,
):
    P: tl.constexpr = len(PRECISIONS)
    TOTAL: tl.constexpr = PRECISIONS[P - 1]
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    row_tiles = tl.cdiv(M, BM)
    n_tile = tl.program_id(0) // row_tiles
    n = n_tile * BN + tl.arange(0, BN)
    m = tl.program_id(0) % row_tiles * BM + tl.arange(0, BM)
    m_ok = m < M
    n_ok = n < N
    u0 = tl.program_id(1) * SPLIT_UNITS
    count_at = np_.to(tl.int64) * kp // 8 * TOTAL + np_.to(tl.int64) * kp // GROUP * 2 * P
    count_ptr = (packed_ptr + count_at).to(tl.pointer_type(tl.int32)) + tl.program_id(0)
    if EARLY:
        # Programmatic dependent launch (Hopper and later): this program may run while the kernel before it
        # drains. Until that one is complete it touches nothing but weights: it brings its first bytes to the L2.
        LINES: tl.constexpr = BN // 2  # 128-byte lines of a run of BN outputs
        line = tl.arange(0, LINES * 4)
        at = ((n_tile * BN) // 64 * (kp * PARTS[0][1] // 512) + u0 * (UNIT * PARTS[0][1] // 512)).to(tl.int64) * 4096
        at += n_tile * BN % 64 * 64 + line // LINES * 4096 + line % LINES * 128
        first = packed_ptr + tl.minimum(at, np_.to(tl.int64) * kp // 8 * TOTAL - 128)
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [first], tl.int32, False, 1)
        if SPLITS > 1:
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [count_ptr], tl.int32, False, 1
            )
        gdc_launch_dependents()
        gdc_wait()
    bits = tl.load(bits_ptr + m, mask=m_ok, other=0)
    serves = tl.zeros((BM,), tl.int32)
    for p in tl.static_range(1, P):
        serves += (bits >= PRECISIONS[p]).to(tl.int32)
    if original_ptr is not None:
        serves = tl.where(bits >= 16, P, serves)
    serves = tl.where(m_ok, serves, -1)
    highest = tl.max(tl.where(serves < P, serves, -1), 0)
    lowest = tl.min(tl.where(m_ok, serves, P), 0)
    acc = tl.zeros((BN, BM), tl.float32)
    if P <= 3:
        for top in tl.static_range(P):
            if highest == top:
                if lowest >= top:
                    acc = _select(
                        _loop(
                            x_ptr,
                            packed_ptr,
                            exponent,
                            K,
                            np_,
                            kp,
                            n,
                            m,
                            m_ok,
                            u0,
                            SPLIT_UNITS,
                            PRECISIONS,
                            PARTS,
                            GROUP,
                            UNIT,
                            top,
                            True,
                            EVEN,
                            BN,
                            BM,
                            STAGES,
                            ASM,
                        ),
                        serves,
                        acc,
                        top,
                        True,
                    )
                else:
                    acc = _select(
                        _loop(
                            x_ptr,
                            packed_ptr,
                            exponent,
                            K,
                            np_,
                            kp,
                            n,
                            m,
                            m_ok,
                            u0,
                            SPLIT_UNITS,
                            PRECISIONS,
                            PARTS,
                            GROUP,
                            UNIT,
                            top,
                            False,
                            EVEN,
                            BN,
                            BM,
                            STAGES,
                            ASM,
                        ),
                        serves,
                        acc,
                        top,
                        False,
                    )
    else:
        if highest >= 0:
            acc = _select(
                _loop(
                    x_ptr,
                    packed_ptr,
                    exponent,
                    K,
                    np_,
                    kp,
                    n,
                    m,
                    m_ok,
                    u0,
                    SPLIT_UNITS,
                    PRECISIONS,
                    PARTS,
                    GROUP,
                    UNIT,
                    P - 1,
                    False,
                    EVEN,
                    BN,
                    BM,
                    STAGES,
                    ASM,
                ),
                serves,
                acc,
                P - 1,
                False,
            )
    if original_ptr is not None:
        if tl.max(serves, 0) == P:
            OTHER: tl.constexpr = DTYPE if original_ptr.dtype.element_ty == DTYPE else tl.float32
            exact = tl.zeros((BN, BM), tl.float32)
            row = original_ptr + n.to(tl.int64) * K
            for step in tl.range(0, SPLIT_UNITS * (UNIT // 64), num_stages=3):
                k = u0 * UNIT + step * 64 + tl.arange(0, 64)
                if EVEN:
                    w = tl.load(row[:, None] + k[None, :], mask=n_ok[:, None], other=0.0)
                    xs = tl.load(x_ptr + m.to(tl.int64)[None, :] * K + k[:, None], mask=m_ok[None, :], other=0.0)
                else:
                    w = tl.load(row[:, None] + k[None, :], mask=n_ok[:, None] & (k < K)[None, :], other=0.0)
                    xs = tl.load(
                        x_ptr + m.to(tl.int64)[None, :] * K + k[:, None],
                        mask=m_ok[None, :] & (k < K)[:, None],
                        other=0.0,
                    )
                exact = tl.dot(w.to(OTHER), xs.to(OTHER), exact, input_precision="ieee")
            acc = tl.where((serves == P)[None, :], exact, acc)
    at = m.to(tl.int64)[None, :] * N + n[:, None]
    ok = n_ok[:, None] & m_ok[None, :]
    if SPLITS > 1:
        # The last program of a tile to arrive adds the parts in fixed order: deterministic, and no second launch.
        size = M.to(tl.int64) * N
        tl.store(parts_ptr + tl.program_id(1) * size + at, acc, mask=ok)
        tl.debug_barrier()
        if tl.atomic_add(count_ptr, 1, sem="acq_rel") == SPLITS - 1:
            tl.debug_barrier()
            acc = tl.zeros((BN, BM), tl.float32)
            for i in tl.static_range(SPLITS):
                acc += tl.load(parts_ptr + i * size + at, mask=ok, other=0.0, cache_modifier=".cg")
            if bias_ptr is not None:
                acc += tl.load(bias_ptr + n, mask=n_ok, other=0.0).to(tl.float32)[:, None]
            tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=ok)
            tl.store(count_ptr, 0)
    else:
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + n, mask=n_ok, other=0.0).to(tl.float32)[:, None]
        tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=ok)
