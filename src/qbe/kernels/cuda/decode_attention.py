"""Launch of `decode_attention.cu`: flash-decoding over pages of mixed precision, compiled where it runs, by NVRTC.

It does what `decode_attention_kernel` of `qbe.kernels.triton` does, for the shapes that most models have and for GPUs
whose copy engine fills shared memory by itself. Everything else, bounded attention too, is left to that one.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch

DIMS = (64, 128)
MOST_REPEAT = 8  # query heads a key head: the columns of a product
WARPS, SLOTS = 8, 3  # as in room.cuh
MOST_PARTS = 64  # of which `combine` of qbe.kernels.triton.paged_attention makes one
START = 12  # pages that a block could read in the time that its beginning and its end take
CAPABILITY = (9, 0)
FOLDER = Path(__file__).parent
SOURCES = ("device.cuh", "room.cuh", "codes.cuh", "sums.cuh", "walk.cuh", "decode_attention.cu")  # compiled as one

log = logging.getLogger(__name__)


def serves(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softcap: float) -> bool:
    """Whether there is a kernel for such arguments of `qbe.kernels.attention_ops.paged_attention`."""
    return (
        query.is_cuda
        and torch.version.hip is None
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == key.dtype == value.dtype
        and query.shape[2] == value.shape[2]
        and query.shape[2] in DIMS
        and query.shape[1] <= MOST_REPEAT * value.shape[1]
        and _fits(query.device, query.shape[2])
        and _kernel(query.device, query.shape[2], query.dtype == torch.float16, softcap != 0) is not None
    )


@cache
def _fits(device: torch.device, dim: int) -> bool:
    """Whether the device has the kernel's instructions and room for a block: not all later than Hopper have both."""
    properties = torch.cuda.get_device_properties(device)
    room: int = getattr(properties, "shared_memory_per_block_optin", 0)  # torch's stubs do not know it
    return (properties.major, properties.minor) >= CAPABILITY and room >= shared_bytes(dim)


@cache
def parts_for(heads: int, pages: int, processors: int) -> int:
    """Parts that a sequence's pages are cut into: those with which the processors are done first.

    A processor has room for one block, which reads a part of one key head.

    Args:
        heads: key heads of all sequences.
        pages: that a table has room for, never how many a sequence has now.
        processors: of the device.
    """

    def time(parts: int) -> int:
        return -(-heads * parts // processors) * (-(-pages // parts) + START)

    return min(range(1, max(1, min(MOST_PARTS, pages)) + 1), key=time)


def shared_bytes(dim: int) -> int:
    """Shared memory of a block: `Room<DIM>::BYTES` of room.cuh."""
    slot = max(68 * dim + 256, 66 * dim + 512)
    warp = -(-(SLOTS * slot + 8 * dim + 16 * 7 + 8 * SLOTS) // 128) * 128
    return WARPS * (warp + 32 * 8) + 8 * 6 + 8 * 4 * dim


def source() -> str:
    """What is compiled."""
    return "".join((FOLDER / name).read_text() for name in SOURCES)


@cache
def _kernel(device: torch.device, dim: int, float16: bool, softcap: bool) -> Any:
    """The loaded kernel; None, with a warning, where it cannot be compiled or loaded."""
    from qbe.kernels.cuda.nvrtc import compiled_kernel

    name = f"decode_attention<{dim}, {str(float16).lower()}, {str(softcap).lower()}>"
    try:
        from torch.cuda._utils import _cuda_load_module

        arch = "".join(map(str, torch.cuda.get_device_capability(device)))
        binary, symbol = compiled_kernel(source(), name, arch)
        with torch.cuda.device(device):
            kernel = _cuda_load_module(binary, [symbol])[symbol]  # type: ignore[index]
            kernel.set_shared_memory_config(shared_bytes(dim))
        return kernel
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, OSError) as error:
        line = next((x for x in str(error).splitlines() if "error" in x), str(error).strip())
        log.warning("decode attention runs in Triton, which is slower: no %s (%s)", name, line[:200])
        return None


def launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    memory: torch.Tensor,
    blocks: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
    window: int,
    softcap: float,
    processors: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments as of `qbe.kernels.attention_ops.paged_attention`, where `serves` says so.

    Returns:
        means: float32 `[B, parts, heads, value_dim]`.
        sums: float32 `[B, parts, 3, heads]`; what they are says `combine_kernel` of `qbe.kernels.triton`.
    """
    batch, heads, dim = query.shape
    kv_heads = value.shape[1]
    parts = parts_for(batch * kv_heads, tables.shape[1], processors)
    means = torch.empty(batch, parts, heads, dim, dtype=torch.float32, device=query.device)
    sums = torch.empty(batch, parts, 3, heads, dtype=torch.float32, device=query.device)
    kernel = _kernel(query.device, dim, query.dtype == torch.float16, softcap != 0)
    arguments = [
        query, key, value, memory, blocks, slots, tables, lengths, means, sums, *query.stride(), *key.stride(),
        *value.stride(), tables.stride(0), float(scaling), float(softcap), parts, kv_heads, heads // kv_heads, window,
    ]  # fmt: skip
    with torch.cuda.device(query.device):
        kernel((batch * kv_heads, parts, 1), (32 * WARPS, 1, 1), arguments, shared_bytes(dim))
    return means, sums
