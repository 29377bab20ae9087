"""Launch of `decode_attention.cu`: flash-decoding over pages of mixed precision, compiled where it runs, by NVRTC.

It does what `decode_attention_kernel` of `qbe.kernels.triton` does, for the shapes that most models have and for GPUs
whose copy engine fills shared memory by itself. Everything else, bounded attention too, is left to that one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from qbe.kernels.cuda.launch import launch as start
from qbe.kernels.cuda.nvrtc import loaded_kernel

DIMS = (64, 128)
MOST_REPEAT, HEADS = 8, 4  # query heads a key head; those of one product of bytes (room.cuh)
WARPS, SLOTS, LISTED = 8, 3, 256  # as in room.cuh
COST = 27  # the most that a page costs (cost_of in plan.cuh); one of 4 bits costs 10
START = 250  # what the beginning and the end of a part cost
LEAST = 80  # pages that cost no more than this are not cut: a page for each warp
MOST_PAIRS = 16384  # whose costs have room in shared memory
FEW = 32  # pages of a block, so few that finding out what pages cost is hardly worth its time
MOST_PARTS = 64  # of a key head, where all key heads have as many
BATCH_INVARIANT_PAGES = 16  # of a part, at least, where parts do not depend on the rows of a step and a table is full
CAPABILITY = (9, 0)
FOLDER = Path(__file__).parent
SOURCES = (  # compiled as one
    "device.cuh", "room.cuh", "plan.cuh", "codes.cuh", "sums.cuh", "rotation.cuh", "list.cuh", "ring.cuh", "full.cuh",
    "quantised_pages.cuh", "merge.cuh", "decode_attention.cu", "combine.cu",
)  # fmt: skip
SHARE_SOURCES = "device.cuh", "room.cuh", "plan.cuh", "share.cu"

log = logging.getLogger(__name__)


def serves(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softcap: float) -> bool:
    """Whether there is a kernel for such arguments of `qbe.kernels.ops.paged_attention.paged_attention`."""
    return (
        query.is_cuda
        and torch.version.hip is None
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == key.dtype == value.dtype
        and query.shape[2] == value.shape[2]
        and query.shape[2] in DIMS
        and query.shape[1] <= MOST_REPEAT * value.shape[1]
        and _fits(query.device, query.shape[2])
        and _kernels(query, value.shape[1], softcap) is not None
    )


@cache
def _fits(device: torch.device, dim: int) -> bool:
    """Whether the device has the kernel's instructions and room for a block: not all later than Hopper have both."""
    properties = torch.cuda.get_device_properties(device)
    room: int = getattr(properties, "shared_memory_per_block_optin", 0)  # torch's stubs do not know it
    return (properties.major, properties.minor) >= CAPABILITY and room >= shared_bytes(dim)


@cache
def parts_for(pairs: int, pages: int, processors: int) -> int:
    """Parts that the pages of each key head are cut into; 0: blocks share them out by what they cost.

    Sharing out takes time itself. So where no block can get more than a few pages, or where there are too many key
    heads for it, all have as many parts.

    Args:
        pairs: key heads of all sequences.
        pages: that a table has room for, never how many a sequence has now.
        processors: of the device, each with room for one block.
    """

    def most(parts: int) -> int:  # pages of a processor, whose warps all have as many
        return -(-pairs * parts // processors) * -(-pages // parts // WARPS) * WARPS

    parts = min(range(1, max(1, min(MOST_PARTS, pages)) + 1), key=lambda n: (most(n), n))
    if pairs > MOST_PAIRS or pairs * (pages * COST + START) >= 1 << 30:
        return 1
    return parts if most(parts) <= FEW else 0


def batch_invariant_splits(kv_heads: int, pages: int, processors: int) -> int:
    """Parts that the pages of each key head are cut into where that may not depend on how many sequences there are.

    A sequence that is alone has a block for each processor, unless parts would become so short that many rows wait for
    their beginnings and ends.
    """
    return max(1, min(MOST_PARTS, processors // kv_heads, -(-pages // BATCH_INVARIANT_PAGES)))


def shared_bytes(dim: int) -> int:
    """Shared memory of a block: `Room<DIM>::BYTES` of room.cuh."""
    slot = max(68 * dim + 256, 66 * dim + 512)
    warp = -(-(SLOTS * slot + 6 * dim + 8 * SLOTS) // 128) * 128
    return WARPS * warp + 8 * LISTED + 8 * 6 + 2 * MOST_REPEAT * (2 * dim + 4) + 16


def source(names: Sequence[str] = SOURCES) -> str:
    """What is compiled."""
    return "".join((FOLDER / name).read_text() for name in names)


def _kernels(query: torch.Tensor, kv_heads: int, softcap: float) -> tuple[Any, Any] | None:
    """The loaded kernels for such queries; None, with a warning, where one cannot be had."""
    sets = -(-query.shape[1] // kv_heads // HEADS)
    return _loaded(query.device, query.shape[2], query.dtype == torch.float16, softcap != 0, sets)


@cache
def _loaded(device: torch.device, dim: int, float16: bool, softcap: bool, sets: int) -> tuple[Any, Any] | None:
    """`decode_attention` and `combine` of that shape."""
    shape = f"{dim}, {str(float16).lower()}, {str(softcap).lower()}"
    walk = loaded_kernel(device, source(), f"decode_attention<{shape}, {sets}>", shared_bytes(dim))
    together = loaded_kernel(device, source(), f"combine<{shape}>", 0) if walk is not None else None
    return None if together is None else (walk, together)


def shares(device: torch.device, batch: int, kv_heads: int, pages: int, processors: int) -> bool:
    """Whether blocks share out pages by cost at such shapes, and `share` can spare them to find out how.

    Args:
        pages: that a table has room for.
    """
    return (
        torch.version.hip is None
        and _fits(device, min(DIMS))
        and parts_for(batch * kv_heads, pages, processors) == 0
        and _share_kernel(device) is not None
    )


@cache
def _share_kernel(device: torch.device) -> Any:
    return loaded_kernel(device, source(SHARE_SOURCES), "share_pages", 4 * MOST_PAIRS)


def share(
    head_offsets: torch.Tensor,
    windows: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    cuts: torch.Tensor,
) -> None:
    """See `qbe.kernels.ops.paged_attention.share_pages`."""
    layers, count, (batch, pages), kv_heads = (
        head_offsets.shape[0],
        cuts.shape[1] - 1,
        block_tables.shape,
        head_offsets.shape[2],
    )
    shared = 4 * batch * kv_heads
    kernel = _share_kernel(head_offsets.device)
    assert kernel is not None, "`shares` was asked"
    arguments: list[torch.Tensor | int] = [
        head_offsets, windows, block_tables, lengths, cuts, head_offsets.stride(0), block_tables.stride(0), pages,
        START, LEAST, batch, kv_heads, count,
    ]  # fmt: skip
    with torch.cuda.device(head_offsets.device):
        start(kernel, layers * -(-(count + 1) // WARPS), 32 * WARPS, arguments, shared)


def launch(
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
    processors: int,
    cuts: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """`qbe.kernels.ops.paged_attention.paged_attention`, where `serves` says so, on a device with so many processors.

    cuts: what `share` found for this layer, int32 `[processors + 1, 2]`.
    batch_invariant: a row comes out the same whatever rows are beside it.
    """
    batch, heads, dim = query.shape
    kv_heads = value.shape[1]
    pairs, repeat = batch * kv_heads, heads // kv_heads
    pages = block_tables.shape[1]
    parts = (
        batch_invariant_splits(kv_heads, pages, processors) if batch_invariant else parts_for(pairs, pages, processors)
    )
    count = pairs * parts or processors
    means = torch.empty(count + pairs, repeat, dim, dtype=torch.float32, device=query.device)
    sums = torch.empty(count + pairs, 3, repeat, dtype=torch.float32, device=query.device)
    spans = torch.empty(pairs, 2, dtype=torch.int32, device=query.device)
    out = torch.empty(batch, heads, dim, dtype=query.dtype, device=query.device)
    kernels = _kernels(query, kv_heads, softcap)
    assert kernels is not None
    numbers = float(scaling), float(softcap)
    walk: list[torch.Tensor | int | float | None] = [
        query, memory, head_offsets, block_tables, lengths, None if parts else cuts, means, sums, spans,
        *query.stride(), block_tables.stride(0), block_tables.shape[1], *numbers, parts, START, LEAST, batch, kv_heads,
        repeat, window,
    ]  # fmt: skip
    together: list[torch.Tensor | int | float | None] = [
        query, key, value, memory, head_offsets, slots, means, sums, spans,
        None if sinks is None else sinks.contiguous(), out, entropy, *query.stride(),
        *key.stride(), *value.stride(), entropy.stride(0), *numbers, kv_heads, repeat, batch * heads,
    ]  # fmt: skip
    with torch.cuda.device(query.device):
        start(kernels[0], count, 32 * WARPS, walk, shared_bytes(dim))
        start(kernels[1], -(-batch * heads // WARPS), 32 * WARPS, together)
    return out
