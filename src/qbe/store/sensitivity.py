"""The sensitivity table: what lowering one site alone does to the model's output.

For every nested site and gear: KL divergence (nats per token) from the logits of the 16-bit model to those of the same
model with that site alone at that gear, on segments of a text (`qbe.store.calibration_text`).
Layers before the lowered site give what they gave in the 16-bit pass, so they are replayed, not computed again:
this halves the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributions import Categorical

from qbe.errors import QBEError
from qbe.kernels.reference.activations import precision_byte, precision_word
from qbe.kernels.reference.difficulty import difficulty
from qbe.sites import FULL_BITS, Site, SiteTable, TextDifficulty
from qbe.store.checked import AllocationCheck
from qbe.store.experts import nested_experts
from qbe.store.nested_experts import NestedExperts
from qbe.store.nested_tensor import NestedTensor

Way = TypeVar("Way", bound=Hashable)  # of lowering a site
Measured = dict[str, dict[int, float]]  # site name -> gear -> KL, nats per token

BROKEN = 1e4  # nats per token, recorded when the lowered model gives no numbers at all
DIFFICULT = 0.25  # share of the tokens that keep 16-bit activations when a request has 8 (docs/quality.md)


@dataclass(frozen=True)
class Sensitivity:
    """What is measured of a model.

    Attributes:
        weights: KL of every nested site at every gear of its weight.
        activations: KL of every site whose inputs may have fewer bits, at those; empty when not measured.
        difficult_entropy: see `difficult_entropy`; None when not measured.
        native: site name -> format -> KL of its product in that format (`qbe.store.native_products`); empty when not
            measured.
        text: how hard the built-in text is to predict; None when not measured.
        check: what assignments by `weights`, then corrected, were measured to do; None where nobody checked them.
    """

    weights: Measured
    activations: Measured = field(default_factory=dict)
    difficult_entropy: float | None = None
    native: dict[str, dict[str, float]] = field(default_factory=dict)
    text: TextDifficulty | None = None
    check: AllocationCheck | None = None


def measure(
    model: nn.Module, table: SiteTable, tokens: torch.Tensor, on_site: Callable[[str], None] | None = None
) -> Measured:
    """Measures every nested site's weight at every gear below 16.

    Args:
        model: a transformers causal LM whose nested sites hold NestedTensors with their originals.
        tokens: int64 [segments, tokens].
        on_site: called with each site's name when it is done (a progress bar).

    Returns:
        site name -> gear -> KL, nats per token; 0 at gear 16.

    Raises:
        QBEError: a nested site lost its 16-bit original.
    """
    gears = {site.name: site.gears[:-1] for site in table.nested}
    return _with_full(lowered_divergence(model, table, tokens, gears, _reading, on_site))


def measure_activations(
    model: nn.Module, table: SiteTable, tokens: torch.Tensor, on_site: Callable[[str], None] | None = None
) -> Measured:
    """The same for the inputs of every nested site that may have fewer bits, at 16-bit weights."""
    gears = {s.name: s.activation_gears[:-1] for s in table.nested if len(s.activation_gears) > 1}

    def rounding(layer: nn.Linear | ExpertMatrix, gear: int) -> AbstractContextManager[None]:
        return _reading(layer, precision_word(FULL_BITS, gear))

    return _with_full(lowered_divergence(model, table, tokens, gears, rounding, on_site))


def _with_full(measured: Measured) -> Measured:
    return {name: {FULL_BITS: 0.0, **gears} for name, gears in measured.items()}


@contextmanager
def _reading(layer: nn.Linear | ExpertMatrix, precision: int) -> Iterator[None]:
    """Inside, the layer, or one expert's matrix, reads this word of precision for every row."""
    if isinstance(layer, ExpertMatrix):
        before, at = layer.matrices.precision.clone(), layer.expert
        layer.matrices.precision[:, at] = precision_byte(precision & 255, precision >> 8 or FULL_BITS)
        try:
            yield
        finally:
            layer.matrices.precision.copy_(before)
        return
    weight: NestedTensor = layer.weight  # type: ignore[assignment]
    before, weight.bits = weight.bits, _one(precision, weight.device)
    try:
        yield
    finally:
        weight.bits = before


@torch.inference_mode()
def lowered_divergence(
    model: nn.Module,
    table: SiteTable,
    tokens: torch.Tensor,
    ways: Mapping[str, Sequence[Way]],
    lower: Callable[[Any, Way], AbstractContextManager[None]],
    on_site: Callable[[str], None] | None = None,
) -> dict[str, dict[Way, float]]:
    """What lowering one site alone does, for some sites of a model that otherwise runs at 16 bits.

    Args:
        model: a transformers causal LM whose nested sites hold NestedTensors with their originals.
        tokens: int64 [segments, tokens].
        ways: site name -> the ways to lower it.
        lower: lowers a nested layer, or an `ExpertMatrix`, in one of these ways, as long as its context is open.
        on_site: called with each site's name when it is done.

    Returns:
        site name -> way -> KL, nats per token.

    Raises:
        QBEError: a nested site lost its 16-bit original.
    """
    tokens = tokens.to(next(model.parameters()).device)
    with full_bits(model, table):
        layers = decoder_layers(model, table)
        outputs, reference = recorded_outputs(model, layers, tokens)
        probabilities = reference.softmax(-1)
        measured: dict[str, dict[Way, float]] = {}
        for site in table.nested:
            if site.name not in ways:
                continue
            # An output head comes after every layer: all of them can be replayed.
            replayed = len(layers) if site.layer is None else site.layer
            found = measured[site.name] = {}
            with replay(layers[:replayed], outputs):
                for way in ways[site.name]:
                    with lower(place_of_site(model, site), way):
                        found[way] = divergence(reference, probabilities, logits_of(model, tokens))
            if on_site is not None:
                on_site(site.name)
        return measured


@torch.inference_mode()
def difficult_entropy(model: nn.Module, table: SiteTable, tokens: torch.Tensor) -> float:
    """The entropy, nats, that the share `DIFFICULT` of the 16-bit model's distributions on the text exceeds."""
    with full_bits(model, table):
        logits = logits_of(model, tokens.to(next(model.parameters()).device))
    parts = [Categorical(logits=rows.float(), validate_args=False).entropy() for rows in logits.split(32)]
    return float(torch.cat(parts).quantile(1 - DIFFICULT))


def text_difficulty(logits: torch.Tensor) -> TextDifficulty | None:
    """How hard the tokens after these logits [tokens, vocabulary] are to predict; None where some are no numbers."""
    parts = [difficulty(rows.float(), rows.argmax(-1)) for rows in logits.split(32)]
    _, entropies, margins = torch.cat(parts, -1).cpu()
    if not bool(entropies.isfinite().all() and margins.isfinite().all()):
        return None
    return TextDifficulty(*(tuple(round(v, 4) for v in values.tolist()) for values in (entropies, margins)))


@dataclass(frozen=True)
class ExpertMatrix:
    """One expert of nested ones."""

    matrices: NestedExperts
    expert: int


def place_of_site(model: nn.Module, site: Site) -> Any:
    """The layer of a nested site, or the `ExpertMatrix`."""
    if site.expert is None:
        return model.get_submodule(site.name)
    matrices = model.get_submodule(site.name.rpartition(".")[0])
    assert isinstance(matrices, NestedExperts)
    return ExpertMatrix(matrices, site.expert)


@contextmanager
def full_bits(model: nn.Module, table: SiteTable) -> Iterator[dict[str, NestedTensor]]:
    """Inside, every nested site runs at 16 bits; yields the weights of those that are layers by name.

    Raises:
        QBEError: a nested site lost its 16-bit original.
    """
    modules = dict(model.named_modules())
    weights: dict[str, NestedTensor] = {s.name: modules[s.name].weight for s in table.nested if s.expert is None}
    experts = nested_experts(model)
    precisions = [matrices.precision.clone() for _, matrices in experts]
    before = {name: w.bits for name, w in weights.items()}
    originals = {name: w.original for name, w in weights.items()} | {name: m.original for name, m in experts}
    for name, original in originals.items():
        if original is None:
            raise QBEError(f"{name} was stored without its 16-bit weight, so its sensitivity cannot be measured")
    try:
        for weight in weights.values():
            weight.bits = _one(FULL_BITS, weight.device)
        for _, matrices in experts:
            matrices.set_bits(FULL_BITS)
        yield weights
    finally:
        for (_, matrices), precision in zip(experts, precisions, strict=True):
            matrices.precision.copy_(precision)
        for name, weight in weights.items():
            weight.bits = before[name]


def _one(bits: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([bits], dtype=torch.int32, device=device)


def logits_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logits `[segments * tokens, V]` of whole sequences."""
    return model(input_ids=tokens, use_cache=False).logits.flatten(0, 1)


def divergence(reference: torch.Tensor, probabilities: torch.Tensor, logits: torch.Tensor, rows: int = 32) -> float:
    """Mean KL over the rows, from logits and softmax of the reference and the logits of the lowered model.

    A few rows at a time keep the temporaries in cache.
    """
    total = 0.0
    for i in range(0, len(logits), rows):
        at = slice(i, i + rows)
        total += float(divergence_of_rows(reference[at], probabilities[at], logits[at].float()).sum())
    # A site whose lowering breaks the model must not look harmless.
    return max(0.0, total / len(logits)) if math.isfinite(total) else BROKEN


def divergence_of_rows(reference: torch.Tensor, probabilities: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL of each row, float32 [rows]; all three are float32 [rows, V].

    With d = logits - reference it is log(sum p exp(d)) - sum p d. Written with expm1 nothing large cancels, so float32
    resolves the tiny divergences of 8 bits.
    """
    p, d = probabilities, logits - reference
    d -= (p * d).sum(-1, keepdim=True)  # a common shift changes nothing but the rounding
    return torch.log1p((p * torch.expm1(d)).sum(-1)) - (p * d).sum(-1)


def decoder_layers(model: nn.Module, table: SiteTable) -> list[nn.Module]:
    """The modules that the sites' layer indices count, found from the sites' own names; empty if there are none."""
    found: dict[int, nn.Module] = {}
    modules = dict(model.named_modules())
    for site in table.nested or (s for s in table if s.is_linear):
        if site.layer is not None and site.layer not in found:
            head, _, _ = site.name.partition(f".{site.layer}.")
            layer = modules.get(f"{head}.{site.layer}")
            if layer is None or not isinstance(modules.get(head), nn.ModuleList):
                return []
            found[site.layer] = layer
            for i, m in enumerate(modules[head]):
                found.setdefault(i, m)
    return [found[i] for i in range(len(found))] if sorted(found) == list(range(len(found))) else []


def recorded_outputs(model: nn.Module, layers: list[nn.Module], tokens: torch.Tensor) -> tuple[list[Any], torch.Tensor]:
    """What every layer returned and the logits [rows, V], all at 16 bits."""
    outputs: list[Any] = [None] * len(layers)

    def keep(i: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            outputs[i] = output

        return hook

    hooks = [layer.register_forward_hook(keep(i)) for i, layer in enumerate(layers)]
    try:
        return outputs, logits_of(model, tokens).float()
    finally:
        for h in hooks:
            h.remove()


@contextmanager
def replay(layers: list[nn.Module], outputs: list[Any]) -> Iterator[None]:
    """Inside, each of `layers` returns what it returned in the reference pass."""

    def fixed(output: Any) -> Callable[..., Any]:
        return lambda *_args, **_kwargs: output

    for layer, output in zip(layers, outputs, strict=False):
        layer.forward = fixed(output)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's method shows again
