"""Custom ops that a compiled decode step on a GPU has in place of a norm or a gate: what makes the input of nested
linears also brings it into the form that their decode kernel reads, which else is a launch of its own.

`qbe.compile.fuse` puts them into compiled graphs; nobody need call them. `qbe::quantised_linears` is
`qbe.kernels.ops.merged_linear.nested_linears` of one to three weights and up to 16 rows, with x quantised already; a
single one may be `float32_output` (`qbe.kernels.ops.nested_linear`).
"""

from __future__ import annotations

from typing import Any

import torch

from qbe.kernels.ops import merged_linear as merged_ops

_library = torch.library.Library("qbe", "FRAGMENT")
_SAFE = (torch.Tag.pt2_compliant_tag,)
_library.define("norm(Tensor x, Tensor weight, float eps, int inputs, int group) -> (Tensor, Tensor)", tags=_SAFE)
_library.define(
    "add_norm(Tensor x, Tensor added, Tensor weight, float eps, int inputs, int group) -> (Tensor, Tensor, Tensor)",
    tags=_SAFE,
)
_library.define("gate(Tensor gate, Tensor up, int inputs, int group) -> (Tensor, Tensor)", tags=_SAFE)
_library.define(
    "quantised_linears(Tensor x, Tensor quantised, Tensor[] packed, Tensor[] meta, Tensor[] bits, Tensor[] originals, "
    "Tensor[] biases, int[] slices, int[] exponents, bool float32_output=False) -> Tensor",
    tags=_SAFE,
)


def norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, inputs: int, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm (Zhang and Sennrich 2019) as transformers' Llama has it: in float32, rounded, times weight.

    Args:
        x: float16 or bfloat16 [..., K], contiguous.
        weight: [K] in x's dtype.
        inputs: K padded as the decode kernel's weights are (`qbe.kernels.triton.layout.padded_shape`).
        group: inputs that share a scale of these weights, 64 or 128.

    Returns:
        The normed x, and uint8 [bytes], that as `qbe.kernels.triton.tiled_quantise` describes.
    """
    normed, quantised = torch.ops.qbe.norm.default(x, weight, eps, inputs, group)
    return normed, quantised


def add_norm(
    x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float, inputs: int, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`norm` of the sum of two tensors of the same shape, and that sum before it."""
    total, normed, quantised = torch.ops.qbe.add_norm.default(x, added, weight, eps, inputs, group)
    return total, normed, quantised


def gate(gate: torch.Tensor, up: torch.Tensor, inputs: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """SwiGLU (Shazeer 2020): silu(gate), rounded, times up, both [..., K] with any strides; results as `norm`'s."""
    gated, quantised = torch.ops.qbe.gate.default(gate, up, inputs, group)
    return gated, quantised


def _quantised(x: torch.Tensor, inputs: int, group: int) -> torch.Tensor:
    # The size is `qbe.kernels.triton.tiled_quantise.quantised_bytes`, which needs Triton.
    rows = x.numel() // x.shape[-1]
    return x.new_empty(2 * rows * inputs + 16 * rows * (inputs // group), dtype=torch.uint8)


@torch.library.register_fake("qbe::norm", lib=_library)
def _fake_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, inputs: int, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), _quantised(x, inputs, group)


@torch.library.register_fake("qbe::add_norm", lib=_library)
def _fake_add_norm(
    x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float, inputs: int, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), _quantised(x, inputs, group)


@torch.library.register_fake("qbe::gate", lib=_library)
def _fake_gate(gate: torch.Tensor, up: torch.Tensor, inputs: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    return gate.new_empty(gate.shape), _quantised(gate, inputs, group)


@torch.library.register_fake("qbe::quantised_linears", lib=_library)
def _fake_linears(
    x: torch.Tensor, quantised: torch.Tensor, packed: Any, meta: Any, bits: Any, originals: Any, biases: Any,
    slices: Any, exponents: Any, float32_output: bool = False,
) -> torch.Tensor:  # fmt: skip
    y = merged_ops._fake(x, packed, meta, bits, originals, biases, slices, exponents)
    return y.float() if float32_output else y


def _norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, inputs: int, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    from qbe.kernels.triton.fused_rows import norm as kernel

    return kernel(x, None, weight, eps, inputs, group)[1:]


def _add_norm(
    x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float, inputs: int, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from qbe.kernels.triton.fused_rows import norm as kernel

    return kernel(x, added, weight, eps, inputs, group)


def _gate(gate: torch.Tensor, up: torch.Tensor, inputs: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    from qbe.kernels.triton.fused_rows import gate as kernel

    return kernel(gate, up, inputs, group)


def _linears(
    x: torch.Tensor, quantised: torch.Tensor, packed: Any, meta: Any, bits: Any, originals: Any, biases: Any,
    slices: Any, exponents: Any, float32_output: bool = False,
) -> torch.Tensor:  # fmt: skip
    from qbe.kernels.triton.nested_linears import nested_linears as kernel

    return kernel(
        x, packed, meta, bits, originals, biases, slices, exponents, ready=quantised, float32_output=float32_output
    )


for _name, _kernel in (("norm", _norm), ("add_norm", _add_norm), ("gate", _gate), ("quantised_linears", _linears)):
    _library.impl(_name, _kernel, "CUDA")
