"""`qbe::cascade` written out: one row after the other."""

from __future__ import annotations

import math

import torch

from qbe.kernels.ops.cascade import WHO
from qbe.kernels.ops.routing import worths_of


def cascade(
    attended: torch.Tensor,
    entropy: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor | None,
    seen: torch.Tensor,
    inner: torch.Tensor,
    inner_bias: torch.Tensor,
    outer: torch.Tensor,
    outer_bias: torch.Tensor,
    thresholds: torch.Tensor,
    gears: torch.Tensor,
    dynamic_precision: torch.Tensor,
    precision_words: torch.Tensor,
    point: int,
) -> torch.Tensor:
    """Arguments as those of `qbe.kernels.ops.cascade.cascade`. It waits for the device."""
    heads = entropy.shape[1]
    for i, (of_heads, length) in enumerate(zip(entropy, lengths.tolist(), strict=True)):
        row = i if rows is None else int(rows[i])
        who, level = divmod(int(dynamic_precision[row]), 256)
        if who != WHO:
            continue
        seen[row, point * heads : (point + 1) * heads] = of_heads / math.log(max(2, length))
        x = seen[row, : (point + 1) * heads]
        if not x.isfinite().all():
            continue
        hidden = (inner_bias.double() + x.double() @ inner.double()).relu()
        worth = worths_of((outer_bias.double() + hidden @ outer.double()).view(len(precision_words), -1)).float()
        precision_words[:, row] = precision_words[:, row] & ~255 | gears[(worth > thresholds[level]).sum(-1)]
    return attended.clone()
