"""How hard a token is to predict: what the kernels are held against."""

from __future__ import annotations

import torch

LOWEST = -1e4  # of a logit below the best one: 0 * -inf would be NaN


def difficulty(logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Arguments and result as those of `qbe.analysis.difficulty.difficulty`."""
    first = best.clamp_min(0)[:, None]
    below = (logits - logits.gather(-1, first)).clamp_min_(LOWEST)
    weights = below.exp()
    total = weights.sum(-1)
    entropy = total.log() - (weights * below).sum(-1) / total
    margin = -below.scatter_(-1, first, -torch.inf).amax(-1)
    return torch.stack([best.double(), entropy.double(), torch.where(entropy.isnan(), entropy, margin).double()])
