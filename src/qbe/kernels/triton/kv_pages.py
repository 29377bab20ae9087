"""Sealing and reading pages of the KV cache on a GPU: a program for each page, key head and (sealing) layer."""

# mypy: disable-error-code="no-untyped-def, assignment, operator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qbe.kernels.kv_blocks import PAGE_SIZE
from qbe.kernels.triton.kv_blocks import (
    PAGE,
    block_of,
    full_keys,
    full_values,
    key_scales,
    numbers_of,
    part,
    row_bytes,
    sealed_keys,
    sealed_values,
    value_scales,
)


@triton.jit
def _codes(x, ok, AXIS: tl.constexpr, BITS: tl.constexpr):
    """`quantise` of the reference along AXIS of float32 x: codes int32, scale and low float16 with that axis kept."""
    LEVELS: tl.constexpr = 2**BITS - 1
    poison = tl.sum(tl.where(ok, x * 0, 0.0), AXIS, keep_dims=True)
    least = tl.min(tl.where(ok, x, float("inf")), AXIS, keep_dims=True)
    most = tl.max(tl.where(ok, x, float("-inf")), AXIS, keep_dims=True)
    low = tl.clamp(least, -65504.0, 65504.0).to(tl.float16)
    width = tl.maximum(tl.clamp(most, -65504.0, 65504.0) - low.to(tl.float32), 0.0)
    scale = (width / LEVELS * 1.0009765625 + poison).to(tl.float16)
    step = tl.where(scale > 0, scale.to(tl.float32), float("inf"))
    codes = tl.clamp(tl.floor((x - low.to(tl.float32)) / step + 0.5), 0.0, LEVELS + 0.0)
    return tl.where(ok, codes, 0.0).to(tl.int32), scale, low


@triton.jit
def _seal(
    numbers_ptr, memory_ptr, at, to, BITS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ITEM: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Field by field: of keys a part of the channels, of values a part of the tokens."""
    FIELDS: tl.constexpr = 8 // BITS
    ROW: tl.constexpr = row_bytes(KEY_DIM, BITS)
    t = tl.arange(0, PAGE)
    u = tl.arange(0, block_of(ROW))
    keys = numbers_ptr + at // ITEM
    packed = tl.zeros((PAGE, block_of(ROW)), tl.int32)
    for i in tl.static_range(FIELDS):
        d = i * ROW + u
        ok = (u < ROW) & (d < KEY_DIM)
        inside = ok[None, :] & (t >= 0)[:, None]
        x = tl.load(keys + t[:, None] * KEY_DIM + d[None, :], mask=inside, other=0.0).to(tl.float32)
        codes, scale, low = _codes(x, inside, 0, BITS)
        packed |= codes << (i * BITS)
        pairs = (memory_ptr + to + part("key_scales", BITS, KEY_DIM, VALUE_DIM, 2)).to(tl.pointer_type(tl.float16))
        tl.store(pairs + 2 * d[None, :], scale, mask=ok[None, :])
        tl.store(pairs + 2 * d[None, :] + 1, low, mask=ok[None, :])
    tl.store(memory_ptr + to + t[:, None] * ROW + u[None, :], packed.to(tl.uint8), mask=(u < ROW)[None, :])

    VALUES: tl.constexpr = part("values", BITS, KEY_DIM, VALUE_DIM, 2)
    TOKENS: tl.constexpr = PAGE // FIELDS
    dv = tl.arange(0, BV)
    inside = (dv < VALUE_DIM)[None, :] & (tl.arange(0, TOKENS) >= 0)[:, None]
    values = keys + PAGE * KEY_DIM
    packed = tl.zeros((TOKENS, BV), tl.int32)
    for i in tl.static_range(FIELDS):
        token = i * TOKENS + tl.arange(0, TOKENS)
        x = tl.load(values + token[:, None] * VALUE_DIM + dv[None, :], mask=inside, other=0.0).to(tl.float32)
        codes, scale, low = _codes(x, inside, 1, BITS)
        packed |= codes << (i * BITS)
        pairs = (memory_ptr + to + part("value_scales", BITS, KEY_DIM, VALUE_DIM, 2)).to(tl.pointer_type(tl.float16))
        tl.store(pairs + 2 * token[:, None], scale)
        tl.store(pairs + 2 * token[:, None] + 1, low)
    row = memory_ptr + to + VALUES + dv[None, :] * TOKENS + tl.arange(0, TOKENS)[:, None]
    tl.store(row, packed.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["sources_ptr", "targets_ptr", "words_ptr", "layer_words"])
def seal_kernel(
    memory_ptr, numbers_ptr, words_ptr, sources_ptr, targets_ptr, layer_words,
    KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ITEM: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    words_ptr += tl.program_id(2) * layer_words
    source = tl.load(sources_ptr + tl.program_id(0))
    target = tl.load(targets_ptr + tl.program_id(0))
    from_word = tl.load(words_ptr + source % 256 * KV_HEADS + head)
    to_word = tl.load(words_ptr + target % 256 * KV_HEADS + head)
    at = tl.multiple_of(source - source % 256 + from_word - from_word % 256, 256)
    to = tl.multiple_of(target - target % 256 + to_word - to_word % 256, 256)
    bits = to_word % 256
    if bits == 16:
        t = tl.arange(0, PAGE)
        d = tl.arange(0, BK)
        dv = tl.arange(0, BV)
        k = full_keys(numbers_ptr, at, t < PAGE, KEY_DIM, BK, ITEM)
        v = full_values(numbers_ptr, at, t < PAGE, KEY_DIM, VALUE_DIM, BV, ITEM)
        tl.store(numbers_ptr + to // ITEM + t[:, None] * KEY_DIM + d[None, :], k, mask=(d < KEY_DIM)[None, :])
        at_values = numbers_ptr + to // ITEM + PAGE * KEY_DIM + t[:, None] * VALUE_DIM + dv[None, :]
        tl.store(at_values, v, mask=(dv < VALUE_DIM)[None, :])
    elif bits == 8:
        _seal(numbers_ptr, memory_ptr, at, to, 8, KEY_DIM, VALUE_DIM, ITEM, BV)
    elif bits == 4:
        _seal(numbers_ptr, memory_ptr, at, to, 4, KEY_DIM, VALUE_DIM, ITEM, BV)
    else:
        _seal(numbers_ptr, memory_ptr, at, to, 2, KEY_DIM, VALUE_DIM, ITEM, BV)


@triton.jit
def _store_read(
    memory_ptr, at, keys_ptr, values_ptr, BITS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    FIELDS: tl.constexpr = 8 // BITS
    ROW: tl.constexpr = row_bytes(KEY_DIM, BITS)
    TOKENS: tl.constexpr = PAGE // FIELDS
    t = tl.arange(0, PAGE)
    u = tl.arange(0, block_of(ROW))
    packed = sealed_keys(memory_ptr, at, BITS, KEY_DIM)
    for i in tl.static_range(FIELDS):
        d = i * ROW + u
        scale, low = key_scales(memory_ptr, at, i, BITS, KEY_DIM, VALUE_DIM)
        k = numbers_of(packed, i, BITS, tl.float32, False) * scale[None, :] + low[None, :]
        ok = (u < ROW) & (d < KEY_DIM)
        tl.store(keys_ptr + t[:, None] * KEY_DIM + d[None, :], k.to(keys_ptr.dtype.element_ty), mask=ok[None, :])
    dv = tl.arange(0, BV)
    packed = sealed_values(memory_ptr, at, BITS, KEY_DIM, VALUE_DIM, BV)
    for i in tl.static_range(FIELDS):
        token = i * TOKENS + tl.arange(0, TOKENS)
        scale, low = value_scales(memory_ptr, at, token, BITS, KEY_DIM, VALUE_DIM)
        v = numbers_of(packed, i, BITS, tl.float32, False) * scale[None, :] + low[None, :]
        v_at = values_ptr + token[None, :] * VALUE_DIM + dv[:, None]
        tl.store(v_at, v.to(values_ptr.dtype.element_ty), mask=(dv < VALUE_DIM)[:, None])


@triton.jit(do_not_specialize=["entries_ptr", "pages"])
def read_kernel(
    memory_ptr, numbers_ptr, words_ptr, entries_ptr, keys_ptr, values_ptr, pages,
    KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ITEM: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    page = tl.program_id(0)
    head = tl.program_id(1)
    entry = tl.load(entries_ptr + page)
    word = tl.load(words_ptr + entry % 256 * KV_HEADS + head)
    at = tl.multiple_of(entry - entry % 256 + word - word % 256, 256)
    bits = word % 256
    row = (head.to(tl.int64) * pages + page) * PAGE
    keys_ptr += row * KEY_DIM
    values_ptr += row * VALUE_DIM
    if bits == 16:
        t = tl.arange(0, PAGE)
        d = tl.arange(0, BK)
        dv = tl.arange(0, BV)
        k = full_keys(numbers_ptr, at, t < PAGE, KEY_DIM, BK, ITEM)
        v = full_values(numbers_ptr, at, t < PAGE, KEY_DIM, VALUE_DIM, BV, ITEM)
        tl.store(keys_ptr + t[:, None] * KEY_DIM + d[None, :], k, mask=(d < KEY_DIM)[None, :])
        tl.store(values_ptr + t[:, None] * VALUE_DIM + dv[None, :], v, mask=(dv < VALUE_DIM)[None, :])
    elif bits == 8:
        _store_read(memory_ptr, at, keys_ptr, values_ptr, 8, KEY_DIM, VALUE_DIM, BV)
    elif bits == 4:
        _store_read(memory_ptr, at, keys_ptr, values_ptr, 4, KEY_DIM, VALUE_DIM, BV)
    else:
        _store_read(memory_ptr, at, keys_ptr, values_ptr, 2, KEY_DIM, VALUE_DIM, BV)


def _sizes(shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, int]:
    kv_heads, key_dim, value_dim = shape
    return {
        "KV_HEADS": kv_heads, "KEY_DIM": key_dim, "VALUE_DIM": value_dim, "ITEM": dtype.itemsize,
        "BK": max(16, triton.next_power_of_2(key_dim)), "BV": max(16, triton.next_power_of_2(value_dim)),
    }  # fmt: skip


def seal_pages(
    memory: torch.Tensor,
    blocks: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    """See `qbe.kernels.kv_pages.seal_pages`."""
    seal_kernel[(sources.shape[0], shape[0], blocks.shape[0])](
        memory, memory.view(dtype), blocks, sources, targets, blocks.stride(0),
        **_sizes(shape, dtype), num_warps=4,
    )  # fmt: skip


def read_pages(
    memory: torch.Tensor, blocks: torch.Tensor, entries: torch.Tensor, shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `qbe.kernels.kv_pages.read_pages`."""
    kv_heads, key_dim, value_dim = shape
    pages = entries.shape[0]
    keys, values = (
        torch.empty(kv_heads, pages * PAGE_SIZE, dim, dtype=dtype, device=memory.device) for dim in (key_dim, value_dim)
    )
    read_kernel[(pages, kv_heads)](
        memory, memory.view(dtype), blocks, entries, keys, values, pages,
        **_sizes(shape, dtype), num_warps=4,
    )  # fmt: skip
    return keys, values
