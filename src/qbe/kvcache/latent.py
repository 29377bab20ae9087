"""Latent attention over pages (DeepSeek-V2, section 2.1): a token's latent, and the rotary part of its key beside it.

A page of such a layer holds one "key head": latents in the place of keys, rotary parts in the place of values. All
query heads share it, absorbed (`Absorbed`): their key is the latent with the rotary part behind it, their value the
latent again. So a page has the `rank + rope` numbers of a token once, quantised as any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from qbe.errors import QBEError
from qbe.format.kv_blocks import quantised_pages
from qbe.kernels.ops.kv_pages import write_rows
from qbe.kvcache.pages import PAGE_SIZE, PagePool, pages_for

if TYPE_CHECKING:
    from qbe.kvcache.prompt import PromptSpan

ABSORBED = "qbe_absorbed"  # the attribute of an attention module that holds its `Absorbed`


class Absorbed(Protocol):
    """The matrix that would expand latents to keys and values, on the queries' side of attention."""

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Queries `[1, heads, T, key_dim]` as latents meet them, `[1, heads, T, rank + rope]`."""

    def expand(self, found: torch.Tensor) -> torch.Tensor:
        """Sums of latents `[1, T, heads, rank]` as sums of values, `[1, T, heads, value_dim]`."""


def attend(
    query: torch.Tensor,
    latent: torch.Tensor,
    rotary: torch.Tensor,
    seen: torch.Tensor | None,
    scaling: float,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What absorbed queries find, `[T, heads, rank]`, and the entropy of their weights in nats, float32 `[T, heads]`.

    Args:
        query: `[T, heads, rank + rope]`.
        latent, rotary: `[keys, rank]` and `[keys, rope]`.
        seen: bool `[T, keys]`; None: every query sees every key.
        sinks: float32 `[heads]` or None (`qbe.kernels.ops.paged_attention.paged_attention`).
    """
    keys = torch.cat([latent, rotary], 1)
    scores = (query.flatten(0, 1) @ keys.T).float().unflatten(0, query.shape[:2]) * scaling
    if seen is not None:
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None].expand(len(query), -1, 1)], 2)
    weights = scores.softmax(-1)
    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    own = weights[..., : len(keys)].to(latent.dtype).flatten(0, 1)
    return (own @ latent).unflatten(0, query.shape[:2]), entropy


def attend_decode(
    pool: PagePool,
    layer: int,
    new: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    entropy: torch.Tensor,
    scaling: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`qbe.kernels.ops.paged_attention.paged_attention` of a latent layer, one row after the other.

    It waits for the device, so that a GPU has no graph of such a step.

    Args:
        new: absorbed queries `[B, heads, rank + rope]`, latents `[B, 1, rank]` and rotary parts `[B, 1, rope]`.

    Returns:
        `[B, heads, rank]`.
    """
    query, latent, rotary = new
    head_offsets = pool.head_offsets[layer]
    assert head_offsets is not None
    _refuse_softcap(softcap)
    write_rows(latent, rotary, pool.memory, head_offsets, slots)
    found = []
    for row, length in enumerate(lengths.tolist()):
        first = max(0, length - window) if window else 0
        page = first // PAGE_SIZE
        past = slice(first - page * PAGE_SIZE, length - page * PAGE_SIZE)
        keys, values = (t[0, 0, past] for t in pool.read(layer, block_tables[row, page : pages_for(length)]))
        out, entropy[row] = _first(attend(query[row, None], keys, values, None, scaling, sinks))
        found.append(out)
    return torch.stack(found)


def _first(both: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return both[0][0], both[1][0]


def attend_prompt(
    pool: PagePool,
    layer: int,
    prompt: PromptSpan,
    query: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`qbe.kvcache.prompt.attend_prompt` of a latent layer, the tokens of one page after the other.

    Args:
        query: absorbed, `[1, heads, count, rank + rope]`.

    Returns:
        `[1, count, heads, rank]`.
    """
    _refuse_softcap(softcap or 0.0)
    lowest = 0 if window is None else max(0, prompt.start - window + 1) // PAGE_SIZE  # the first page that is seen
    begin = min(lowest, prompt.first_staging_page)
    quantised = pool.read(layer, prompt.block_ids[begin:])
    exact = pool.read(layer, prompt.staging_pages)
    positions = torch.arange(prompt.end, device=query.device)
    parts = []
    for page in range(prompt.start // PAGE_SIZE, pages_for(prompt.end)):
        start, end = max(prompt.start, page * PAGE_SIZE), min(prompt.end, (page + 1) * PAGE_SIZE)
        cut = max(begin, quantised_pages(page))
        latent, rotary = (
            torch.cat([
                q[0, 0, : (cut - begin) * PAGE_SIZE],
                e[0, 0, (cut - prompt.first_staging_page) * PAGE_SIZE : end - prompt.first_staging_page * PAGE_SIZE],
            ])
            for q, e in zip(quantised, exact, strict=True)
        )  # fmt: skip
        keys, own = positions[begin * PAGE_SIZE : end], positions[start:end, None]
        seen = keys <= own
        if window is not None:
            seen &= keys > own - window
        rows = query[0, :, start - prompt.start : end - prompt.start].transpose(0, 1)
        parts.append(attend(rows, latent, rotary, seen, scaling, sinks)[0])
    return torch.cat(parts)[None]


def _refuse_softcap(softcap: float) -> None:
    if softcap:
        raise QBEError("a soft cap on the scores of latent attention: QBE cannot run this model")
