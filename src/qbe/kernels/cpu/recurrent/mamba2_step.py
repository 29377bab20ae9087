"""`qbe::mamba2_step` on the CPU: one call of the compiled kernel (mamba2_step.c), or the reference."""

from __future__ import annotations

import ctypes

import torch

from qbe.kernels.cpu import build, dispatch
from qbe.kernels.cpu.geometry import DTYPES
from qbe.kernels.ops.mamba2_step import GATE_ALONE, NORMS
from qbe.kernels.reference.mamba2_step import mamba2_step as reference
from qbe.sites import STATE_BITS

_threads = torch.get_num_threads


class _Shape(ctypes.Structure):
    """`Mamba2Shape` of mamba2_step.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "heads", "head_dim", "size", "groups", "taps", "norm_groups")),
        ("bytes", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("norm", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )


class _Call(ctypes.Structure):
    """`Mamba2Call` of mamba2_step.c."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in (
            "projected", "memory", "conv_at", "state_at", "bits", "positions", "conv_weight", "conv_bias", "dt_bias",
            "a", "d", "norm", "y", "shape",
        )
    )  # fmt: skip


def mamba2_step(
    projected: torch.Tensor, memory: torch.Tensor, conv_at: torch.Tensor, state_at: torch.Tensor, bits: torch.Tensor,
    positions: torch.Tensor, conv_weight: torch.Tensor, conv_bias: torch.Tensor, dt_bias: torch.Tensor,
    a: torch.Tensor, d: torch.Tensor, norm: torch.Tensor | None, eps: float, head_dim: int, groups: int,
    norm_groups: int, gating: int,
) -> torch.Tensor:  # fmt: skip
    """Arguments, result and errors as those of `qbe.kernels.ops.mamba2_step.mamba2_step`."""
    (taps, channels), (rows, width), heads = conv_weight.shape, projected.shape, len(a)
    inner = heads * head_dim
    size = (channels - inner) // (2 * groups)
    of_rows = [t.dtype is torch.int64 and t.shape == (rows,) for t in (conv_at, state_at)]
    of_heads = [t.dtype is torch.float32 and t.shape == (heads,) for t in (dt_bias, a, d)]
    of_rows += [t.dtype is torch.int32 and t.shape == (rows,) for t in (bits, positions)]
    fits = all(of_rows) and all(of_heads)
    fits = fits and channels == inner + 2 * groups * size and width == inner + channels + heads
    fits = fits and heads % groups == 0 and inner % norm_groups == 0 and gating in NORMS
    fits = fits and conv_weight.dtype is conv_bias.dtype is torch.float32 and conv_bias.shape == (channels,)
    fits = fits and (gating == GATE_ALONE) == (norm is None) and memory.dtype is torch.uint8 and memory.dim() == 1
    fits = fits and (norm is None or (norm.shape == (inner,) and norm.dtype is torch.float32))
    tensors = [projected, memory, conv_at, state_at, bits, positions, conv_weight, conv_bias, dt_bias, a, d, norm]
    if not fits or not all(t is None or t.is_contiguous() for t in tensors):
        raise RuntimeError(
            f"projected {list(projected.shape)}, convolution {list(conv_weight.shape)}, {heads} heads of {head_dim}, "
            f"{groups} groups and {norm_groups} of the norm do not belong together"
        )
    if not bits.numel() or set(bits.tolist()) - set(STATE_BITS):
        raise RuntimeError(f"states have {', '.join(map(str, STATE_BITS))} bits, and {bits.tolist()} were asked for")
    if not dispatch.steps_mamba2(projected.dtype, size):
        return reference(
            projected, memory, conv_at, state_at, bits, positions, conv_weight, conv_bias, dt_bias, a, d, norm, eps,
            head_dim, groups, norm_groups, gating,
        )  # fmt: skip
    shape = _Shape(
        rows, heads, head_dim, size, groups, taps, norm_groups, len(memory), eps, gating, DTYPES[projected.dtype]
    )
    y = projected.new_empty(rows, inner)
    pointers = [None if t is None else t.data_ptr() for t in (*tensors, y)]
    call = _Call(*pointers, ctypes.addressof(shape))
    failed = build.loaded().qbe_mamba2_step(ctypes.addressof(call), _threads(), build.number())
    if failed == -1:
        raise RuntimeError(f"a state lies outside of a memory of {len(memory)} bytes")
    if failed:
        raise MemoryError("the CPU kernel found no memory for its working buffers")
    return y
