"""Mixtures of experts of a transformers model: where their matrices are, and how nested ones are multiplied.

Nearly all families call their experts through transformers' `ExpertsInterface`: a module with one parameter
`[experts, out, in]` (or `[experts, in, out]`) for each matrix, told the chosen experts and their weights. QBE registers
an implementation of that interface. Routing stays the model's own. Llama 4, whose experts see all tokens sorted by
expert and scaled by their scores, is served by a forward of its own.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from qbe.kernels.ops.experts import nested as ops
from qbe.kernels.ops.nested_linear import nested_linear
from qbe.kernels.reference.activations import word_of_byte
from qbe.kernels.reference.experts.nested import gated
from qbe.store.nested_experts import NestedExperts

NAME = "qbe"  # among transformers' implementations of experts
_LLAMA4 = "Llama4TextExperts"
_FIRST, _DOWN = ("gate_up_proj", "up_proj"), "down_proj"

Multiply = Callable[[str, int, torch.Tensor, torch.Tensor], torch.Tensor]
Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # states [T, H], ids and weights [T, k]


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer of a model.

    Attributes:
        name: of the module, such as `model.layers.3.mlp.experts`.
        parameters: names of its matrices, the one that reads the hidden states first.
    """

    name: str
    module: nn.Module
    parameters: tuple[str, str]

    @property
    def transposed(self) -> bool:
        """Whether a plain parameter is `[experts, in, out]`."""
        return bool(getattr(self.module, "is_transposed", type(self.module).__name__ == _LLAMA4))

    @property
    def count(self) -> int:
        """Experts."""
        matrix: Any = getattr(self.module, self.parameters[0])
        return len(matrix)

    def nested(self, parameter: str) -> NestedExperts | None:
        """Its nested matrices of this name; None where they are not."""
        found = getattr(self.module, parameter)
        return found if isinstance(found, NestedExperts) else None

    def weight(self, parameter: str, e: int) -> torch.Tensor:
        """One expert's 16-bit matrix [N, K]; a view where that is possible."""
        nested = self.nested(parameter)
        if nested is not None:
            assert nested.original is not None
            return nested.original[e]
        plain: torch.Tensor = getattr(self.module, parameter)[e]
        return plain.T if self.transposed else plain

    def bias(self, parameter: str) -> torch.Tensor | None:
        """[E, N] or None."""
        return getattr(self.module, f"{parameter}_bias", None)

    def site(self, parameter: str, e: int) -> str:
        """The name of the site of one expert's matrix."""
        return f"{self.name}.{parameter}.{e}"

    def sites(self) -> Iterator[tuple[str, str, int]]:
        """Name, parameter and expert of every site, in the order of the site table."""
        return ((self.site(p, e), p, e) for p in self.parameters for e in range(self.count))


def expert_layers(model: nn.Module) -> list[ExpertLayer]:
    """The experts of `model` that can be nested, in module order."""
    found = []
    for name, module in model.named_modules():
        interface = hasattr(module, "is_transposed") and hasattr(module, "has_gate")
        first = next((p for p in _FIRST if _stacked(module, p)), None)
        if (interface or type(module).__name__ == _LLAMA4) and first is not None and _stacked(module, _DOWN):
            found.append(ExpertLayer(name, module, (first, _DOWN)))
    return found


def _stacked(module: nn.Module, parameter: str) -> bool:
    plain = module._parameters.get(parameter)
    return isinstance(module._modules.get(parameter), NestedExperts) or (plain is not None and plain.dim() == 3)


def nested_experts(model: nn.Module) -> list[tuple[str, NestedExperts]]:
    """Name and matrices of everything that is nested of the model's experts, in module order."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, NestedExperts)]


def paged_experts(model: nn.Module) -> list[tuple[str, NestedExperts]]:
    """Those of them that a kernel multiplies as they are, so that their codes may lie in pages."""
    found = []
    for layer in expert_layers(model):
        nested = [layer.nested(p) for p in layer.parameters]
        if all(m is not None for m in nested) and gate_of(layer.module) is not None:
            found += [(f"{layer.name}.{p}", m) for p, m in zip(layer.parameters, nested, strict=True) if m is not None]
    return found


def install(layer: ExpertLayer, parameter: str, matrices: NestedExperts) -> None:
    """Puts nested matrices in the place of a parameter, or of others, and lets the module's forward read them."""
    module = layer.module
    module._parameters.pop(parameter, None)
    setattr(module, parameter, matrices)
    if (bias := layer.bias(parameter)) is not None:
        bias.requires_grad_(False)
    if all(layer.nested(p) is not None for p in layer.parameters):
        if type(module).__name__ == _LLAMA4:
            module.forward = types.MethodType(_llama4_forward, module)
        else:
            module.config._experts_implementation = NAME  # type: ignore[union-attr]


def remove(layer: ExpertLayer) -> None:
    """Puts the 16-bit parameters back, where no kernel of the device reads nested ones."""
    for parameter in layer.parameters:
        nested = layer.nested(parameter)
        if nested is not None:
            assert nested.original is not None
            delattr(layer.module, parameter)
            weight = nested.original.transpose(1, 2).contiguous() if layer.transposed else nested.original
            setattr(layer.module, parameter, nn.Parameter(weight, requires_grad=False))
    if type(layer.module).__name__ == _LLAMA4:
        vars(layer.module).pop("forward", None)


def served_on(device: torch.device) -> bool:
    """Whether a kernel of the device reads nested experts."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("qbe::nested_experts", device.type.upper()))


def experts_forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What transformers calls a module's forward with, once QBE's implementation is chosen."""
    first = self._modules.get(_FIRST[0]) or self._modules.get(_FIRST[1])
    down = self._modules.get(_DOWN)
    if not isinstance(first, NestedExperts) or not isinstance(down, NestedExperts):
        plain: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, hidden_states, top_k_index, top_k_weights)
        return plain
    if first.counter is not None:
        first.counter.see(top_k_index)
    return _multiplied(self, hidden_states, top_k_index, top_k_weights, first, down, first.rows_of(len(hidden_states)))


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def _llama4_forward(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """All tokens for every expert, scaled by their scores: those that did not choose it are zeros, and stay so."""
    first, down = self._modules[_FIRST[0]], self._modules[_DOWN]
    assert isinstance(first, NestedExperts)
    assert isinstance(down, NestedExperts)
    x, ids, weights = _routed(self, hidden_states)
    if first.counter is not None:
        first.counter.see(torch.where(ids < 0, len(first), ids).view(len(first), -1).T)
    rows = first.rows_of(len(x) // len(first)).repeat(len(first))
    return _multiplied(self, x, ids, weights, first, down, rows)


def _routed(module: nn.Module, hidden_states: torch.Tensor, *chosen: torch.Tensor) -> Routed:
    """What a module of experts was called with as states, ids and weights."""
    if chosen:
        return hidden_states, chosen[0], chosen[1]
    count = int(module.num_experts)  # type: ignore[arg-type]
    ids = torch.arange(count, device=hidden_states.device).repeat_interleave(len(hidden_states) // count)
    ids = torch.where((hidden_states != 0).any(-1), ids, -1)[:, None]
    return hidden_states, ids, torch.ones_like(ids, dtype=hidden_states.dtype)


def _multiplied(
    module: nn.Module, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, first: NestedExperts,
    down: NestedExperts, rows: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    form = gate_of(module)
    if form is not None:
        bias = getattr(module, f"{_FIRST[0]}_bias", None), getattr(module, f"{_DOWN}_bias", None)
        return ops.nested_experts(
            x, ids, weights, rows, first.matrices(bias[0]), down.matrices(bias[1]), first.slices, form.activation,
            form.interleaved, form.alpha, form.limit, first.page_bytes,
        )  # fmt: skip

    def multiply(parameter: str, e: int, some: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        matrices: Any = module._modules[parameter]
        words = word_of_byte(matrices.precision[rows[tokens].long(), e])
        bias = getattr(module, f"{parameter}_bias", None)
        return nested_linear(
            some, matrices.packed[e], matrices.meta[e], words,
            None if matrices.original is None else matrices.original[e], None if bias is None else bias[e],
            matrices.slices, int(matrices.exponents[e]),
        )  # fmt: skip

    return by_expert(module, x, ids, weights, multiply)


def by_expert(
    module: nn.Module, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, multiply: Multiply
) -> torch.Tensor:
    """The experts of a layer one after the other, with the module's own activation.

    Args:
        x: [T, H]. ids, weights: [T, k]; an id that is no expert's chooses nobody.
        multiply: parameter, expert, states [t, K] and which tokens these are of, int64 [t] -> [t, N].
    """
    first = next(p for p in _FIRST if hasattr(module, p))
    activate: Any = getattr(module, "_apply_gate", None) if getattr(module, "has_gate", True) else module.act_fn
    out = torch.zeros_like(x)
    for e in ids.unique().tolist():
        if not 0 <= e < int(module.num_experts):  # type: ignore[arg-type]
            continue
        tokens, slot = torch.where(ids == e)
        both = multiply(first, e, x[tokens], tokens)
        inner = activate(both) if activate is not None else _plain_gate(module, both)
        y = multiply(_DOWN, e, inner, tokens)
        if getattr(module, "has_post_expert_norm", False):
            y = module.post_expert_norm(y)  # type: ignore[operator]
        out = out.index_add(0, tokens, (y * weights[tokens, slot, None]).to(out.dtype))
    return out


def _plain_gate(module: nn.Module, both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    activation: Any = module.act_fn
    y: torch.Tensor = activation(gate) * up
    return y


def original_products(layer: ExpertLayer) -> Multiply:
    """The layer's products with its 16-bit matrices, which let gradients through."""

    def multiply(parameter: str, e: int, x: torch.Tensor, _tokens: torch.Tensor) -> torch.Tensor:
        bias = layer.bias(parameter)
        return nn.functional.linear(x, layer.weight(parameter, e), None if bias is None else bias[e])

    return multiply


@contextmanager
def tapped(layers: list[ExpertLayer], multiply: Callable[[ExpertLayer], Multiply]) -> Iterator[None]:
    """Inside, these layers are computed expert by expert with other products, which may watch what they are given."""

    def forward(layer: ExpertLayer) -> Callable[..., torch.Tensor]:
        products = multiply(layer)
        return lambda *args, **kwargs: by_expert(
            layer.module, *_routed(layer.module, *args, *kwargs.values()), products
        )

    with ExitStack() as stack:
        for layer in layers:
            before = vars(layer.module).get("forward")
            layer.module.forward = forward(layer)
            stack.callback(_restore, layer.module, before)
        yield


def _restore(module: nn.Module, forward: Any) -> None:
    vars(module).pop("forward", None)
    if forward is not None:
        module.forward = forward


@contextmanager
def watched(layers: list[ExpertLayer], see: Callable[[ExpertLayer, torch.Tensor], None]) -> Iterator[None]:
    """Inside, `see` is told the ids [T, k] that each call of these layers chooses."""

    def hook(layer: ExpertLayer) -> Callable[..., None]:
        return lambda module, args, kwargs: see(layer, _routed(module, *args, *kwargs.values())[1])

    hooks = [layer.module.register_forward_pre_hook(hook(layer), with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


@dataclass(frozen=True)
class Gate:
    """An activation as `qbe::nested_experts` takes it."""

    activation: str
    interleaved: bool = False
    alpha: float = 1.0
    limit: float = 0.0


def gate_of(module: nn.Module) -> Gate | None:
    """The kernel's form of a module's activation, found by a trial; None where it has none."""
    known: Any = vars(module).get("qbe_gate", False)
    if known is False:
        with torch.inference_mode(False), torch.no_grad():
            known = vars(module)["qbe_gate"] = _find_gate(module)
    return known


def _find_gate(module: nn.Module) -> Gate | None:
    if not getattr(module, "has_gate", True) or getattr(module, "has_post_expert_norm", False):
        return None
    both = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)) * 6
    apply: Any = getattr(module, "_apply_gate", None)
    try:
        wanted = apply(both) if apply is not None else _plain_gate(module, both)
    except (RuntimeError, TypeError, ValueError):
        return None
    config = getattr(module, "config", None)
    limits = {float(v) for owner in (module, config) for key, v in vars(owner or object).items()
              if "limit" in key and isinstance(v, int | float) and v > 0}  # fmt: skip
    alphas = {1.0, *(float(v) for v in (getattr(module, "alpha", None),) if isinstance(v, int | float))}
    for interleaved in (False, True):
        for activation in ops.ACTIVATIONS:
            for alpha in alphas if activation == ops.SWIGLU_OAI else (1.0,):
                for limit in (0.0, *sorted(limits)):
                    if torch.allclose(gated(both, activation, interleaved, alpha, limit), wanted, rtol=1e-5, atol=1e-5):
                        return Gate(activation, interleaved, alpha, limit)
    return None
