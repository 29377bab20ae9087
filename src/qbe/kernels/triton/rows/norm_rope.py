"""RMS norm, rotary embedding and SwiGLU as one kernel each, where torch launches two to fourteen.

Each operation is rounded as torch's is by itself; a norm's sum of squares has another order, which its length alone
decides, and exp another last bit.
"""

# Triton's language is not Python's: its arguments carry no types, and a branch on a constant must stand alone.
# mypy: disable-error-code="no-untyped-def, assignment, operator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qbe.kernels.triton.linear.tiled.launch import early

_GATE_BLOCK = 1024


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `qbe.kernels.ops.rms_norm`."""
    k = x.shape[-1]
    rows = x.reshape(-1, k)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        block = triton.next_power_of_2(k)
        with torch.cuda.device_of(x):
            rms_norm_kernel[(len(rows),)](
                rows, weight.contiguous(), out, k, *rows.stride(), eps, BLOCK=block,
                num_warps=max(1, min(16, block // 256)), **early(x.device),
            )  # fmt: skip
    return out


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `qbe.kernels.ops.rotary`."""
    _, heads, tokens, width = x.shape
    out = torch.empty_like(x)
    if out.numel():
        with torch.cuda.device_of(x):
            rotate_kernel[(tokens, heads)](
                x, cos, sin, out, width // 2, *x.stride()[1:], *cos.stride()[1:], *sin.stride()[1:], *out.stride()[1:],
                BLOCK=triton.next_power_of_2(width // 2), num_warps=1, enable_fp_fusion=False, **early(x.device),
            )  # fmt: skip  # fused, a product would be added before it is rounded
    return out


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See `qbe.kernels.ops.swiglu`."""
    k = gate.shape[-1]
    gates, ups = gate.reshape(-1, k), up.reshape(-1, k)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        with torch.cuda.device_of(gate):
            swiglu_kernel[(len(gates), -(-k // _GATE_BLOCK))](
                gates, ups, out, k, *gates.stride(), *ups.stride(), BLOCK=_GATE_BLOCK, num_warps=4,
                **early(gate.device),
            )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["eps"])
def rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, K, x_row, x_one, eps, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """a whole row"""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    if EARLY:  # the weight above is nobody's to write
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row * x_row + k * x_one, mask=k < K, other=0.0).to(tl.float32)
    x = (x * tl.rsqrt(tl.sum(x * x, 0) / K + eps)).to(DTYPE).to(tl.float32)
    tl.store(out_ptr + row * K + k, (weight * x).to(DTYPE), mask=k < K)


@triton.jit
def rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, HALF, x_head, x_token, x_one, cos_token, cos_one, sin_token, sin_one, out_head,
    out_token, out_one, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """a head of a token"""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < HALF
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    x = x_ptr + head * x_head + token * x_token
    out = out_ptr + head * out_head + token * out_token
    first = tl.load(x + d * x_one, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + (d + HALF) * x_one, mask=inside, other=0.0).to(tl.float32)
    for half in tl.static_range(2):
        at = d + half * HALF
        cos = tl.load(cos_ptr + token * cos_token + at * cos_one, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + token * sin_token + at * sin_one, mask=inside, other=0.0).to(tl.float32)
        own = first if half == 0 else second
        other = -second if half == 0 else first
        y = (own * cos).to(DTYPE).to(tl.float32) + (other * sin).to(DTYPE).to(tl.float32)
        tl.store(out + at * out_one, y.to(DTYPE), mask=inside)


@triton.jit
def swiglu_kernel(
    gate_ptr, up_ptr, out_ptr, K, gate_row, gate_one, up_row, up_one, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """BLOCK numbers of a row"""
    DTYPE: tl.constexpr = gate_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(gate_ptr + row * gate_row + k * gate_one, mask=k < K, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + k * up_one, mask=k < K, other=0.0).to(tl.float32)
    x = (x / (1.0 + tl.exp(-x))).to(DTYPE).to(tl.float32)
    tl.store(out_ptr + row * K + k, (x * up).to(DTYPE), mask=k < K)
