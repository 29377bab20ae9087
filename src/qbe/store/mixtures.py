"""What whole assignments of bits do to a model's output: the divergence of each on every passage of a text.

Where the model is a chain of layers it is run layer by layer (`qbe.store.layerwise`), in float32 whatever the model is
in, each layer once for all assignments; elsewhere as a whole, from its nested weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import linear

from qbe.kernels.cpu import dispatch
from qbe.kernels.cpu.linear.nested import dequantised
from qbe.kernels.reference.nested_linear import dequantise
from qbe.sites import FULL_BITS, Site, SiteTable
from qbe.store.experts import ExpertLayer, Multiply, expert_layers, tapped
from qbe.store.layerwise import Layerwise, NotLayered, Pass, first, on
from qbe.store.nested_experts import NestedExperts
from qbe.store.nested_tensor import NestedTensor
from qbe.store.sensitivity import decoder_layers, divergence, full_bits, logits_of

Assignment = Sequence[int]  # the gear of every nested site
Numbers = npt.NDArray[np.float64]


class Mixtures:
    """Divergences of assignments on one text, whose pass at 16 bits is made once for however many are asked for.

    Args:
        model: nested, with its 16-bit originals.
        tokens: int64 [passages, tokens].
        device: where layers are computed; a model that is no chain of them has to be there already.
        step: called once for each layer and once at the end, of the pass at 16 bits and of every call.
    """

    def __init__(
        self, model: nn.Module, table: SiteTable, tokens: torch.Tensor, device: torch.device,
        step: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._model, self._table, self._tokens, self._step = model, table, tokens, step
        try:
            self._layers: _Layers | None = _Layers(model, table, tokens, device, step)
        except NotLayered:
            self._layers = None

    def divergences(self, assignments: Sequence[Assignment]) -> Numbers:
        """KL divergence of each assignment from 16 bits, nats per token, float64 [assignments, passages]."""
        if self._layers is not None:
            return self._layers.divergences(assignments)
        found = as_a_whole(self._model, self._table, self._tokens, assignments)
        self._step()
        return found


@torch.inference_mode()
def as_a_whole(model: nn.Module, table: SiteTable, tokens: torch.Tensor, assignments: Sequence[Assignment]) -> Numbers:
    """The same by whole passes of the model where it is, in its own dtype."""
    found = np.zeros((len(assignments), len(tokens)))
    experts = {name: m for name, m in model.named_modules() if isinstance(m, NestedExperts)}
    with full_bits(model, table) as weights:
        for at, passage in enumerate(tokens.to(next(model.parameters()).device)):
            _set(table, [FULL_BITS] * len(table.nested), weights, experts)
            reference = logits_of(model, passage[None]).float()
            p = reference.softmax(-1)
            for i, gears in enumerate(assignments):
                _set(table, gears, weights, experts)
                found[i, at] = divergence(reference, p, logits_of(model, passage[None]))
    return found


def _set(
    table: SiteTable, gears: Assignment, weights: dict[str, NestedTensor], experts: dict[str, NestedExperts]
) -> None:
    of_experts: dict[str, list[int]] = {name: [FULL_BITS] * len(m) for name, m in experts.items()}
    for site, gear in zip(table.nested, gears, strict=True):
        if site.expert is None:
            weights[site.name].set_bits(gear)
        else:
            of_experts[site.name.rpartition(".")[0]][site.expert] = gear
    for name, bits in of_experts.items():
        experts[name].set_bits(bits)


class _Layers:
    """A chain of layers, with every assignment's states brought from one to the next.

    Raises:
        NotLayered: the model is none.
    """

    def __init__(
        self, model: nn.Module, table: SiteTable, tokens: torch.Tensor, device: torch.device, step: Callable[[], None]
    ) -> None:  # fmt: skip
        self._step = step
        self._walk = Layerwise(model, decoder_layers(model, table), device)
        self._sites = table.nested
        self._places = {site.name: i for i, site in enumerate(table.nested)}
        names = {id(module): name for name, module in model.named_modules()}
        self._linears: list[dict[str, nn.Linear]] = [
            {names[id(m)]: m for m in layer.modules() if names[id(m)] in self._places and isinstance(m, nn.Linear)}
            for layer in self._walk.layers
        ]
        stacked = expert_layers(model)
        inside = [{id(m) for m in layer.modules()} for layer in self._walk.layers]
        self._experts = [[e for e in stacked if id(e.module) in some] for some in inside]
        self._head = names[id(self._walk.head.module)]
        there = {n for some in self._linears for n in some} | {self._head}
        there |= {n for some in self._experts for e in some for n, _, _ in e.sites()}
        if set(self._places) - there:
            raise NotLayered
        # `Layerwise` puts originals in the place of nested weights while a layer is there.
        self._nested: dict[str, Any] = {
            s.name: model.get_submodule(s.name).weight for s in table.nested if s.expert is None
        }
        self._passed = self._walk.run(tokens, lambda *_: step(), head=False)
        full = first(self._passed.outputs[-1])
        with self._head_at(FULL_BITS):
            self._reference = [self._walk.logits(self._passed, full, t).float() for t in range(len(tokens))]
        step()

    @torch.no_grad()
    def divergences(self, assignments: Sequence[Assignment]) -> Numbers:
        states = [self._passed.hidden(0)] * len(assignments)
        for i, layer in enumerate(self._walk.layers):
            with on(layer.modules(), self._walk.device):
                self._through(i, self._passed, assignments, states)
            self._step()
        found = self._at_head(self._passed, assignments, states)
        self._step()
        return found

    def _through(self, i: int, passed: Pass, assignments: Sequence[Assignment], states: list[torch.Tensor]) -> None:
        """Moves the states of every assignment through a layer that is on the device."""
        products = _Products(self._sites, self._places, self._nested, self._walk.device)
        here = [self._places[n] for n in (*self._linears[i], *(n for e in self._experts[i] for n, _, _ in e.sites()))]
        moved: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
        before = list(states)  # assignments that are alike up to here go on together
        with tapped(self._experts[i], products.experts), ExitStack() as stack:
            for name, module in self._linears[i].items():
                module.forward = products.linear(name, module)  # type: ignore[method-assign, assignment]
                stack.callback(delattr, module, "forward")
            for a, gears in enumerate(assignments):
                same = id(before[a]), tuple(gears[place] for place in here)
                if same not in moved:
                    products.gears = gears
                    moved[same] = passed.call(i, self._walk.layers[i], before[a])
                states[a] = moved[same]

    def _at_head(self, passed: Pass, assignments: Sequence[Assignment], states: list[torch.Tensor]) -> Numbers:
        """Divergences from what the last layer gave."""
        walk, place = self._walk, self._places.get(self._head)
        found = np.zeros((len(assignments), passed.tokens.shape[0]))
        gears = [FULL_BITS if place is None else a[place] for a in assignments]
        for gear in sorted(set(gears)):
            with self._head_at(gear):
                for t, full in enumerate(self._reference):
                    p = full.softmax(-1)
                    for a in (a for a, own in enumerate(gears) if own == gear):
                        found[a, t] = divergence(full, p, walk.logits(passed, states[a], t))
        return found

    @contextmanager
    def _head_at(self, gear: int) -> Iterator[None]:
        """Inside, the head multiplies by its weight at this gear, in float32 on the device."""
        head = self._walk.head
        before = head.weight
        full = gear >= FULL_BITS
        head.weight = before.to(self._walk.device).float() if full else at_gear(
            self._nested[self._head], gear, self._walk.device
        )  # fmt: skip
        try:
            yield
        finally:
            head.weight = before


class _Products:
    """The products of one layer at the gears of an assignment; a matrix at a gear is dequantised once."""

    def __init__(
        self, sites: Sequence[Site], places: dict[str, int], nested: dict[str, Any], device: torch.device
    ) -> None:
        self._sites, self._places, self._nested, self._device = sites, places, nested, device
        self._read: dict[tuple[str, int], torch.Tensor] = {}
        self.gears: Assignment = ()

    def _weight(self, name: str, full: torch.Tensor, nested: Callable[[], NestedTensor]) -> torch.Tensor:
        gear = self.gears[self._places[name]]
        if gear >= FULL_BITS:
            return full
        if (name, gear) not in self._read:
            self._read[name, gear] = at_gear(nested(), gear, self._device)
        return self._read[name, gear]

    def linear(self, name: str, module: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        full, bias = module.weight, module.bias
        return lambda x: linear(x, self._weight(name, full, lambda: self._nested[name]), bias)

    def experts(self, layer: ExpertLayer) -> Multiply:
        def multiply(parameter: str, e: int, x: torch.Tensor, _tokens: torch.Tensor) -> torch.Tensor:
            matrices, bias = layer.nested(parameter), layer.bias(parameter)
            assert matrices is not None
            name, full = layer.site(parameter, e), layer.weight(parameter, e)
            weight = self._weight(name, full, lambda: matrices.expert(e))
            return linear(x, weight, None if bias is None else bias[e])

        return multiply


def at_gear(nested: NestedTensor, gear: int, device: torch.device) -> torch.Tensor:
    """The weight at a gear below 16, float32 [N, K] on the device."""
    packed, meta = nested.canonical_packed().to(device), nested.meta.to(device)
    if device.type == "cpu" and dispatch.dequantises(torch.float32):
        return dequantised(
            packed, meta, gear, nested.slices, nested.exponent, nested.in_features, torch.float32
        )  # fmt: skip
    return dequantise(packed, meta, nested.exponent, nested.slices, nested.in_features, gear)
