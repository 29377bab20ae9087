"""On a CPU: decode steps of Mamba-2 layers as one op between the two projections (`qbe::mamba2_step`).

Transformers' own makes forty operations of it, most of them calls that take longer than their arithmetic, and copies
states of several sequences together and apart. A trial at load compares it with the module's own forward in float32,
where nothing is rounded away; in bfloat16 the op rounds less often. What it does not serve goes the model's own way.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qbe.kernels.cpu import build, dispatch
from qbe.kernels.ops.mamba2_step import GATE_ALONE, GATE_OF_NORMED, NORM_OF_GATED, mamba2_step
from qbe.sites import STATE_FULL_BITS

_UPDATE = "mamba2_selective_state_update"  # the function that transformers' Mamba-2 layers call
_CLOSE = 1e-4  # of the largest number, in float32


@dataclass(frozen=True)
class Mamba2Step:
    """The op's arguments that are a layer's own; see `qbe.kernels.ops.mamba2_step`."""

    conv_weight: torch.Tensor
    conv_bias: torch.Tensor
    dt_bias: torch.Tensor
    a: torch.Tensor
    d: torch.Tensor
    norm: torch.Tensor | None
    eps: float
    head_dim: int
    groups: int
    norm_groups: int
    gating: int

    def __call__(
        self, projected: torch.Tensor, memory: torch.Tensor, conv_at: torch.Tensor, state_at: torch.Tensor,
        bits: torch.Tensor, positions: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """What the input projection `[B, width]` becomes before the output projection, `[B, inner]`."""
        return mamba2_step(
            projected, memory, conv_at, state_at, bits, positions, self.conv_weight, self.conv_bias, self.dt_bias,
            self.a, self.d, self.norm, self.eps, self.head_dim, self.groups, self.norm_groups, self.gating,
        )  # fmt: skip


@torch.inference_mode()
def fused_step(module: nn.Module, layer: Any, call: Callable[..., Any]) -> Mamba2Step | None:
    """The op for this module, if it is a Mamba-2 mixer that the op equals.

    Args:
        layer: of transformers' cache, where it looks for its states.
        call: runs a mixer's own forward with that cache.
    """
    parameter = next(module.parameters())
    names = getattr(inspect.unwrap(type(module).forward), "__globals__", {})
    if _UPDATE not in names or parameter.device.type != "cpu" or build.backend() == "torch":
        return None
    try:
        found = _candidates(module)
    except (AttributeError, TypeError):  # it keeps its parts under other names
        return None
    mixer: Any = module
    usable = found and dispatch.steps_mamba2(mixer.conv1d.weight.dtype, _size(found[0]))
    return next((step for step in found if _same(module, layer, call, step)), None) if usable else None


def _size(step: Mamba2Step) -> int:
    """Numbers of a state's row."""
    return (step.conv_weight.shape[1] - len(step.a) * step.head_dim) // (2 * step.groups)


def _candidates(module: Any) -> list[Mamba2Step]:
    """What it may be, by its parts; a gated norm does not say when it gates."""
    channels = module.conv1d.weight.shape[0]
    bias = module.conv1d.bias
    heads, norm = module.A_log.shape[0], getattr(module, "norm", None)
    weight = getattr(norm, "weight", None)
    inner, groups = heads * int(module.head_dim), int(module.n_groups)
    of_norm = {1, groups, inner // int(getattr(norm, "group_size", inner))}
    forms = [(GATE_ALONE, 1)] if weight is None else [(g, n) for g in (NORM_OF_GATED, GATE_OF_NORMED) for n in of_norm]
    return [
        Mamba2Step(
            conv_weight=module.conv1d.weight.squeeze(1).T.float().contiguous(),
            conv_bias=torch.zeros(channels) if bias is None else bias.float(),
            dt_bias=module.dt_bias.float(), a=-torch.exp(module.A_log.float()), d=module.D.float(),
            norm=None if weight is None else weight.float(), eps=float(getattr(norm, "variance_epsilon", 0.0)),
            head_dim=int(module.head_dim), groups=groups, norm_groups=number, gating=gating,
        )
        for gating, number in forms
    ]  # fmt: skip


class _Given(nn.Module):
    """Stands for a projection: keeps what comes in and gives what it was made with, or that."""

    def __init__(self, out: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.out, self.seen = out, list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x)
        return x if self.out is None else self.out


def _same(module: nn.Module, layer: Any, call: Callable[..., Any], step: Mamba2Step) -> bool:
    """Whether a module with its own small parts in float32 and given projections does the same, its states included."""
    twin: Any = copy.copy(module)
    twin._modules, twin._parameters = dict(module._modules), dict(module._parameters)
    for name, parameter in twin._parameters.items():
        if parameter is not None:
            twin._parameters[name] = nn.Parameter(parameter.float(), requires_grad=False)
    for name in ("conv1d", "norm"):
        if name in twin._modules:
            twin._modules[name] = copy.deepcopy(twin._modules[name]).float()
    draw = torch.Generator().manual_seed(0)
    sequences, (taps, channels), heads = 2, step.conv_weight.shape, len(step.a)
    inner = heads * step.head_dim
    projected = torch.randn(sequences, inner + channels + heads, generator=draw)
    window = torch.randn(sequences, channels, taps, generator=draw)
    state = torch.randn(sequences, heads, step.head_dim, _size(step), generator=draw)
    memory = torch.cat([window.flatten(), state.flatten()]).view(torch.uint8).clone()
    hidden = torch.randn(sequences, 1, 8, generator=draw)
    into, out = _Given(projected[:, None]), _Given()
    twin._modules["in_proj"], twin._modules["out_proj"] = into, out
    kept = layer.conv_states[0], layer.recurrent_states[0], layer.has_previous_state[0]
    layer.conv_states[0], layer.recurrent_states[0], layer.has_previous_state[0] = window, state, True
    try:
        theirs = call(twin, hidden)
        window, state = layer.conv_states[0], layer.recurrent_states[0]
    except (AttributeError, RuntimeError, TypeError, ValueError):  # it is called in another way
        return False
    finally:
        layer.conv_states[0], layer.recurrent_states[0], layer.has_previous_state[0] = kept
    at = [torch.arange(sequences) * (t[0].numel() * 4) for t in (window, state)]
    ints = torch.tensor([[STATE_FULL_BITS] * sequences, [0] * sequences], dtype=torch.int32)
    mine = step(projected, memory, at[0], at[1] + window.numel() * 4, ints[0], ints[1])
    pairs = [
        (theirs.reshape(mine.shape), mine),
        (torch.cat([window.flatten(), state.flatten()]), memory.view(torch.float32)),
    ]
    straight = torch.equal(into.seen[0], hidden) and theirs.numel() == out.seen[0].numel()
    return straight and all(bool(((a - b).abs() <= _CLOSE * a.abs().max()).all()) for a, b in pairs)
