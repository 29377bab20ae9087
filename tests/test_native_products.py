"""Where a long prompt is multiplied in the device's own 8-bit format: what that costs, and the sites that bear it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qbe.format import scales
from qbe.kernels.reference import eight_bit_rows
from qbe.sites import ACTIVATION_LOSS, NATIVE_LOSS, Role, Site, SiteTable
from qbe.store import sensitivity_table
from qbe.store.measure import with_measured
from qbe.store.native_products import measure_native, multiplied_in
from qbe.store.sensitivity import Sensitivity
from test_sensitivity import TOKENS, nested_model

E4M3, INT8 = "fp8_e4m3", "int8"


def test_the_measure_is_the_kl_with_both_sides_of_one_site_rounded(device: torch.device) -> None:
    model, table = nested_model(device)
    ids = TOKENS.to(device)
    done: list[str] = []
    measured = measure_native(model, table, TOKENS, done.append)
    names = [s.name for s in table.nested if s.role is not Role.OUTPUT_HEAD]
    assert done == names == list(measured)
    assert len(names) < len(table.nested)
    with torch.inference_mode():
        reference = model(input_ids=ids).logits.flatten(0, 1).log_softmax(-1)
        for name in names:
            layer = model.get_submodule(name)
            full = layer.weight.original
            for form in (E4M3, INT8):
                weight = layer.weight
                bound = scales.largest_of_rows(weight.meta, weight.exponent, weight.layout, 8).to(full.device)
                largest = torch.maximum(bound, full.abs().amax(-1))

                def by_reference(_module, args, _output, full=full, form=form, largest=largest):  # type: ignore[no-untyped-def]
                    x = args[0]
                    y = eight_bit_rows.linear(x.flatten(0, -2), full, eight_bit_rows.DTYPES[form], largest)
                    return y.view(*x.shape[:-1], -1)

                hook = layer.register_forward_hook(by_reference)
                lowered = model(input_ids=ids).logits.flatten(0, 1).log_softmax(-1)
                hook.remove()
                by_hand = (reference.exp() * (reference - lowered)).sum(-1).mean()
                assert measured[name][form] == pytest.approx(float(by_hand), rel=1e-3, abs=1e-7)
                assert measured[name][form] > 0
        assert torch.equal(model(input_ids=ids).logits.flatten(0, 1).log_softmax(-1), reference)  # all is as before


def test_a_layer_that_is_never_called_is_not_taken_for_harmless() -> None:
    model, table = nested_model(torch.device("cpu"))
    mlp = model.model.layers[0].mlp
    linear = torch.nn.functional.linear

    def by_weights(x: torch.Tensor) -> torch.Tensor:
        inner = mlp.act_fn(linear(x, mlp.gate_proj.weight)) * linear(x, mlp.up_proj.weight)
        return linear(inner, mlp.down_proj.weight)

    mlp.forward = by_weights
    measured = measure_native(model, table, TOKENS)
    aside = {f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert {name for name, of in measured.items() if not of} == aside
    native = table.with_sensitivity({}, {}, measured).native(E4M3)
    assert not any(n for site, n in zip(table.nested, native, strict=True) if site.name in aside)


@pytest.mark.parametrize("form", [E4M3, INT8])
@pytest.mark.parametrize("bits", [4, 16])
def test_a_layer_at_any_bits(form: str, bits: int) -> None:
    model, table = nested_model(torch.device("cpu"))
    layer = model.get_submodule(table.nested[0].name)
    layer.weight.set_bits(bits)
    x = torch.randn(2, 5, layer.in_features, generator=torch.Generator().manual_seed(1))
    exact = torch.nn.functional.linear(x, layer.weight.dequantise(bits))
    with multiplied_in(layer, form):
        low = layer(x)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight))
    assert low.dtype == x.dtype
    error = (low - exact).norm() / exact.norm()
    assert 1e-3 < error < (0.06 if form == E4M3 else 0.03)  # two roundings, as `test_uniform_linear` has them


def table_of(losses: list[tuple[float | None, int]]) -> SiteTable:
    """Sites with a divergence in E4M3 (None: not measured) and a number of inputs, and an output head."""
    sites = [
        Site(f"s{i}", Role.FFN_UP, 0, (4, k), True, (4, 16), activation_sensitivity={8: 0.0, 16: 0.0},
             native_sensitivity={} if kl is None else {E4M3: kl})
        for i, (kl, k) in enumerate(losses)
    ]  # fmt: skip
    head = Site("head", Role.OUTPUT_HEAD, None, (4, 4), True, (4, 16), native_sensitivity={E4M3: 0.0})
    return SiteTable((*sites, head), layers=1)


def test_the_most_weights_that_bear_it() -> None:
    unit = NATIVE_LOSS
    assert table_of([(unit / 4, 4), (2 * unit, 4), (None, 4), (unit / 2, 4)]).native(E4M3) == (
        True, False, False, True, False,
    )  # fmt: skip
    # By divergence per weight: the second site alone has more weights than the two others together.
    assert table_of([(unit / 2, 4), (unit * 0.9, 64), (unit / 2, 4)]).native(E4M3) == (False, True, False, False)
    for form in (INT8, None):  # the hardware has another format, or none
        assert not any(table_of([(unit / 4, 4)]).native(form))


@given(losses=st.lists(st.tuples(st.floats(0, 1e-3) | st.none(), st.integers(1, 9)), min_size=1, max_size=8))
def test_the_promise_is_kept_and_no_site_is_left_out_in_vain(losses: list[tuple[float | None, int]]) -> None:
    *chosen, head = table_of(losses).native(E4M3)
    assert not head
    assert all(kl is not None for (kl, _), native in zip(losses, chosen, strict=True) if native)
    total = sum(kl or 0.0 for (kl, _), native in zip(losses, chosen, strict=True) if native)
    assert total <= NATIVE_LOSS * (1 + 1e-9)
    for (kl, _), native in zip(losses, chosen, strict=True):
        assert native or kl is None or total + kl > NATIVE_LOSS * (1 - 1e-9)


def test_a_site_that_keeps_16_bits_everywhere_is_none() -> None:
    table = table_of([(1e-9, 4), (1e-9, 4)])
    assert table.native(E4M3) == (True, True, False)
    table = table.with_sensitivity({}, {"s0": {8: 2 * ACTIVATION_LOSS, 16: 0.0}})
    assert table.activations(8) == (16, 8, 16)
    assert table.native(E4M3) == (False, True, False)


def test_the_file_keeps_it_and_an_older_one_means_nowhere(tmp_path: Path) -> None:
    table = table_of([(None, 4), (None, 4)])
    measured = Sensitivity(
        {}, {"s0": {8: 1e-5, 16: 0.0}}, 2.5, {"s0": {E4M3: 1.23457e-4, INT8: 3e-5}, "s1": {E4M3: 6e-4}}
    )
    sensitivity_table.write(tmp_path, measured, {"text": "made up"})
    read = sensitivity_table.read(tmp_path)
    assert read == measured
    full = with_measured(table, read)
    assert full.native(E4M3) == (True, False, False)
    assert full.native(INT8) == (True, False, False)
    # Blueprints do not depend on it: what was learned or kept of a model stays valid.
    assert full.digest == with_measured(table, Sensitivity({}, measured.activations)).digest
    file = tmp_path / sensitivity_table.NAME
    older = json.loads(file.read_text())
    del older["native"]
    file.write_text(json.dumps(older))
    read = sensitivity_table.read(tmp_path)
    assert read is not None
    assert read.activations == measured.activations
    assert not any(with_measured(table, read).native(E4M3))
