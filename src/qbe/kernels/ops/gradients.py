"""Nested layers have no gradient: a backward pass through one fails with one line, where it would lose it in silence.

That is an operator of its own, which a compiled backward pass calls when it runs and not when it is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qbe.errors import QBEError
from qbe.kernels.ops.register import register


def _refuse(grad: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    raise QBEError("a nested linear layer has no gradient, so nothing before it can be trained; train the 16-bit model")


def _fake(grad: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return grad.new_empty(shape)


OP = register("no_gradient(Tensor grad, SymInt[] shape) -> Tensor", cpu=_refuse, cuda=_refuse, fake=_fake)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, *wanting: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [t.shape for t in wanting]
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, *(torch.ops.qbe.no_gradient(grads[0], shape) for shape in ctx.shapes)


def without_gradient(y: torch.Tensor, *sources: torch.Tensor | None) -> torch.Tensor:
    """y, made of `sources`. If gradients are enabled and a source requires one, `y.backward()` raises QBEError."""
    if torch.is_grad_enabled():
        wanting = [t for t in sources if t is not None and t.requires_grad]
        if wanting:
            return _NoGradient.apply(y, *wanting)
    return y
