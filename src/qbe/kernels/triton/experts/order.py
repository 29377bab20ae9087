"""Pairs of a token and an expert in the order of the experts, found on the device: no size depends on what was chosen.

A pair has the number token * top + slot. `order` lists them expert by expert, each expert's in their own order; a tile
is a run of them that one program multiplies with a part of its expert's matrix. There are as many programs as tiles at
most; those beyond the last tile do nothing. So one launch, and one CUDA graph, serves whatever the router chose.
"""

# Triton's language is not Python's: its arguments carry no types, and a branch on a constant must stand alone.
# mypy: disable-error-code="no-untyped-def, assignment, operator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_TILES = 16  # that one program of `tiles_kernel` describes


class ExpertOrder(NamedTuple):
    """Where the tiles' programs find their rows, all int32 on the device.

    Attributes:
        order: [pairs].
        first: [E + 1]: pairs before each expert's.
        tile_expert: [tiles]: -1 where there is none.
        tile_first: [tiles]: place in `order` of a tile's first pair.
        gate_up_words, down_words: [pairs]: precision word of each pair, by its number.
        tiles: how many there are at most.
    """

    order: torch.Tensor
    first: torch.Tensor
    tile_expert: torch.Tensor
    tile_first: torch.Tensor
    gate_up_words: torch.Tensor
    down_words: torch.Tensor
    tiles: int


def order_pairs(
    topk_ids: torch.Tensor, rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, tile_rows: int
) -> ExpertOrder:
    """The order of the pairs of one call, in tiles of `tile_rows` pairs at most.

    Args:
        topk_ids: int32 or int64 [T, k], contiguous.
        rows: int32 [T], contiguous.
        gate_up, down: uint8 [R, E], the precision of each matrix; the last dimension contiguous.
    """
    pairs, experts = topk_ids.numel(), gate_up.shape[1]
    tiles = min(pairs, pairs // tile_rows + min(experts, pairs))

    def int32(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=topk_ids.device)

    made = ExpertOrder(
        int32(pairs), int32(experts + 1), int32(tiles), int32(tiles), int32(pairs), int32(pairs), tiles
    )  # fmt: skip
    block = min(1024, triton.next_power_of_2(pairs))
    order_kernel[(experts + 1,)](
        topk_ids, rows, gate_up, down, made.order, made.first, made.gate_up_words, made.down_words, pairs, experts,
        gate_up.stride(0), down.stride(0), TOP=topk_ids.shape[1], BLOCK=block, num_warps=4,
    )  # fmt: skip
    tiles_kernel[(-(-tiles // _TILES),)](
        made.first, made.tile_expert, made.tile_first, experts, tiles, TILE_ROWS=tile_rows,
        EXPERTS=triton.next_power_of_2(experts), BLOCK=_TILES, num_warps=4,
    )  # fmt: skip
    return made


@triton.jit
def _word_of_byte(byte):
    """`qbe.kernels.reference.activations.word_of_byte`"""
    wide = byte.to(tl.int32)
    return (wide & 127) | tl.where(wide >= 128, 0x800, 0)


@triton.jit(do_not_specialize=["pairs", "gate_up_row", "down_row"])
def order_kernel(
    ids_ptr, rows_ptr, gate_up_ptr, down_ptr, order_ptr, first_ptr, gate_up_words_ptr, down_words_ptr, pairs, experts,
    gate_up_row, down_row, TOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One expert's pairs, and how many there are before them; one program more than experts"""
    expert = tl.program_id(0)
    place = 0
    for start in range(0, pairs, BLOCK):
        i = start + tl.arange(0, BLOCK)
        chosen = tl.load(ids_ptr + i, mask=i < pairs, other=-1)
        place += tl.sum(((chosen >= 0) & (chosen < expert)).to(tl.int32), 0)
    tl.store(first_ptr + expert, place)
    if expert < experts:
        for start in range(0, pairs, BLOCK):
            i = start + tl.arange(0, BLOCK)
            mine = tl.load(ids_ptr + i, mask=i < pairs, other=-1) == expert
            tl.store(order_ptr + place + tl.cumsum(mine.to(tl.int32), 0) - 1, i, mask=mine)
            place += tl.sum(mine.to(tl.int32), 0)
            row = tl.load(rows_ptr + i // TOP, mask=mine, other=0).to(tl.int64)
            gate_up = tl.load(gate_up_ptr + row * gate_up_row + expert, mask=mine, other=0)
            down = tl.load(down_ptr + row * down_row + expert, mask=mine, other=0)
            tl.store(gate_up_words_ptr + i, _word_of_byte(gate_up), mask=mine)
            tl.store(down_words_ptr + i, _word_of_byte(down), mask=mine)


@triton.jit(do_not_specialize=["tiles"])
def tiles_kernel(
    first_ptr, tile_expert_ptr, tile_first_ptr, experts, tiles, TILE_ROWS: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK tiles: the expert of each, and where in the order of the pairs it begins"""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, EXPERTS)
    begin = tl.load(first_ptr + e, mask=e < experts, other=0)
    end = tl.load(first_ptr + e + 1, mask=e < experts, other=0)
    own = tl.cdiv(end - begin, TILE_ROWS)
    until = tl.cumsum(own, 0)
    expert = tl.sum(((until[None, :] <= t[:, None]) & (e < experts)[None, :]).to(tl.int32), 1)
    this = e[None, :] == expert[:, None]
    before = tl.sum(tl.where(this, (until - own)[None, :], 0), 1)
    first = tl.sum(tl.where(this, begin[None, :], 0), 1) + (t - before) * TILE_ROWS
    tl.store(tile_expert_ptr + t, tl.where(expert < experts, expert, -1), mask=t < tiles)
    tl.store(tile_first_ptr + t, first, mask=t < tiles)
