"""Writing, quantising and reading pages of the KV cache, written out: one block after the other, float32, nothing
clever.

Bound: a number x that is quantised, |x| <= 65504, comes back within `error_bound(scale, low, bits)`: half a step
and float32's rounding of it, what rounding `low` to float16 moves the lowest code, and what rounding a tiny scale takes
from the highest. What is quantised is rotated: there the bound holds. NaN and infinity in a value make its token's
scale NaN, in a key every scale of its block, so that they are found downstream instead of vanishing.
"""

from __future__ import annotations

import ctypes

import torch

from qbe.format.kv_blocks import ALIGN, DEVIATION, FULL_BITS, LEVELS, PAGE_SIZE, TURBO, head_layout
from qbe.kernels.reference.rotation import rotate
from qbe.sites import kv_number_bits

LARGEST = 65504.0  # of float16


def quantise(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 `[n, m]`, scale and low float16 `[n]` of the rows of `x` `[n, m]`."""
    x = x.to(torch.float32)
    levels = 2**bits - 1
    poison = (x * 0).sum(1)
    low = x.amin(1).clamp(-LARGEST, LARGEST).half()
    high = x.amax(1).clamp(-LARGEST, LARGEST)
    # A little wider, so that rounding to float16 leaves no number beyond the highest code.
    scale = ((high - low.float()).clamp(min=0) / levels * (1 + 2**-10) + poison).half()
    steps = torch.where(scale == 0, torch.inf, scale.float())
    codes = ((x - low.float()[:, None]) / steps[:, None] + 0.5).floor().nan_to_num(0).clamp(0, levels)
    return codes.to(torch.uint8), scale, low


def error_bound(scale: torch.Tensor, low: torch.Tensor, bits: int) -> torch.Tensor:
    """The largest |x - (scale * code + low)| for the numbers x of a row, in float64."""
    return scale.double() * (0.5 + 2**bits * 2.0**-21) + low.double().abs() * 2**-11 + 2**bits * 2.0**-25


def turbo_keys(y: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of rotated keys `[n, dim]`: codes uint8 `[n, dim]`; float16 scale and sketch scale `[n]`, mean `[dim]`."""
    y = y.to(torch.float32)
    mean = y.mean(0).half()
    y = y - mean.float()
    levels = torch.tensor(LEVELS[bits], dtype=torch.float32, device=y.device)
    step = y.square().mean(1, keepdim=True).sqrt() / DEVIATION[bits]
    magnitude = torch.bucketize(y.abs() / torch.where(step == 0, 1, step), (levels[1:] + levels[:-1]) / 2)
    level = torch.where(y < 0, -1, 1) * levels[magnitude]
    scale = ((y * level).sum(1) / level.square().sum(1)).half()
    rest = y - scale.float()[:, None] * level
    sketched = rotate(rest, signs=False)
    sums = sketched.abs().sum(1)
    sketch_scale = (rest.square().sum(1) / torch.where(sums == 0, 1, sums)).half()
    codes = magnitude + (level > 0) * 2 ** (bits - 2) + (sketched >= 0) * 2 ** (bits - 1)
    return codes.to(torch.uint8), scale, sketch_scale, mean


def turbo_numbers(
    codes: torch.Tensor, scale: torch.Tensor, sketch_scale: torch.Tensor, mean: torch.Tensor, bits: int
) -> torch.Tensor:
    """float32 `[n, dim]`, the rotated keys of `turbo_keys`."""
    signs = torch.where(codes & 2 ** (bits - 2) > 0, 1.0, -1.0)
    level = signs * torch.tensor(LEVELS[bits], device=codes.device)[(codes & (2 ** (bits - 2) - 1)).long()]
    sketch = rotate(torch.where(codes & 2 ** (bits - 1) > 0, 1.0, -1.0), signs=False)
    return mean.float() + scale.float()[:, None] * level + sketch_scale.float()[:, None] * sketch


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 `[n, ceil(m * bits / 8)]` of codes `[n, m]`."""
    per = 8 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per)).view(codes.shape[0], -1, per)
    out = torch.zeros_like(codes[..., 0])
    for i in range(per):
        out |= codes[..., i] << (i * bits)
    return out


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Codes uint8 `[..., count]` of packed `[..., row]`."""
    parts = [(packed >> (i * bits)) & (2**bits - 1) for i in range(8 // bits)]
    return torch.stack(parts, -1).flatten(-2)[..., :count]


def write_rows(
    key: torch.Tensor, value: torch.Tensor, memory: torch.Tensor, head_offsets: torch.Tensor, slots: torch.Tensor
) -> None:
    """Arguments as those of `qbe.kernels.ops.kv_pages.write_rows`."""
    full = head_layout(FULL_BITS, key.shape[2], value.shape[2], key.element_size())
    layer_offsets, offsets = head_offsets[0].long(), slots % ALIGN
    begins = (slots - offsets)[:, None] + layer_offsets - layer_offsets % ALIGN  # of blocks, [T, kv_heads]
    for x, begin, size in ((key + key * 0, 0, full.key_row), (value, full.values, full.value_row)):
        indices = (begins + begin + offsets[:, None] * size) // key.element_size()
        memory.view(key.dtype)[indices[..., None] + torch.arange(x.shape[2], device=x.device)] = x


def quantise_pages(
    memory: torch.Tensor,
    head_offsets: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    """Arguments as those of `qbe.kernels.ops.kv_pages.quantise_pages`. It waits for the device."""
    kv_heads, key_dim, value_dim = shape
    full = head_layout(FULL_BITS, key_dim, value_dim, dtype.itemsize)
    for layer_offsets in head_offsets:
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            for head in range(kv_heads):
                _, begin = find(layer_offsets, source, head)
                keys = memory[begin : begin + full.values].view(dtype).view(PAGE_SIZE, key_dim)
                values = memory[begin + full.values : begin + full.key_scales].view(dtype).view(PAGE_SIZE, value_dim)
                kind, to = find(layer_offsets, target, head)
                if kind == FULL_BITS:
                    memory[to : to + full.nbytes] = memory[begin : begin + full.nbytes]
                    continue
                layout, bits = head_layout(kind, key_dim, value_dim, dtype.itemsize), kv_number_bits(kind)
                keys, values = rotate(keys.to(torch.float32)), rotate(values.to(torch.float32))
                if kind > TURBO:
                    codes, *scales = turbo_keys(keys, bits)
                    codes = codes.T
                else:
                    codes, *scales = quantise(keys.T, bits)
                _write(memory, to, pack(codes, bits))
                _write(memory, to + layout.key_scales, *scales)
                codes, *scales = quantise(values, bits)
                _write(memory, to + layout.values, pack(codes, bits))
                _write(memory, to + layout.value_scales, *scales)


def _write(memory: torch.Tensor, address: int, *parts: torch.Tensor) -> None:
    """These tensors one after the other."""
    raw = torch.cat([p.contiguous().view(torch.uint8).flatten() for p in parts])
    memory[address : address + len(raw)] = raw


def read_pages(
    memory: torch.Tensor,
    head_offsets: torch.Tensor,
    block_ids: torch.Tensor,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    wide: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and result as those of `qbe.kernels.ops.kv_pages.read_pages`, but in `wide` if it is given. It waits
    for the device.
    """
    kv_heads, key_dim, value_dim = shape
    tokens = block_ids.shape[0] * PAGE_SIZE
    keys = memory.new_empty((kv_heads, tokens, key_dim), dtype=wide or dtype)
    values = memory.new_empty((kv_heads, tokens, value_dim), dtype=wide or dtype)
    for i, block_id in enumerate(block_ids.tolist()):
        rows = slice(i * PAGE_SIZE, (i + 1) * PAGE_SIZE)
        for head in range(kv_heads):
            kind, address = find(head_offsets, block_id, head)
            keys[head, rows], values[head, rows] = _read(memory, address, kind, key_dim, value_dim, dtype)
    return keys, values


def find(head_offsets: torch.Tensor, block_id: int, head: int) -> tuple[int, int]:
    """Kind and address of a head's block; blocks int32 `[FORMATS, kv_heads]`."""
    head_offset = int(head_offsets[block_id % ALIGN, head])
    return head_offset % ALIGN, block_id - block_id % ALIGN + head_offset - head_offset % ALIGN


def _bytes_at(memory: torch.Tensor, address: int, count: int) -> torch.Tensor:
    """uint8 `[count]` on the memory's device; addresses outside of it are those of host memory, counted from it."""
    if 0 <= address < len(memory):
        return memory[address : address + count]
    raw = (ctypes.c_uint8 * count).from_address(memory.data_ptr() + address)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(memory.device)


def _read(
    memory: torch.Tensor, address: int, kind: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    layout, bits = head_layout(kind, key_dim, value_dim, dtype.itemsize), kv_number_bits(kind)
    raw = _bytes_at(memory, address, layout.nbytes)
    if kind == FULL_BITS:
        keys = raw[: layout.values].view(dtype).view(PAGE_SIZE, key_dim)
        return keys, raw[layout.values : layout.key_scales].view(dtype).view(PAGE_SIZE, value_dim)
    codes = unpack(raw[: key_dim * layout.key_row].view(key_dim, layout.key_row), bits, PAGE_SIZE).T
    scales = raw[layout.key_scales : layout.value_scales].view(torch.float16)
    if kind > TURBO:
        scale, sketch_scale, mean = scales[: 2 * PAGE_SIZE + key_dim].split((PAGE_SIZE, PAGE_SIZE, key_dim))
        keys = turbo_numbers(codes, scale, sketch_scale, mean, bits)
    else:
        keys = codes * scales[:key_dim].float() + scales[key_dim:].float()
    value_codes = unpack(raw[layout.values : layout.key_scales].view(PAGE_SIZE, layout.value_row), bits, value_dim)
    ends = layout.value_scales + 4 * PAGE_SIZE
    value_scale, value_low = raw[layout.value_scales : ends].view(torch.float16).float().view(2, PAGE_SIZE, 1)
    return rotate(keys), rotate(value_codes * value_scale + value_low)


def rearrange(
    memory: torch.Tensor,
    head_offsets: torch.Tensor,
    block_ids: torch.Tensor,
    shape: tuple[int, int, int],
    itemsize: int,
    back: bool = False,
) -> torch.Tensor:
    """A copy of `memory` with the quantised blocks of these pages as they lie on a GPU (`qbe.format.kv_blocks`).

    back: from there to how they lie on a CPU.
    """
    kv_heads, key_dim, value_dim = shape
    out = memory.clone()
    for block_id in set(block_ids.flatten().tolist()):
        for head in range(kv_heads):
            kind, address = find(head_offsets, block_id, head)
            if kind == FULL_BITS:
                continue
            layout, bits = head_layout(kind, key_dim, value_dim, itemsize), kv_number_bits(kind)
            for begin, n, m in ((address, key_dim, PAGE_SIZE), (address + layout.values, PAGE_SIZE, value_dim)):
                on_cpu, on_gpu = (n, -(-m * bits // 8)), (m, -(-n * bits // 8))
                rows, row = on_gpu if back else on_cpu
                raw = memory[begin : begin + rows * row].view(rows, row)
                packed = (
                    pack(_unpack_fields(raw, bits, n).T, bits) if back else _pack_fields(unpack(raw, bits, m).T, bits)
                )
                out[begin : begin + packed.numel()] = packed.flatten()
            key_pairs = PAGE_SIZE if kind > TURBO else key_dim
            for begin, n in ((address + layout.key_scales, key_pairs), (address + layout.value_scales, PAGE_SIZE)):
                pairs = memory[begin : begin + 4 * n].view(torch.int16)
                out[begin : begin + 4 * n] = (
                    pairs.view(*((n, 2) if back else (2, n))).T.contiguous().view(torch.uint8).flatten()
                )
    return out


def _pack_fields(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 `[n, R]` of codes `[n, m]`: code i is field i // R of byte i % R."""
    row, per = -(-codes.shape[1] * bits // 8), 8 // bits
    fields = torch.nn.functional.pad(codes, (0, row * per - codes.shape[1])).view(len(codes), per, row)
    out = torch.zeros_like(fields[:, 0])
    for i in range(per):
        out |= fields[:, i] << (i * bits)
    return out


def _unpack_fields(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Codes uint8 `[n, count]` of packed `[n, R]`."""
    return torch.cat([(packed >> (i * bits)) & (2**bits - 1) for i in range(8 // bits)], 1)[:, :count]
