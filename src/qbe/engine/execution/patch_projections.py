"""On a GPU: layers that read the same input run as one launch in steps that are not compiled.

A launch costs a row of a small matrix more than its bytes do. Queries, keys and values, and gate and up with SwiGLU
after them, are what `torch.compile` merges, too (`qbe.compile.merge`). Attention's own code calls its projections one
after the other with the same tensor; the first of them computes all, and the others hand over what it left for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from qbe.format.layout import SliceLayout
from qbe.kernels.cuda.dispatch import PREFILL_ROWS, decodes_together, merges
from qbe.kernels.ops import fused as fused_ops
from qbe.kernels.ops import merged_linear as merged_ops
from qbe.kernels.ops.rms_norm import rms_norm
from qbe.kernels.ops.swiglu import swiglu
from qbe.store.nested_tensor import NestedTensor

_ATTENTION = ("q_proj", "k_proj", "v_proj")
_GATED = ("act_fn", "gate_proj", "up_proj", "down_proj")
_ROWS = (1, 3)  # of the trials
# Attribute of a tensor: padded inputs and group, and itself as the decode kernel of such weights reads it. It is true
# as long as nobody writes to the tensor.
_QUANTISED = "quantised_rows"
_NEAR = {"rtol": 2**-5, "atol": 2**-6}  # exp's last bit, through a product

Replace = Callable[[nn.Module, Any], None]


def patch_projections(model: nn.Module, replace: Replace) -> dict[int, nn.Module]:
    """Let the layers of `model` that read the same input run together, wherever a trial shows the same result.

    Args:
        replace: puts a function in the place of a module's forward.

    Returns:
        Inputs -> one of the layers that read so many, for `norm_and_quantise`.
    """
    readers: dict[int, nn.Module] = {}
    for module in model.modules():
        if _merges(module, _ATTENTION):
            first, *others = (getattr(module, name) for name in _ATTENTION)
            first.beside = tuple(others)  # a tuple is no submodule
            replace(first, _first)
            for other in others:
                replace(other, _other)
        elif _merges(module, _GATED[1:3]) and _same_gated(module):
            first = getattr(module, _GATED[1])
            replace(module, _gated)
        else:
            continue
        readers[first.in_features] = first
    return readers


def projection_launches(model: nn.Module) -> Iterator[Callable[[], object]]:
    """Calls that together need every kernel of these layers, for each kind of layer once."""
    seen: set[object] = set()
    for module in model.modules():
        gated = _merges(module, _GATED[1:3])
        names = _GATED[1:3] if gated else _ATTENTION
        if not gated and not _merges(module, _ATTENTION):
            continue
        layers = [getattr(module, name) for name in names]
        kind = tuple(layer.weight.shape for layer in layers), tuple(layers[0].weight.slices), layers[0].bias is None
        if kind not in seen:
            seen.add(kind)
            for rows in (1 << i for i in range(PREFILL_ROWS.bit_length() - 1)):
                yield functools.partial(_zeros_through, layers, rows)
            if gated:
                yield functools.partial(_same_gated, module)


@torch.inference_mode()
def _zeros_through(layers: Sequence[nn.Linear], rows: int) -> object:
    weight: NestedTensor = layers[0].weight  # type: ignore[assignment]
    x = torch.zeros(rows, weight.in_features, dtype=weight.logical_dtype, device=weight.packed.device)
    return _merged(x, layers)


def _names_of(module: nn.Module) -> list[str]:
    code = getattr(type(module).forward, "__code__", None)
    return [] if code is None else list(code.co_names)


def _merges(module: nn.Module, names: Sequence[str]) -> bool:
    """Whether these are nested linears of a module whose forward calls them in this order."""
    used, layers = _names_of(module), [getattr(module, name, None) for name in names]
    if not all(type(layer) is nn.Linear for layer in layers) or not set(names) <= set(used):
        return False
    weights = [layer.weight for layer in layers]  # type: ignore[union-attr]
    if not all(isinstance(w, NestedTensor) and w.packed.dim() == 1 for w in weights):
        return False
    alike = {(tuple(w.slices), w.group_size, w.in_features, w.original is None, w.logical_dtype) for w in weights}
    biases = {layer.bias is None for layer in layers}  # type: ignore[union-attr]
    order = [used.index(name) for name in names]
    return len(alike) == len(biases) == 1 and order == sorted(order)


def _merged(x: torch.Tensor, layers: Sequence[nn.Module]) -> Sequence[torch.Tensor] | None:
    """The results of all layers, side by side; None where one launch does not serve them."""
    weights: list[NestedTensor] = [layer._parameters["weight"] for layer in layers]  # type: ignore[misc]
    first, width = weights[0], x.shape[-1]
    rows = x.numel() // width if width else 0
    if torch.is_grad_enabled() or width != first.in_features or x.dtype is not first.logical_dtype:
        return None
    enough = all(w.bits.shape[0] >= rows for w in weights)
    if not enough or not merges(rows, x.dtype, True, len(weights)):
        return None
    sizes, quantised = getattr(x, _QUANTISED, (None, None))
    if sizes is None or sizes != quantised_sizes(first, x):
        quantised = None
    y = _linears(x, quantised, layers, weights, rows)
    return y.split([w.shape[0] for w in weights], -1)


def _linears(
    x: torch.Tensor, quantised: torch.Tensor | None, layers: Sequence[nn.Module], weights: list[NestedTensor], rows: int
) -> torch.Tensor:
    first = weights[0]
    biases = [layer._parameters["bias"] for layer in layers]
    parts = (
        [w.packed for w in weights], [w.meta for w in weights], [w.bits[:rows] for w in weights],
        [] if first.original is None else [w.original for w in weights], [] if biases[0] is None else biases,
        first.slices, [w.exponent for w in weights],
    )  # fmt: skip
    if quantised is None:
        return merged_ops.nested_linears(x, *parts, first.batch_invariant)  # type: ignore[arg-type]
    y: torch.Tensor = torch.ops.qbe.quantised_linears.default(x, quantised, *parts)
    return y


def _first(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    parts = _merged(x, (self, *self.beside))  # type: ignore[misc]
    if parts is None:
        return nn.Linear.forward(self, x)
    for other, part in zip(self.beside, parts[1:], strict=True):  # type: ignore[arg-type]
        other.left = x, part
    return parts[0]


def _other(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    of, part = self.__dict__.pop("left", (None, None))
    return part if of is x and part is not None else nn.Linear.forward(self, x)


def _gated(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    parts = _merged(x, (self.gate_proj, self.up_proj))  # type: ignore[arg-type]
    if parts is None:
        parts = self.gate_proj(x), self.up_proj(x)  # type: ignore[operator]
    weight = self.down_proj._parameters["weight"]  # type: ignore[union-attr]
    sizes = quantised_sizes(weight, parts[0])
    if sizes is None:
        y: torch.Tensor = self.down_proj(swiglu(*parts))  # type: ignore[operator]
        return y
    gate, up = parts
    gated, quantised = fused_ops.gate(gate, up, *sizes)
    rows = gated.numel() // gated.shape[-1]
    return _linears(gated, quantised, [self.down_proj], [weight], rows)  # type: ignore[list-item]


def quantised_sizes(weight: object, x: torch.Tensor) -> tuple[int, int] | None:
    """Padded inputs and group of a weight whose kernel reads such an x quantised; None where it does not."""
    if not isinstance(weight, NestedTensor) or weight.packed.dim() != 1 or torch.is_grad_enabled():
        return None
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    fits = x.shape[-1] == weight.in_features and x.dtype is weight.logical_dtype and weight.bits.shape[0] >= rows
    if not fits or not decodes_together(rows, x.dtype, True, 1, weight.batch_invariant):
        return None
    from qbe.kernels.triton.linear.tiled.layout import padded_shape

    inputs = padded_shape(weight.shape[0], weight.in_features, SliceLayout.of(weight.slices))[1]
    return inputs, weight.group_size


def norm_and_quantise(x: torch.Tensor, weight: torch.Tensor, eps: float, reader: nn.Module) -> torch.Tensor:
    """`rms_norm` of x; where the layer `reader` multiplies few rows, it brings with it what that kernel reads."""
    sizes = quantised_sizes(reader._parameters["weight"], x)
    if sizes is None:
        return rms_norm(x, weight, eps)
    normed, quantised = fused_ops.norm(x, weight, eps, *sizes)
    setattr(normed, _QUANTISED, (sizes, quantised))
    return normed


@torch.inference_mode()
def _same_gated(module: nn.Module) -> bool:
    """Whether its forward is a SwiGLU layer's."""
    weight: NestedTensor = module.gate_proj.weight  # type: ignore[assignment,union-attr]
    if set(_names_of(module)) != set(_GATED) or any(True for _ in module.children() if isinstance(_, nn.Dropout)):
        return False
    generator = torch.Generator().manual_seed(0)
    for rows in _ROWS:
        if weight.bits.shape[0] < rows:
            continue
        x = torch.randn(1, rows, weight.in_features, generator=generator).to(weight.device, weight.logical_dtype)
        try:
            found, expected = _gated(module, x), type(module).forward(module, x)
        except (RuntimeError, TypeError):
            return False
        if not torch.allclose(found, expected, **_NEAR):  # type: ignore[arg-type]
            return False
    return True
