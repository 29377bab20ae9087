"""Rotary position embeddings as one op: `qbe::rotate` of queries or keys, `qbe::rotate_both` of both.

For each, transformers' Llama has seven operations of torch; see `qbe.kernels.ops.rms_norm`. On a GPU both are a launch.
"""

from __future__ import annotations

import torch

from qbe.kernels.ops.register import register


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [1, heads, T, D] rotated (Su et al. 2021) by cos and sin [1, T, D], one half of D with the other."""
    y: torch.Tensor = torch.ops.qbe.rotate.default(x, cos, sin)
    return y


def rotate_both(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotate` of queries and of keys, which may have another number of heads."""
    rotated_q, rotated_k = torch.ops.qbe.rotate_both.default(q, k, cos, sin)
    return rotated_q, rotated_k


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)


def _fake(x: torch.Tensor, _cos: torch.Tensor, _sin: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


OP = register(
    "rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    cpu=_rotate,
    cuda="qbe.kernels.triton.rows.norm_rope:rotate",
    fake=_fake,
)


def _rotate_both(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return rotate(q, cos, sin), rotate(k, cos, sin)


def _fake_both(
    q: torch.Tensor, k: torch.Tensor, _cos: torch.Tensor, _sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


BOTH_OP = register(
    "rotate_both(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)",
    cpu=_rotate_both,
    cuda="qbe.kernels.triton.rows.norm_rope:rotate_both",
    fake=_fake_both,
)
