"""A norm or a gate of few rows that also quantises its result for the decode kernels (`linear.tiled.quantise`).

Each operation is rounded as torch's is by itself; the sum of squares has another order, and exp another last bit.
"""

# Triton's language is not Python's: its arguments carry no types, and a branch on a constant must stand alone.
# mypy: disable-error-code="no-untyped-def, assignment, operator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qbe.kernels.triton.linear.tiled.launch import early
from qbe.kernels.triton.linear.tiled.quantise import quantised_bytes, store_quantised


def norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, inputs: int, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `qbe.kernels.ops.fused.norm`."""
    return add_norm(x, None, weight, eps, inputs, group)[1:]


def add_norm(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float, inputs: int, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `qbe.kernels.ops.fused.add_norm`; without `added` the first result has no elements."""
    k = x.shape[-1]
    rows = x.reshape(-1, k).contiguous()
    more = None if added is None else added.reshape(-1, k).contiguous()
    m = len(rows)
    total = torch.empty_like(rows) if more is not None else rows.new_empty(0)
    out = torch.empty_like(rows)
    quantised = torch.empty(quantised_bytes(m, inputs, group), dtype=torch.uint8, device=x.device)
    block = triton.next_power_of_2(inputs)
    with torch.cuda.device_of(x):
        norm_kernel[(m,)](
            rows, more, weight.contiguous(), total, out, quantised, m, k, inputs, eps, GROUP=group,
            GROUPS=block // group, num_warps=max(4, min(16, block // 256)), **early(x.device),
        )  # fmt: skip
    return total.view(x.shape) if more is not None else total, out.view(x.shape), quantised


def gate(gate: torch.Tensor, up: torch.Tensor, inputs: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `qbe.kernels.ops.fused.gate`."""
    k = gate.shape[-1]
    gates, ups = gate.reshape(-1, k), up.reshape(-1, k)
    m = len(gates)
    out = torch.empty(m, k, dtype=gate.dtype, device=gate.device)
    quantised = torch.empty(quantised_bytes(m, inputs, group), dtype=torch.uint8, device=gate.device)
    with torch.cuda.device_of(gate):
        gate_kernel[(m, -(-inputs // 1024))](
            gates, ups, out, quantised, m, k, inputs, *gates.stride(), *ups.stride(), GROUP=group,
            GROUPS=1024 // group, num_warps=4, **early(gate.device),
        )  # fmt: skip
    return out.view(gate.shape), quantised


@triton.jit(do_not_specialize=["M", "eps"])
def norm_kernel(
    x_ptr, added_ptr, weight_ptr, total_ptr, out_ptr, quantised_ptr, M, K, kp, eps, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """a whole row"""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    m = tl.program_id(0)
    g = tl.arange(0, GROUPS)
    k = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = k < K
    offsets = m.to(tl.int64) * K + k
    weight = tl.load(weight_ptr + k, mask=inside, other=0.0).to(tl.float32)
    if EARLY:  # the weight above is nobody's to write
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if added_ptr is not None:
        x = (x + tl.load(added_ptr + offsets, mask=inside, other=0.0).to(tl.float32)).to(DTYPE)
        tl.store(total_ptr + offsets, x, mask=inside)
        x = x.to(tl.float32)
    mean = tl.sum(tl.sum(x * x, 1), 0) / K
    x = (x * tl.rsqrt(mean + eps)).to(DTYPE).to(tl.float32)
    x = (weight * x).to(DTYPE)
    tl.store(out_ptr + offsets, x, mask=inside)
    store_quantised(x.to(tl.float32), quantised_ptr, m, g, k, M, kp, GROUP)


@triton.jit(do_not_specialize=["M"])
def gate_kernel(
    gate_ptr, up_ptr, out_ptr, quantised_ptr, M, K, kp, gate_row, gate_one, up_row, up_one, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """GROUPS groups of one row"""
    DTYPE: tl.constexpr = gate_ptr.dtype.element_ty
    m = tl.program_id(0)
    row = m.to(tl.int64)
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = k < K
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(gate_ptr + row * gate_row + k * gate_one, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + k * up_one, mask=inside, other=0.0).to(tl.float32)
    x = (x / (1.0 + tl.exp(-x))).to(DTYPE).to(tl.float32)
    x = (x * up).to(DTYPE)
    tl.store(out_ptr + row * K + k, x, mask=inside)
    store_quantised(x.to(tl.float32), quantised_ptr, m, g, k, M, kp, GROUP)
