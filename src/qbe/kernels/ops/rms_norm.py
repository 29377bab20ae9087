"""`qbe::rms_norm`: RMS norm as one op.

Transformers' Llama makes eight operations of torch of it, and a step of few rows on a CPU is largely the calling of
such, and on a GPU of launches. Compiled (`cpu/rows/norm_rope.c`) it rounds wherever torch does, so that no bit differs;
on a GPU (`triton/rows/norm_rope.py`) the sum of squares has another order. `qbe.engine.execution.patch_modules` puts it
into models.
"""

from __future__ import annotations

import torch

from qbe.kernels.ops.register import register


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm (Zhang and Sennrich 2019) of x [..., K]: in float32, rounded to x's dtype, times weight [K]."""
    y: torch.Tensor = torch.ops.qbe.rms_norm.default(x, weight, eps)
    return y


def add_rms_norm(
    x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + added [..., K], rounded to their dtype, and its `rms_norm`."""
    total, normed = torch.ops.qbe.add_rms_norm.default(x, added, weight, eps)
    return total, normed


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _fake(x: torch.Tensor, _weight: torch.Tensor, _eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


OP = register(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    cpu=_rms_norm,
    cuda="qbe.kernels.triton.rows.norm_rope:rms_norm",
    fake=_fake,
)


def _add_rms_norm(
    x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + added
    return total, rms_norm(total, weight, eps)


def _fake_add(
    x: torch.Tensor, _added: torch.Tensor, _weight: torch.Tensor, _eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


ADD_OP = register(
    "add_rms_norm(Tensor x, Tensor added, Tensor weight, float eps) -> (Tensor, Tensor)",
    cpu=_add_rms_norm,
    cuda="qbe.kernels.triton.rows.norm_rope:add_rms_norm",
    fake=_fake_add,
)
