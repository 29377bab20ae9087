"""SmoothQuant scales: outlier channels are moved into the weights, and no site gets worse where it has few bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from conftest import tiny_llama
from engine_models import DEVICE
from qbe.format.codes import quantise
from qbe.format.layout import SliceLayout
from qbe.format.packing import pack
from qbe.kernels.reference.activations import eight_bits
from qbe.kernels.reference.nested_linear import dequantise
from qbe.sites import ACTIVATION_LOSS, KEEPS_ACTIVATIONS, NESTABLE_ROLES, Role, Site, SiteTable
from qbe.store.folding import LARGEST, edges
from qbe.store.smoothing import Inputs, best_exponents, smooth
from qbe.tagger import tag

LAYOUT = SliceLayout.of((4, 2, 2))
TOKENS = (torch.arange(192).view(4, 48) * 11 % 320).to(DEVICE)


def seen(rows: torch.Tensor) -> Inputs:
    equal = rows / rows.square().mean(-1, keepdim=True).sqrt()
    return Inputs(rows, equal.square().mean(0).sqrt())


def error(x: torch.Tensor, w: torch.Tensor, exponents: torch.Tensor, bits: int, eight: bool) -> float:
    """Relative error of the outputs, as the engine would compute them."""
    scale = 2.0 ** exponents.float()
    codes, meta, exponent = quantise(w * scale, LAYOUT, 64)
    read = dequantise(pack(codes, LAYOUT), meta, exponent, (4, 2, 2), w.shape[1], bits) if bits < 16 else w * scale
    inputs = eight_bits(x / scale, 64) if eight else x / scale
    exact = x @ w.T
    return float(((inputs @ read.T - exact).square().mean(-1) / exact.square().mean(-1)).mean())


def test_an_outlier_channel_is_smoothed() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 128, generator=generator)
    x[:, 17] *= 60
    w = torch.randn(64, 128, generator=generator) * 0.05
    exponents = best_exponents(seen(x), [w], LAYOUT, 64)
    assert exponents is not None
    others = torch.cat([exponents[:17], exponents[18:]])
    assert int(exponents[17]) >= int(others.max()) + 2
    none = torch.zeros_like(exponents)
    assert error(x, w, exponents, 16, True) < error(x, w, none, 16, True) / 4
    assert error(x, w, exponents, 4, False) <= error(x, w, none, 4, False)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    outputs=st.integers(1, 200),
    inputs=st.sampled_from([40, 64, 130]),
    spread=st.floats(0, 3),
)
def test_a_site_never_gets_worse_at_four_bits(seed: int, outputs: int, inputs: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(50, inputs, generator=generator) * torch.exp(spread * torch.randn(inputs, generator=generator))
    w = torch.randn(outputs, inputs, generator=generator) * torch.exp(torch.randn(inputs, generator=generator))
    exponents = best_exponents(seen(x), [w], LAYOUT, 64)
    if exponents is None:
        return
    assert exponents.dtype == torch.int8
    assert int(exponents.abs().max()) <= LARGEST
    sample = w[:: max(1, outputs // 64)]
    none = torch.zeros_like(exponents)
    assert error(x, sample, exponents, 4, False) <= error(x, sample, none, 4, False) * (1 + 1e-5)


@pytest.mark.parametrize(("x", "w"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_inputs_and_weights_of_zeros_need_no_scales(x: float, w: float) -> None:
    rows = torch.full((8, 64), x)
    assert best_exponents(Inputs(rows, rows[0]), [torch.full((4, 64), w)], LAYOUT, 64) is None


def test_a_model_with_outliers_loses_less_and_stays_what_it_is() -> None:
    """A norm whose channels differ by a factor of 40, as in trained models."""
    model = tiny_llama(vocabulary=320).to(DEVICE)
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight[7::32] *= 40
    table = tag(model)
    names = [s.name for s in table if s.is_linear and s.role in NESTABLE_ROLES - KEEPS_ACTIVATIONS]

    def divergence() -> float:
        """KL of the logits at 8-bit activations to those without, both of the model as it is."""
        with torch.inference_mode():
            full = model(input_ids=TOKENS).logits.log_softmax(-1)
            hooks = [
                model.get_submodule(n).register_forward_pre_hook(lambda _m, args: (eight_bits(args[0], 64),))
                for n in names
            ]
            low = model(input_ids=TOKENS).logits.log_softmax(-1)
        for h in hooks:
            h.remove()
        return float((full.exp() * (full - low)).sum(-1).mean())

    def logits(of: nn.Module) -> torch.Tensor:
        with torch.inference_mode():
            return of(input_ids=TOKENS).logits

    before, cost = logits(model), divergence()
    done: list[None] = []
    places = edges(model, table, names, TOKENS)
    folds = smooth(model, places, TOKENS, LAYOUT, 64, lambda: done.append(None))
    assert len(done) == len(places) == 6
    assert {f.source.rpartition(".")[2] for f in folds} >= {"input_layernorm", "post_attention_layernorm"}
    assert torch.equal(logits(model), before)
    assert divergence() < cost / 3


def table_of(*losses: float) -> SiteTable:
    gears = (4, 16)
    sites = [
        Site(f"s{i}", Role.FFN_UP, 0, (4, 4), True, gears, activation_sensitivity={8: kl, 16: 0.0})
        for i, kl in enumerate(losses)
    ]
    return SiteTable((*sites, Site("head", Role.OUTPUT_HEAD, None, (4, 4), True, gears)), layers=1)


def test_the_sites_that_cost_most_keep_16_bits() -> None:
    unit = ACTIVATION_LOSS
    assert table_of(unit / 4, unit / 2).activations(8) == (8, 8, 16)
    assert table_of(unit / 4, 3 * unit, unit / 2, 2 * unit).activations(8) == (8, 16, 8, 16, 16)
    assert table_of(2 * unit).activations(8) == (16, 16)
    assert table_of(2 * unit).activations(16) == (16, 16)


@given(losses=st.lists(st.floats(0, 1e-3), min_size=1, max_size=7))
def test_no_fewer_sites_at_16_would_do(losses: list[float]) -> None:
    from itertools import combinations

    *chosen, _head = table_of(*losses).activations(8)
    kept = chosen.count(16)
    assert sum(kl for kl, bits in zip(losses, chosen, strict=True) if bits == 8) <= ACTIVATION_LOSS * (1 + 1e-9)
    if kept:
        fewer = combinations(range(len(losses)), len(losses) - kept + 1)  # one more site at 8 bits, in any choice
        assert all(sum(losses[i] for i in at) > ACTIVATION_LOSS * (1 - 1e-9) for at in fewer)
