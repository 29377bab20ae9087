"""Rows of 8-bit activations, rounded as the decode kernels hold them, for kernels that multiply floating point.

One launch before every such product, whatever the words say: a captured CUDA graph serves them all.
"""

# Triton's language is not Python's: its arguments carry no types, and a branch on a constant must stand alone.
# mypy: disable-error-code="no-untyped-def, assignment, operator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qbe.kernels.triton.linear.tiled.common import has_eight
from qbe.kernels.triton.linear.tiled.quantise import fixed_point, high_byte


@triton.jit
def round_rows_kernel(
    x_ptr, bits_ptr, out_ptr, K, EACH: tl.constexpr, GROUP: tl.constexpr, GROUP_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """GROUPS groups of one row, one of EACH that are made of a row of x; GROUP_SIZE: at least a group"""
    m = tl.program_id(0)
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    i = tl.arange(0, GROUP_SIZE)
    k = g[:, None] * GROUP + i[None, :]
    ok = (i < GROUP)[None, :] & (k < K)
    row = m.to(tl.int64) * K
    x = tl.load(x_ptr + (m // EACH).to(tl.int64) * K + k, mask=ok, other=0.0)
    if has_eight(tl.load(bits_ptr + m)):
        scale, q = fixed_point(x.to(tl.float32), 1)
        x = (high_byte(q).to(tl.float32) * (scale * 256)).to(x.dtype)
    tl.store(out_ptr + row + k, x, mask=ok)


def round_rows(x: torch.Tensor, bits: torch.Tensor, group: int) -> torch.Tensor:
    """x with its rows of 8-bit activations rounded (`qbe.kernels.reference.activations.eight_bits`), in x's dtype.

    Args:
        x: float16, bfloat16 or float32 [M, K], contiguous.
        bits: int32 [M * n], contiguous, words of precision on x's device; read by the kernel only. There is a row of
            the result for each, n for a row of x.
        group: inputs that share a scale.
    """
    m, k = len(bits), x.shape[1]
    out = torch.empty(m, k, dtype=x.dtype, device=x.device)
    size = triton.next_power_of_2(group)
    groups = max(1, 1024 // size)
    grid = (m, -(-k // (groups * group)))
    round_rows_kernel[grid](x, bits, out, k, EACH=m // len(x), GROUP=group, GROUP_SIZE=size, GROUPS=groups, num_warps=4)
    return out
