"""Sensitivities from gradients: what `qbe.store.sensitivity` measures site by site, for all sites at once.

A site at fewer bits adds an error e to its outputs. To second order the divergence of a row of logits is half the
variance of what that does to them under the 16-bit model's distribution p: half the mean of (r J e)^2, with r of the
covariance of one token drawn from p, and r J the gradient that one backward pass brings to every site (as
`qbe.learning.sensitivities`, which asks about single texts and tokens). r is made of tokens drawn from p, with weights
that add up to 0 and whose squares add up to 1: that is its covariance, and it needs a few rows of the output head where
a normal r needs all of them. The head's own errors come from the drawn tokens, too.

No gradient shows that an error in one layer sends a token to other experts in a later one. Measuring does: such tokens
are few, and can have most of what an early layer's experts do.

Forward and backward go layer by layer (`qbe.store.layerwise`), so that a device needs room for one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn.functional import linear

from qbe.format import scales
from qbe.kernels.reference import eight_bit_rows
from qbe.kernels.reference.activations import eight_bits
from qbe.kernels.reference.nested_linear import dequantise
from qbe.sites import ACTIVATION_GEARS, FULL_BITS, KEEPS_ACTIVATIONS, Role
from qbe.store.expert_use import ExpertUse, shrunk
from qbe.store.experts import ExpertLayer, Multiply, expert_layers, tapped
from qbe.store.kv_estimate import KVEstimate
from qbe.store.layerwise import Layerwise, NotLayered, Pass, on
from qbe.store.nested_tensor import NestedTensor
from qbe.store.sensitivity import DIFFICULT, Sensitivity

DRAWS = 64  # gradients of a segment of the text in all; a backward pass brings one for each segment
TOKENS = 16  # drawn for each row of a pass
HEAD_TOKENS = 64  # drawn for each row to tell the head's own errors by

Way = int | str  # a gear of the weight; `ACTIVATIONS`; a format of native products
ACTIVATIONS = "activations"


def drawn(p: torch.Tensor, draws: int, generator: torch.Generator) -> torch.Tensor:
    """Tokens drawn from each row of p [rows, vocabulary], int64 [rows, draws]."""
    return torch.multinomial(p, draws, replacement=True, generator=generator)


def zero_sum(rows: int, draws: int, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """Weights [rows, draws] of either sign that add up to 0, and their squares to 1."""
    signs = torch.ones(draws, device=device)
    signs[draws // 2 :] = -1
    order = torch.rand(rows, draws, generator=generator, device=device).argsort(-1)
    return signs[order] / draws**0.5


def errors(x: torch.Tensor, full: torch.Tensor, nested: NestedTensor, ways: Sequence[Way]) -> torch.Tensor:
    """What each way of lowering a site changes of its outputs.

    Args:
        x: float32 [rows, K], its inputs.
        full: float32 [N, K], its 16-bit weight.
        nested: the same weight, nested.

    Returns:
        float32 [ways, rows, N].
    """
    y, found, there = x @ full.T, [], _moved(nested, x.device)
    for way in ways:
        if isinstance(way, int):
            found.append(x @ (_read(there, way) - full).T)
        elif way == ACTIVATIONS:
            found.append((eight_bits(x, nested.group_size) - x) @ full.T)
        else:
            bound = scales.largest_of_rows(there.meta, there.exponent, there.layout, there.layout.total_bits)
            largest = torch.maximum(bound, full.abs().amax(-1))
            found.append(eight_bit_rows.linear(x, full, eight_bit_rows.DTYPES[way], largest) - y)
    return torch.stack(found)


def _moved(nested: NestedTensor, device: torch.device) -> NestedTensor:
    """The weight without its original, on the device in the canonical layout."""
    return NestedTensor(
        nested.canonical_packed().to(device), nested.meta.to(device), nested.bits, nested.slices, nested.group_size,
        nested.exponent, nested.in_features, nested.logical_dtype,
    )  # fmt: skip


def _read(nested: NestedTensor, bits: int) -> torch.Tensor:
    """The weight at these bits, float32 [N, K]."""
    return dequantise(nested.packed, nested.meta, nested.exponent, nested.slices, nested.in_features, bits)


def ways_of(role: Role, precisions: Sequence[int]) -> list[Way]:
    """Every way of lowering a site that is told."""
    if role is Role.MOE_EXPERT:
        return [*precisions, ACTIVATIONS]
    return [*precisions, *(() if role in KEEPS_ACTIVATIONS else (ACTIVATIONS, *eight_bit_rows.DTYPES))]


class Estimate:
    """Estimates of one model, from a forward pass and as many backward ones as give `draws` gradients of segments.

    Args:
        walk: the model.
        sites: name -> role of those that are, or will be, nested.
        tokens: int64 [texts, tokens].
        kv_tokens: int64 [texts, tokens], for the KV cache; None leaves it out.
        precisions: of the store.

    Raises:
        NotLayered: the model is built otherwise; then it has to be measured.
    """

    def __init__(
        self, walk: Layerwise, sites: Mapping[str, Role], tokens: torch.Tensor, kv_tokens: torch.Tensor | None,
        precisions: Sequence[int], draws: int = DRAWS,
    ) -> None:  # fmt: skip
        self._walk, self._draws, self._precisions = walk, max(1, draws // len(tokens)), tuple(precisions)
        names = {id(module): name for name, module in walk.model.named_modules()}
        self._of_layer: list[dict[str, nn.Linear]] = [
            {names[id(m)]: m for m in layer.modules() if names[id(m)] in sites and isinstance(m, nn.Linear)}
            for layer in walk.layers
        ]
        stacked = expert_layers(walk.model)
        inside = [{id(m) for m in layer.modules()} for layer in walk.layers]
        self._experts_of_layer = [[e for e in stacked if id(e.module) in some] for some in inside]
        of_experts = {name for some in self._experts_of_layer for e in some for name, _, _ in e.sites()}
        self.counts: dict[str, int] = {}
        outside = set(sites) - {n for some in self._of_layer for n in some} - of_experts
        self._head = names[id(walk.head.module)]
        if outside - {self._head}:
            raise NotLayered
        self._roles = sites
        self._found: dict[str, dict[Way, float]] = {}
        generator = torch.Generator(walk.device).manual_seed(0)
        self._pass = walk.run(tokens)
        logits, self._pass.logits = self._pass.logits, None
        assert logits is not None
        rows = logits.flatten(0, 1).float()
        del logits
        p = rows.softmax(-1)
        entropy = torch.cat([Categorical(logits=r, validate_args=False).entropy() for r in rows.split(32)])
        self.difficult_entropy = float(entropy.quantile(1 - DIFFICULT))
        self._gradients = [self._tail(p, rows, generator) for _ in range(self._draws)]
        self._head_tokens = drawn(p, HEAD_TOKENS, generator) if self._head in sites else None
        del p, rows
        self._kv = KVEstimate(walk, kv_tokens, generator, drawn, zero_sum) if kv_tokens is not None else None

    def _tail(self, p: torch.Tensor, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        tokens = drawn(p, TOKENS, generator)
        return gradient_of_drawn(
            self._walk, self._pass, logits, tokens, zero_sum(len(tokens), TOKENS, generator, p.device)
        )

    def layer(self, i: int, nested: Mapping[str, NestedTensor]) -> None:
        """Goes back through a layer, from the last to the first, whose sites have these weights."""
        with on(self._walk.layers[i].modules(), self._walk.device):
            self.layer_there(i, nested)

    def layer_there(self, i: int, nested: Mapping[str, NestedTensor]) -> None:
        """The same of a layer that is on the device already."""
        walk, passed, sites = self._walk, self._pass, self._of_layer[i]
        texts = passed.tokens.shape[0]
        sums: dict[str, torch.Tensor] = {}
        totals: dict[str, torch.Tensor] = {}

        def multiplying(name: str, module: nn.Linear, ways: list[Way]) -> Callable[[torch.Tensor], torch.Tensor]:
            weight, bias = module.weight, module.bias

            def forward(x: torch.Tensor) -> torch.Tensor:
                y = linear(x, weight, bias)
                if y.numel() % (texts * weight.shape[0]):
                    raise NotLayered
                with torch.no_grad():
                    wrong = errors(x.detach().flatten(0, -2), weight, nested[name], ways)
                wrong = wrong.view(len(ways), texts, -1)

                def add(gradient: torch.Tensor) -> None:
                    product = torch.einsum("wte,te->wt", wrong, gradient.reshape(texts, -1).float())
                    sums[name] = sums.get(name, 0.0) + product

                y.register_hook(add)
                return y

            return forward

        experts = ExpertErrors(self._precisions, passed.tokens)
        with torch.enable_grad(), tapped(self._experts_of_layer[i], experts.watching), ExitStack() as stack:
            for name, module in sites.items():
                module.forward = multiplying(name, module, ways_of(self._roles[name], self._precisions))  # type: ignore[method-assign, assignment]
                stack.callback(delattr, module, "forward")
            states = passed.hidden(i).detach().requires_grad_()
            out = passed.call(i, walk.layers[i], states)
            for draw in range(self._draws):
                sums.clear()
                experts.sums.clear()
                last = draw + 1 == self._draws
                (self._gradients[draw],) = torch.autograd.grad(
                    out, states, self._gradients[draw], retain_graph=not last
                )
                for name, product in (*sums.items(), *experts.sums.items()):
                    totals[name] = totals.get(name, 0.0) + product.double().square().sum(1)
        if set(totals) - set(experts.counts) != set(sites):
            raise NotLayered  # it multiplies by a weight without calling its layer
        self.counts |= experts.counts
        for name in (n for e in self._experts_of_layer[i] for n, _, _ in e.sites()):
            if name not in totals:  # no token of the text used it
                self.counts[name], totals[name] = 0, torch.zeros(len(ways_of(Role.MOE_EXPERT, self._precisions)))
        count = 2 * self._draws * passed.tokens.numel()
        for name, total in totals.items():
            ways = ways_of(self._roles[name], self._precisions)
            self._found[name] = dict(zip(ways, (total / count).tolist(), strict=True))
        if self._kv is not None:
            self._kv.layer(i, passed)
        passed.outputs[i] = passed.args[i] = passed.kwargs[i] = None  # type: ignore[call-overload]

    def head(self, nested: Callable[[torch.Tensor], NestedTensor]) -> None:
        """The output head's own; before any layer.

        Args:
            nested: makes rows of the head's weight, float32 [n, inputs], into nested ones.
        """
        if self._head_tokens is None:
            return
        walk, passed, tokens = self._walk, self._pass, self._head_tokens
        which, at = tokens.unique(return_inverse=True)
        full = walk.head.rows(which)
        rows = _moved(nested(full), walk.device)
        with torch.no_grad():
            plain = walk.tail(passed, tokens)[0].double()
            found = self._found[self._head] = {}
            for way in self._precisions:
                changed, _ = walk.tail(passed, tokens, (_read(rows, way), at))
                change = changed.double() - plain
                change -= change.mean(-1, keepdim=True)
                kl = torch.log1p(torch.expm1(change).mean(-1)) * HEAD_TOKENS / (HEAD_TOKENS - 1)
                found[way] = max(0.0, float(kl.mean()))

    def sensitivity(self, use: ExpertUse | None = None) -> Sensitivity:
        """All that was found, once every layer is done; of experts as `qbe.store.expert_use.shrunk` has it."""
        for layer in (e for some in self._experts_of_layer for e in some if use is not None):
            for parameter in layer.parameters:
                names = [layer.site(parameter, e) for e in range(layer.count)]
                counts = np.array([self.counts[n] for n in names], np.float64)
                for way in ways_of(Role.MOE_EXPERT, self._precisions):
                    damage = np.array([self._found[n][way] for n in names])
                    tokens = self._pass.tokens.numel()
                    expected = shrunk(damage, counts, tokens, use.shares(layer.name))  # type: ignore[union-attr]
                    for name, value in zip(names, expected, strict=True):
                        self._found[name][way] = float(value)
        weights, activations, native = {}, {}, {}
        for name, of in self._found.items():
            weights[name] = {FULL_BITS: 0.0, **{g: of[g] for g in self._precisions}}
            if ACTIVATIONS in of:
                activations[name] = {FULL_BITS: 0.0, ACTIVATION_GEARS[0]: of[ACTIVATIONS]}
                native[name] = {form: of[form] for form in eight_bit_rows.DTYPES if of.get(form, 0.0) > 0}
        return Sensitivity(weights, activations, self.difficult_entropy, native)

    @property
    def kv(self) -> Any:
        """Key heads (`qbe.sites.KVSite`), once every layer is done."""
        return () if self._kv is None else self._kv.sites()


class ExpertErrors:
    """What lowering each expert changes, dotted with the gradients that come back to it.

    Attributes:
        sums: site -> float32 [ways, texts], of the backward passes since it was cleared.
        counts: site -> tokens that used it.
    """

    def __init__(self, precisions: Sequence[int], tokens: torch.Tensor) -> None:
        self._ways, self._texts = ways_of(Role.MOE_EXPERT, precisions), tokens.shape
        self.sums: dict[str, torch.Tensor] = {}
        self.counts: dict[str, int] = {}

    def watching(self, layer: ExpertLayer) -> Multiply:
        """The layer's products, watched."""

        def multiply(parameter: str, e: int, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            weight, bias, nested = layer.weight(parameter, e), layer.bias(parameter), layer.nested(parameter)
            assert nested is not None
            y, name = linear(x, weight, None if bias is None else bias[e]), layer.site(parameter, e)
            texts, length = self._texts
            text = tokens % (texts * length) // length
            with torch.no_grad():
                wrong = errors(x.detach(), weight, nested.expert(e), self._ways)

            def add(gradient: torch.Tensor) -> None:
                product = torch.einsum("wtn,tn->wt", wrong, gradient.float())
                of_texts = product.new_zeros(len(self._ways), texts).index_add_(1, text, product)
                self.sums[name] = self.sums.get(name, 0.0) + of_texts

            self.counts[name] = len(tokens)
            y.register_hook(add)
            return y

        return multiply


def gradient_of_drawn(
    walk: Layerwise, passed: Pass, logits: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The gradient of the weighted sum of drawn tokens' logits with respect to what the last layer returned.

    Raises:
        NotLayered: what the model makes of its head's outputs depends on more than each of them.
    """
    found, gradient = walk.tail(passed, tokens, weights=weights)
    known = logits.gather(1, tokens)
    if found.shape != known.shape or float((found - known).abs().max()) > 1e-2 * float(known.abs().max()):
        raise NotLayered
    assert gradient is not None
    return gradient
