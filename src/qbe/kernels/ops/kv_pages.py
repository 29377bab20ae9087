"""Writing, quantising and reading pages of the KV cache, on the device where their memory is.

Plain functions, not custom ops: they run between and before forward passes that are not captured.
"""

from __future__ import annotations

import torch

Shape = tuple[int, int, int]  # kv_heads, key_dim, value_dim


def write_rows(
    key: torch.Tensor, value: torch.Tensor, memory: torch.Tensor, head_offsets: torch.Tensor, slots: torch.Tensor
) -> None:
    """Writes tokens to their pages of 16 bits.

    Infinite numbers of keys become NaN, so that they cannot hide behind a score that is low.

    Args:
        key: `[T, kv_heads, key_dim]`, of the dtype of pages of 16 bits; any strides, as for value.
        value: `[T, kv_heads, value_dim]`.
        memory: uint8, all pages; written at `slots`.
        head_offsets: int32 `[FORMATS, kv_heads]`, of the layer.
        slots: int64 `[T]`, address of a page of format 0 | where in it a token goes.
    """
    if memory.is_cuda:
        from qbe.kernels.triton.kv_cache.write_rows import write_rows as kernel
    else:
        from qbe.kernels.cpu.kv_cache.pages import write_rows as kernel
    kernel(key, value, memory, head_offsets, slots)


def quantise_pages(
    memory: torch.Tensor,
    head_offsets: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    shape: Shape,
    dtype: torch.dtype,
) -> None:
    """Quantises full pages of 16 bits, each to the format of its target, without waiting for the device.

    Args:
        memory: uint8, all pages; written at `targets`.
        head_offsets: int32 `[L, FORMATS, kv_heads]`, of the layers to quantise.
        sources: int64 `[n]`, entries of pages of 16 bits, every token of which is written.
        targets: int64 `[n]`, entries that the pages will have; their memory is distinct from the sources'.
        shape: of these layers.
        dtype: of pages of 16 bits.
    """
    if memory.is_cuda:
        from qbe.kernels.triton.kv_cache.pages import quantise_pages as kernel
    else:
        from qbe.kernels.cpu.kv_cache.pages import quantise_pages as kernel
    kernel(memory, head_offsets, sources, targets, shape, dtype)


def read_pages(
    memory: torch.Tensor, head_offsets: torch.Tensor, block_ids: torch.Tensor, shape: Shape, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys `[kv_heads, P * PAGE_SIZE, key_dim]` and values `[kv_heads, P * PAGE_SIZE, value_dim]` of pages.

    Tokens of an open page that are not yet written come back as whatever is there.

    Args:
        memory: uint8, all pages.
        head_offsets: int32 `[FORMATS, kv_heads]`, of one layer.
        block_ids: int64 `[P]`.
        shape: of the layer.
        dtype: of pages of 16 bits and of the result.
    """
    if memory.is_cuda:
        from qbe.kernels.triton.kv_cache.pages import read_pages as kernel
    else:
        from qbe.kernels.cpu.kv_cache.pages import read_pages as kernel
    return kernel(memory, head_offsets, block_ids, shape, dtype)
