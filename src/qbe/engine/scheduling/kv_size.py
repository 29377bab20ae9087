"""How large the KV cache and the state pool are when nobody says, and which key heads the former has."""

from __future__ import annotations

import torch

from qbe.errors import QBEError
from qbe.hardware import free_memory
from qbe.kvcache.cache import PagedCache
from qbe.kvcache.pages import PAGE_SIZE
from qbe.sites import SiteTable

_DEFAULT_SEQUENCES = 4  # at full context, what the KV cache holds when its size is not given
_CPU_KV_TOKENS = 16384
_CUDA_KV_SHARE = 0.3  # of the memory that is free once the model is loaded
_STATE_SHARE = 0.3  # likewise, of any device
SEQUENCES = 16  # that an engine runs at the same time when nobody says


def default_kv_tokens(
    context: int | None, device: torch.device, page_bytes: int, coming: int = 0, free: int | None = None
) -> int:  # fmt: skip
    """Tokens of 16 bits that the cache has room for.

    Args:
        context: of the model, None for no limit.
        page_bytes: of a page of 16 bits.
        coming: bytes of the device's free memory that something else will take before.
        free: bytes of a device that is not here; None: what this one has free.
    """
    wanted = _DEFAULT_SEQUENCES * context if context is not None else _CPU_KV_TOKENS
    if device.type != "cuda":
        return min(wanted, _CPU_KV_TOKENS)
    fits = (
        int(((free_memory(device) if free is None else free) - coming) * _CUDA_KV_SHARE)
        // max(1, page_bytes)
        * PAGE_SIZE
    )
    return max(PAGE_SIZE, min(wanted, fits))


def state_slots(
    sequences: int, device: torch.device, slot_bytes: int, coming: int = 0, free: int | None = None
) -> int:  # fmt: skip
    """Sequences whose states there is room for, at most so many and at least one; `coming` and `free` as above."""
    there = free_memory(device) if free is None else free
    return max(1, min(sequences, int((there - coming) * _STATE_SHARE) // max(1, slot_bytes)))


def with_kv(table: SiteTable, cache: PagedCache) -> SiteTable:
    """The table with the model's key heads, which it may know already from measuring them."""
    heads = cache.sites()
    if not table.kv:
        return table.with_kv(heads)
    known = [(s.layer, s.head, s.query_heads, s.numbers) for s in table.kv]
    if known != [(s.layer, s.head, s.query_heads, s.numbers) for s in heads]:
        raise QBEError(
            f"the KV sensitivities of {table.model_name} are of other key heads than the model has: delete "
            "kv_sensitivity.json in its store and run 'qbe quantize' again"
        )
    return table
