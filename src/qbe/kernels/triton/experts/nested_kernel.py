"""Device code of `qbe::nested_experts`: a program multiplies a tile of one expert's rows with a part of its matrix.

The products are those of `linear.nested_kernel`, whose functions these use: rows of all precisions share one reading of
the codes, up to the slices that the most precise of them needs, and a row gets the same sums whatever the others ask
for. Gate and up of an output are neighbours in a tile, so that the activation is applied before anything is stored.
"""

# Triton's language is not Python's: its arguments carry no types, and a branch on a constant must stand alone.
# mypy: disable-error-code="no-untyped-def, assignment, operator"
# ruff: noqa: SIM102

from __future__ import annotations

import triton
import triton.language as tl

from qbe.kernels.triton.linear.nested_kernel import (
    _input_order,
    _load_code_words,
    _multiply,
    _scale_offset,
    _unpack_code_words,
)


@triton.jit
def _products(
    x_row,  # pointers [BLOCK_M]
    packed_ptr,  # int32, of the expert, or None
    addresses_ptr,  # int64 [COLUMNS], of the expert, or None
    meta_ptr,  # uint8 [2P, N, G], of the expert
    original_ptr,  # [N, K] of the expert, or None
    words,  # int32 [BLOCK_M]
    m_ok,
    n,  # rows of the matrix [BLOCK_N]
    n_ok,
    N,
    K,
    blocks,
    exponent,
    PRECISIONS: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr,
    STEP_BLOCKS: tl.constexpr,
    DEQUANTISE: tl.constexpr,
    STAGES: tl.constexpr,
    PAGES: tl.constexpr,
    SLICE_PAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """W[n] @ x.T in float32 [BLOCK_N, BLOCK_M], as `linear.nested_kernel` multiplies, which says why"""
    P: tl.constexpr = len(PRECISIONS)
    TOTAL: tl.constexpr = PRECISIONS[P - 1]
    DTYPE: tl.constexpr = x_row.dtype.element_ty
    BLOCK_K: tl.constexpr = 64 * STEP_BLOCKS
    n_long = n.to(tl.int64)
    bits = words & 255
    serves = tl.zeros((words.shape[0],), tl.int32)
    for p in tl.static_range(1, P):
        serves += (bits >= PRECISIONS[p]).to(tl.int32)
    if original_ptr is not None:
        serves = tl.where(bits >= 16, P, serves)
    if addresses_ptr is not None:  # no more than is there
        there = 1
        most = 0
        for p in tl.static_range(1, P):
            there = there & (tl.load(addresses_ptr + SLICE_PAGES[p]) != 0).to(tl.int32)
            most += there
        serves = tl.minimum(serves, most)
    serves = tl.where(m_ok, serves, -1)
    highest = tl.max(tl.where(serves < P, serves, -1), 0)
    present = 0
    for p in tl.static_range(P + 1):
        present |= tl.max((serves == p).to(tl.int32), 0) << p
    acc = tl.zeros((n.shape[0], words.shape[0]), tl.float32)

    if highest >= 0:
        col = tl.arange(0, 8 * STEP_BLOCKS)
        nothing = tl.zeros((BLOCK_K, words.shape[0]), tl.float32).to(DTYPE)
        order = _input_order(tl.arange(0, BLOCK_K))
        groups = blocks // GROUP_BLOCKS
        plane = tl.cast(N, tl.int64) * groups
        meta_row = meta_ptr + n_long * groups
        pages = ()
        rows_in_page = ()
        if addresses_ptr is not None:
            for i in tl.static_range(len(PARTS)):
                page = n // PAGES[i][1]
                address = tl.load(addresses_ptr + PAGES[i][0] + page, mask=n_ok & (highest >= PARTS[i][2]), other=0)
                pages += (tl.multiple_of(address.to(tl.pointer_type(tl.int32)), ALIGNED),)
                rows_in_page += ((n - page * PAGES[i][1]).to(tl.int64),)
        for block in tl.range(0, blocks, STEP_BLOCKS, num_stages=STAGES):
            k = block * 64 + order
            x = tl.load(x_row[None, :] + k[:, None], mask=(k < K)[:, None] & m_ok[None, :], other=0.0)
            code_words = ()
            for i in tl.static_range(len(PARTS)):
                wanted = n_ok & (highest >= PARTS[i][2])
                if addresses_ptr is not None:
                    code_words += (
                        _load_code_words(pages[i], rows_in_page[i], N, blocks, block, col, wanted, 0, PARTS[i][1]),
                    )
                else:
                    code_words += (
                        _load_code_words(packed_ptr, n_long, N, blocks, block, col, wanted, PARTS[i][0], PARTS[i][1]),
                    )
            meta_at = meta_row + block // GROUP_BLOCKS
            scale = tl.load(meta_at, mask=n_ok, other=0)
            zero = tl.load(meta_at + plane, mask=n_ok, other=0)
            ratios = ()
            offsets = ()
            for p in tl.static_range(P - 1):
                wanted = n_ok & ((present >> p) & 1 != 0)
                ratios += (tl.load(meta_at + (2 + 2 * p) * plane, mask=wanted, other=0),)
                offsets += (tl.load(meta_at + (3 + 2 * p) * plane, mask=wanted, other=0),)
            ratios += (scale,)  # the widest precision has none; keeps the indices below in range
            offsets += (zero,)
            code0 = tl.zeros((n.shape[0], 8 * STEP_BLOCKS), tl.int32)
            code1 = tl.zeros((n.shape[0], 8 * STEP_BLOCKS), tl.int32)
            for i in tl.static_range(len(PARTS)):
                if highest >= PARTS[i][2]:
                    code0, code1 = _unpack_code_words(code_words[i], col % 8, code0, code1, PARTS[i][1])
                if PARTS[i][3]:
                    if (present >> PARTS[i][2]) & 1 != 0:
                        rows = tl.where((serves == PARTS[i][2])[None, :], x, nothing)
                        s, o = _scale_offset(
                            scale, zero, ratios[PARTS[i][2]], offsets[PARTS[i][2]], exponent,
                            TOTAL - PRECISIONS[PARTS[i][2]],
                        )  # fmt: skip
                        acc = _multiply(acc, code0, code1, s, o, rows, PRECISIONS[PARTS[i][2]], DEQUANTISE)

    if original_ptr is not None:
        if (present >> P) & 1 != 0:
            OTHER: tl.constexpr = DTYPE if original_ptr.dtype.element_ty == DTYPE else tl.float32
            original_row = original_ptr + n_long * K
            for block in range(blocks):
                k = block * 64 + tl.arange(0, 64)
                mask = (k < K)[:, None] & (serves == P)[None, :]
                rows = tl.load(x_row[None, :] + k[:, None], mask=mask, other=0.0).to(OTHER)
                w = tl.load(original_row[:, None] + k[None, :], mask=n_ok[:, None] & (k < K)[None, :], other=0.0)
                acc = tl.dot(w.to(OTHER), rows, acc, input_precision="ieee")
    return acc


@triton.jit
def _activated(gate, up, alpha, limit, ACTIVATION: tl.constexpr, LIMITED: tl.constexpr):
    """ACTIVATION: the number of `qbe.kernels.ops.experts.nested.ACTIVATIONS`"""
    if LIMITED:
        gate = tl.minimum(gate, limit)
        up = tl.maximum(tl.minimum(up, limit), -limit)
    if ACTIVATION == 0:  # silu
        out = gate * tl.sigmoid(gate) * up
    elif ACTIVATION == 1:  # gelu
        out = gate * (0.5 + 0.5 * tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == 2:  # gelu_tanh: (1 + tanh z) / 2 is the sigmoid of 2 z
        out = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:  # swiglu_oai
        out = gate * tl.sigmoid(alpha * gate) * (up + 1.0)
    return out


@triton.jit
def experts_kernel(
    x_ptr,  # [pairs, K]: a row for each pair, by its number
    packed_ptr,  # int32 view of [E, bytes of one matrix], or None
    addresses_ptr,  # int64 [E, COLUMNS] of pages, or None
    meta_ptr,  # uint8 [E, 2P, N, G]
    exponents_ptr,  # int32 [E]
    words_ptr,  # int32 [pairs], by their numbers
    original_ptr,  # [E, N, K] or None
    bias_ptr,  # [E, N] or None
    y_ptr,  # [pairs, N / 2] of the activation's results, or float32 [pairs, N]
    order_ptr,
    first_ptr,
    tile_expert_ptr,
    tile_first_ptr,
    N,
    K,
    blocks,
    alpha,
    limit,
    PRECISIONS: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr,
    STEP_BLOCKS: tl.constexpr,
    DEQUANTISE: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,  # rows of the matrix, of gate and up together
    BLOCK_M: tl.constexpr,
    GATED: tl.constexpr,  # whether the matrix is gate and up, whose activation is stored
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMITED: tl.constexpr,
    PAGES: tl.constexpr,  # of each part its first page, and the rows of the matrix in each
    SLICE_PAGES: tl.constexpr,  # of each slice its first page
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,  # bytes that the addresses of pages are multiples of
):
    """One tile of pairs times BLOCK_N rows of its expert's matrix"""
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile)
    if expert >= 0:
        long = expert.to(tl.int64)
        at = tl.load(tile_first_ptr + tile) + tl.arange(0, BLOCK_M)
        m_ok = at < tl.load(first_ptr + expert + 1)
        pair = tl.load(order_ptr + at, mask=m_ok, other=0).to(tl.int64)
        words = tl.load(words_ptr + pair, mask=m_ok, other=0)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        n_ok = n < N
        if GATED:  # gate and up of an output beside each other
            if not INTERLEAVED:
                n = n // 2 + n % 2 * (N // 2)
        own = original_ptr
        if original_ptr is not None:
            own = original_ptr + long * N * K
        packed = packed_ptr
        if packed_ptr is not None:
            packed = packed_ptr + long * (tl.cast(blocks, tl.int64) * 2 * PRECISIONS[len(PRECISIONS) - 1] * N)
        addresses = addresses_ptr
        if addresses_ptr is not None:
            addresses = addresses_ptr + long * COLUMNS
        meta_bytes = tl.cast(blocks, tl.int64) // GROUP_BLOCKS * 2 * len(PRECISIONS) * N
        acc = _products(
            x_ptr + pair * K, packed, addresses, meta_ptr + long * meta_bytes, own, words, m_ok, n, n_ok, N, K, blocks,
            tl.load(exponents_ptr + expert), PRECISIONS, PARTS, GROUP_BLOCKS, STEP_BLOCKS, DEQUANTISE, STAGES, PAGES,
            SLICE_PAGES, ALIGNED,
        )  # fmt: skip
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + long * N + n, mask=n_ok, other=0.0).to(tl.float32)[:, None]
        if GATED:
            both = tl.permute(tl.reshape(acc, (BLOCK_N // 2, 2, BLOCK_M)), (0, 2, 1))
            gate, up = tl.split(both)
            out = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            y_at = y_ptr + pair[None, :] * (N // 2) + out[:, None]
            y = _activated(gate, up, alpha, limit, ACTIVATION, LIMITED)
            tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=(out < N // 2)[:, None] & m_ok[None, :])
        else:
            tl.store(y_ptr + pair[None, :] * N + n[:, None], acc, mask=n_ok[:, None] & m_ok[None, :])


@triton.jit
def sum_kernel(each_ptr, ids_ptr, weights_ptr, y_ptr, experts, N, TOP: tl.constexpr, BLOCK_N: tl.constexpr):
    """y[t] = sum of a token's experts by their weights, in the order in which it chose them"""
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    y = tl.zeros((BLOCK_N,), tl.float32)
    for slot in range(TOP):
        chosen = tl.load(ids_ptr + t * TOP + slot)
        there = (chosen >= 0) & (chosen < experts)
        weight = tl.where(there, tl.load(weights_ptr + t * TOP + slot).to(tl.float32), 0.0)
        y += weight * tl.load(each_ptr + (t * TOP + slot) * N + n, mask=(n < N) & there, other=0.0)
    tl.store(y_ptr + t * N + n, y.to(y_ptr.dtype.element_ty), mask=n < N)
