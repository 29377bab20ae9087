"""Scales and offsets of the lower precisions, tuned on what the whole model answers, after the codes are chosen.

`qbe.store.descent` looks at one matrix at a time: what errors of one layer do to others it cannot know. Here the
ratios and offsets of one precision (`qbe.store.scales`) go down the divergence of the model read at that precision from
the 16-bit model, on the calibration text, as step sizes do in the second phase of EfficientQAT (arXiv 2407.11062).
Codes, the widest precision and the 16-bit weights stay, and so do format and run time. A byte moves in whole steps:
numbers in between are kept beside it, the model is always read as it will be stored.

The last windows of the text are held out; a precision that does not get better on them keeps what it had. Nothing is
drawn at random.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn
from torch.func import functional_call

from qbe.files import make_folder, write_bytes
from qbe.hardware import Format, detect
from qbe.progress import bar
from qbe.store import scales
from qbe.store.layout import SliceLayout

Nested = tuple[torch.Tensor, torch.Tensor, int]  # codes, meta and scale exponent of a site
Planes = dict[str, torch.Tensor]  # of each site: int8 [2, N, G], ratios and offsets of one precision

STEPS = 16  # of a window each; half as many at twice the rate gain less (docs/quality.md)
HELD_OUT = 2  # windows, of a longer text than one of a few
WIDEST = 5  # at 6 bits plain Adam gained 1 %, and it would take as long as any other precision
RATE = 0.01  # how far a group's largest code and its offset go in the first steps, in steps of the precision
MOMENTUM, SQUARES, TINY = 0.9, 0.95, 1e-12  # of Adam
SETTINGS = repr((STEPS, HELD_OUT, WIDEST, RATE))  # results that are kept belong to them


def tune_all(
    model: nn.Module,
    nested: Mapping[str, Nested],
    layout: SliceLayout,
    tokens: torch.Tensor,
    keep: Path | None = None,
    *,
    progress: bool,
) -> dict[str, Nested]:
    """`tune` for every precision up to 5 bits; a text of one window, of which nothing can be held out, is no use.

    Args:
        nested: of each site, by name: codes, meta and scale exponent.
        keep: folder for the results of single precisions; what lies there of this very task is not done again.

    Raises:
        QBEError: a disk that refuses.
    """
    nested = dict(nested)
    todo: dict[int, Path | None] = {}
    if len(tokens) > 1:
        digest = _digest(nested, tokens)
        todo = {b: keep and keep / f"tuned-{b}-{digest}.safetensors" for b in layout.precisions[:-1] if b <= WIDEST}
    found = {b: kept for b, path in todo.items() if path and (kept := _load(path, nested)) is not None}
    with bar("tuning scales", STEPS * (len(todo) - len(found)), progress) as step:
        for bits, path in todo.items():
            planes = found[bits] if bits in found else tune(model, nested, layout, bits, tokens, step)
            if path and bits not in found:
                make_folder(path.parent)
                write_bytes(path, save(planes))
            nested = {n: _with_planes(pair, layout, bits, planes[n]) for n, pair in nested.items()}
    return nested


def tune(
    model: nn.Module,
    nested: Mapping[str, Nested],
    layout: SliceLayout,
    bits: int,
    tokens: torch.Tensor,
    step: Callable[[], None] = lambda: None,
) -> Planes:
    """Ratios and offsets of one precision, better on the end of a text than those given, or these themselves.

    Takes memory for another copy of the weights and their gradients, and for the activations of one window.

    Args:
        model: the 16-bit model, whose linears `nested` names; it is left as it is.
        bits: a precision of the layout below the widest.
        tokens: int64 [windows, tokens], at least two.
        step: called after each of `STEPS` steps.
    """
    held = min(HELD_OUT, len(tokens) // 2)
    device = next(model.parameters()).device
    train, rest = tokens[:-held].to(device), tokens[-held:].to(device)
    sites = {n: _Site(*nested[n], layout, bits, model.get_submodule(n).weight) for n in nested}  # type: ignore[arg-type]
    before = {n: s.planes() for n, s in sites.items()}
    fast = Format.BF16 in detect(device).formats  # gradients are noisy anyway; what is held out is read as it is
    start = _held_out(model, sites, rest)
    if not 0 < start < math.inf:
        return before
    for i in range(STEPS):
        weights = {n: s.weight().requires_grad_() for n, s in sites.items()}
        with torch.enable_grad(), torch.autocast(device.type, torch.bfloat16, enabled=fast):
            divergence = _divergence(model, weights, train[i % len(train)])
        gradients = torch.autograd.grad(divergence, list(weights.values()), allow_unused=True)
        rate = RATE * (1 + math.cos(math.pi * i / STEPS)) / 2
        called = [(s, g) for s, g in zip(sites.values(), gradients, strict=True) if g is not None]
        for site, gradient in called:
            site.observe(gradient)
        typical = torch.cat([site.size().flatten() for site, _ in called]).median()
        for site, _ in called:
            site.descend(rate, typical)
        step()
    return {n: s.planes() for n, s in sites.items()} if _held_out(model, sites, rest) < start else before


def _with_planes(nested: Nested, layout: SliceLayout, bits: int, planes: torch.Tensor) -> Nested:
    codes, meta, exponent = nested
    meta, i = meta.clone(), layout.precisions.index(bits)
    meta[2 + 2 * i : 4 + 2 * i] = planes.view(torch.uint8)
    return codes, meta, exponent


class _Site:
    """One site at one precision: what is read, and the numbers between the bytes of its ratios and offsets.

    Args:
        like: the 16-bit weight [N, K].
    """

    def __init__(
        self, codes: torch.Tensor, meta: torch.Tensor, exponent: int, layout: SliceLayout, bits: int,
        like: torch.Tensor,
    ) -> None:  # fmt: skip
        i, shift = layout.precisions.index(bits), layout.total_bits - bits
        meta = meta.to(like.device)
        self.inputs, self.dtype = like.shape[1], like.dtype
        self.codes = (codes.to(like.device) >> shift).view(*meta.shape[1:], -1)  # [N, G, g]
        self.plain = scales.decode_scale(meta[0], exponent) * 2**shift
        self.middle = scales.nominal_offset(meta[1], shift)
        self.latent = meta[2 + 2 * i : 4 + 2 * i].view(torch.int8).float()  # [2, N, G]
        self.mean, self.square, self.count = torch.zeros_like(self.latent), torch.zeros_like(self.latent), 0
        # A step of the precision, for the largest code and for the offset, in steps of the bytes.
        self.unit = torch.tensor([scales.RATIO_STEP / 2**bits, scales.OFFSET_STEP], device=like.device).view(2, 1, 1)

    def planes(self) -> torch.Tensor:
        return self.latent.round().to(torch.int8).cpu()

    def decoded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and offset as they will be read, float32 [N, G]."""
        ratio, offset = self.latent.round()
        return self.plain * (1 + ratio / scales.RATIO_STEP), self.middle + offset / scales.OFFSET_STEP

    def weight(self) -> torch.Tensor:
        """[N, K] in the model's dtype."""
        scale, offset = self.decoded()
        read = scale[..., None] * (self.codes - offset[..., None])
        return read.flatten(1)[:, : self.inputs].to(self.dtype)

    def gradient(self, of_weight: torch.Tensor) -> torch.Tensor:
        """From that of the weight [N, K] to that of ratios and offsets, in units of `unit`, float32 [2, N, G]."""
        scale, offset = self.decoded()
        padded = nn.functional.pad(of_weight.float(), (0, self.codes[0].numel() - self.inputs)).view(self.codes.shape)
        total = padded.sum(-1)
        ratio = self.plain / scales.RATIO_STEP * ((padded * self.codes).sum(-1) - offset * total)
        return torch.stack([ratio, -scale / scales.OFFSET_STEP * total]) * self.unit

    def observe(self, of_weight: torch.Tensor) -> None:
        """Takes a gradient into Adam's running means."""
        gradient = self.gradient(of_weight)
        self.count += 1
        self.mean.lerp_(gradient, 1 - MOMENTUM)
        self.square.lerp_(gradient.square(), 1 - SQUARES)

    def size(self) -> torch.Tensor:
        """Root mean square of the gradients, float32 [2, N, G]."""
        return (self.square / (1 - SQUARES**self.count)).sqrt()

    def descend(self, rate: float, typical: torch.Tensor) -> None:
        """A step of Adam, shorter for what the model is more sensitive to than to the `typical` number.

        A sensitive number, one that meets outliers say, has its best place near by and sees as much noise as others.
        """
        size = self.size()
        way = self.mean / (1 - MOMENTUM**self.count) / (size + TINY) * (typical / (size + TINY)).clamp_max(1)
        self.latent.sub_(rate * self.unit * way).clamp_(-128, 127)


def _held_out(model: nn.Module, sites: Mapping[str, _Site], tokens: torch.Tensor) -> float:
    with torch.no_grad():
        weights = {n: s.weight() for n, s in sites.items()}
        return sum(float(_divergence(model, weights, row)) for row in tokens)


def _divergence(model: nn.Module, weights: Mapping[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
    """KL of the model with these weights from the 16-bit model, mean over the tokens of a window, nats []."""
    inputs: dict[str, Any] = {"input_ids": row[None], "use_cache": False}
    with torch.no_grad():
        wanted = model(**inputs).logits[0].float().log_softmax(-1)
    swapped = {f"{n}.weight": w for n, w in weights.items()}
    # Not the embedding that an output head shares its weight with: that is not nested.
    found = functional_call(model, swapped, kwargs=inputs, tie_weights=False).logits[0].float().log_softmax(-1)
    return (wanted.exp() * (wanted - found)).sum(-1).mean()


def _digest(nested: Mapping[str, Nested], tokens: torch.Tensor) -> str:
    """Of all that a result depends on."""
    of = hashlib.sha256(repr((SETTINGS, sorted(nested))).encode() + tokens.cpu().numpy().tobytes())
    for name in sorted(nested):
        for part in nested[name][:2]:
            of.update(part.contiguous().numpy().tobytes())
    return of.hexdigest()[:16]


def _load(path: Path, nested: Mapping[str, Nested]) -> Planes | None:
    """What an earlier calibration left of a precision; None when nothing usable is there."""
    try:
        planes = load(path.read_bytes())
    except (OSError, SafetensorError):
        return None
    wanted = {n: (torch.int8, (2, *meta.shape[1:])) for n, (_, meta, _) in nested.items()}
    return planes if {n: (p.dtype, tuple(p.shape)) for n, p in planes.items()} == wanted else None
