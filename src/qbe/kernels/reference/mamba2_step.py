"""A decode step of a Mamba-2 layer, sequence by sequence: what the kernel is held against."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from qbe.format.state_rows import state_bytes
from qbe.kernels.ops.mamba2_step import GATE_OF_NORMED, NORM_OF_GATED
from qbe.kernels.reference.state_rows import dequantise_state, quantise_state
from qbe.sites import STATE_FULL_BITS


def mamba2_step(
    projected: torch.Tensor, memory: torch.Tensor, conv_at: torch.Tensor, state_at: torch.Tensor, bits: torch.Tensor,
    positions: torch.Tensor, conv_weight: torch.Tensor, conv_bias: torch.Tensor, dt_bias: torch.Tensor,
    a: torch.Tensor, d: torch.Tensor, norm: torch.Tensor | None, eps: float, head_dim: int, groups: int,
    norm_groups: int, gating: int,
) -> torch.Tensor:  # fmt: skip
    """Arguments and result as those of `qbe.kernels.ops.mamba2_step.mamba2_step`."""
    (taps, channels), heads, dtype = conv_weight.shape, len(a), projected.dtype
    inner = heads * head_dim
    size, answers = (channels - inner) // (2 * groups), []
    where = zip(conv_at.tolist(), state_at.tolist(), bits.tolist(), positions.tolist(), strict=True)
    for row, (window_at, at, gear, position) in zip(projected, where, strict=True):
        gate, new, dt = row.split([inner, channels, heads])
        window = _bytes(memory, window_at, channels * taps * dtype.itemsize).view(dtype).view(channels, taps)
        window.copy_(torch.cat([window[:, 1:], new[:, None]], 1))
        mixed = F.silu((window.float() * conv_weight.T).sum(1) + conv_bias)
        x, b, c = mixed.split([inner, groups * size, groups * size])
        x = x.view(heads, head_dim)
        b, c = (t.view(groups, size).repeat_interleave(heads // groups, 0)[:, None] for t in (b, c))
        step = F.softplus(dt.float() + dt_bias)
        stored, shape = _bytes(memory, at, state_bytes(inner, size, gear, 4)), (heads, head_dim, size)
        full = gear == STATE_FULL_BITS
        state = stored.view(torch.float32).view(shape) if full else dequantise_state(stored, shape, gear)
        state = state * torch.exp(step * a)[:, None, None] + b * (step[:, None] * x)[..., None]
        stored.copy_(state.flatten().view(torch.uint8) if full else quantise_state(state, gear, position))
        read = ((state * c).sum(-1) + x * d[:, None]).flatten()
        answers.append(_gated(read, gate.float(), norm, eps, norm_groups, gating, dtype))
    return torch.stack(answers)


def _bytes(memory: torch.Tensor, at: int, count: int) -> torch.Tensor:
    if at < 0 or at + count > len(memory):
        raise RuntimeError(f"a state of {count} bytes at {at} lies outside of a memory of {len(memory)}")
    return memory[at : at + count]


def _gated(
    read: torch.Tensor, gate: torch.Tensor, norm: torch.Tensor | None, eps: float, groups: int, gating: int,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    def normed(v: torch.Tensor) -> torch.Tensor:
        parts = v.view(groups, -1)
        return (parts / (parts.square().mean(1, keepdim=True) + eps).sqrt()).flatten()

    if norm is None:
        return (read * F.silu(gate)).to(dtype)
    if gating == NORM_OF_GATED:
        return (normed(read * F.silu(gate)).to(dtype).float() * norm).to(dtype)
    assert gating == GATE_OF_NORMED
    return (normed(read) * norm * F.silu(gate)).to(dtype)
