"""A norm or a gate that also brings its result into the form that the linears after it read: quantised for the decode
kernels (`linear.tiled.quantise`), or float16 for the batch kernels (`linear.tiled.half`).

Each operation is rounded as torch's is by itself; the sum of squares has another order, and exp another last bit.
"""

# Triton's language is not Python's: its arguments carry no types, and a branch on a constant must stand alone.
# mypy: disable-error-code="no-untyped-def, assignment, operator"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qbe.kernels.triton.linear.tiled.half import half_bytes, store_whole_row
from qbe.kernels.triton.linear.tiled.launch import early, three
from qbe.kernels.triton.linear.tiled.quantise import quantised_bytes, store_quantised

_BLOCK = 1024  # inputs of a program that quantises part of a row


def norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, inputs: int, group: int, bits: Sequence[torch.Tensor] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `qbe.kernels.ops.fused.norm`."""
    return add_norm(x, None, weight, eps, inputs, group, bits)[1:]


def add_norm(
    x: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    inputs: int,
    group: int,
    bits: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `qbe.kernels.ops.fused.add_norm`; without `added` the first result has no elements."""
    k = x.shape[-1]
    rows = x.reshape(-1, k).contiguous()
    more = None if added is None else added.reshape(-1, k).contiguous()
    m = len(rows)
    total = torch.empty_like(rows) if more is not None else rows.new_empty(0)
    out = torch.empty_like(rows)
    ready, form = _ready(m, inputs, group, bits, x.device)
    block = triton.next_power_of_2(inputs)
    with torch.cuda.device_of(x):
        norm_kernel[(m,)](
            rows, more, weight.contiguous(), total, out, ready, *form, m, k, inputs, eps, WEIGHTS=len(bits),
            GROUP=group, GROUPS=block // group, num_warps=max(4, min(16, block // 256)), **early(x.device),
        )  # fmt: skip
    return total.view(x.shape) if more is not None else total, out.view(x.shape), ready


def gate(
    gate: torch.Tensor, up: torch.Tensor, inputs: int, group: int, bits: Sequence[torch.Tensor] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `qbe.kernels.ops.fused.gate`."""
    k = gate.shape[-1]
    gates, ups = gate.reshape(-1, k), up.reshape(-1, k)
    m = len(gates)
    out = torch.empty(m, k, dtype=gate.dtype, device=gate.device)
    ready, form = _ready(m, inputs, group, bits, gate.device)
    block = triton.next_power_of_2(inputs) if bits else _BLOCK  # the scale of float16 rows is the whole row's
    with torch.cuda.device_of(gate):
        gate_kernel[(m, -(-inputs // block))](
            gates, ups, out, ready, *form, m, k, inputs, *gates.stride(), *ups.stride(), WEIGHTS=len(bits),
            GROUP=group, GROUPS=block // group, num_warps=max(4, min(16, block // 512)), **early(gate.device),
        )  # fmt: skip
    return out.view(gate.shape), ready


def _ready(
    m: int, inputs: int, group: int, bits: Sequence[torch.Tensor], device: torch.device
) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """The buffer of m rows as linears read them, for each weight with these words or quantised for all, and what the
    kernels take after it."""
    size = half_bytes(m, inputs) if bits else quantised_bytes(m, inputs, group)
    ready = torch.empty(max(1, len(bits)) * size, dtype=torch.uint8, device=device)
    return ready, (*three([b.contiguous() for b in bits]), size)


@triton.jit
def _convert(
    x, ready_ptr, bits0_ptr, bits1_ptr, bits2_ptr, size, m, g, k, M, kp, WEIGHTS: tl.constexpr, GROUP: tl.constexpr
):
    """float32 x, groups g and inputs k of row m; for no weights: quantised"""
    if WEIGHTS > 0:
        store_whole_row(x, ready_ptr, bits0_ptr, bits1_ptr, bits2_ptr, size, m, k, M, kp, WEIGHTS)
    else:
        store_quantised(x, ready_ptr, m, g, k, M, kp, GROUP)


@triton.jit(
    do_not_specialize=["M", "eps", "size"], do_not_specialize_on_alignment=["bits0_ptr", "bits1_ptr", "bits2_ptr"]
)
def norm_kernel(
    x_ptr, added_ptr, weight_ptr, total_ptr, out_ptr, ready_ptr, bits0_ptr, bits1_ptr, bits2_ptr, size, M, K, kp, eps,
    WEIGHTS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, EARLY: tl.constexpr,
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
    _convert(x.to(tl.float32), ready_ptr, bits0_ptr, bits1_ptr, bits2_ptr, size, m, g, k, M, kp, WEIGHTS, GROUP)


@triton.jit(do_not_specialize=["M", "size"], do_not_specialize_on_alignment=["bits0_ptr", "bits1_ptr", "bits2_ptr"])
def gate_kernel(
    gate_ptr, up_ptr, out_ptr, ready_ptr, bits0_ptr, bits1_ptr, bits2_ptr, size, M, K, kp, gate_row, gate_one, up_row,
    up_one, WEIGHTS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """GROUPS groups of one row: all of them, where the rows become float16"""
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
    _convert(x.to(tl.float32), ready_ptr, bits0_ptr, bits1_ptr, bits2_ptr, size, m, g, k, M, kp, WEIGHTS, GROUP)
