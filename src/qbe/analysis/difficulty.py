"""How hard a token is to predict, read from its logits: what a refresh (`qbe.refresh.monitor`) goes by."""

from __future__ import annotations

import torch

from qbe.kernels.cpu.rows.difficulty import difficulty as on_cpu


def difficulty(logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """How hard tokens are to predict, beside the tokens themselves, so that one copy brings all of it to the host.

    Args:
        logits: float32 `[n, vocabulary]`; they stay.
        best: int64 `[n]`, the likeliest token of each row; -1 where the logits are no numbers.

    Returns:
        float64 `[3, n]` on the logits' device, of float32's accuracy: `best`; entropies in nats; by how much the
        likeliest token's logit exceeds the next one's, 1e4 at most and infinite where there is no other token. Both are
        NaN where the logits are no numbers.
    """
    if logits.is_cuda:
        from qbe.kernels.triton.rows.difficulty import difficulty as on_gpu

        return on_gpu(logits, best)
    return on_cpu(logits, best)
