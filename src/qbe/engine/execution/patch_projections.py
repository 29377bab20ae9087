"""On a GPU: layers that read the same input run as one launch in steps that are not compiled.

A launch costs a row of a small matrix more than its bytes do. Queries, keys and values, and gate and up with SwiGLU
after them, are what `torch.compile` merges, too (`qbe.compile.merge`). Attention's own code calls its projections one
after the other with the same tensor; the first of them computes all, and the others hand over what it left for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from qbe.format.layout import SliceLayout
from qbe.kernels.cuda.dispatch import PREFILL_ROWS, WHOLE_ROW, input_form, merges
from qbe.kernels.ops import fused as fused_ops
from qbe.kernels.ops import merged_linear as merged_ops
from qbe.kernels.ops.rms_norm import add_rms_norm, rms_norm
from qbe.kernels.ops.swiglu import swiglu
from qbe.store.nested_tensor import NestedTensor

_ATTENTION = ("q_proj", "k_proj", "v_proj")
_GATED = ("act_fn", "gate_proj", "up_proj", "down_proj")
_ROWS = (1, 3)  # of the trials
# Attribute of a tensor: `input_sizes` of the layers that it is for, and itself as their kernel reads it. It is true as
# long as nobody writes to the tensor.
_READY = "ready_rows"
_NEAR = {"rtol": 2**-5, "atol": 2**-6}  # exp's last bit, through a product

Replace = Callable[[nn.Module, Any], None]


def patch_projections(model: nn.Module, replace: Replace) -> dict[int, nn.Module]:
    """Let the layers of `model` that read the same input run together, wherever a trial shows the same result.

    Args:
        replace: puts a function in the place of a module's forward.

    Returns:
        Inputs -> one of the layers that read so many, for `norm_and_convert`.
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
            for rows in (1, PREFILL_ROWS // 2):
                yield functools.partial(_zeros_normed, layers, rows)
                if gated:
                    yield functools.partial(_zeros_through, [module], rows)
            if gated:
                yield functools.partial(_same_gated, module)


def _zeros(layer: nn.Module, rows: int) -> torch.Tensor:
    weight: NestedTensor = layer.weight  # type: ignore[assignment]
    return torch.zeros(1, rows, weight.in_features, dtype=weight.logical_dtype, device=weight.packed.device)


@torch.inference_mode()
def _zeros_through(layers: Sequence[nn.Module], rows: int) -> object:
    """Through layers that read the same input, or through a SwiGLU layer."""
    if not isinstance(layers[0], nn.Linear):
        return _gated(layers[0], _zeros(layers[0].gate_proj, rows))  # type: ignore[arg-type]
    return _merged(_zeros(layers[0], rows), layers)


@torch.inference_mode()
def _zeros_normed(layers: Sequence[nn.Module], rows: int) -> object:
    x = _zeros(layers[0], rows)
    weight = x.new_zeros(x.shape[-1])
    return [norm_and_convert(x, added, weight, 1e-6, given) for added in (None, x) for given in (layers, ())]


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
    sizes, ready = getattr(x, _READY, (None, None))
    if sizes is None or not _alike(sizes, input_sizes(weights, x)):
        ready = None
    y = _linears(x, ready, layers, weights, rows)
    return y.split([w.shape[0] for w in weights], -1)


def _linears(
    x: torch.Tensor, ready: torch.Tensor | None, layers: Sequence[nn.Module], weights: list[NestedTensor], rows: int
) -> torch.Tensor:
    first = weights[0]
    biases = [layer._parameters["bias"] for layer in layers]
    parts = (
        [w.packed for w in weights], [w.meta for w in weights], [w.bits[:rows] for w in weights],
        [] if first.original is None else [w.original for w in weights], [] if biases[0] is None else biases,
        first.slices, [w.exponent for w in weights],
    )  # fmt: skip
    if ready is None:
        return merged_ops.nested_linears(x, *parts, first.batch_invariant)  # type: ignore[arg-type]
    y: torch.Tensor = torch.ops.qbe.converted_linears.default(x, ready, *parts, False, first.batch_invariant)
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
    sizes = input_sizes([weight], parts[0])
    if sizes is None:
        y: torch.Tensor = self.down_proj(swiglu(*parts))  # type: ignore[operator]
        return y
    gate, up = parts
    rows = gate.numel() // gate.shape[-1]
    gated, ready = fused_ops.gate(gate, up, *sizes.of(rows))
    return _linears(gated, ready, [self.down_proj], [weight], rows)  # type: ignore[list-item]


class InputSizes(NamedTuple):
    """How a launch for some weights reads its rows.

    Attributes:
        inputs: padded.
        group: inputs of a scale.
        words: the precision words of each weight, if these make a difference (`input_form` is `half`).
    """

    inputs: int
    group: int
    words: tuple[torch.Tensor, ...]

    def of(self, rows: int) -> tuple[int, int, list[torch.Tensor]]:
        """The last arguments of `qbe.kernels.ops.fused`'s ops for so many rows."""
        return self.inputs, self.group, [w[:rows] for w in self.words]


def _alike(a: InputSizes, b: InputSizes | None) -> bool:
    """Whether what was made for a is what b reads: for the same words, not only equal ones."""
    return b is not None and a[:2] == b[:2] and list(map(id, a.words)) == list(map(id, b.words))


def input_sizes(weights: Sequence[Any], x: torch.Tensor) -> InputSizes | None:
    """How the launch for these weights reads rows such as x; None where it takes them as they are, or is none."""
    first, k = weights[0], x.shape[-1]
    if torch.is_grad_enabled() or not all(isinstance(w, NestedTensor) and w.packed.dim() == 1 for w in weights):
        return None
    rows = x.numel() // k if k else 0
    if k != first.in_features or x.dtype is not first.logical_dtype or first.bits.shape[0] < rows:
        return None
    form = input_form(rows, x.dtype, True, len(weights), first.batch_invariant)
    if form is None:
        return None
    from qbe.kernels.triton.linear.tiled.layout import padded_shape

    inputs = padded_shape(first.shape[0], k, SliceLayout.of(first.slices))[1]
    if form == "half" and inputs > WHOLE_ROW:
        return None
    return InputSizes(inputs, first.group_size, tuple(w.bits for w in weights) if form == "half" else ())


def norm_and_convert(
    x: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    readers: Sequence[nn.Module],
    generic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x plus `added`, if that is not None, and its RMS norm, which brings with it what the layers `readers` read.

    Args:
        generic: these stand for others that read as many inputs, with words of their own.
    """
    sizes = input_sizes([r._parameters["weight"] for r in readers], x) if readers else None
    if sizes is None or (generic and sizes.words):
        return (x, rms_norm(x, weight, eps)) if added is None else add_rms_norm(x, added, weight, eps)
    form = sizes.of(x.numel() // x.shape[-1])
    if added is None:
        normed, ready = fused_ops.norm(x, weight, eps, *form)
    else:
        x, normed, ready = fused_ops.add_norm(x, added, weight, eps, *form)
    setattr(normed, _READY, (sizes, ready))
    return x, normed


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
