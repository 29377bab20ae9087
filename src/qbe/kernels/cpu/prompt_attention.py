"""Attention of a prompt's tokens on a CPU with AVX-512, in bfloat16 (prompt_attention.c)."""

from __future__ import annotations

import ctypes

import torch

from qbe.kernels.cpu import build

_threads = torch.get_num_threads


class _Shape(ctypes.Structure):
    """`PromptShape` of prompt_attention.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in (
            "heads", "kv_heads", "rows", "keys", "key_dim", "value_dim", "query_head", "query_row", "key_head",
            "key_row", "value_head", "value_row", "window",
        )),
        ("scaling", ctypes.c_float),
    )  # fmt: skip


def serves(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `prompt_attention` takes these; torch's attention, which multiplies tiles where there are any, has the
    rest."""
    tensors = (query, key, value)
    return (
        all(t.dtype is torch.bfloat16 and t.device.type == "cpu" for t in tensors)
        and query.shape[-1] % 2 == 0
        and build.backend() == "avx512"
    )


def prompt_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, scaling: float
) -> torch.Tensor:
    """Causal attention of the last tokens to all: `[Q, heads, value_dim]`.

    A row's result is the same, bit for bit, for any Q and K between which and whose ends it lies, if keys begin at the
    same token.

    Args:
        query: `[heads, Q, key_dim]`, of the last Q keys.
        key, value: `[kv_heads, K, dim]`, kv_heads a divisor of heads.
        window: a query sees so many keys, its own the last; None: all.
    """
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    (heads, rows, key_dim), (kv_heads, keys, value_dim) = query.shape, value.shape
    if key.shape != (kv_heads, keys, key_dim) or heads % max(1, kv_heads) or not 0 < rows <= keys:
        raise RuntimeError(
            f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} do not belong together"
        )
    out = torch.empty(rows, heads, value_dim, dtype=query.dtype)
    shape = _Shape(
        heads, kv_heads, rows, keys, key_dim, value_dim, *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
        window or 0, scaling,
    )  # fmt: skip
    failed = build.loaded().qbe_prompt_attention(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), ctypes.addressof(shape), _threads()
    )
    if failed:
        raise MemoryError("the CPU kernel found no memory for its working buffers")
    return out
