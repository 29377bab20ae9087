"""Folds: the model computes the same bits, whatever its architecture, or the fold is not made."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from conftest import tiny_llama
from engine_models import DEVICE, VOCABULARY, build
from qbe.sites import KEEPS_ACTIVATIONS, NESTABLE_ROLES, SiteTable
from qbe.store.folding import LARGEST, Fold, apply, apply_exact, edges
from qbe.tagger import tag

TOKENS = (torch.arange(48).view(2, 24) * 7 % VOCABULARY).to(DEVICE)


def places(model: nn.Module) -> tuple[SiteTable, list[tuple[str, tuple[str, ...]]]]:
    table = tag(model)
    names = [s.name for s in table if s.is_linear and s.role in NESTABLE_ROLES - KEEPS_ACTIVATIONS]
    return table, edges(model, table, names, TOKENS)


def random_folds(model: nn.Module, found: list[tuple[str, tuple[str, ...]]], seed: int = 0) -> list[Fold]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [model.get_submodule(source).weight.shape[0] for source, _ in found]
    high = LARGEST + 1
    draws = [torch.randint(-LARGEST, high, (n,), generator=generator, dtype=torch.int8) for n in sizes]
    return [Fold(source, consumers, e) for (source, consumers), e in zip(found, draws, strict=True)]


@torch.inference_mode()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=TOKENS, use_cache=False).logits


# Of a layer with attention and a gated block: two norms and the product. Gemma's norms multiply by 1 + weight, routers
# and experts read the norms of mixtures, latent attention and recurrent mixers read one norm in linears of many roles.
KEPT = {
    "llama": {"input_layernorm": 4, "post_attention_layernorm": 4, "up_proj": 4},
    "qwen3": {"input_layernorm": 4, "post_attention_layernorm": 4, "up_proj": 4},
    "mistral-sliding": {"input_layernorm": 4, "post_attention_layernorm": 4, "up_proj": 4},
    "gemma2-softcap": {"up_proj": 4},
    "gemma3-text": {"up_proj": 4},
    "mixtral": {"input_layernorm": 4},
    "phi3-longrope": {"input_layernorm": 4, "post_attention_layernorm": 4},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KEPT)
def test_what_is_folded_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    model = build(name).to(dtype)
    before = logits(model)
    weights = {n: p.clone() for n, p in model.named_parameters()}
    folds = apply_exact(model, random_folds(model, places(model)[1]), TOKENS)
    assert torch.equal(logits(model), before)
    assert Counter(f.source.rpartition(".")[2] for f in folds) == KEPT[name]
    for fold in folds:
        for scaled in (fold.source, *fold.consumers):
            assert not torch.equal(model.get_submodule(scaled).weight, weights[f"{scaled}.weight"])


@pytest.mark.parametrize("name", ["mamba2", "jamba", "bamba", "granite-moe-hybrid", "falcon-h1", "deepseek-v3"])
def test_other_architectures_stay_what_they_are(name: str) -> None:
    model = build(name)
    before = logits(model)
    folds = apply_exact(model, random_folds(model, places(model)[1]), TOKENS)
    assert folds
    assert torch.equal(logits(model), before)


def test_folds_that_leave_a_reader_out_are_dropped_alone() -> None:
    model = build("llama")
    before = logits(model)
    found = [
        (source, consumers[:-1] if source == "model.layers.2.input_layernorm" else consumers)
        for source, consumers in places(model)[1]
    ]
    folds = apply_exact(model, random_folds(model, found), TOKENS)
    assert len(folds) == len(found) - 1
    assert "model.layers.2.input_layernorm" not in {f.source for f in folds}
    assert torch.equal(logits(model), before)


def test_a_norm_that_something_else_reads_is_no_place() -> None:
    model = tiny_llama().to(DEVICE)
    table = tag(model)
    names = [s.name for s in table if s.is_linear and "layers.0.self_attn.k_proj" not in s.name]
    sources = {source for source, _ in edges(model, table, names, TOKENS)}
    assert "model.layers.0.input_layernorm" not in sources
    assert {"model.layers.1.input_layernorm", "model.norm"} <= sources  # the final norm, where the head is wanted


def test_weights_that_would_become_subnormal_are_left_alone() -> None:
    model = build("llama").half()
    source = "model.layers.1.mlp.up_proj"
    with torch.no_grad():
        model.get_submodule(source).weight[5, 5] = 2.0**-13 * 1.25
    found = [p for p in places(model)[1] if p[0] == source]
    assert found
    down = [Fold(*found[0], torch.full((96,), LARGEST, dtype=torch.int8))]
    before = logits(model)
    assert apply_exact(model, down, TOKENS) == []
    assert torch.equal(logits(model), before)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.integers(-3, 3))
def test_any_exponents_are_taken_back_exactly(seed: int, scale: int) -> None:
    model = tiny_llama(seed=seed % 7).to(DEVICE)
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.mul_(2.7**scale)
    before = {n: p.clone() for n, p in model.named_parameters()}
    wanted = random_folds(model, places(model)[1], seed)
    assert len(apply_exact(model, wanted, TOKENS)) == 6
    apply(model, wanted, -1)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
