"""`qbe::nested_experts`: the routed experts of a mixture-of-experts layer, each read at each token's own precision.

One call does what transformers' `ExpertsInterface` asks of an implementation: gate and up of every chosen expert, the
activation, down, and the sum of a token's experts by their routing weights. An expert sees few rows of a step, so what
is read of it is nearly what those rows asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from qbe.errors import QBEError
from qbe.kernels.ops.gradients import without_gradient
from qbe.kernels.ops.register import register

SILU, GELU, GELU_TANH, SWIGLU_OAI = "silu", "gelu", "gelu_tanh", "swiglu_oai"
ACTIVATIONS = (SILU, GELU, GELU_TANH, SWIGLU_OAI)  # their numbers in kernels


class ExpertMatrices(NamedTuple):
    """One matrix of every expert of a layer: E nested matrices of one shape, [N, K].

    Attributes:
        packed: uint8 [E, total_bits, N*Kp/8], contiguous: of each expert what `qbe.kernels.ops.nested_linear` calls
            packed, so that the bytes of an expert's slice lie together.
        meta: uint8 [E, 2P, N, G], contiguous: likewise.
        exponents: int32 [E]: the scale exponent of each expert's matrix.
        precision: uint8 [R, E], the last dimension contiguous: a precision byte of every row of the plan for every
            expert (`qbe.kernels.reference.activations.precision_byte`). Kernels read it while they run. A width that
            the store lacks is served as in `nested_linear`; 16 and more reads the original.
        original: [E, N, K] in the model's dtype, contiguous, on x's device or in pinned host memory; None if dropped.
        bias: [E, N] or None.
        addresses: int64 [E, pages], where each page of an expert's codes begins (`qbe.format.expert_pages`), in memory
            that x's device reads; 0: it is not there. Kernels read it while they run: an expert's rows read the nearest
            precision whose slices are all there. Its first slice always is. `packed` then tells shapes only. None: the
            codes are in `packed`.
    """

    packed: torch.Tensor
    meta: torch.Tensor
    exponents: torch.Tensor
    precision: torch.Tensor
    original: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    addresses: torch.Tensor | None = None


def nested_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    rows: torch.Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    slices: Sequence[int],
    activation: str = SILU,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float = 0.0,
    page_bytes: int = 0,
) -> torch.Tensor:
    """out[t] = sum over i of topk_weights[t, i] * down_e(act(gate_up_e(x[t]))), e = topk_ids[t, i].

    Sums are float32, those of a token's experts in the order of i; act's result is rounded once to x's dtype, as the
    input of down. A row comes out the same, bit for bit, whatever rows are beside it. For inference: a gradient through
    it raises QBEError.

    Args:
        x: float16, bfloat16 or float32 [T, H].
        topk_ids: int64 or int32 [T, k]. What is below 0 or at least E chooses nobody (expert parallelism's mark).
        topk_weights: float [T, k]. Any dtype; multiplied in float32.
        rows: int32 [T]: which row of `precision` each token reads.
        gate_up: N = 2 I, K = H: the I rows of gate, then those of up; or in turns, if `interleaved`.
        down: N = H, K = I.
        slices: widths of the slices of both, most significant first.
        activation: with g of gate and u of up, in float32:
            silu: g sigmoid(g) u. gelu: g Phi(g) u; gelu_tanh: its tanh approximation.
            swiglu_oai: g sigmoid(alpha g) (u + 1), gpt-oss's, whose alpha is 1.702 and limit 7.
        alpha: of swiglu_oai.
        limit: if not 0, g is first brought to at most `limit`, u to [-limit, limit]; for every activation.
        page_bytes: of the pages of both matrices, where they have addresses.

    Returns:
        [T, H] in x's dtype.

    Raises:
        QBEError: an activation of another name.
        RuntimeError: shapes or dtypes that do not belong together; on a CPU a row at 16 bits without an original.
    """
    if activation not in ACTIVATIONS:
        raise QBEError(f"experts have no activation {activation!r}: choose one of {', '.join(ACTIVATIONS)}")
    y = torch.ops.qbe.nested_experts.default(
        x, topk_ids, topk_weights, rows, *gate_up, *down, slices, activation, interleaved, alpha, limit, page_bytes
    )
    return without_gradient(y, x, topk_weights, gate_up.bias, down.bias)


def _fake(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _matrices(name: str) -> str:
    of_experts = ", ".join(f"Tensor {name}_{part}" for part in ("packed", "meta", "exponents", "precision"))
    return f"{of_experts}, Tensor? {name}_original, Tensor? {name}_bias, Tensor? {name}_addresses"


OP = register(
    f"nested_experts(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor rows, {_matrices('gate_up')}, "
    f"{_matrices('down')}, int[] slices, str activation, bool interleaved, float alpha, float limit, "
    "int page_bytes) -> Tensor",
    cpu="qbe.kernels.cpu.experts.nested:nested_experts",
    cuda="qbe.kernels.triton.experts.nested:nested_experts",
    fake=_fake,
)
