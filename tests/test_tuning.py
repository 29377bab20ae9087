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

from models_tiny import tiny_model
from qbe.store import scales, tuning
from qbe.store.codes import quantise
from qbe.store.layout import SliceLayout
from qbe.store.nested_tensor import NestedTensor
from qbe.store.nesting import nestable
from qbe.store.tuning import Nested, tune, tune_all
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
    assert torch.equal(site.weight(), NestedTensor.from_weight(weight, LAYOUT.slices).dequantise(bits))
    latent = site.latent.clone().requires_grad_()
    scale = site.plain * (1 + latent[0] / scales.RATIO_STEP)
    offset = site.middle + latent[1] / scales.OFFSET_STEP
    read = (scale[..., None] * (site.codes - offset[..., None])).flatten(1)[:, :k]
    (wanted,) = torch.autograd.grad((read * pull).sum(), latent)
    torch.testing.assert_close(site.gradient(pull), wanted * site.unit, rtol=1e-4, atol=1e-4)


def test_only_scales_change_and_no_precision_gets_worse() -> None:
    model = tiny_model()
    before = {n: p.clone() for n, p in model.named_parameters()}
    text = HELD.expand(8, -1)  # what is learned of random weights holds for nothing else
    given_, tuned = plain(model), tune_all(model, plain(model), LAYOUT, text, progress=False)
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
    planes = tune(model, nested, LAYOUT, 3, TOKENS)
    assert all(torch.equal(p.view(torch.uint8), nested[n][1][2:4]) for n, p in planes.items())


def test_an_interrupted_tuning_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    whole = tune_all(model, plain(model), LAYOUT, TOKENS, progress=False)
    done: list[int] = []

    def counted(*args: Any) -> Any:
        done.append(args[3])
        if len(done) == 2:
            raise KeyboardInterrupt
        return tune(*args)

    monkeypatch.setattr(tuning, "tune", counted)
    with pytest.raises(KeyboardInterrupt):
        tune_all(model, plain(model), LAYOUT, TOKENS, tmp_path, progress=False)
    (kept,) = tmp_path.iterdir()
    again = tune_all(model, plain(model), LAYOUT, TOKENS, tmp_path, progress=False)
    assert done == [3, 4, 4]
    assert all(torch.equal(meta, whole[n][1]) for n, (_, meta, _) in again.items())
    kept.write_bytes(b"not a result")
    tune_all(model, plain(model), LAYOUT, TOKENS, tmp_path, progress=False)
    assert done[3:] == [3]
    tune_all(model, plain(model), LAYOUT, TOKENS + 1, tmp_path, progress=False)
    assert done[4:] == [3, 4]


def test_without_a_text_to_judge_by_all_stays() -> None:
    model = tiny_model()
    nested = plain(model)
    for tokens, spoil in ((TOKENS[:1], 1.0), (TOKENS, math.nan)):
        with torch.no_grad():
            model.model.norm.weight.mul_(spoil)
        tuned = tune_all(model, nested, LAYOUT, tokens, progress=False)
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
    planes = tune(model, nested, LAYOUT, 3, TOKENS[:1].expand(8, -1))
    assert torch.equal(planes["unused"].view(torch.uint8), nested["unused"][1][2:4])
    assert not torch.equal(planes["used"].view(torch.uint8), nested["used"][1][2:4])
