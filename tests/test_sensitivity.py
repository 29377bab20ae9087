"""The sensitivity table: replaying layers changes nothing, and the numbers are the KL they claim to be."""

from __future__ import annotations

import pytest
import torch

from conftest import tiny_llama
from qbe.errors import QBEError
from qbe.sites import SiteTable
from qbe.store import sensitivity
from qbe.store.nested_linears import NestedWeightConfig, nest
from qbe.store.nesting import nestable, with_store
from qbe.store.placement import place
from qbe.tagger import tag

TOKENS = torch.arange(60).view(2, 30) % 256


def nested_model(device: torch.device, seed: int = 0) -> tuple[torch.nn.Module, SiteTable]:
    model = tiny_llama(seed)
    table = tag(model, name="tiny")
    nest(model, nestable(table), NestedWeightConfig())
    table = with_store(table, model)
    place(model, device, "device")
    return model, table


def test_the_measure_is_the_kl_of_a_full_pass(device: torch.device) -> None:
    model, table = nested_model(device)
    ids = TOKENS.to(device)
    measured = sensitivity.measure(model, table, TOKENS)
    with torch.inference_mode():
        reference = model(input_ids=ids).logits.flatten(0, 1).log_softmax(-1)
        for site in table.nested:
            weight = model.get_submodule(site.name).weight
            for gear in (4, 8):
                weight.bits = torch.tensor([gear], dtype=torch.int32, device=device)
                lowered = model(input_ids=ids).logits.flatten(0, 1).log_softmax(-1)
                by_hand = (reference.exp() * (reference - lowered)).sum(-1).mean()
                assert measured[site.name][gear] == pytest.approx(float(by_hand), rel=1e-3, abs=1e-7)
            weight.bits = torch.tensor([16], dtype=torch.int32, device=device)


def test_every_site_and_gear_is_measured_and_lower_bits_hurt_more(device: torch.device) -> None:
    model, table = nested_model(device, 1)
    done: list[str] = []
    measured = sensitivity.measure(model, table, TOKENS, done.append)
    assert done == [s.name for s in table.nested]
    for gears in measured.values():
        assert set(gears) == {4, 6, 8, 16}
        assert gears[4] > gears[6] > gears[8] > gears[16] == 0
    full = table.with_sensitivity(measured)
    assert full.measured
    assert not table.measured


def test_bits_and_layers_are_as_before_afterwards(device: torch.device) -> None:
    model, table = nested_model(device)
    before = {s.name: model.get_submodule(s.name).weight.bits for s in table.nested}
    logits = model(input_ids=TOKENS.to(device)).logits
    sensitivity.measure(model, table, TOKENS)
    assert all(model.get_submodule(n).weight.bits is b for n, b in before.items())
    assert torch.equal(model(input_ids=TOKENS.to(device)).logits, logits)


def test_without_originals_there_is_nothing_to_compare_with() -> None:
    model = tiny_llama()
    table = tag(model)
    nest(model, nestable(table), NestedWeightConfig(keep_original=False))
    with pytest.raises(QBEError, match="without its 16-bit weight"):
        sensitivity.measure(model, with_store(table, model), TOKENS)
