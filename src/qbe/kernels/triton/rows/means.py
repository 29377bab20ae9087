"""Means of rows, each summed in an order that its length alone decides.

torch divides a reduction among threads by the number of rows, too, so that a norm of one row rounds differently from
the same row beside others. A decode step on a GPU takes the means of its norms from here.
"""

# Triton's language is not Python's: its arguments carry no types, and a branch on a constant must stand alone.
# mypy: disable-error-code="no-untyped-def, assignment, operator"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode

LARGEST = 16384  # inputs of a row that a program holds


def row_means(x: torch.Tensor, keepdim: bool) -> torch.Tensor:
    """The mean over the last dimension of x, float32 [..., K] contiguous, K up to `LARGEST`."""
    k = x.shape[-1]
    out = torch.empty(x.shape[:-1], dtype=x.dtype, device=x.device)
    if out.numel():
        block = triton.next_power_of_2(k)
        with torch.cuda.device_of(x):
            row_means_kernel[(out.numel(),)](x, out, k, BLOCK=block, num_warps=max(1, min(16, block // 256)))
    return out[..., None] if keepdim else out


class RowMeans(TorchDispatchMode):
    """Inside it, means over the last dimension of float32 tensors on a device are `row_means`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.mean.dim and not kwargs and self._takes(*args):
            return row_means(args[0], len(args) > 2 and args[2])
        return func(*args, **(kwargs or {}))

    def _takes(self, x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False) -> bool:
        return (
            x.device.type == self._device.type
            and x.dtype == torch.float32
            and x.is_contiguous()
            and dim is not None
            and [d % x.dim() for d in dim] == [x.dim() - 1]
            and x.shape[-1] <= LARGEST
        )


@triton.jit
def row_means_kernel(x_ptr, out_ptr, K, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    tl.store(out_ptr + row, tl.sum(tl.load(x_ptr + row * K + k, mask=k < K, other=0.0), 0) / K)
