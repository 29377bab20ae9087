"""`qbe::swiglu`: the gate of most models' feed-forward layers as one op; on a GPU a launch instead of two."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from qbe.kernels.ops.register import register


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SwiGLU (Shazeer 2020): silu(gate), rounded, times up, both [..., K] with any strides; contiguous [..., K]."""
    y: torch.Tensor = torch.ops.qbe.swiglu.default(gate, up)
    return y


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (F.silu(gate) * up).contiguous()


def _fake(gate: torch.Tensor, _up: torch.Tensor) -> torch.Tensor:
    return gate.new_empty(gate.shape)


OP = register(
    "swiglu(Tensor gate, Tensor up) -> Tensor", cpu=_swiglu, cuda="qbe.kernels.triton.rows.norm_rope:swiglu", fake=_fake
)
