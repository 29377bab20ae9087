"""What fewer bits in one key head's part of the KV cache do to the model's output.

For every layer, at 4 and 2 bits: KL divergence (nats per token) of the logits when the full pages of that layer alone
have that width, on some long segments of a text (`qbe.store.calibration_text`). A token sees its own page and the
segment's first one at 16 bits and the others before it as they are quantised, by the kernels of the engine. (An engine
keeps the page before its own at 16 bits, too; of so short a text that would be a large part.)

A layer's divergence is divided among its heads by what each of them alone does to the layer's output, squared: small
errors of independent heads add up that way (`docs/quality.md` has how close this comes), and it takes one layer's
forward instead of the model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from qbe.format.kv_blocks import FORMATS, FULL_BITS, KV_BITS, PAGE_SIZE, head_layout
from qbe.kernels.ops.kv_pages import quantise_pages, read_pages
from qbe.sites import KVSite, SiteTable
from qbe.store.latent import AbsorbedWeight, latent_modules
from qbe.store.sensitivity import decoder_layers, divergence, full_bits, logits_of, recorded_outputs, replay
from qbe.tagger.shared_layers import shared_layers

# Measured widths; others below 16 follow from the damage being proportional to the step of the codes squared. So small
# a damage as that of 8 bits (a 289th of that of 4 by this rule, a 253rd measured, median of SmolLM2's heads) is at the
# limit of what a float32 pass resolves, and a third of the passes.
MEASURED = (4, 2)
DERIVED = tuple(b for b in KV_BITS[:-1] if b not in MEASURED)
ATTENTION = "qbe_kv_probe"  # the name under which transformers finds `_probe_attention`
_PROBE = "qbe_kv_probe"  # the attribute of an attention module that holds its `Probe`


def quantised(keys: torch.Tensor, values: torch.Tensor, bits: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as they come back from their pages; the last tokens, which fill no page, stay.

    Args:
        keys: `[kv_heads, T, key_dim]`; its dtype is that of pages of 16 bits. values: `[kv_heads, T, value_dim]`.
        bits: of each head.
    """
    (heads, tokens, key_dim), value_dim, dtype = keys.shape, values.shape[2], keys.dtype
    pages = tokens // PAGE_SIZE
    if not pages:
        return keys, values
    full = head_layout(FULL_BITS, key_dim, value_dim, dtype.itemsize)
    sizes = [head_layout(b, key_dim, value_dim, dtype.itemsize).nbytes for b in bits]
    head_offsets = torch.zeros(1, FORMATS, heads, dtype=torch.int32)
    for head in range(heads):
        head_offsets[0, 0, head] = head * full.nbytes | FULL_BITS
        head_offsets[0, 1, head] = sum(sizes[:head]) | bits[head]
    head_offsets = head_offsets.to(keys.device)
    staging_page = heads * full.nbytes
    sources = torch.arange(pages) * staging_page
    targets = (pages * staging_page + torch.arange(pages) * sum(sizes)) | 1
    memory = torch.zeros(pages * (staging_page + sum(sizes)), dtype=torch.uint8, device=keys.device)
    staging_pages = memory[: pages * staging_page].view(pages, heads, full.nbytes)
    for x, begin, end in ((keys, 0, full.values), (values, full.values, full.key_scales)):
        paged = x[:, : pages * PAGE_SIZE].reshape(heads, pages, -1).transpose(0, 1).contiguous()
        staging_pages[:, :, begin:end] = paged.view(torch.uint8)
    shape = heads, key_dim, value_dim
    targets = targets.to(keys.device)
    quantise_pages(memory, head_offsets, sources.to(keys.device), targets, shape, dtype)
    back = read_pages(memory, head_offsets[0], targets, shape, dtype)
    return tuple(torch.cat([b, x[:, b.shape[1] :]], 1) for b, x in zip(back, (keys, values), strict=True))  # type: ignore[return-value]


@dataclass
class Probe:
    """What the attention of a model under measurement does, and what it has seen.

    bits: layer -> bits of its key heads; other layers keep 16.
    shapes: layer -> query heads, key heads, key and value dim. entropy: layer -> per key head mean and deviation.
    absorbed: of attention modules whose cache holds latents. sources: layers that read another's keys, and which one's.
    modules: layer -> the first attention module that used its keys.
    """

    bits: dict[int, tuple[int, ...]] = field(default_factory=dict)
    shapes: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)
    entropy: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    absorbed: dict[nn.Module, AbsorbedWeight] = field(default_factory=dict)
    sources: dict[int, int] = field(default_factory=dict)
    modules: dict[int, nn.Module] = field(default_factory=dict)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float,
        window: int | None, softcap: float | None, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Causal attention `[n, T, heads, value_dim]` of whole sequences, written out; takes `[n, heads, T, dim]`.

        Latents in the place of keys and rotary parts in that of values take absorbed queries and give sums of latents.
        """
        kv_heads, tokens = key.shape[1:3]
        bits = self.bits.get(layer)
        stored, earlier = (key, value), (key, value)
        if bits is not None:
            pairs = [quantised(k[:, PAGE_SIZE:], v[:, PAGE_SIZE:], bits) for k, v in zip(key, value, strict=True)]
            keys, values = (torch.stack(x) for x in zip(*pairs, strict=True))
            earlier = torch.cat([key[:, :, :PAGE_SIZE], keys], 2), torch.cat([value[:, :, :PAGE_SIZE], values], 2)
        if query.shape[3] > key.shape[3]:  # latents and rotary parts
            (key, value), earlier = ((torch.cat(pair, 3), pair[0]) for pair in (stored, earlier))
        at = torch.arange(tokens, device=key.device)
        seen = at <= at[:, None]
        if window is not None:
            seen &= at > at[:, None] - window
        own = at // PAGE_SIZE == at[:, None] // PAGE_SIZE
        # A key head's query heads as rows of it.
        q = query.unflatten(1, (kv_heads, -1))
        scores = torch.where(own, q @ key[:, :, None].mT, q @ earlier[0][:, :, None].mT).float() * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            own_score = sinks.float().view(1, kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, own_score], -1)
        weights = scores.softmax(-1)
        if layer not in self.shapes:
            self.shapes[layer] = query.shape[1], kv_heads, stored[0].shape[3], stored[1].shape[3]
            self.entropy[layer] = _entropy(weights, seen.sum(1))
        weights = weights[..., :tokens].to(value.dtype)
        out = (weights * own) @ value[:, :, None] + (weights * ~own) @ earlier[1][:, :, None]
        return out.flatten(1, 2).transpose(1, 2)


def _entropy(weights: torch.Tensor, seen: torch.Tensor) -> list[tuple[float, float]]:
    """Per key head mean and deviation of the entropy over its logarithmic maximum; weights `[n, kv, repeat, T, T]`."""
    one = -torch.special.xlogy(weights, weights).sum(-1)[..., PAGE_SIZE:] / seen[PAGE_SIZE:].log()
    mean = one.mean(2)  # of a key head's query heads
    return [(float(h.mean()), float(h.std(correction=0))) for h in mean.transpose(0, 1)]


class OtherAttention(Exception):
    """The model's attention is not what is written out here."""


def _probe_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: torch.Tensor | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """An attention function of transformers."""
    probe: Probe | None = getattr(module, _PROBE, None)
    if probe is None or attention_mask is not None:
        raise OtherAttention
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer, absorbed = int(module.layer_idx), probe.absorbed.get(module)  # type: ignore[arg-type]
    query = query if absorbed is None else absorbed.absorb(query)
    layer = probe.sources.get(layer, layer)
    probe.modules.setdefault(layer, module)
    out = probe.attend(layer, query, key, value, scaling, sliding_window, softcap, s_aux)
    return out if absorbed is None else absorbed.expand(out), None


AttentionInterface.register(ATTENTION, _probe_attention)


@contextmanager
def probing(model: nn.Module, probe: Probe) -> Iterator[Probe]:
    """Inside, the model attends through the probe."""
    before = model.config._attn_implementation  # type: ignore[union-attr]
    owners = [m for m in model.modules() if hasattr(m, "layer_idx")]
    for module in owners:
        setattr(module, _PROBE, probe)
    latent, probe.sources = latent_modules(model), shared_layers(model)
    probe.absorbed = {m: AbsorbedWeight(m) for m in latent}
    for module in latent:
        module.expand_kv = lambda latent, rotary: (latent, rotary)  # type: ignore[assignment]
    try:
        model.set_attn_implementation(ATTENTION)  # type: ignore[operator]
        yield probe
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]
        for module in owners:
            delattr(module, _PROBE)
        for module in latent:
            del module.expand_kv  # the class's again


@torch.inference_mode()
def measure(
    model: nn.Module, table: SiteTable, tokens: torch.Tensor, on_layer: Callable[[], None] | None = None
) -> tuple[KVSite, ...]:
    """Measures every key head; none for a model whose attention is not the common one, or too short to fill two pages.

    Args:
        model: a transformers causal LM whose nested sites hold NestedTensors with their originals.
        tokens: int64 [segments, tokens]; those beyond the model's context are left out.
        on_layer: called when a layer is done (a progress bar).

    Returns:
        by layer and head.
    """
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)  # type: ignore[union-attr, operator]
    tokens = tokens[:, :context].to(next(model.parameters()).device)
    if tokens.shape[1] <= 2 * PAGE_SIZE:
        return ()
    with full_bits(model, table):
        native = logits_of(model, tokens)
        try:
            return _measure(model, table, tokens, native, on_layer)
        except OtherAttention:
            return ()


def _measure(
    model: nn.Module, table: SiteTable, tokens: torch.Tensor, native: torch.Tensor, on_layer: Callable[[], None] | None
) -> tuple[KVSite, ...]:
    layers = decoder_layers(model, table)
    places = torch.arange(tokens.numel(), device=tokens.device) % tokens.shape[1]
    rows = places >= 2 * PAGE_SIZE  # that see a quantised page
    sites: list[KVSite] = []
    with probing(model, Probe()) as probe:
        outputs, logits = recorded_outputs(model, layers, tokens)
        if float((logits - native.float()).abs().max()) > 0.02 * float(native.abs().max()):
            raise OtherAttention  # it asks for something that the probe ignores, such as a position's bias
        reference = logits[rows]
        probabilities = reference.softmax(-1)
        for layer, (heads, kv_heads, key_dim, value_dim) in sorted(probe.shapes.items()):
            damage: list[dict[int, float]] = [{FULL_BITS: 0.0} for _ in range(kv_heads)]
            inside = _decoder_layer(probe.modules[layer], layers)
            with replay(layers[: inside or 0], outputs):
                for bits in MEASURED:
                    probe.bits = {layer: (bits,) * kv_heads}
                    whole = divergence(reference, probabilities, logits_of(model, tokens)[rows])
                    shares = [1.0] * kv_heads
                    if inside is not None and kv_heads > 1:
                        shares = [
                            _moved(model, probe, layers[inside], layer, outputs[inside], tokens, head, bits, kv_heads)
                            for head in range(kv_heads)
                        ]
                    total = sum(shares)
                    for one, share in zip(damage, shares, strict=True):
                        one[bits] = whole * share / total if 0 < total < math.inf else whole
                    probe.bits = {}
            for one in damage:
                one.update({bits: one[4] * (15 / (2**bits - 1)) ** 2 for bits in DERIVED})
            numbers = key_dim + value_dim
            sites += [
                KVSite(layer, head, heads // kv_heads, numbers, dict(sorted(damage[head].items())), entropy)
                for head, entropy in enumerate(probe.entropy[layer])
            ]
            if on_layer is not None:
                on_layer()
    return tuple(sites)


class _Done(Exception):
    """The layer that was asked for has run."""


def _decoder_layer(attention: nn.Module, layers: list[nn.Module]) -> int | None:
    """Which decoder layer it is in: LongCat's have two attention layers each."""
    return next((i for i, layer in enumerate(layers) if any(m is attention for m in layer.modules())), None)


def _moved(
    model: nn.Module, probe: Probe, inside: nn.Module, layer: int, output: Any, tokens: torch.Tensor,
    head: int, bits: int, kv_heads: int,
) -> float:  # fmt: skip
    """How far one head at these bits moves its decoder layer's output: the sum of squared differences."""
    found: list[torch.Tensor] = []

    def stop(_module: nn.Module, _args: Any, output: Any) -> None:
        found.append(output if isinstance(output, torch.Tensor) else output[0])
        raise _Done

    probe.bits = {layer: tuple(bits if h == head else FULL_BITS for h in range(kv_heads))}
    hook = inside.register_forward_hook(stop)
    try:
        model(input_ids=tokens, use_cache=False)
    except _Done:
        pass
    finally:
        hook.remove()
    before = output if isinstance(output, torch.Tensor) else output[0]
    return float((found[0].float() - before.float()).square().sum())
