"""Sealing and reading pages of the KV cache on a GPU: a program for each page, key head and (sealing) layer."""

# mypy: disable-error-code="no-untyped-def, assignment, operator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qbe.kernels.kv_blocks import PAGE_SIZE
from qbe.kernels.triton.kv_blocks import PAGE, full_keys, full_values, part, sealed_keys, sealed_values


@triton.jit
def _row_codes(x, ok, BITS: tl.constexpr):
    """`quantise` of the reference for the rows of float32 x [n, m]: codes uint8, scale and low float16 [n]."""
    LEVELS: tl.constexpr = 2**BITS - 1
    poison = tl.sum(tl.where(ok, x * 0, 0.0), 1)
    least = tl.min(tl.where(ok, x, float("inf")), 1)
    most = tl.max(tl.where(ok, x, float("-inf")), 1)
    low = tl.clamp(least, -65504.0, 65504.0).to(tl.float16)
    width = tl.maximum(tl.clamp(most, -65504.0, 65504.0) - low.to(tl.float32), 0.0)
    scale = (width / LEVELS * 1.0009765625 + poison).to(tl.float16)
    step = tl.where(scale > 0, scale.to(tl.float32), float("inf"))
    codes = tl.floor((x - low.to(tl.float32)[:, None]) / step[:, None] + 0.5)
    return tl.clamp(codes, 0.0, LEVELS + 0.0).to(tl.uint8), scale, low


@triton.jit
def _packed(codes, BITS: tl.constexpr):
    """uint8 [n, m] of codes -> [n, m * BITS / 8]"""
    if BITS == 8:
        return codes
    else:
        PER: tl.constexpr = 8 // BITS
        fields = tl.reshape(codes.to(tl.int32), (codes.shape[0], codes.shape[1] // PER, PER))
        return tl.sum(fields << (tl.arange(0, PER) * BITS)[None, None, :], 2).to(tl.uint8)


@triton.jit
def _seal(
    k, v, memory_ptr, halves_ptr, to, BITS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    t = tl.arange(0, PAGE)
    d = tl.arange(0, BK)
    KEY_ROW: tl.constexpr = PAGE * BITS // 8
    SCALES: tl.constexpr = part("key_scales", BITS, KEY_DIM, VALUE_DIM, 2)
    codes, scale, low = _row_codes(k.to(tl.float32), (d < BK)[:, None] & (t < PAGE)[None, :], BITS)
    at = memory_ptr + to + d[:, None] * KEY_ROW + tl.arange(0, KEY_ROW)[None, :]
    tl.store(at, _packed(codes, BITS), mask=(d < KEY_DIM)[:, None])
    tl.store(halves_ptr + (to + SCALES) // 2 + d, scale, mask=d < KEY_DIM)
    tl.store(halves_ptr + (to + SCALES) // 2 + KEY_DIM + d, low, mask=d < KEY_DIM)

    VALUES: tl.constexpr = part("values", BITS, KEY_DIM, VALUE_DIM, 2)
    VALUE_ROW: tl.constexpr = part("value_row", BITS, KEY_DIM, VALUE_DIM, 2)
    VALUE_SCALES: tl.constexpr = part("value_scales", BITS, KEY_DIM, VALUE_DIM, 2)
    dv = tl.arange(0, BV)
    j = tl.arange(0, BV * BITS // 8)
    inside = (t < PAGE)[:, None] & (dv < VALUE_DIM)[None, :]
    codes, scale, low = _row_codes(v.to(tl.float32), inside, BITS)
    codes = tl.where(inside, codes, 0)
    at = memory_ptr + to + VALUES + t[:, None] * VALUE_ROW + j[None, :]
    tl.store(at, _packed(codes, BITS), mask=(j < VALUE_ROW)[None, :])
    tl.store(halves_ptr + (to + VALUE_SCALES) // 2 + t, scale)
    tl.store(halves_ptr + (to + VALUE_SCALES) // 2 + PAGE + t, low)


@triton.jit(do_not_specialize=["sources_ptr", "targets_ptr", "words_ptr", "layer_words"])
def seal_kernel(
    memory_ptr, numbers_ptr, halves_ptr, words_ptr, sources_ptr, targets_ptr, layer_words,
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
    t = tl.arange(0, PAGE)
    k = full_keys(numbers_ptr, at, t < PAGE, KEY_DIM, BK, ITEM)
    v = full_values(numbers_ptr, at, t < PAGE, KEY_DIM, VALUE_DIM, BV, ITEM)
    if bits == 16:
        d = tl.arange(0, BK)
        dv = tl.arange(0, BV)
        tl.store(numbers_ptr + to // ITEM + t[None, :] * KEY_DIM + d[:, None], k, mask=(d < KEY_DIM)[:, None])
        at_values = numbers_ptr + to // ITEM + PAGE * KEY_DIM + t[:, None] * VALUE_DIM + dv[None, :]
        tl.store(at_values, v, mask=(dv < VALUE_DIM)[None, :])
    elif bits == 8:
        _seal(k, v, memory_ptr, halves_ptr, to, 8, KEY_DIM, VALUE_DIM, BK, BV)
    elif bits == 4:
        _seal(k, v, memory_ptr, halves_ptr, to, 4, KEY_DIM, VALUE_DIM, BK, BV)
    else:
        _seal(k, v, memory_ptr, halves_ptr, to, 2, KEY_DIM, VALUE_DIM, BK, BV)


@triton.jit
def _store_read(
    memory_ptr, halves_ptr, at, keys_ptr, values_ptr, BITS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    t = tl.arange(0, PAGE)
    d = tl.arange(0, BK)
    dv = tl.arange(0, BV)
    codes, scale, low = sealed_keys(memory_ptr, halves_ptr, at, BITS, KEY_DIM, VALUE_DIM, BK)
    k = codes.to(tl.float32) * scale[:, None] + low[:, None]
    k_at = keys_ptr + t[None, :] * KEY_DIM + d[:, None]
    tl.store(k_at, k.to(keys_ptr.dtype.element_ty), mask=(d < KEY_DIM)[:, None])
    codes, scale, low = sealed_values(memory_ptr, halves_ptr, at, BITS, KEY_DIM, VALUE_DIM, BV)
    v = codes.to(tl.float32) * scale[:, None] + low[:, None]
    v_at = values_ptr + t[:, None] * VALUE_DIM + dv[None, :]
    tl.store(v_at, v.to(values_ptr.dtype.element_ty), mask=(dv < VALUE_DIM)[None, :])


@triton.jit(do_not_specialize=["entries_ptr", "pages"])
def read_kernel(
    memory_ptr, numbers_ptr, halves_ptr, words_ptr, entries_ptr, keys_ptr, values_ptr, pages,
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
        tl.store(keys_ptr + t[None, :] * KEY_DIM + d[:, None], k, mask=(d < KEY_DIM)[:, None])
        tl.store(values_ptr + t[:, None] * VALUE_DIM + dv[None, :], v, mask=(dv < VALUE_DIM)[None, :])
    elif bits == 8:
        _store_read(memory_ptr, halves_ptr, at, keys_ptr, values_ptr, 8, KEY_DIM, VALUE_DIM, BK, BV)
    elif bits == 4:
        _store_read(memory_ptr, halves_ptr, at, keys_ptr, values_ptr, 4, KEY_DIM, VALUE_DIM, BK, BV)
    else:
        _store_read(memory_ptr, halves_ptr, at, keys_ptr, values_ptr, 2, KEY_DIM, VALUE_DIM, BK, BV)


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
        memory, memory.view(dtype), memory.view(torch.float16), blocks, sources, targets, blocks.stride(0),
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
        memory, memory.view(dtype), memory.view(torch.float16), blocks, entries, keys, values, pages,
        **_sizes(shape, dtype), num_warps=4,
    )  # fmt: skip
    return keys, values
