"""Scales tuned on the answers of the whole model: gradients, what stays as it is, what gets better, going on."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

from models_tiny import tiny_model
from qbe.format import scales
from qbe.format.codes import quantise
from qbe.format.layout import SliceLayout
from qbe.store import tuning
from qbe.store.nested_tensor import NestedTensor
from qbe.store.nesting import nestable
from qbe.store.tuning import Nested, tune
from qbe.tagger import tag

TOKENS = (torch.arange(8 * 64).view(8, 64) * 7919 % 251) + 2
LAYOUT = SliceLayout((3, 1, 2, 2))
HELD = TOKENS[-1:]


def plain(model: nn.Module) -> dict[str, Nested]:
    return {n: quantise(model.get_submodule(n).weight.detach(), LAYOUT, 64) for n in nestable(tag(model))}


@torch.no_grad()
def divergence(model: nn.Module, nested: dict[str, Nested], bits: int) -> float:
    """KL on the held-out window from the 16-bit model, its linears overwritten one by one: nothing of `tuning`."""
    wanted = model(input_ids=HELD).logits.log_softmax(-1)
    own = {n: model.get_submodule(n).weight for n in nested}
    try:
        for name, (codes, meta, exponent) in nested.items():
            scale, offset = scales.decode(meta, exponent, LAYOUT, bits)
            prefix = (codes >> (LAYOUT.total_bits - bits)).view(*scale.shape, -1)
            read = (scale[..., None] * (prefix - offset[..., None])).flatten(1)[:, : own[name].shape[1]]
            model.get_submodule(name).weight = nn.Parameter(read)
        found = model(input_ids=HELD).logits.log_softmax(-1)
    finally:
        for name, weight in own.items():
            model.get_submodule(name).weight = weight
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), k=st.integers(1, 200), bits=st.sampled_from(LAYOUT.precisions[:-1]))
def test_gradients_are_those_of_the_weight_that_is_read(seed: int, k: int, bits: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, pull = torch.randn(2, 5, k, generator=generator)
    codes, meta, exponent = quantise(weight, LAYOUT, 64)
    site = tuning._Site(codes, meta, exponent, LAYOUT, bits, weight)
    assert torch.equal(site.weight(torch.float32), NestedTensor.from_weight(weight, LAYOUT.slices).dequantise(bits))
    latent = site.latent.clone().requires_grad_()
    scale = site.plain * (1 + latent[0] / scales.RATIO_STEP)
    offset = site.middle + latent[1] / scales.OFFSET_STEP
    read = (scale[..., None] * (site.prefix() - offset[..., None])).flatten(1)[:, :k]
    (wanted,) = torch.autograd.grad((read * pull).sum(), latent)
    torch.testing.assert_close(site.gradient(pull), wanted * site.unit, rtol=1e-4, atol=1e-4)


def test_only_scales_change_and_no_precision_gets_worse() -> None:
    model = tiny_model()
    before = {n: p.clone() for n, p in model.named_parameters()}
    text = HELD.expand(8, -1)  # what is learned of random weights holds for nothing else
    given_, tuned = plain(model), tune(model, plain(model), LAYOUT, text, progress=False)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert list(tuned) == list(given_)
    for name, (codes, meta, exponent) in tuned.items():
        was = given_[name]
        assert torch.equal(codes, was[0])
        assert torch.equal(meta[:2], was[1][:2])  # the widest precision
        assert exponent == was[2]
    ratio = {b: divergence(model, tuned, b) / divergence(model, given_, b) for b in LAYOUT.precisions}
    assert max(ratio.values()) <= 1.0
    assert ratio[3] < 0.97


def test_what_gets_worse_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "RATE", 5.0)
    model = tiny_model()
    nested = plain(model)
    tuned = tune(model, nested, LAYOUT, TOKENS, progress=False)
    assert all(torch.equal(tuned[n][1], nested[n][1]) for n in nested)


def test_side_by_side_the_precisions_become_what_each_becomes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    nested = plain(model)
    text = HELD.expand(8, -1)
    together = tune(model, nested, LAYOUT, text, progress=False)
    monkeypatch.setattr(tuning, "WIDEST", 3)
    alone = tune(model, nested, LAYOUT, text, progress=False)
    for name, (_, meta, _) in alone.items():
        assert torch.equal(meta[2:4], together[name][1][2:4])
        assert not torch.equal(meta[2:4], nested[name][1][2:4])
        assert torch.equal(meta[4:6], nested[name][1][4:6])
        assert not torch.equal(together[name][1][4:6], nested[name][1][4:6])


@pytest.mark.parametrize("bits", [3, 4])
def test_steps_are_those_of_the_reference(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "detect", lambda _: SimpleNamespace(formats=()))  # float32, to compare
    monkeypatch.setattr(tuning, "STEPS", 16)  # the more, the more numbers come to lie half way
    model = tiny_model()
    nested = plain(model)
    text = HELD.expand(8, -1)
    tuned = tune(model, nested, LAYOUT, text, progress=False)
    slow = tuned_slowly(model, nested, bits, text[:-2])
    at = 2 + 2 * LAYOUT.precisions.index(bits)
    moved = 0
    for name, planes in slow.items():
        found = tuned[name][1][at : at + 2].view(torch.int8).int()
        moved += int((planes != nested[name][1][at : at + 2].view(torch.int8)).sum())
        off = (found - planes).abs()  # numbers half way between two bytes go either way
        assert off.amax() <= 1
        assert (off > 0).float().mean() < 0.01
    assert moved > 100


def tuned_slowly(model: nn.Module, nested: dict[str, Nested], bits: int, text: torch.Tensor) -> dict[str, torch.Tensor]:
    """What `tune` makes of one precision in float32: the divergence written out, gradients by autograd alone."""
    i, shift = LAYOUT.precisions.index(bits), LAYOUT.total_bits - bits
    own = {n: model.get_submodule(n).weight for n in nested}
    latent = {n: meta[2 + 2 * i : 4 + 2 * i].view(torch.int8).float() for n, (_, meta, _) in nested.items()}
    mean = {n: torch.zeros_like(x) for n, x in latent.items()}
    square = {n: torch.zeros_like(x) for n, x in latent.items()}
    unit = torch.tensor([scales.RATIO_STEP / 2**bits, scales.OFFSET_STEP]).view(2, 1, 1)
    for t in range(tuning.STEPS):
        window = text[t % len(text)][None]
        bytes_ = {n: x.round().requires_grad_() for n, x in latent.items()}
        read = {}
        for n, (codes, meta, exponent) in nested.items():
            ratio, offset = bytes_[n]
            scale = scales.decode_scale(meta[0], exponent) * 2**shift * (1 + ratio / scales.RATIO_STEP)
            middle = scales.nominal_offset(meta[1], shift) + offset / scales.OFFSET_STEP
            prefix = (codes >> shift).view(*scale.shape, -1)
            read[n + ".weight"] = (scale[..., None] * (prefix - middle[..., None])).flatten(1)[:, : own[n].shape[1]]
        wanted = model(input_ids=window).logits.detach().log_softmax(-1)
        found = functional_call(model, read, kwargs={"input_ids": window}, tie_weights=False).logits.log_softmax(-1)
        loss = (wanted.exp() * (wanted - found)).sum(-1).mean()
        gradients = torch.autograd.grad(loss, list(bytes_.values()))
        size = {}
        for n, g in zip(latent, gradients, strict=True):
            mean[n] = tuning.MOMENTUM * mean[n] + (1 - tuning.MOMENTUM) * g * unit
            square[n] = tuning.SQUARES * square[n] + (1 - tuning.SQUARES) * (g * unit) ** 2
            size[n] = (square[n] / (1 - tuning.SQUARES ** (t + 1))).sqrt() + tuning.TINY
        typical = torch.cat([s.flatten() for s in size.values()]).median()
        rate = tuning.RATE * (1 + math.cos(math.pi * t / tuning.STEPS)) / 2
        for n in latent:
            way = mean[n] / (1 - tuning.MOMENTUM ** (t + 1)) / size[n] * (typical / size[n]).clamp_max(1)
            latent[n] = (latent[n] - rate * unit * way).clamp(-128, 127)
    return {n: x.round().int() for n, x in latent.items()}


def test_an_interrupted_tuning_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    whole = tune(model, plain(model), LAYOUT, TOKENS, progress=False)
    step, held_out = tuning._Run.step, tuning._held_out
    done: list[str] = []
    fails = 5

    def counted(*args: Any) -> None:
        done.append("step")
        if len(done) == fails:
            raise KeyboardInterrupt
        step(*args)

    def judged(*args: Any) -> dict[int, float]:
        done.append("judged")
        return held_out(*args)

    monkeypatch.setattr(tuning._Run, "step", counted)
    monkeypatch.setattr(tuning, "_held_out", judged)

    def again(tokens: torch.Tensor = TOKENS) -> list[str]:
        done.clear()
        tuned = tune(model, plain(model), LAYOUT, tokens, tmp_path, progress=False)
        if tokens is TOKENS:
            assert all(torch.equal(meta, whole[n][1]) for n, (_, meta, _) in tuned.items())
        return done

    with pytest.raises(KeyboardInterrupt):
        again()
    assert done == ["judged", "step", "step", "step", "step"]
    fails = -1
    (kept,) = tmp_path.iterdir()
    assert again() == ["step"] * (tuning.STEPS - 3) + ["judged"]
    assert again() == []
    kept.write_bytes(b"not a result")
    everything = ["judged"] + ["step"] * tuning.STEPS + ["judged"]
    assert again() == everything
    assert again(TOKENS + 1) == everything


def test_without_a_text_to_judge_by_all_stays() -> None:
    model = tiny_model()
    nested = plain(model)
    for tokens, spoil in ((TOKENS[:1], 1.0), (TOKENS, math.nan)):
        with torch.no_grad():
            model.model.norm.weight.mul_(spoil)
        tuned = tune(model, nested, LAYOUT, tokens, progress=False)
        assert all(torch.equal(tuned[n][1], nested[n][1]) for n in nested)


def test_a_site_that_nothing_calls_keeps_its_scales() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.used, self.unused = nn.Linear(64, 32), nn.Linear(64, 32)

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            return SimpleNamespace(logits=self.used(nn.functional.one_hot(input_ids % 64, 64).float()))

    model = Lazy()
    nested = {n: quantise(model.get_submodule(n).weight.detach(), LAYOUT, 64) for n in ("used", "unused")}
    tuned = tune(model, nested, LAYOUT, TOKENS[:1].expand(8, -1), progress=False)
    assert torch.equal(tuned["unused"][1], nested["unused"][1])
    assert not torch.equal(tuned["used"][1], nested["used"][1])
