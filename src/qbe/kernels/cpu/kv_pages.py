"""Sealing and reading pages on the CPU: compiled where there is a compiler, else the reference."""

from __future__ import annotations

import torch

from qbe.kernels.cpu import build
from qbe.kernels.cpu.geometry import DTYPES
from qbe.kernels.cpu.paged_attention import compiled_for
from qbe.kernels.reference import kv_pages as reference


def seal_pages(
    memory: torch.Tensor,
    blocks: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    """See `qbe.kernels.kv_pages.seal_pages`. Raises MemoryError where its working buffers find no room."""
    if not compiled_for(dtype):
        reference.seal_pages(memory, blocks, sources, targets, shape, dtype)
        return
    blocks, sources, targets = blocks.contiguous(), sources.contiguous(), targets.contiguous()
    failed = build.loaded().qbe_seal_pages(
        memory.data_ptr(), blocks.data_ptr(), sources.data_ptr(), targets.data_ptr(), blocks.shape[0],
        sources.shape[0], *shape, DTYPES[dtype],
    )  # fmt: skip
    if failed:
        raise MemoryError("the CPU kernel found no memory for its working buffers")


def read_pages(
    memory: torch.Tensor, blocks: torch.Tensor, entries: torch.Tensor, shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `qbe.kernels.kv_pages.read_pages`. Raises MemoryError where its working buffers find no room."""
    if not compiled_for(dtype):
        return reference.read_pages(memory, blocks, entries, shape, dtype)
    kv_heads, key_dim, value_dim = shape
    blocks, entries = blocks.contiguous(), entries.contiguous()
    tokens = entries.shape[0] * reference.PAGE_SIZE
    keys, values = (torch.empty(kv_heads, tokens, dim, dtype=dtype) for dim in (key_dim, value_dim))
    failed = build.loaded().qbe_read_pages(
        memory.data_ptr(), blocks.data_ptr(), entries.data_ptr(), entries.shape[0], *shape, DTYPES[dtype],
        keys.data_ptr(), values.data_ptr(),
    )  # fmt: skip
    if failed:
        raise MemoryError("the CPU kernel found no memory for its working buffers")
    return keys, values
