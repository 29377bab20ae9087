"""`qbe::cascade` written out: one row after the other."""

from __future__ import annotations

import math

import torch

from qbe.kernels.cascade_ops import DOWN, POINTS, UP, WHO


def cascade(
    attended: torch.Tensor,
    entropy: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor | None,
    words: torch.Tensor,
    steering: torch.Tensor,
    moves: torch.Tensor,
    thresholds: torch.Tensor,
    steps: torch.Tensor,
    layers: torch.Tensor,
    point: int,
    layer: int,
    sign: int,
    window: int,
    most: int,
) -> torch.Tensor:
    """Arguments as those of `qbe.kernels.cascade_ops.cascade`. It waits for the device."""
    for i, (of_heads, length) in enumerate(zip(entropy.float(), lengths.tolist(), strict=True)):
        row = i if rows is None else int(rows[i])
        done = int(moves[row]) if point else 0
        who, level = divmod(int(steering[row]), 256)
        if who == WHO:
            seen = min(length, window) if window else length
            share = sign * float(of_heads.mean()) / math.log(max(2, seen))
            low, high = thresholds[point, level].tolist()
            move = UP if share > high else DOWN if share < low else 0
            changes = sum((done >> 2 * p & 3) != 0 for p in range(POINTS))
            if move and changes < most:
                done |= move << 2 * point
                for site in range(len(words)):
                    if layers[site] > layer:
                        word = int(words[site, row])
                        words[site, row] = word & ~255 | int(steps[site, (move == UP and 1) or 0, word & 31])
        moves[row] = done
    return attended.clone()
