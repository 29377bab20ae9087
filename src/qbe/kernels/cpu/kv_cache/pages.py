"""Writing, quantising and reading pages on the CPU: compiled where there is a compiler, else the reference."""

from __future__ import annotations

import ctypes

import torch

from qbe.format.kv_blocks import FORMATS
from qbe.kernels.cpu import build, dispatch
from qbe.kernels.cpu.attention.paged import AttentionShape
from qbe.kernels.cpu.geometry import DTYPES
from qbe.kernels.reference import kv_pages as reference


def write_rows(
    key: torch.Tensor, value: torch.Tensor, memory: torch.Tensor, head_offsets: torch.Tensor, slots: torch.Tensor
) -> None:
    """See `qbe.kernels.ops.kv_pages.write_rows`. Raises RuntimeError for shapes that do not belong together, or a slot
    outside of the memory."""
    if not dispatch.reads_pages(key.dtype):
        reference.write_rows(key, value, memory, head_offsets, slots)
        return
    key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (key, value))
    head_offsets, slots = head_offsets.contiguous(), slots.contiguous()
    (rows, kv_heads, key_dim), value_dim = key.shape, value.shape[2]
    if value.shape[:2] != key.shape[:2] or slots.shape != (rows,) or head_offsets.shape != (FORMATS, kv_heads):
        raise RuntimeError(
            f"key {list(key.shape)}, value {list(value.shape)}, {list(slots.shape)} slots and blocks "
            f"{list(head_offsets.shape)} do not belong together"
        )
    shape = AttentionShape(
        batch=rows, kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim, bytes=memory.shape[0],
        key_row=key.stride(0), key_head=key.stride(1), value_row=value.stride(0), value_head=value.stride(1),
        dtype=DTYPES[key.dtype],
    )  # fmt: skip
    if build.loaded().qbe_write_rows(
        key.data_ptr(), value.data_ptr(), memory.data_ptr(), head_offsets.data_ptr(), slots.data_ptr(),
        ctypes.addressof(shape),
    ):  # fmt: skip
        raise RuntimeError("a slot lies outside of the KV cache's memory")


def quantise_pages(
    memory: torch.Tensor,
    head_offsets: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    """See `qbe.kernels.ops.kv_pages.quantise_pages`. Raises MemoryError where its working buffers find no room."""
    if not dispatch.reads_pages(dtype):
        reference.quantise_pages(memory, head_offsets, sources, targets, shape, dtype)
        return
    head_offsets, sources, targets = head_offsets.contiguous(), sources.contiguous(), targets.contiguous()
    failed = build.loaded().qbe_quantise_pages(
        memory.data_ptr(), head_offsets.data_ptr(), sources.data_ptr(), targets.data_ptr(), head_offsets.shape[0],
        sources.shape[0], *shape, DTYPES[dtype], build.number(),
    )  # fmt: skip
    if failed:
        raise MemoryError("the CPU kernel found no memory for its working buffers")


def read_pages(
    memory: torch.Tensor,
    head_offsets: torch.Tensor,
    block_ids: torch.Tensor,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `qbe.kernels.ops.kv_pages.read_pages`. Raises MemoryError where its working buffers find no room."""
    if not dispatch.reads_pages(dtype):
        return reference.read_pages(memory, head_offsets, block_ids, shape, dtype)
    kv_heads, key_dim, value_dim = shape
    head_offsets, block_ids = head_offsets.contiguous(), block_ids.contiguous()
    tokens = block_ids.shape[0] * reference.PAGE_SIZE
    keys, values = (torch.empty(kv_heads, tokens, dim, dtype=dtype) for dim in (key_dim, value_dim))
    failed = build.loaded().qbe_read_pages(
        memory.data_ptr(), head_offsets.data_ptr(), block_ids.data_ptr(), block_ids.shape[0], *shape, DTYPES[dtype],
        keys.data_ptr(), values.data_ptr(), build.number(),
    )  # fmt: skip
    if failed:
        raise MemoryError("the CPU kernel found no memory for its working buffers")
    return keys, values
