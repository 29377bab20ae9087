"""Custom ops that a decode step on a GPU has in place of a norm or a gate: what makes the input of nested linears also
brings it into the form that their kernel reads, which else is a launch of its own.

`qbe.compile.fuse` puts them into compiled graphs, `qbe.engine.execution.patch_projections` into other steps; nobody
need call them. `qbe::converted_linears` is `qbe.kernels.ops.merged_linear.nested_linears` of one to three weights, with
x in that form already; a single one may be `float32_output` (`qbe.kernels.ops.nested_linear`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qbe.kernels.ops import merged_linear as merged_ops
from qbe.kernels.ops.register import register


def _ready(x: torch.Tensor, inputs: int, group: int, bits: Sequence[torch.Tensor]) -> torch.Tensor:
    # The sizes are `quantised_bytes` and `half_bytes` of `qbe.kernels.triton`, which need Triton.
    rows = x.numel() // x.shape[-1]
    half = len(bits) * (-(-(2 * rows * inputs + 4 * rows) // 16) * 16)
    return x.new_empty(half or 2 * rows * inputs + 16 * rows * (inputs // group), dtype=torch.uint8)


def fake_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, inputs: int, group: int, bits: Sequence[torch.Tensor] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), _ready(x, inputs, group, bits)


def fake_add_norm(
    x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float, inputs: int, group: int,
    bits: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return x.new_empty(x.shape), x.new_empty(x.shape), _ready(x, inputs, group, bits)


def fake_gate(
    gate: torch.Tensor, up: torch.Tensor, inputs: int, group: int, bits: Sequence[torch.Tensor] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    return gate.new_empty(gate.shape), _ready(gate, inputs, group, bits)


def fake_linears(
    x: torch.Tensor, ready: torch.Tensor, packed: Any, meta: Any, bits: Any, originals: Any, biases: Any,
    slices: Any, exponents: Any, float32_output: bool = False, batch_invariant: bool = True,
) -> torch.Tensor:  # fmt: skip
    y = merged_ops.fake(x, packed, meta, bits, originals, biases, slices, exponents)
    return y.float() if float32_output else y


NORM = register(
    "norm(Tensor x, Tensor weight, float eps, int inputs, int group, Tensor[] bits) -> (Tensor, Tensor)",
    cuda="qbe.kernels.triton.rows.fused:norm",
    fake=fake_norm,
)
ADD_NORM = register(
    "add_norm(Tensor x, Tensor added, Tensor weight, float eps, int inputs, int group, Tensor[] bits) "
    "-> (Tensor, Tensor, Tensor)",
    cuda="qbe.kernels.triton.rows.fused:add_norm",
    fake=fake_add_norm,
)
GATE = register(
    "gate(Tensor gate, Tensor up, int inputs, int group, Tensor[] bits) -> (Tensor, Tensor)",
    cuda="qbe.kernels.triton.rows.fused:gate",
    fake=fake_gate,
)
CONVERTED_LINEARS = register(
    "converted_linears(Tensor x, Tensor ready, Tensor[] packed, Tensor[] meta, Tensor[] bits, Tensor[] originals, "
    "Tensor[] biases, int[] slices, int[] exponents, bool float32_output=False, bool batch_invariant=True) -> Tensor",
    cuda="qbe.kernels.triton.linear.merged:converted_linears",
    fake=fake_linears,
)


def norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, inputs: int, group: int, bits: Sequence[torch.Tensor] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm (Zhang and Sennrich 2019) as transformers' Llama has it: in float32, rounded, times weight.

    Args:
        x: float16 or bfloat16 [..., K], contiguous.
        weight: [K] in x's dtype.
        inputs: K padded as the weights of the linears are (`qbe.kernels.triton.linear.tiled.layout.padded_shape`).
        group: inputs that share a scale of these weights, 64 or 128.
        bits: int32 [rows] of each of these weights if the batch kernel reads x; none if the decode kernel does
            (`qbe.kernels.cuda.dispatch.input_form`). With bits, `inputs` are at most `WHOLE_ROW` there.

    Returns:
        The normed x, and uint8 [bytes], that as `qbe.kernels.triton.linear.tiled.half` or `.quantise` describes.
    """
    normed, ready = torch.ops.qbe.norm.default(x, weight, eps, inputs, group, bits)
    return normed, ready


def add_norm(
    x: torch.Tensor,
    added: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    inputs: int,
    group: int,
    bits: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`norm` of the sum of two tensors of the same shape, and that sum before it."""
    total, normed, ready = torch.ops.qbe.add_norm.default(x, added, weight, eps, inputs, group, bits)
    return total, normed, ready


def gate(
    gate: torch.Tensor, up: torch.Tensor, inputs: int, group: int, bits: Sequence[torch.Tensor] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """SwiGLU (Shazeer 2020): silu(gate), rounded, times up, both [..., K] with any strides; results as `norm`'s."""
    gated, ready = torch.ops.qbe.gate.default(gate, up, inputs, group, bits)
    return gated, ready
