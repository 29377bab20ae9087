"""A KV precision for each key head, from the policy to the pages: answers, prefixes, raises, preemption, results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import byte_tokenizer, tiny_llama
from engine_models import NO_SITES, build, prompts, request, run
from qbe import Budget, Engine, QBEError, Request, SamplingParams
from qbe.blueprint import Blueprint
from qbe.engine.core import Core
from qbe.explain.heatmap import HeatMap
from qbe.format.kv_blocks import FORMATS
from qbe.kvcache.pages import PAGE_SIZE
from qbe.records import RecordStore, export
from qbe.sites import KVBits, KVSite
from qbe.store.kv_sensitivity import quantised

HEADS: tuple[KVBits, ...] = ((4, 16), 8, (2, 8), (16, 4))


def kv(*bits: KVBits) -> Blueprint:
    return Blueprint("kv", (), (), bits)


def core(name: str = "llama", **sizes: Any) -> Core:
    model = build(name)
    model.config.max_position_embeddings = 2048
    return Core(model, NO_SITES, **{"max_batch_tokens": 512, "max_sequences": 8, "kv_tokens": 4096} | sizes)


def by_hand(name: str, prompt: list[int], bits: tuple[KVBits, ...], tokens: int) -> list[int]:
    """Greedy answer of a Llama computed anew for every token, its attention written out over the whole sequence."""
    model, ids = build(name), list(prompt)
    config = model.config
    repeat = config.num_attention_heads // config.num_key_value_heads
    width = config.hidden_size // config.num_attention_heads

    def attention(layer: torch.nn.Module, hidden: torch.Tensor, place: Any) -> torch.Tensor:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        q, k, v = (p(hidden).view(1, -1, n, width).transpose(1, 2) for p, n in (
            (layer.q_proj, config.num_attention_heads), (layer.k_proj, config.num_key_value_heads),
            (layer.v_proj, config.num_key_value_heads)))  # fmt: skip
        q, k = apply_rotary_pos_emb(q, k, *place)
        of = bits[layer.layer_idx]
        low = quantised(k[0], v[0], of if isinstance(of, tuple) else (of,) * config.num_key_value_heads)
        out = []
        for t in range(hidden.shape[1]):
            own = max(0, t // PAGE_SIZE - 1) * PAGE_SIZE  # and the page before it
            keys, values = (torch.cat([a[:, :own], b[0, :, own : t + 1]], 1).repeat_interleave(repeat, 0)
                            for a, b in zip(low, (k, v), strict=True))  # fmt: skip
            weights = (keys @ q[0, :, t, :, None])[..., 0].mul(width**-0.5).softmax(-1)
            out.append((weights[:, None] @ values).flatten())
        return layer.o_proj(torch.stack(out)[None])

    for layer in model.model.layers:
        layer.self_attn.forward = lambda hidden_states, position_embeddings, at=layer.self_attn, **_: (
            attention(at, hidden_states, position_embeddings), None
        )  # fmt: skip
    with torch.inference_mode():
        for _ in range(tokens):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model by hand is on the CPU")
def test_answers_with_bits_per_head_equal_attention_written_out() -> None:
    prompt = prompts(200)[0]
    expected = by_hand("llama", prompt, HEADS, 20)
    for tokens in (16, 512):
        r = request("r", prompt, kv(*HEADS), max_tokens=20)
        assert run(core(max_batch_tokens=tokens), r) == [expected]
        assert r.paging.quantised_bits == [HEADS] * 3
        assert r.paging.average_kv_bits == pytest.approx((128 * 8.25 + 91 * 16) / 219)
    assert run(core(), request("full", prompt, kv(16, 16, 16, 16), max_tokens=20)) != [expected]


def raising(c: Core, prompt: list[int], at: int, bits: tuple[KVBits, ...], tokens: int = 100) -> Any:
    """A request whose pages to come get other bits when its cache has reached a length."""
    r = request("raised", prompt, kv(4, 4, 4, 4), max_tokens=tokens)
    c.add(r)
    for _ in range(2000):
        if r.finish_reason:
            return r
        if r.computed == at:
            c.raise_kv(r, bits)
        c.step()
    raise AssertionError("the core did not finish")


def test_raised_pages_are_known_by_their_own_bits_and_shared_up_to_the_raise() -> None:
    c, prompt = core(), prompts(500)[0]
    first = raising(c, prompt, 512, HEADS, 540)
    low = (4, 4, 4, 4)
    assert first.paging.quantised_bits == [low] * 8 + [HEADS] * 8
    fork_parent = request("fork_parent", first.token_ids, kv(*low), max_tokens=5)
    other = request("other", first.token_ids, kv(*HEADS), max_tokens=5)
    run(c, fork_parent, other)
    cached = fork_parent.paging.cached, other.paging.cached
    assert cached == (8 * PAGE_SIZE, 0), "the ninth page is there, but at other bits"
    fresh = core()
    assert run(fresh, request("fork_parent", first.token_ids, kv(*low), max_tokens=5)) == [fork_parent.output_ids]


def test_a_raised_request_that_is_preempted_gets_the_same_pages_again() -> None:
    prompt = prompts(70)[0]
    expected = raising(core(), prompt, 128, HEADS).output_ids
    c = core(kv_tokens=5 * PAGE_SIZE)
    older = request("older", prompts(90)[0], max_tokens=160)
    c.add(older)
    c.step()
    r = raising(c, prompt, 128, HEADS)
    assert r.preemptions > 0
    assert r.output_ids == expected
    assert r.paging.quantised_bits[:2] == [(4, 4, 4, 4)] * 2


def test_a_raise_that_would_not_fit_is_left() -> None:
    c = core(kv_tokens=3 * PAGE_SIZE)
    r = request("r", prompts(20)[0], kv(2, 2, 2, 2), max_tokens=230)
    c.add(r)
    c.step()
    c.raise_kv(r, (16, 16, 16, 16))
    assert r.blueprint.kv_bits == (2, 2, 2, 2)
    c.raise_kv(r, (4, 2, 2, 2))
    assert r.blueprint.kv_bits == (4, 2, 2, 2)


def test_more_precisions_than_there_are_numbers_pass_through_one_pool() -> None:
    """Pages that nobody owns any more give theirs up."""
    c, prompt = core(), prompts(520)[0]
    widths = (2, 4, 8, 16)
    for i in range(FORMATS + 10):
        a, b, c4, d = (widths[i // 4**j % 4] for j in range(4))
        r = request(str(i), prompt, kv((a, b), (c4, d), 4, 4 if i < FORMATS else 8), max_tokens=1)
        run(c, r)
        assert r.finish_reason == "length"
    assert c.scheduler.allocator.evictable > 0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Engine:
    """Its measured sensitivities and entropies come from `qbe.store.kv_sensitivity`."""
    records = tmp_path_factory.mktemp("heads") / "records.sqlite"
    return Engine(tiny_llama(), tokenizer=byte_tokenizer(), device=device.type, records=records)


def test_budgets_explanations_results_and_records_carry_the_bits_of_every_head(engine: Engine, tmp_path: Path) -> None:
    prompt, params = "Count the stars. " * 9, SamplingParams(max_tokens=8, ignore_eos=True)
    assert engine.table.kv_measured
    assert [(s.layer, s.head, s.query_heads, s.numbers) for s in engine.table.kv] == [
        (layer, head, 2, 64) for layer in range(2) for head in range(2)
    ]
    explained = engine.explain(prompt, params, budget=Budget(kv_bits=5))
    result = engine.generate(prompt, params, budget=Budget(kv_bits=5))
    bits = result.blueprint.kv_bits
    assert explained.blueprint.kv_bits == bits
    assert sorted(result.blueprint.kv_bits_at(s.layer, s.head) for s in engine.table.kv) in ([4, 4, 4, 8], [2, 2, 8, 8])
    heat = HeatMap.of(explained.blueprint, engine.table)
    assert sum(cell.bits for cell in heat.kv if cell) / 2 == 5
    described = explained.describe()
    assert described["kv_measured"]
    assert described["context"] == explained.prompt_tokens + 8
    assert described["budget"]["kv_bits"] == described["blueprint"]["average_kv_bits"] == 5
    assert [tuple(b) if isinstance(b, list) else b for b in described["blueprint"]["kv_bits"]] == list(bits)
    store = RecordStore(engine._records.path)
    assert store.list(1)[0].kv_bits == bits
    export(store, tmp_path / "r.parquet", "parquet")
    import pyarrow.parquet as pq

    row = pq.read_table(tmp_path / "r.parquet").to_pylist()[-1]["kv_bits"]
    assert [b[0] if len(set(b)) == 1 else tuple(b) for b in row] == list(bits)


def test_a_running_request_is_raised_by_its_own_entropies(engine: Engine) -> None:
    prompt, params = "Count the stars. " * 9, SamplingParams(max_tokens=130, ignore_eos=True)
    table = engine.table
    assert engine.explain(prompt, params).blueprint.average_kv_bits(table) < 16

    def pages(kv_sites: tuple[KVSite, ...], budget: Budget) -> list[tuple[KVBits, ...]]:
        engine._table = table.with_kv(kv_sites)
        running = engine._live[engine.submit(Request(prompt, params, budget))].running
        while not engine.finished(running.request_id):
            engine.step()
        engine.take_result(running.request_id)
        return running.paging.quantised_bits

    try:
        loose = tuple(replace(s, entropy=(0.5, 1.0)) for s in table.kv)
        strict = (replace(loose[0], entropy=(5.0, 0.1)), *loose[1:])
        as_ever = pages(loose, Budget())
        assert as_ever[0] == (8, 8), "the first page, unless an average is asked for"
        assert len(set(as_ever[1:])) == 1
        raised = pages(strict, Budget())
        assert raised[:2] == as_ever[:2]
        assert Blueprint("", (), (), raised[-1]).kv_bits_at(0, 0) > Blueprint("", (), (), raised[1]).kv_bits_at(0, 0)
        assert pages(strict, Budget()) == raised
        assert len(set(pages(strict, Budget(kv_bits=5)))) == 1, "an average that was asked for is kept"
    finally:
        engine._table = table


def test_sensitivities_of_another_model_are_refused() -> None:
    table = NO_SITES.with_kv([KVSite(0, 0, 1, 64)])
    with pytest.raises(QBEError, match=r"of other key heads than the model has: delete kv_sensitivity\.json"):
        Core(build("llama"), table, kv_tokens=256)
