"""`qbe::mamba2_step`: a decode step of a Mamba-2 layer between its two projections, for one token of each sequence.

Transformers makes some forty operations of it and eight passes over the states. Here each state is read, updated and
written once, where it lies and at its own precision; everything is float32 inside, and rounded when it is done.
`qbe.engine.execution.mamba2` puts it into models.
"""

from __future__ import annotations

import torch

from qbe.kernels.ops.register import register

GATE_ALONE, NORM_OF_GATED, GATE_OF_NORMED = range(3)
NORMS = (GATE_ALONE, NORM_OF_GATED, GATE_OF_NORMED)


def mamba2_step(
    projected: torch.Tensor, memory: torch.Tensor, conv_at: torch.Tensor, state_at: torch.Tensor, bits: torch.Tensor,
    positions: torch.Tensor, conv_weight: torch.Tensor, conv_bias: torch.Tensor, dt_bias: torch.Tensor,
    a: torch.Tensor, d: torch.Tensor, norm: torch.Tensor | None, eps: float, head_dim: int, groups: int,
    norm_groups: int, gating: int,
) -> torch.Tensor:  # fmt: skip
    """One token of each of B sequences (Dao and Gu 2024): short convolution, SiLU, state update, read, gated norm.

    Args:
        projected: float32 or bfloat16 [B, inner + channels + heads], contiguous: gate; x, B and C; dt. `inner` is
            heads * head_dim, `channels` inner + 2 * groups * size.
        memory: uint8 [bytes]. Written to.
        conv_at: int64 [B]: where in it the last inputs of each sequence's convolution are, [channels, taps] in the
            dtype of `projected`.
        state_at: int64 [B]: where its state is, [heads, head_dim, size], as `qbe.format.state_rows` has it at
        bits: int32 [B]: 32 (float32), 16, 10 or 8.
        positions: int32 [B]: of the tokens. Below 16 bits rounding is stochastic, and differs by them.
        conv_weight, conv_bias: float32 [taps, channels] and [channels].
        dt_bias, a, d: float32 [heads]; a is -exp(A_log).
        norm: float32 [inner], the gated norm's weight; None: there is none.
        eps: of it.
        norm_groups: parts of a row with a norm of their own.
        gating: `GATE_ALONE`: what is read times SiLU(gate). `NORM_OF_GATED`: the RMS norm of that.
            `GATE_OF_NORMED`: the gate after the norm.

    Returns:
        [B, inner] in the dtype of `projected`. A sequence's numbers do not depend on those beside it.

    Raises:
        RuntimeError: shapes or dtypes that do not belong together, or a state outside of the memory.
    """
    y: torch.Tensor = torch.ops.qbe.mamba2_step.default(
        projected, memory, conv_at, state_at, bits, positions, conv_weight, conv_bias, dt_bias, a, d, norm, eps,
        head_dim, groups, norm_groups, gating,
    )  # fmt: skip
    return y


def _fake(projected: torch.Tensor, *arguments: object) -> torch.Tensor:
    heads, head_dim = arguments[7], arguments[12]
    assert isinstance(heads, torch.Tensor)
    assert isinstance(head_dim, int)
    return projected.new_empty(projected.shape[0], heads.shape[0] * head_dim)


OP = register(
    "mamba2_step(Tensor projected, Tensor(a!) memory, Tensor conv_at, Tensor state_at, Tensor bits, Tensor positions, "
    "Tensor conv_weight, Tensor conv_bias, Tensor dt_bias, Tensor a, Tensor d, Tensor? norm, float eps, int head_dim, "
    "int groups, int norm_groups, int gating) -> Tensor",
    cpu="qbe.kernels.cpu.recurrent.mamba2_step:mamba2_step",
    fake=_fake,
)
