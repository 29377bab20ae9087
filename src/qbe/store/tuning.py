"""Scales and offsets of the lower precisions, tuned on what the whole model answers, after the codes are chosen.

`qbe.store.descent` looks at one matrix at a time: what errors of one layer do to others it cannot know. Here the
ratios and offsets of one precision (`qbe.format.scales`) go down the divergence of the model read at that precision
from the 16-bit model, on the calibration text, as step sizes do in the second phase of EfficientQAT (arXiv 2407.11062).
Codes, the widest precision and the 16-bit weights stay, and so do format and run time. A byte moves in whole steps:
numbers in between are kept beside it, the model is always read as it will be stored.

The last windows of the text are held out; a precision that does not get better on them keeps what it had. Nothing is
drawn at random.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from qbe.format import scales
from qbe.format.layout import SliceLayout
from qbe.hardware import NumberFormat, detect
from qbe.progress import bar
from qbe.store import kept
from qbe.store.matrices import Matrices
from qbe.store.sensitivity import divergence

Nested = tuple[torch.Tensor, torch.Tensor, int]  # codes, meta and scale exponent of a site

STEPS = 20  # of a window each; half as many at twice the rate gain less (docs/quality.md)
HELD_OUT = 2  # windows, of a longer text than one of a few
WIDEST = 5  # at 6 bits plain Adam gained 1 %, and it would take as long as any other precision
RATE = 0.01  # how far a group's largest code and its offset go in the first steps, in steps of the precision
MOMENTUM, SQUARES, TINY = 0.9, 0.95, 1e-12  # of Adam
SETTINGS = repr((STEPS, HELD_OUT, WIDEST, RATE))  # results that are kept belong to them


def tune(
    model: nn.Module,
    nested: Mapping[str, Nested],
    layout: SliceLayout,
    tokens: torch.Tensor,
    keep: Path | None = None,
    *,
    progress: bool,
) -> dict[str, Nested]:
    """The sites with better ratios and offsets of every precision up to 5 bits, or with those given.

    The precisions have nothing to do with each other. They go through the text side by side, so that the 16-bit model
    answers each window once for all. Takes memory for the weights of one precision and their gradients, the
    activations of one window and its probabilities twice, and 32 bytes for each group and precision.

    Args:
        model: the 16-bit model, whose linears and experts' matrices `nested` names; it is left as it is.
        nested: of each site, by name: codes, meta and scale exponent.
        tokens: int64 [windows, tokens]; of a single window nothing can be held out, and nothing is done.
        keep: folder for what is reached after every window; an interrupted call goes on from there.

    Raises:
        QBEError: a disk that refuses.
    """
    widths = [b for b in layout.precisions[:-1] if b <= WIDEST]
    if len(tokens) < 2 or not widths:
        return dict(nested)
    held = min(HELD_OUT, len(tokens) // 2)
    device = next(model.parameters()).device
    train, rest = tokens[:-held].to(device), tokens[-held:].to(device)
    run = _Run(_sites(model, nested, layout, widths, device))
    file = keep and keep / f"tuning-{_digest(nested, widths, tokens)}.safetensors"
    if not (file and run.load(file)):
        run.before = _held_out(model, run.sites, rest)
    with bar("tuning scales", STEPS - run.steps, progress) as step:
        while run.steps < STEPS:
            run.step(model, train[run.steps % len(train)])
            if file:
                run.save(file)
            step()
    if not run.after:
        run.after = _held_out(model, run.sites, rest)
        if file:
            run.save(file)
    nested = dict(nested)
    for bits in widths:
        if run.after[bits] < run.before[bits]:
            for name, site in run.sites[bits].items():
                nested[name] = _with_planes(nested[name], layout, bits, site.planes())
    return nested


@dataclass
class _Run:
    """A tuning between two steps.

    Attributes:
        sites: of each precision, by name.
        steps: that are done.
        before, after: divergence of each precision on what is held out, nats; `after` once all steps are done.
    """

    sites: dict[int, dict[str, _Site]]
    steps: int = 0
    before: dict[int, float] = field(default_factory=dict)
    after: dict[int, float] = field(default_factory=dict)

    def step(self, model: nn.Module, window: torch.Tensor) -> None:
        """Takes every precision down its divergence from the 16-bit model on a window, int64 [tokens]."""
        rate = RATE * (1 + math.cos(math.pi * self.steps / STEPS)) / 2
        fast = NumberFormat.BF16 in detect(window.device).formats  # gradients are noisy anyway
        with torch.autocast(window.device.type, torch.bfloat16, enabled=fast):
            with torch.no_grad():
                wanted = _logits(model, window).float().softmax(-1)
            for sites in self.sites.values():
                weights = {n: s.weight(torch.bfloat16 if fast else s.dtype) for n, s in sites.items()}
                for weight in weights.values():
                    weight.requires_grad_()
                with torch.enable_grad():
                    logits = _logits(model, window, weights)
                # The gradient that the divergence, mean over the tokens, has.
                pull = logits.detach().float().softmax(-1).sub_(wanted).div_(len(wanted)).to(logits.dtype)
                gradients = torch.autograd.grad(logits, list(weights.values()), pull, allow_unused=True)
                called = [(s, g) for s, g in zip(sites.values(), gradients, strict=True) if g is not None and g.any()]
                for site, gradient in called:
                    site.observe(gradient)
                typical = torch.cat([site.size().flatten() for site, _ in called]).median()
                for site, _ in called:
                    site.descend(rate, typical)
        self.steps += 1

    def save(self, path: Path) -> None:
        about = {"steps": self.steps, "before": self.before, "after": self.after}
        state = {f"{b}.{n}": torch.stack([s.latent, s.mean, s.square]).cpu() for b, n, s in self._each()}
        counts = torch.tensor([s.count for _, _, s in self._each()])
        kept.keep(path, {**state, "counts": counts}, {"about": json.dumps(about)})

    def load(self, path: Path) -> bool:
        """Goes on from what `save` kept; False when nothing usable is there."""
        found = kept.kept(path)
        if found is None:
            return False
        state, about = found[0], json.loads(found[1]["about"])
        self.steps = about["steps"]
        self.before, self.after = ({int(b): v for b, v in about[when].items()} for when in ("before", "after"))
        for (bits, name, site), count in zip(self._each(), state["counts"].tolist(), strict=True):
            site.latent, site.mean, site.square = state[f"{bits}.{name}"].to(site.latent.device)
            site.count = count
        return True

    def _each(self) -> Iterator[tuple[int, str, _Site]]:
        return ((b, n, s) for b, sites in self.sites.items() for n, s in sites.items())


def _sites(
    model: nn.Module, nested: Mapping[str, Nested], layout: SliceLayout, widths: Sequence[int], device: torch.device
) -> dict[int, dict[str, _Site]]:
    sites: dict[int, dict[str, _Site]] = {b: {} for b in widths}
    matrices = Matrices(model)
    for name, (codes, meta, exponent) in nested.items():
        weight = matrices.weight(name)
        codes, meta = codes.to(device), meta.to(device)  # once for all precisions
        for bits in widths:
            sites[bits][name] = _Site(codes, meta, exponent, layout, bits, weight)
    return sites


def _with_planes(nested: Nested, layout: SliceLayout, bits: int, planes: torch.Tensor) -> Nested:
    codes, meta, exponent = nested
    meta, i = meta.clone(), layout.precisions.index(bits)
    meta[2 + 2 * i : 4 + 2 * i] = planes.view(torch.uint8)
    return codes, meta, exponent


class _Site:
    """One site at one precision: what is read, and the numbers between the bytes of its ratios and offsets.

    Args:
        like: the 16-bit weight [N, K], on the device of codes and meta.
    """

    def __init__(
        self, codes: torch.Tensor, meta: torch.Tensor, exponent: int, layout: SliceLayout, bits: int,
        like: torch.Tensor,
    ) -> None:  # fmt: skip
        i, shift = layout.precisions.index(bits), layout.total_bits - bits
        self.inputs, self.dtype, self.shift = like.shape[1], like.dtype, shift
        self.codes = codes.view(*meta.shape[1:], -1)  # [N, G, g]
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

    def prefix(self) -> torch.Tensor:
        """The first bits of the codes, float32 [N, G, g]."""
        return (self.codes >> self.shift).float()

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        """What is read, [N, K]."""
        scale, offset = self.decoded()
        read = self.prefix().sub_(offset[..., None]).mul_(scale[..., None])
        return read.flatten(1)[:, : self.inputs].to(dtype)

    def gradient(self, of_weight: torch.Tensor) -> torch.Tensor:
        """From that of the weight [N, K] to that of ratios and offsets, in units of `unit`, float32 [2, N, G]."""
        scale, offset = self.decoded()
        padded = of_weight.float()
        if self.codes[0].numel() > self.inputs:
            padded = nn.functional.pad(padded, (0, self.codes[0].numel() - self.inputs))
        padded = padded.view(self.codes.shape)
        total, with_codes = padded.sum(-1), (padded * self.prefix()).sum(-1)
        ratio = self.plain / scales.RATIO_STEP * (with_codes - offset * total)
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


def _held_out(model: nn.Module, sites: Mapping[int, Mapping[str, _Site]], tokens: torch.Tensor) -> dict[int, float]:
    """KL from the 16-bit model, sum over windows of the mean over tokens, for each precision read as it is stored."""
    found = dict.fromkeys(sites, 0.0)
    with torch.no_grad():
        for window in tokens:
            wanted = _logits(model, window).float()
            probabilities = wanted.softmax(-1)
            for bits, some in sites.items():
                logits = _logits(model, window, {n: s.weight(s.dtype) for n, s in some.items()})
                found[bits] += divergence(wanted, probabilities, logits)
    return found


def _logits(model: nn.Module, window: torch.Tensor, weights: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
    """Of a window, int64 [tokens], with these weights in place of the 16-bit ones: [tokens, V]."""
    swapped = Matrices(model).parameters(weights) if weights else {}
    inputs: dict[str, Any] = {"input_ids": window[None], "use_cache": False}
    # Not the embedding that an output head shares its weight with: that is not nested.
    return functional_call(model, swapped, kwargs=inputs, tie_weights=False).logits[0]


def _digest(nested: Mapping[str, Nested], widths: Sequence[int], tokens: torch.Tensor) -> str:
    """Of all that a result depends on."""
    of = hashlib.sha256(repr((SETTINGS, widths, list(nested))).encode() + tokens.cpu().numpy().tobytes())
    for codes, meta, _ in nested.values():
        of.update(codes.contiguous().numpy().tobytes())
        of.update(meta.contiguous().numpy().tobytes())
    return of.hexdigest()[:16]
