"""How hard a token is to predict, read from its logits: what a refresh (`qbe.records.refresh`) goes by."""

from __future__ import annotations

import torch


def difficulty(logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """How hard tokens are to predict, `[2, n]` on the logits' device: entropies in nats, and by how much the likeliest
    token's logit exceeds the next one's.

    Args:
        logits: float32 `[n, vocabulary]`; they stay.
        best: int64 `[n]`, the likeliest token of each row; -1 where there is none.
    """
    first = best.clamp_min(0)[:, None]
    below = (logits - logits.gather(-1, first)).clamp_min_(-1e4)  # 0 * -inf would be NaN
    weights = below.exp()
    total = weights.sum(-1)
    entropy = total.log() - (weights * below).sum(-1) / total
    return torch.stack([entropy, -below.scatter_(-1, first, -torch.inf).amax(-1)])
