"""How hard tokens are to predict, on a CPU: the compiled kernel where there is one, else the reference."""

from __future__ import annotations

import torch

from qbe.kernels.cpu import build, dispatch
from qbe.kernels.reference.difficulty import difficulty as reference


def difficulty(logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Arguments and result as those of `qbe.analysis.difficulty.difficulty`."""
    n, vocabulary = logits.shape
    if not dispatch.measures_difficulty(logits):
        return reference(logits, best)
    best = best.long().contiguous()
    out = torch.empty(3, n, dtype=torch.float64)
    build.loaded().qbe_difficulty(
        logits.data_ptr(), best.data_ptr(), out.data_ptr(), n, logits.stride(0), vocabulary, build.number()
    )
    return out
