"""What fewer bits in one layer's recurrent state do to a model's output, by the position of the token.

A text is read as an answer is written: each token reads the state before it as it was kept, and the state after it is
rounded again. Only the layer's own module has to take the tokens one by one for that, for all precisions beside each
other. What they change of its output then goes through the rest of the model in one forward pass each, a layer of the
model at a time (`qbe.store.layerwise`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from qbe.kernels.reference.state_rows import round_state
from qbe.sites import STATE_BITS, STATE_FULL_BITS, SiteTable
from qbe.store.layerwise import Layerwise, NotLayered, Pass
from qbe.store.sensitivity import BROKEN, decoder_layers, divergence_of_rows

GEARS = tuple(b for b in reversed(STATE_BITS) if b != STATE_FULL_BITS)


@dataclass(frozen=True)
class Drift:
    """Of one layer's state at each gear below 32 bits, both float32 [windows, tokens].

    Attributes:
        kl: gear -> KL divergence (nats) of a token's logits from those at 32 bits in every layer.
        error: gear -> norm of what the state after a token differs by, over the norm of the state.
    """

    kl: dict[int, torch.Tensor]
    error: dict[int, torch.Tensor]


@torch.no_grad()
def measure(
    model: nn.Module, table: SiteTable, tokens: torch.Tensor, device: torch.device,
    on_token: Callable[[], None] | None = None,
) -> dict[str, Drift]:  # fmt: skip
    """Measures every layer with a recurrent state by itself, the others at 32 bits.

    Args:
        model: a transformers causal LM whose weights are plain.
        tokens: int64 [windows, tokens].
        device: where it is computed, in float32; the model is moved there a layer at a time.
        on_token: called for each token of each state (a progress bar).

    Returns:
        name of the state's site -> its drift.

    Raises:
        NotLayered: the model is no plain chain of layers, or a mixer takes more than hidden states.
    """
    layers = decoder_layers(model, table)
    walk = Layerwise(model, layers, device)
    sites = {site.layer: site for site in table.states}
    changed: dict[tuple[str, int], torch.Tensor] = {}  # what each gear makes of the states between the layers
    errors: dict[str, dict[int, torch.Tensor]] = {}

    def visit(i: int, passed: Pass) -> None:
        for key, hidden in changed.items():
            changed[key] = passed.call(i, layers[i], hidden)
        if (site := sites.get(i)) is not None:
            mixer = model.get_submodule(site.name.rpartition(".")[0])
            with _heard(mixer) as heard:
                passed.call(i, layers[i], passed.hidden(i))
            ((given, plain),) = heard
            outputs, errors[site.name] = stepwise(model, mixer, i, given, on_token)
            for gear in GEARS:
                with _saying(mixer, plain + (outputs[gear] - outputs[STATE_FULL_BITS])):
                    changed[site.name, gear] = passed.call(i, layers[i], passed.hidden(i))

    passed = walk.run(tokens, visit)
    assert passed.logits is not None
    reference = passed.logits.flatten(0, 1).float()
    found: dict[str, Drift] = {}
    for site in sites.values():
        kl = {gear: _divergences(reference, walk.logits(passed, changed.pop((site.name, gear)))) for gear in GEARS}
        found[site.name] = Drift({g: k.view(tokens.shape).cpu() for g, k in kl.items()}, errors[site.name])
    return found


def stepwise(
    model: nn.Module, mixer: nn.Module, layer: int, hidden: torch.Tensor, on_token: Callable[[], None] | None = None
) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """A mixer's outputs when it takes its tokens one by one, with its state kept at each gear in between.

    Args:
        layer: under whose number it looks for its state.
        hidden: float32 [windows, tokens, hidden].

    Returns:
        gear, 32 bits included -> outputs [windows, tokens, hidden]; gear -> errors as in `Drift`.

    Raises:
        NotLayered: it takes no cache, or keeps its state elsewhere.
    """
    bits = (STATE_FULL_BITS, *GEARS)
    windows, tokens, _ = hidden.shape
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))  # type: ignore[union-attr, operator]
    name = next(
        (n for n in ("cache_params", "past_key_values") if n in inspect.signature(mixer.forward).parameters), ""
    )
    kept: Any = cache.layers[layer] if layer < len(cache.layers) else None
    if not name or not hasattr(kept, "recurrent_states"):
        raise NotLayered
    rows = hidden.repeat(len(bits), 1, 1)
    outputs: list[torch.Tensor] = []
    errors = torch.zeros(len(bits), windows, tokens)
    for at in range(tokens):
        try:
            outputs.append(mixer(rows[:, at : at + 1], **{name: cache}))
        except TypeError:  # it wants more
            raise NotLayered from None
        states = [state for state in kept.recurrent_states.values() if state is not None]
        if not states:
            raise NotLayered
        off, norm = torch.zeros(len(bits), windows), torch.zeros(windows)
        for state in states:
            each = state.unflatten(0, (len(bits), windows))
            for i, gear in enumerate(bits[1:], 1):
                each[i] = round_state(each[i], gear, at)
            off += (each - each[0]).flatten(2).square().sum(2).cpu()
            norm += each[0].flatten(1).square().sum(1).cpu()
        errors[:, :, at] = _finite((off / norm.clamp_min(1e-30)).sqrt())
        if on_token is not None:
            on_token()
    found = torch.cat(outputs, 1).unflatten(0, (len(bits), windows))
    return dict(zip(bits, found, strict=True)), dict(zip(GEARS, errors[1:], strict=True))


@contextmanager
def _heard(mixer: nn.Module) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Inside, what the module takes and returns is noted."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def hear(_module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if len(given) != 1 or not isinstance(output, torch.Tensor) or output.shape != given[0].shape:
            raise NotLayered
        found.append((given[0], output))

    hook = mixer.register_forward_hook(hear, with_kwargs=True)
    try:
        yield found
    finally:
        hook.remove()


@contextmanager
def _saying(module: nn.Module, output: torch.Tensor) -> Iterator[None]:
    """Inside, the module returns this."""
    module.forward = lambda *_args, **_kwargs: output
    try:
        yield
    finally:
        del module.forward  # the class's method shows again


def _divergences(reference: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL of each row, from float32 [rows, vocabulary]; a few rows at a time keep the temporaries in cache."""
    parts = zip(reference.split(32), logits.split(32), strict=True)
    return _finite(torch.cat([divergence_of_rows(ref, ref.softmax(-1), rows.float()) for ref, rows in parts]))


def _finite(measured: torch.Tensor) -> torch.Tensor:
    """What broke the model or its state must not look harmless."""
    return measured.nan_to_num(nan=BROKEN, posinf=BROKEN).clamp(0, BROKEN)
