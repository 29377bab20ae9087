"""`qbe::paged_attention` and `qbe::bounded_attention` on the CPU: the compiled kernel where there is one, else the
references.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from qbe.format.kv_blocks import FORMATS
from qbe.kernels.cpu import build, dispatch
from qbe.kernels.cpu.geometry import DTYPES
from qbe.kernels.reference.bounded_attention import bounded_attention as bounded_reference
from qbe.kernels.reference.paged_attention import paged_attention as reference

_threads = torch.get_num_threads


class _Bounds(ctypes.Structure):
    """`Bounds` of bounds.c."""

    _fields_ = (("originals", ctypes.c_void_p), ("limits", ctypes.c_void_p), ("counts", ctypes.c_void_p))


class AttentionShape(ctypes.Structure):
    """Of attention.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in (
            "batch", "heads", "kv_heads", "key_dim", "value_dim", "bytes", "table_width", "query_row", "query_head",
            "key_row", "key_head", "value_row", "value_head", "table_row", "entropy_row", "window",
        )),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("dtype", ctypes.c_int32),
    )  # fmt: skip


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    memory: torch.Tensor,
    head_offsets: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    entropy: torch.Tensor,
    scaling: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Arguments and result as those of `qbe.kernels.ops.paged_attention.paged_attention`.

    Raises:
        RuntimeError: shapes or dtypes that do not belong together, or a slot, length or page outside of the memory.
        QBEError: $QBE_CPU_KERNEL asks for a path that this machine lacks.
    """
    if not dispatch.reads_pages(query.dtype, key.dtype, value.dtype):
        return reference(
            query, key, value, memory, head_offsets, slots, block_tables, lengths, entropy, scaling, window, softcap,
            sinks,
        )  # fmt: skip
    return _attend(
        query, key, value, memory, head_offsets, slots, block_tables, lengths, entropy, scaling, window, softcap, sinks,
        None,
    )  # fmt: skip


def bounded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    memory: torch.Tensor,
    head_offsets: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    entropy: torch.Tensor,
    originals: torch.Tensor,
    limits: torch.Tensor,
    counts: torch.Tensor,
    scaling: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Arguments and result as those of `qbe.kernels.ops.bounded_attention.bounded_attention`; errors as of
    `paged_attention`."""
    if not dispatch.reads_pages(query.dtype, key.dtype, value.dtype):
        return bounded_reference(
            query, key, value, memory, head_offsets, slots, block_tables, lengths, entropy, originals, limits, counts,
            scaling, window, softcap, sinks,
        )  # fmt: skip
    batch = query.shape[0]
    tensors = (
        (originals, torch.int64, block_tables.shape),
        (limits, torch.float32, (batch,)),
        (counts, torch.int64, (batch, 3)),
    )
    if any(t.dtype is not dtype or t.shape != shape or t.stride(-1) != 1 for t, dtype, shape in tensors) or (
        originals.stride(0) != block_tables.stride(0) or not counts.is_contiguous()
    ):
        raise RuntimeError("originals, limits and counts do not belong to these tables")
    bounds = _Bounds(originals.data_ptr(), limits.data_ptr(), counts.data_ptr())
    return _attend(
        query, key, value, memory, head_offsets, slots, block_tables, lengths, entropy, scaling, window, softcap, sinks,
        bounds,
    )  # fmt: skip


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    memory: torch.Tensor,
    head_offsets: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    entropy: torch.Tensor,
    scaling: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    bounds: _Bounds | None,
) -> torch.Tensor:
    dtype = query.dtype
    query, key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (query, key, value))
    slots, lengths, head_offsets = slots.contiguous(), lengths.contiguous(), head_offsets.contiguous()
    shape = _shape(
        query.shape, key.shape, value.shape, memory.shape, head_offsets.shape, block_tables.shape, entropy.shape,
        query.stride(), key.stride(), value.stride(), block_tables.stride(), entropy.stride(), scaling, window, softcap,
        dtype,
    )  # fmt: skip
    if memory.dtype is not torch.uint8 or not memory.is_contiguous() or head_offsets.dtype is not torch.int32:
        raise RuntimeError("the pages must be contiguous uint8, the head offsets int32")
    if {slots.dtype, lengths.dtype, block_tables.dtype} != {torch.int64} or entropy.dtype is not torch.float32:
        raise RuntimeError(
            f"slots, tables and lengths must be int64, not {slots.dtype}, {block_tables.dtype} and {lengths.dtype}; "
            f"entropy must be float32, not {entropy.dtype}"
        )
    if slots.shape != query.shape[:1] or lengths.shape != query.shape[:1]:
        raise RuntimeError(f"{list(slots.shape)} slots and {list(lengths.shape)} lengths for {query.shape[0]} queries")
    sinks = checked_sinks(sinks, query.shape[1])
    out = torch.empty(query.shape[0], query.shape[1], value.shape[2], dtype=dtype)
    failed = build.loaded().qbe_bounded_attention(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        memory.data_ptr(),
        head_offsets.data_ptr(),
        slots.data_ptr(),
        block_tables.data_ptr(),
        lengths.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        entropy.data_ptr(),
        out.data_ptr(),
        ctypes.addressof(shape),
        None if bounds is None else ctypes.addressof(bounds),
        _threads(),
        build.number(),
    )
    if failed == -1:
        raise RuntimeError("a slot, length or page lies outside of the KV cache's memory")
    if failed:
        raise MemoryError("the CPU kernel found no memory for its working buffers")
    return out


def checked_sinks(sinks: torch.Tensor | None, heads: int) -> torch.Tensor | None:
    """Contiguous, as C reads them.

    Raises:
        RuntimeError: they are not float32 `[heads]`.
    """
    if sinks is None:
        return None
    if sinks.dtype is not torch.float32 or sinks.shape != (heads,):
        raise RuntimeError(f"sinks must be float32 [{heads}], not {sinks.dtype} {list(sinks.shape)}")
    return sinks.contiguous()


@functools.lru_cache(maxsize=1024)
def _shape(
    query: tuple[int, ...],
    key: tuple[int, ...],
    value: tuple[int, ...],
    memory: tuple[int, ...],
    head_offsets: tuple[int, ...],
    block_tables: tuple[int, ...],
    entropy: tuple[int, ...],
    query_stride: tuple[int, ...],
    key_stride: tuple[int, ...],
    value_stride: tuple[int, ...],
    table_stride: tuple[int, ...],
    entropy_stride: tuple[int, ...],
    scaling: float,
    window: int,
    softcap: float,
    dtype: torch.dtype,
) -> AttentionShape:
    """The table that C reads, for tensors of these shapes and strides; checked and laid out once.

    Raises:
        RuntimeError: they do not belong together.
    """
    fits = (
        len(query) == len(key) == len(value) == 3 and len(memory) == 1 and len(head_offsets) == len(block_tables) == 2
    )
    fits = (
        fits
        and query[0] == key[0] == value[0] == block_tables[0]
        and head_offsets == (FORMATS, key[1])
        and value[1] == key[1]
        and query[2] == key[2]
        and key[1] > 0
        and query[1] % key[1] == 0
        and table_stride[1] == 1
        and entropy == query[:2]
        and entropy_stride[1] == 1
        and window >= 0
    )
    if not fits:
        raise RuntimeError(
            f"query {list(query)}, key {list(key)}, value {list(value)}, "
            f"head_offsets {list(head_offsets)}, block_tables {list(block_tables)} and entropy {list(entropy)} do not "
            "belong together"
        )
    return AttentionShape(
        query[0], query[1], key[1], key[2], value[2], memory[0], block_tables[1], *query_stride[:2], *key_stride[:2],
        *value_stride[:2], table_stride[0], entropy_stride[0], window, scaling, softcap, DTYPES[dtype],
    )  # fmt: skip
