"""Launches of the Triton kernels of `qbe::nested_experts` (device code: `nested_kernel`, `order`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import triton

from qbe.errors import QBEError
from qbe.format.expert_pages import part_pages
from qbe.format.layout import BLOCK, SliceLayout
from qbe.kernels.ops.experts.arguments import check_experts
from qbe.kernels.ops.experts.nested import ACTIVATIONS, ExpertMatrices
from qbe.kernels.triton.experts.nested_kernel import experts_kernel, sum_kernel
from qbe.kernels.triton.experts.order import ExpertOrder, order_pairs
from qbe.kernels.triton.linear.nested import LEAST_ROWS, _parts
from qbe.kernels.triton.linear.round_rows import round_rows

MOST_ROWS = 64  # of a tile; so many are worth a weight that is dequantised for them
SUMMED = 1024  # numbers that a program of `sum_kernel` adds up


def tile_rows(tokens: int, top: int, experts: int) -> int:
    """Pairs in a tile: what an expert sees on average; of few tokens always as many, so that each comes out the same"""
    average = -(-tokens * top // experts)
    return LEAST_ROWS if tokens <= LEAST_ROWS else max(LEAST_ROWS, min(MOST_ROWS, triton.next_power_of_2(average)))


def nested_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    rows: torch.Tensor,
    *matrices: Any,
) -> torch.Tensor:
    """Arguments and result as those of the op (`qbe.kernels.ops.experts.nested`), its matrices one by one.

    Nothing is asked of the device on the way and no size depends on what was chosen, so that a CUDA graph holds the
    call. Precision, expert numbers and rows are read by kernels alone and cannot be refused; rows that ask for 16 bits
    are served by the widest slice when the original was dropped. Originals may lie in pinned host memory, and so may
    pages that have addresses.

    Raises:
        RuntimeError: shapes or dtypes that do not belong together.
        QBEError: x in another dtype than float16, bfloat16 or float32, or an original in pageable host memory.
    """
    gate_up, down = ExpertMatrices(*matrices[:7]), ExpertMatrices(*matrices[7:14])
    slices, activation, interleaved, alpha, limit, page_bytes = matrices[14:]
    check_experts(x, topk_ids, topk_weights, rows, gate_up, down)
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise QBEError(f"nested_experts takes float16, bfloat16 or float32 inputs, not {x.dtype}")
    for one in (gate_up, down):
        if one.original is not None and one.original.device != x.device and not one.original.is_pinned():
            raise QBEError("the 16-bit original lies in pageable host memory, which a GPU cannot read: pin it first")
    tokens, top = topk_ids.shape
    experts, hidden, inner = len(gate_up.packed), x.shape[1], gate_up.meta.shape[2] // 2
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0 or top == 0:
        return out.zero_()
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    block_m = tile_rows(tokens, top, experts)
    linear = partial(
        _linear, slices=slices, block_m=block_m, gate=(activation, interleaved, alpha, limit), page_bytes=page_bytes
    )
    with torch.cuda.device_of(x):  # Triton launches on the current device; does nothing for a CPU tensor
        order = order_pairs(topk_ids, rows.contiguous(), gate_up.precision, down.precision, block_m)
        inside = torch.empty(tokens * top, inner, dtype=x.dtype, device=x.device)
        linear(x.contiguous(), gate_up, order.gate_up_words, order, inside, gated=True)
        each = torch.empty(tokens * top, hidden, dtype=torch.float32, device=x.device)
        linear(inside, down, order.down_words, order, each, gated=False)
        sum_kernel[(tokens, -(-hidden // SUMMED))](
            each, topk_ids, topk_weights, out, experts, hidden, TOP=top, BLOCK_N=SUMMED, num_warps=4
        )
    return out


def _linear(
    x: torch.Tensor,
    one: ExpertMatrices,
    words: torch.Tensor,
    order: ExpertOrder,
    y: torch.Tensor,
    gated: bool,
    slices: Sequence[int],
    block_m: int,
    gate: tuple[str, bool, float, float],
    page_bytes: int,
) -> None:
    """Every pair's row times its expert's matrix, to y [pairs, ..].

    Args:
        x: [pairs, K], or a row for each token, which its pairs share.
        words: int32 [pairs].
        gated: whether y is the activation's result.
    """
    layout, (activation, interleaved, alpha, limit) = SliceLayout.of(slices), gate
    outputs, groups = one.meta.shape[2:]
    blocks = one.packed.shape[2] * 8 // outputs // BLOCK
    group_blocks = blocks // groups
    x = round_rows(x, words, group_blocks * BLOCK)
    block_n = 32 if x.dtype is torch.float32 else 64
    codes = one.packed.view(torch.int32) if one.addresses is None else None
    experts_kernel[(order.tiles, -(-outputs // block_n))](
        x, codes, one.addresses, one.meta, one.exponents, words, one.original,
        None if one.bias is None else one.bias.contiguous(), y, order.order, order.first, order.tile_expert,
        order.tile_first, outputs, x.shape[1], blocks, alpha, limit, PRECISIONS=layout.precisions, PARTS=_parts(layout),
        GROUP_BLOCKS=group_blocks, STEP_BLOCKS=2 if group_blocks % 2 == 0 else 1, DEQUANTISE=block_m >= MOST_ROWS,
        STAGES=3, BLOCK_N=block_n, BLOCK_M=block_m, GATED=gated, INTERLEAVED=interleaved,
        ACTIVATION=ACTIVATIONS.index(activation), LIMITED=limit != 0, num_warps=4,
        **_paging(one, layout, page_bytes),
    )  # fmt: skip


def _paging(one: ExpertMatrices, layout: SliceLayout, page_bytes: int) -> dict[str, Any]:
    """Where in a matrix's addresses the kernel finds the pages of each part and slice."""
    if one.addresses is None:
        return {"PAGES": (), "SLICE_PAGES": (), "COLUMNS": 0, "ALIGNED": 4}
    plane = one.packed.shape[2]
    pages = part_pages(layout, one.meta.shape[2], plane, page_bytes)
    apart = all(size % 16 == 0 for size in (page_bytes, plane * layout.total_bits))
    firsts = tuple(next(p.first for p in pages if p.slice == s) for s in range(len(layout.slices)))
    return {
        "PAGES": tuple((p.first, p.rows) for p in pages), "SLICE_PAGES": firsts,
        "COLUMNS": sum(p.pages for p in pages), "ALIGNED": 16 if apart and all(p.aligned(16) for p in pages) else 4,
    }  # fmt: skip
