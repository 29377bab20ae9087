"""`qbe::rms_norm`: RMS norm as one op.

Transformers' Llama makes eight operations of torch of it, and a step of few rows on a CPU is largely the calling of
such. Compiled (`cpu/norm_rope.c`) it rounds wherever torch does, so that no bit differs.
`qbe.engine.execution.patch_modules` puts it into models.
"""

from __future__ import annotations

import torch

ARGUMENTS = "Tensor x, Tensor weight, float eps"
_library = torch.library.Library("qbe", "FRAGMENT")
_library.define(f"rms_norm({ARGUMENTS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm (Zhang and Sennrich 2019) of x [..., K]: in float32, rounded to x's dtype, times weight [K]."""
    y: torch.Tensor = torch.ops.qbe.rms_norm.default(x, weight, eps)
    return y


def _cpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


on_cpu = torch.library.Library("qbe", "IMPL")  # `qbe.kernels.cpu.native` may take its place
on_cpu.impl("rms_norm", _cpu, "CPU")


@torch.library.register_fake("qbe::rms_norm", lib=_library)
def _fake(x: torch.Tensor, _weight: torch.Tensor, _eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)
