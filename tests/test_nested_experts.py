"""Experts in the nested store: at 16 bits what transformers computes, below it what the dequantised weights give, in
every family; and their place in the site table, the plan and the checkpoint."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_models import FAMILIES, tiny_moe, tiny_moe_folder
from qbe.blueprint import Blueprint
from qbe.errors import QBEError
from qbe.kernels.cpu import build
from qbe.models import load_model
from qbe.sites import Role, SiteTable
from qbe.store import checkpoint
from qbe.store.experts import expert_layers, gate_of, nested_experts
from qbe.store.nested_experts import NestedExperts
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.nesting import nest_model, with_store
from qbe.store.plan import Plan
from qbe.tagger import tag

TOKENS = torch.arange(24).view(2, 12) * 7 % 320
BY_PARTS = {"nemotron_h"}  # families whose experts no kernel takes as a whole


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return found


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture
def tolerance() -> float:
    """Of the norm, as of the kernels: AVX-512 reads rows as 16-bit fixed point (`qbe.kernels.cpu.linear.nested`)."""
    return 3e-4 if build.backend() in ("avx512", "amx") else 1e-5


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_family_computes_the_same_at_16_bits_and_what_dequantised_weights_give_below(
    family: str, tolerance: float
) -> None:
    model = tiny_moe(family)
    plain, expected = copy.deepcopy(model), logits(model)
    table = nest_model(model, family, NestedWeightConfig(), progress=False)
    layers = expert_layers(model)
    assert layers
    assert all(layer.nested(p) is not None for layer in layers for p in layer.parameters)
    assert all((gate_of(layer.module) is None) == (family in BY_PARTS) for layer in layers)
    assert torch.allclose(logits(model), expected, atol=2e-5)
    assert torch.equal(logits(model).argmax(-1), expected.argmax(-1))

    # Every expert at a precision of its own; the rest stays at 16 bits.
    for layer, reference in zip(layers, expert_layers(plain), strict=True):
        for at, parameter in enumerate(layer.parameters):
            nested = layer.nested(parameter)
            assert nested is not None
            bits = [(4, 6, 8, 16)[(e + at) % 4] for e in range(layer.count)]
            nested.set_bits(bits)
            for e, b in enumerate(bits):
                reference.weight(parameter, e).copy_(nested.expert(e).dequantise(b))
    assert error(logits(model), logits(plain)) <= tolerance
    assert (logits(plain) - expected).abs().max() > 1e-2
    sites = [s for s in table.nested if s.expert is not None]
    assert len(sites) == sum(len(list(layer.sites())) for layer in layers)
    assert {s.role for s in sites} == {Role.MOE_EXPERT}
    assert {s.gears for s in sites} == {(4, 6, 8, 16)}


def test_greedy_tokens_are_those_of_transformers() -> None:
    model = tiny_moe("qwen3_moe")
    wanted = model.generate(TOKENS[:1], max_new_tokens=12, do_sample=False)
    nest_model(model, "tiny", NestedWeightConfig(), progress=False)
    assert torch.equal(model.generate(TOKENS[:1], max_new_tokens=12, do_sample=False), wanted)


def test_an_expert_is_laid_out_as_a_nested_linear_is() -> None:
    from qbe.store.nested_tensor import NestedTensor

    model = tiny_moe("gpt_oss")
    weight = model.model.layers[0].mlp.experts.gate_up_proj.detach().clone()  # [experts, in, out]
    nest_model(model, "tiny", NestedWeightConfig(), progress=False)
    nested = model.model.layers[0].mlp.experts.gate_up_proj
    assert isinstance(nested, NestedExperts)
    assert nested.shape == (4, 128, 64)
    for e in range(4):
        alone = NestedTensor.from_weight(weight[e].T.contiguous())
        assert torch.equal(nested.packed[e], alone.packed)
        assert torch.equal(nested.meta[e], alone.meta)
        assert int(nested.exponents[e]) == alone.exponent
        assert torch.equal(nested.expert(e).dequantise(6), alone.dequantise(6))
    with pytest.raises(QBEError, match="5 bits are not in this store"):
        nested.set_bits(5)


def nested_tiny(family: str = "qwen3_moe") -> tuple[Any, SiteTable]:
    model = tiny_moe(family)
    return model, nest_model(model, "tiny", NestedWeightConfig(), progress=False)


def test_rows_of_a_plan_read_experts_at_their_own_bits(family: str, tolerance: float) -> None:
    model, table = nested_tiny(family)
    choices = [tuple(s.gears[(i * k) % 4] for i, s in enumerate(table.nested)) for k in (1, 3)]
    blueprints = [Blueprint.of("test", table, bits) for bits in choices]
    plan = Plan(table, 24, torch.device("cpu"), head_sees_kept=False)
    plan.bind(model)
    plan.write([(blueprints[0], 12), (blueprints[1], 12)], blueprints)
    both = logits(model)
    for row, blueprint in enumerate(blueprints):
        plan.write([(blueprint, 24)], [blueprint] * 2)
        assert error(logits(model)[row], both[row]) <= tolerance


def test_a_checkpoint_keeps_experts_and_older_ones_have_them_at_16_bits(tmp_path: Path) -> None:
    source = tiny_moe_folder(tmp_path / "16", "qwen3_moe")
    model, _ = nested_tiny()
    store = tmp_path / "store"
    store.mkdir()
    checkpoint.write_nested(store, model, "tiny")
    raw = json.loads((store / "qbe.json").read_text())
    assert raw["format_version"] == 3
    assert len(raw["experts"]) == 4

    again = load_model(source, progress=False).model
    table = tag(again)
    checkpoint.attach(again, store)
    table = with_store(table, again)
    for (_, old), (_, new) in zip(nested_experts(model), nested_experts(again), strict=True):
        old.set_bits(4), new.set_bits(4)
        assert torch.equal(old.packed, new.packed)
        assert torch.equal(old.meta, new.meta)
    assert torch.allclose(logits(model), logits(again), atol=1e-5)

    older = raw | {"format_version": 2}
    older.pop("experts")
    (store / "qbe.json").write_text(json.dumps(older))
    plain = load_model(source, progress=False).model
    table = tag(plain)
    checkpoint.attach(plain, store)
    table = with_store(table, plain)
    assert not nested_experts(plain)
    assert any(s.role is Role.MOE_EXPERT and not s.nested for s in table)

    (store / "qbe.json").write_text(json.dumps(raw))
    other = load_model(tiny_moe_folder(tmp_path / "other", "mixtral"), progress=False).model
    with pytest.raises(QBEError, match="does not fit the model"):
        checkpoint.attach(other, store)
    broken = copy.deepcopy(raw)
    next(iter(broken["experts"].values()))["exponents"].pop()
    (store / "qbe.json").write_text(json.dumps(broken))
    with pytest.raises(QBEError, match=r"qbe\.json is damaged"):
        checkpoint.read_manifest(store)


def test_dense_models_keep_the_format_that_older_versions_read(tmp_path: Path) -> None:
    from conftest import tiny_llama

    model = tiny_llama()
    nest_model(model, "tiny", NestedWeightConfig(), progress=False)
    checkpoint.write_nested(tmp_path, model, "tiny")
    raw = json.loads((tmp_path / "qbe.json").read_text())
    assert raw["format_version"] == 2
    assert "experts" not in raw
