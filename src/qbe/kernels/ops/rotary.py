"""`qbe::rotate`: rotary position embedding of queries or keys as one op.

Seven operations of torch in transformers' Llama; see `qbe.kernels.ops.rms_norm`.
"""

from __future__ import annotations

import torch

from qbe.kernels.ops.register import register


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [1, heads, T, D] rotated (Su et al. 2021) by cos and sin [1, T, D], one half of D with the other."""
    y: torch.Tensor = torch.ops.qbe.rotate.default(x, cos, sin)
    return y


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
