"""Quantising and reading pages of the KV cache on a GPU: a program for each page, key head and (quantising) layer."""

# mypy: disable-error-code="no-untyped-def, assignment, operator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qbe.format.kv_blocks import DEVIATION, LEVELS, PAGE_SIZE
from qbe.kernels.triton.kv_cache.blocks import (
    PAGE,
    QUANTISED_KINDS,
    TURBO2,
    TURBO4,
    bits_of,
    block_of,
    fields_of,
    full_keys,
    full_values,
    is_turbo,
    part,
    quantised_kind,
    row_bytes,
    turbo_levels,
    turbo_mean,
    turbo_scales,
    turbo_signs,
    value_scales,
)
from qbe.kernels.triton.kv_cache.rotation import rotate


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


@triton.constexpr_function
def _middle(i):
    """Between the i-th magnitude of turbo keys of 4 bits and the next one."""
    return (LEVELS[4][i] + LEVELS[4][i + 1]) / 2


@triton.constexpr_function
def _over_deviation(bits):
    return 1 / DEVIATION[bits]


@triton.jit
def _turbo_codes(y, ok, BITS: tl.constexpr, KEY_DIM: tl.constexpr):
    """`turbo_keys` of the reference for y [PAGE, BK]; codes int32, the scales with their axis kept."""
    mean = (tl.sum(y, 0, keep_dims=True) / PAGE).to(tl.float16)
    y = tl.where(ok, y - mean.to(tl.float32), 0.0)
    step = tl.sqrt(tl.sum(y * y, 1, keep_dims=True) / KEY_DIM) * _over_deviation(BITS)
    size = tl.abs(y) / tl.where(step == 0, 1.0, step)
    codes = (y >= 0).to(tl.int32) << (BITS - 2)
    if BITS == 4:
        codes += (size > _middle(0)).to(tl.int32) + (size > _middle(1)).to(tl.int32)
        codes += (size > _middle(2)).to(tl.int32)
    level = tl.where(ok, turbo_levels(codes, BITS).to(tl.float32), 0.0)
    scale = (tl.sum(y * level, 1, keep_dims=True) / tl.sum(level * level, 1, keep_dims=True)).to(tl.float16)
    rest = y - scale.to(tl.float32) * level
    sketched = rotate(rest, KEY_DIM, SIGNS=False)
    sums = tl.sum(tl.abs(sketched), 1, keep_dims=True)
    sketch_scale = (tl.sum(rest * rest, 1, keep_dims=True) / tl.where(sums == 0, 1.0, sums)).to(tl.float16)
    return codes + ((sketched >= 0).to(tl.int32) << (BITS - 1)), scale, sketch_scale, mean


@triton.jit
def _quantise(
    k, v, memory_ptr, to, KIND: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """Of rotated keys and values; a field of keys is a part of the channels, one of values a part of the tokens."""
    BITS: tl.constexpr = bits_of(KIND)
    FIELDS: tl.constexpr = 8 // BITS
    ROW: tl.constexpr = row_bytes(KEY_DIM, BITS)
    SCALES: tl.constexpr = part("key_scales", KIND, KEY_DIM, VALUE_DIM, 2)
    t = tl.arange(0, PAGE)
    d = tl.arange(0, BK)
    u = tl.arange(0, block_of(ROW))
    inside = (d < KEY_DIM)[None, :] & (t >= 0)[:, None]
    pairs = (memory_ptr + to + SCALES).to(tl.pointer_type(tl.float16))
    if is_turbo(KIND):
        codes, scale, sketch_scale, mean = _turbo_codes(k, inside, BITS, KEY_DIM)
        tl.store(pairs + 2 * t[:, None], scale)
        tl.store(pairs + 2 * t[:, None] + 1, sketch_scale)
        tl.store(pairs + 2 * PAGE + d[None, :], mean, mask=(d < KEY_DIM)[None, :])
    else:
        codes, scale, low = _codes(k, inside, 0, BITS)
        tl.store(pairs + 2 * d[None, :], scale, mask=(d < KEY_DIM)[None, :])
        tl.store(pairs + 2 * d[None, :] + 1, low, mask=(d < KEY_DIM)[None, :])
    packed = tl.zeros((PAGE, block_of(ROW)), tl.int32)
    for i in tl.static_range(FIELDS):
        ok = (u < ROW) & (i * ROW + u < KEY_DIM)
        index = tl.where(ok, i * ROW + u, 0)[None, :] + tl.zeros((PAGE, block_of(ROW)), tl.int32)
        packed |= tl.where(ok[None, :], tl.gather(codes, index, 1) << (i * BITS), 0)
    tl.store(memory_ptr + to + t[:, None] * ROW + u[None, :], packed.to(tl.uint8), mask=(u < ROW)[None, :])

    VALUES: tl.constexpr = part("values", KIND, KEY_DIM, VALUE_DIM, 2)
    VALUE_SCALES: tl.constexpr = part("value_scales", KIND, KEY_DIM, VALUE_DIM, 2)
    TOKENS: tl.constexpr = PAGE // FIELDS
    dv = tl.arange(0, BV)
    few = tl.arange(0, TOKENS)
    inside_v = (dv < VALUE_DIM)[None, :] & (few >= 0)[:, None]
    values = fields_of(v, FIELDS)
    packed_v = tl.zeros((TOKENS, BV), tl.int32)
    pairs_v = (memory_ptr + to + VALUE_SCALES).to(tl.pointer_type(tl.float16))
    for i in tl.static_range(FIELDS):
        codes_v, scale_v, low_v = _codes(values[i], inside_v, 1, BITS)
        packed_v |= codes_v << (i * BITS)
        token = i * TOKENS + few
        tl.store(pairs_v + 2 * token[:, None], scale_v)
        tl.store(pairs_v + 2 * token[:, None] + 1, low_v)
    tl.store(memory_ptr + to + VALUES + dv[None, :] * TOKENS + few[:, None], packed_v.to(tl.uint8), mask=inside_v)


@triton.jit(do_not_specialize=["sources_ptr", "targets_ptr", "head_offsets_ptr", "layer_words"])
def quantise_kernel(
    memory_ptr, numbers_ptr, head_offsets_ptr, sources_ptr, targets_ptr, layer_words,
    KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ITEM: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    head_offsets_ptr += tl.program_id(2) * layer_words
    source = tl.load(sources_ptr + tl.program_id(0))
    target = tl.load(targets_ptr + tl.program_id(0))
    from_word = tl.load(head_offsets_ptr + source % 256 * KV_HEADS + head)
    to_word = tl.load(head_offsets_ptr + target % 256 * KV_HEADS + head)
    begin = tl.multiple_of(source - source % 256 + from_word - from_word % 256, 256)
    to = tl.multiple_of(target - target % 256 + to_word - to_word % 256, 256)
    kind = to_word % 256
    t = tl.arange(0, PAGE)
    k = full_keys(numbers_ptr, begin, t < PAGE, KEY_DIM, BK, ITEM)
    v = full_values(numbers_ptr, begin, t < PAGE, KEY_DIM, VALUE_DIM, BV, ITEM)
    if kind == 16:
        d = tl.arange(0, BK)
        dv = tl.arange(0, BV)
        tl.store(numbers_ptr + to // ITEM + t[:, None] * KEY_DIM + d[None, :], k, mask=(d < KEY_DIM)[None, :])
        at_values = numbers_ptr + to // ITEM + PAGE * KEY_DIM + t[:, None] * VALUE_DIM + dv[None, :]
        tl.store(at_values, v, mask=(dv < VALUE_DIM)[None, :])
    else:
        rotated_k = rotate(k, KEY_DIM)
        rotated_v = rotate(v, VALUE_DIM)
        for i in tl.static_range(QUANTISED_KINDS):
            if kind == quantised_kind(i):
                _quantise(rotated_k, rotated_v, memory_ptr, to, quantised_kind(i), KEY_DIM, VALUE_DIM, BK, BV)


@triton.jit
def _read(
    memory_ptr, begin, KIND: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """Keys [PAGE, BK] and values [PAGE, BV] of the quantised block at this address, rotated, in float32."""
    BITS: tl.constexpr = bits_of(KIND)
    ROW: tl.constexpr = row_bytes(KEY_DIM, BITS)
    TOKENS: tl.constexpr = PAGE * BITS // 8
    t = tl.arange(0, PAGE)
    d = tl.arange(0, BK)
    ok = d < KEY_DIM
    packed = tl.load(memory_ptr + begin + t[:, None] * ROW + (d % ROW)[None, :], mask=ok[None, :], other=0).to(tl.int32)
    codes = (packed >> (d // ROW * BITS)[None, :]) & (2**BITS - 1)
    if is_turbo(KIND):
        scale, sketch_scale = turbo_scales(memory_ptr, begin, t, KIND, KEY_DIM, VALUE_DIM)
        mean = turbo_mean(memory_ptr, begin, d, ok, KIND, KEY_DIM, VALUE_DIM)
        signs = rotate(turbo_signs(codes, BITS), KEY_DIM, SIGNS=False)
        k = turbo_levels(codes, BITS).to(tl.float32) * scale[:, None] + mean[None, :] + signs * sketch_scale[:, None]
    else:
        pairs = (memory_ptr + begin + part("key_scales", KIND, KEY_DIM, VALUE_DIM, 2)).to(tl.pointer_type(tl.float16))
        scale = tl.load(pairs + 2 * d, mask=ok, other=0.0).to(tl.float32)
        low = tl.load(pairs + 2 * d + 1, mask=ok, other=0.0).to(tl.float32)
        k = codes.to(tl.float32) * scale[None, :] + low[None, :]
    dv = tl.arange(0, BV)
    values = memory_ptr + begin + part("values", KIND, KEY_DIM, VALUE_DIM, 2)
    packed_v = tl.load(values + dv[None, :] * TOKENS + (t % TOKENS)[:, None], mask=(dv < VALUE_DIM)[None, :], other=0)
    codes_v = (packed_v.to(tl.int32) >> (t // TOKENS * BITS)[:, None]) & (2**BITS - 1)
    scale_v, low_v = value_scales(memory_ptr, begin, t, KIND, KEY_DIM, VALUE_DIM)
    return k, codes_v.to(tl.float32) * scale_v[:, None] + low_v[:, None]


@triton.jit(do_not_specialize=["block_ids_ptr", "pages"])
def read_kernel(
    memory_ptr, numbers_ptr, head_offsets_ptr, block_ids_ptr, keys_ptr, values_ptr, pages,
    KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ITEM: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    page = tl.program_id(0)
    head = tl.program_id(1)
    block_id = tl.load(block_ids_ptr + page)
    head_offset = tl.load(head_offsets_ptr + block_id % 256 * KV_HEADS + head)
    begin = tl.multiple_of(block_id - block_id % 256 + head_offset - head_offset % 256, 256)
    kind = head_offset % 256
    row = (head.to(tl.int64) * pages + page) * PAGE
    keys_ptr += row * KEY_DIM
    values_ptr += row * VALUE_DIM
    t = tl.arange(0, PAGE)
    d = tl.arange(0, BK)
    dv = tl.arange(0, BV)
    at_keys = keys_ptr + t[:, None] * KEY_DIM + d[None, :]
    at_values = values_ptr + t[:, None] * VALUE_DIM + dv[None, :]
    if kind == 16:
        k = full_keys(numbers_ptr, begin, t < PAGE, KEY_DIM, BK, ITEM)
        v = full_values(numbers_ptr, begin, t < PAGE, KEY_DIM, VALUE_DIM, BV, ITEM)
        tl.store(at_keys, k, mask=(d < KEY_DIM)[None, :])
        tl.store(at_values, v, mask=(dv < VALUE_DIM)[None, :])
    else:
        if kind == 8:
            rotated_k, rotated_v = _read(memory_ptr, begin, 8, KEY_DIM, VALUE_DIM, BK, BV)
        elif kind == 4:
            rotated_k, rotated_v = _read(memory_ptr, begin, 4, KEY_DIM, VALUE_DIM, BK, BV)
        elif kind == 2:
            rotated_k, rotated_v = _read(memory_ptr, begin, 2, KEY_DIM, VALUE_DIM, BK, BV)
        elif kind == TURBO4:
            rotated_k, rotated_v = _read(memory_ptr, begin, TURBO4, KEY_DIM, VALUE_DIM, BK, BV)
        else:
            rotated_k, rotated_v = _read(memory_ptr, begin, TURBO2, KEY_DIM, VALUE_DIM, BK, BV)
        back_k = rotate(rotated_k, KEY_DIM).to(keys_ptr.dtype.element_ty)
        back_v = rotate(rotated_v, VALUE_DIM).to(values_ptr.dtype.element_ty)
        tl.store(at_keys, back_k, mask=(d < KEY_DIM)[None, :])
        tl.store(at_values, back_v, mask=(dv < VALUE_DIM)[None, :])


def _sizes(shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, int]:
    kv_heads, key_dim, value_dim = shape
    return {
        "KV_HEADS": kv_heads, "KEY_DIM": key_dim, "VALUE_DIM": value_dim, "ITEM": dtype.itemsize,
        "BK": max(16, triton.next_power_of_2(key_dim)), "BV": max(16, triton.next_power_of_2(value_dim)),
    }  # fmt: skip


def quantise_pages(
    memory: torch.Tensor,
    head_offsets: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    """See `qbe.kernels.ops.kv_pages.quantise_pages`."""
    quantise_kernel[(sources.shape[0], shape[0], head_offsets.shape[0])](
        memory, memory.view(dtype), head_offsets, sources, targets, head_offsets.stride(0),
        **_sizes(shape, dtype), num_warps=4,
    )  # fmt: skip


def read_pages(
    memory: torch.Tensor,
    head_offsets: torch.Tensor,
    block_ids: torch.Tensor,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `qbe.kernels.ops.kv_pages.read_pages`."""
    kv_heads, key_dim, value_dim = shape
    pages = block_ids.shape[0]
    keys, values = (
        torch.empty(kv_heads, pages * PAGE_SIZE, dim, dtype=dtype, device=memory.device) for dim in (key_dim, value_dim)
    )
    read_kernel[(pages, kv_heads)](
        memory, memory.view(dtype), head_offsets, block_ids, keys, values, pages,
        **_sizes(shape, dtype), num_warps=4,
    )  # fmt: skip
    return keys, values
