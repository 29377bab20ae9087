"""`qbe::paged_attention` on the CPU: the compiled kernel where there is one, else the reference."""

from __future__ import annotations

import ctypes
import functools

import torch

from qbe.kernels.cpu import build
from qbe.kernels.cpu.geometry import DTYPES
from qbe.kernels.reference.paged_attention import paged_attention as reference

_threads = torch.get_num_threads


def compiled_for(dtype: torch.dtype) -> bool:
    """Whether the compiled kernel serves queries and pages of this dtype here; else it is the slow reference."""
    return build.backend() != "torch" and dtype in DTYPES


class _Shape(ctypes.Structure):
    """`AttentionShape` of attention.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in (
            "batch", "heads", "kv_heads", "key_dim", "value_dim", "pages", "page_size", "table_width",
            "query_row", "query_head", "key_row", "key_head", "value_row", "value_head", "table_row", "window",
        )),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("dtype", ctypes.c_int32),
    )  # fmt: skip


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Arguments and result as those of `qbe.kernels.attention_ops.paged_attention`.

    Raises:
        RuntimeError: shapes or dtypes that do not belong together, or a slot, length or page outside of the memory.
        QBEError: $QBE_CPU_KERNEL asks for a path that this machine lacks.
    """
    dtype = query.dtype
    if not compiled_for(dtype) or keys.dtype is not dtype or values.dtype is not dtype:
        return reference(query, key, value, keys, values, slots, tables, lengths, scaling, window, softcap)
    if key.dtype is not dtype or value.dtype is not dtype:
        key, value = key.to(dtype), value.to(dtype)
    query, key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (query, key, value))
    slots, lengths = slots.contiguous(), lengths.contiguous()
    shape = _shape(
        query.shape, key.shape, value.shape, keys.shape, values.shape, tables.shape, query.stride(), key.stride(),
        value.stride(), tables.stride(), scaling, window, softcap, dtype,
    )  # fmt: skip
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise RuntimeError("the pages must be contiguous")
    if slots.dtype is not torch.int64 or lengths.dtype is not torch.int64 or tables.dtype is not torch.int32:
        raise RuntimeError(
            f"slots and lengths must be int64, tables int32, not {slots.dtype}, {lengths.dtype} and {tables.dtype}"
        )
    if slots.shape != query.shape[:1] or lengths.shape != query.shape[:1]:
        raise RuntimeError(f"{list(slots.shape)} slots and {list(lengths.shape)} lengths for {query.shape[0]} queries")
    out = torch.empty(query.shape[0], query.shape[1], value.shape[2], dtype=dtype)
    failed = build.loaded().qbe_paged_attention(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        slots.data_ptr(),
        tables.data_ptr(),
        lengths.data_ptr(),
        out.data_ptr(),
        ctypes.addressof(shape),
        _threads(),
        build.number(),
    )
    if failed == -1:
        raise RuntimeError("a slot, length or page lies outside of the KV cache's memory")
    if failed:
        raise MemoryError("the CPU kernel found no memory for its working buffers")
    return out


@functools.lru_cache(maxsize=1024)
def _shape(
    query: tuple[int, ...],
    key: tuple[int, ...],
    value: tuple[int, ...],
    keys: tuple[int, ...],
    values: tuple[int, ...],
    tables: tuple[int, ...],
    query_stride: tuple[int, ...],
    key_stride: tuple[int, ...],
    value_stride: tuple[int, ...],
    table_stride: tuple[int, ...],
    scaling: float,
    window: int,
    softcap: float,
    dtype: torch.dtype,
) -> _Shape:
    """The table that C reads, for tensors of these shapes and strides; checked and laid out once.

    Raises:
        RuntimeError: they do not belong together.
    """
    fits = len(query) == len(key) == len(value) == 3 and len(keys) == len(values) == 4 and len(tables) == 2
    fits = (
        fits
        and query[0] == key[0] == value[0] == tables[0]
        and key[1:] == keys[2:]
        and value[1:] == values[2:]
        and keys[:3] == values[:3]
        and query[2] == key[2]
        and key[1] > 0
        and query[1] % key[1] == 0
        and table_stride[1] == 1
        and window >= 0
    )
    if not fits:
        raise RuntimeError(
            f"query {list(query)}, key {list(key)}, value {list(value)}, pages {list(keys)} and {list(values)} and "
            f"tables {list(tables)} do not belong together"
        )
    return _Shape(
        query[0], query[1], key[1], key[2], value[2], keys[0], keys[1], tables[1], *query_stride[:2], *key_stride[:2],
        *value_stride[:2], table_stride[0], window, scaling, softcap, DTYPES[dtype],
    )  # fmt: skip
