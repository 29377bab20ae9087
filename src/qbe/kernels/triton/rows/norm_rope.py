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
    return _rms_norm(x, None, weight, eps)[1]


def add_rms_norm(
    x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `qbe.kernels.ops.rms_norm`."""
    return _rms_norm(x, added, weight, eps)


def _rms_norm(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    k = x.shape[-1]
    rows = x.reshape(-1, k)
    more = None if added is None else added.reshape(-1, k)
    strides = *rows.stride(), *(rows if more is None else more).stride()
    total = x.new_empty(0 if added is None else x.shape)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        block = triton.next_power_of_2(k)
        with torch.cuda.device_of(x):
            rms_norm_kernel[(len(rows),)](
                rows, more, weight.contiguous(), total, out, k, *strides, eps, BLOCK=block,
                num_warps=max(1, min(16, block // 256)), **early(x.device),
            )  # fmt: skip
    return total, out


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `qbe.kernels.ops.rotary`."""
    return _rotate(x, x[:, :0], cos, sin)[0]


def rotate_both(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `qbe.kernels.ops.rotary`."""
    if q.stride(-1) != 1 or k.stride(-1) != 1:  # of which the kernel knows one only
        return rotate(q, cos, sin), rotate(k, cos, sin)
    return _rotate(q, k, cos, sin)


def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    _, heads, tokens, width = q.shape
    out = torch.empty_like(q), torch.empty_like(k)
    if out[0].numel():
        strides = (
            *q.stride()[1:3], *k.stride()[1:3], q.stride(3), *cos.stride()[1:], *sin.stride()[1:],
            *out[0].stride()[1:3], *out[1].stride()[1:3], out[0].stride(3),
        )  # fmt: skip
        with torch.cuda.device_of(q):
            rotate_kernel[(tokens, heads + k.shape[1])](
                q, k, cos, sin, *out, heads, width // 2, *strides,
                BLOCK=triton.next_power_of_2(width // 2), num_warps=1, enable_fp_fusion=False, **early(q.device),
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
    x_ptr, added_ptr, weight_ptr, total_ptr, out_ptr, K, x_row, x_one, added_row, added_one, eps, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """a whole row, of a sum if there is something to add"""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    if EARLY:  # the weight above is nobody's to write
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row * x_row + k * x_one, mask=k < K, other=0.0).to(tl.float32)
    if added_ptr is not None:
        added = tl.load(added_ptr + row * added_row + k * added_one, mask=k < K, other=0.0).to(tl.float32)
        x = (x + added).to(DTYPE)
        tl.store(total_ptr + row * K + k, x, mask=k < K)
        x = x.to(tl.float32)
    x = (x * tl.rsqrt(tl.sum(x * x, 0) / K + eps)).to(DTYPE).to(tl.float32)
    tl.store(out_ptr + row * K + k, (weight * x).to(DTYPE), mask=k < K)


@triton.jit
def rotate_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, HEADS, HALF, q_head, q_token, k_head, k_token, one, cos_token,
    cos_one, sin_token, sin_one, q_out_head, q_out_token, k_out_head, k_out_token, out_one,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """a head of a token: of the queries, or after those of the keys"""
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < HALF
    x = q_ptr + head * q_head + token * q_token
    out = q_out_ptr + head * q_out_head + token * q_out_token
    if head >= HEADS:
        x = k_ptr + (head - HEADS) * k_head + token * k_token
        out = k_out_ptr + (head - HEADS) * k_out_head + token * k_out_token
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.load(x + d * one, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + (d + HALF) * one, mask=inside, other=0.0).to(tl.float32)
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
