"""Latent attention: absorbed weights at every row's bits, attention over pages of latents, models that have both."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import qbe
from conftest import byte_tokenizer
from engine_models import NO_SITES, build, greedy, prompts, request, run
from kv_samples import PAGE_SIZE, prompt_in_pages
from moe_models import tiny_moe
from qbe.blueprint import Blueprint
from qbe.engine.core import Core
from qbe.errors import QBEError
from qbe.format.kv_blocks import quantised_pages
from qbe.kvcache import latent
from qbe.kvcache.pages import KVShape
from qbe.store.latent import AbsorbedWeight
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.nested_tensor import NestedTensor
from qbe.store.nesting import nest_model

HEADS, NOPE, ROPE, VALUE, RANK = 3, 10, 4, 6, 70
MIXED = [16, 8, 4, 2, 68, 66]


def module(dtype: torch.dtype = torch.float32, bias: bool = False) -> nn.Module:
    """What of an attention module of transformers is looked at."""
    torch.manual_seed(0)
    made = nn.Module()
    made.kv_b_proj = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=bias).to(dtype).requires_grad_(False)
    made.qk_nope_head_dim, made.qk_rope_head_dim, made.v_head_dim = NOPE, ROPE, VALUE
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_absorbed_products_are_those_with_expanded_keys_and_values(path: str, dtype: torch.dtype) -> None:
    """Rows of all gears in one step, words that name none, and 8-bit activations asked for."""
    plain = module(dtype)
    nested = NestedTensor.from_weight(plain.kv_b_proj.weight, group_size=64)
    words = [4, 16, 8, 6, 4, 5, 3, 99, 8 | 8 << 8]
    gears = [4, 16, 8, 6, 4, 4, 4, 16, 8]
    rows, g = len(words), torch.Generator().manual_seed(1)
    query = torch.randn(1, HEADS, rows, NOPE + ROPE, generator=g).to(dtype)
    stored = torch.randn(rows, RANK + ROPE, generator=g).to(dtype)
    nested.bits = torch.tensor([*words, 4], dtype=torch.int32)  # an engine's plan has room for more rows
    plain.kv_b_proj.weight = nn.Parameter(nested, requires_grad=False)
    absorbed = AbsorbedWeight(plain)
    found = (absorbed.absorb(query)[0] * stored).sum(-1)
    values = absorbed.expand(stored[None, :, None, :RANK].expand(-1, -1, HEADS, -1))[0]
    for row, gear in enumerate(gears):
        weight = nested.dequantise(gear).view(HEADS, NOPE + VALUE, RANK)
        key = torch.cat([weight[:, :NOPE] @ stored[row, :RANK], stored[row, RANK:].expand(HEADS, -1)], 1)
        tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.3}
        torch.testing.assert_close(found[:, row], (query[0, :, row] * key).sum(-1), **tolerance)
        torch.testing.assert_close(values[row], weight[:, NOPE:] @ stored[row, :RANK], **tolerance)


def test_one_precision_for_all_rows_and_a_weight_that_is_not_nested() -> None:
    plain = module()
    query = torch.randn(2, HEADS, 5, NOPE + ROPE)
    expected = AbsorbedWeight(plain).absorb(query)
    assert expected.shape == (2, HEADS, 5, RANK + ROPE)
    plain.kv_b_proj.weight = nn.Parameter(NestedTensor.from_weight(plain.kv_b_proj.weight), requires_grad=False)
    torch.testing.assert_close(AbsorbedWeight(plain).absorb(query), expected)


@pytest.mark.parametrize("wrong", ["bias", "sizes"])
def test_a_projection_of_another_kind_is_refused(wrong: str) -> None:
    made = module(bias=wrong == "bias")
    if wrong == "sizes":
        del made.v_head_dim
    with pytest.raises(QBEError, match="in a way of its own"):
        AbsorbedWeight(made)


def written_out(query: torch.Tensor, pages: torch.Tensor, rotary: torch.Tensor, window: int, sinks: bool) -> tuple:
    """What one token `[heads, rank + rope]` finds in all it may see, and its weights' entropy."""
    first = max(0, len(pages) - window) if window else 0
    pages, rotary = pages[first:], rotary[first:]
    scores = (query @ torch.cat([pages, rotary], 1).T) * 0.2
    if sinks:
        scores = torch.cat([scores, SINKS[:, None]], 1)
    weights = scores.softmax(1)
    entropy = torch.distributions.Categorical(probs=weights).entropy()
    return weights[:, : len(pages)] @ pages, entropy


SINKS = torch.tensor([-torch.inf, 0.5, 3.0, -1.0])


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize(("start", "count"), [(0, 150), (290, 100), (470, 140), (575, 2)])
def test_attention_over_pages_of_latents(start: int, count: int, window: int, sinks: bool) -> None:
    """A prompt's tokens, and the last of them once more as a decode step."""
    shape = KVShape(1, 40, 8, latent=True)
    pool, prompt, _ = prompt_in_pages(shape, 4, start, count, MIXED, torch.float32)
    query = torch.randn(1, 4, count, 48, generator=torch.Generator().manual_seed(0))
    given = SINKS if sinks else None
    found = latent.attend_prompt(pool, 0, prompt, query, 0.2, window or None, None, given)
    quantised, exact = (pool.read(0, ids) for ids in (prompt.block_ids, prompt.staging_pages))
    for row in range(count):
        at = start + row
        edge = quantised_pages(at // PAGE_SIZE) * PAGE_SIZE
        own = slice(edge - prompt.first_staging_page * PAGE_SIZE, at + 1 - prompt.first_staging_page * PAGE_SIZE)
        latents, rotary = (torch.cat([q[0, 0, :edge], e[0, 0, own]]) for q, e in zip(quantised, exact, strict=True))
        expected, entropy = written_out(query[0, :, row], latents, rotary, window, sinks)
        torch.testing.assert_close(found[0, row], expected, rtol=1e-4, atol=1e-5)
    end = start + count
    edge = quantised_pages((end - 1) // PAGE_SIZE)
    table = torch.cat([prompt.block_ids[:edge], prompt.staging_pages[edge - prompt.first_staging_page :]])
    noted = torch.zeros(1, 4)
    last = latents[-1].view(1, 1, -1), rotary[-1].view(1, 1, -1)
    slot = prompt.staging_pages[-1:] + (end - 1) % PAGE_SIZE
    out = latent.attend_decode(
        pool, 0, (query[0, :, -1][None], *last), slot, table[None], torch.tensor([end]), noted, 0.2, window, 0.0, given
    )
    torch.testing.assert_close(out[0], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(noted[0], entropy, rtol=1e-4, atol=1e-5)


def test_a_soft_cap_is_refused() -> None:
    pool, prompt, query = prompt_in_pages(KVShape(1, 8, 4, latent=True), 2, 0, 3, [16], torch.float32)
    with pytest.raises(QBEError, match="soft cap"):
        latent.attend_prompt(pool, 0, prompt, query, 1.0, None, 5.0, None)


def test_nested_weights_give_what_the_model_gives_at_the_same_bits() -> None:
    """Requests of several precisions side by side, each as transformers alone expands keys and values at its bits."""
    model = build("deepseek-v3", first_k_dense_replace=4)
    table = nest_model(model, "tiny", NestedWeightConfig(), progress=False)
    gears, texts = (16, 8, 4), prompts(70, 5, 20)
    expected = []
    for gear, text in zip(gears, texts, strict=True):
        for parameter in model.modules():
            if isinstance(getattr(parameter, "weight", None), NestedTensor):
                parameter.weight.set_bits(gear)
        expected.append(greedy(model, text, 12))
    core = Core(model, table, max_batch_tokens=32, max_sequences=3)
    requests = [
        request(str(gear), text, Blueprint.of("test", table, (gear,) * len(table.nested)), max_tokens=12)
        for gear, text in zip(gears, texts, strict=True)
    ]
    assert run(core, *requests) == expected
    assert core.pool.latent


def test_a_page_is_as_large_as_its_latents() -> None:
    core = Core(build("deepseek-v3"), NO_SITES, kv_tokens=256)
    assert core.pool.page_bytes == 4 * PAGE_SIZE * (32 + 8) * 4


@pytest.mark.parametrize("kv_bits", [16, 4])
def test_it_runs_from_the_public_api(kv_bits: int) -> None:
    engine = qbe.Engine(
        tiny_moe("deepseek_v3"), tokenizer=byte_tokenizer(), device="cpu", records=False, kv_tokens=1024
    )
    params = qbe.SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)
    with engine:
        result = engine.generate("one two " * 30, params, budget=qbe.Budget(bits=8, kv_bits=kv_bits))
        assert len(result.token_ids) == 8
        assert (result.average_kv_bits < 16) == (kv_bits < 16)
        with pytest.raises(QBEError, match=r"kv_error does nothing here, because .* latents"):
            engine.generate("one", params, budget=qbe.Budget(bits=8, kv_bits=4, kv_error=0.1))
