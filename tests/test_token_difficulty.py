"""Tokens that were hard to predict go through the model with 16-bit activations, wherever and whenever they do."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import qbe
from conftest import byte_tokenizer, tiny_llama
from engine_models import DEVICE, build, prompts, run
from engine_models import request as plain_request
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.compatibility import Situation
from qbe.engine.core import Core
from qbe.engine.extensions.high_precision import HighPrecisionTokens
from qbe.engine.sampling.sampler import Scores, likeliest, sample
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.engine.scheduling.scheduler import ScheduledTokens
from qbe.engine.scheduling.sequence import Sequence
from qbe.errors import QBEError
from qbe.kernels.cpu.dispatch import many_rows
from qbe.kvcache.pages import block_ids_of
from qbe.records import RecordStore
from qbe.sites import NESTABLE_ROLES, SiteTable
from qbe.store.nested_linears import nest
from qbe.store.nesting import with_store
from qbe.tagger import tag

EIGHT = 8 << 8
TOKENS = 80


def core_with(threshold: float | None, model: str = "llama", **sizes: int) -> Core:
    plain = build(model)
    table = tag(plain)
    nest(plain, [s.name for s in table if s.is_linear and s.role in NESTABLE_ROLES])
    return Core(plain, replace(with_store(table, plain), difficult_entropy=threshold), **sizes)


def request(core: Core, name: str, prompt: list[int], blueprint: Blueprint, tokens: int = TOKENS) -> Sequence:
    """A request whose difficult tokens are read with 16-bit activations, as an engine makes it."""
    made = plain_request(name, prompt, blueprint, max_tokens=tokens)
    made.difficulty.threshold = core.table.difficult_entropy
    return made


def low(table: SiteTable) -> Blueprint:
    return Blueprint.of("low", table, (6,) * len(table.nested), table.activations(8))


@pytest.fixture(scope="module")
def threshold() -> float:
    """One that about half of the tokens exceed."""
    core = core_with(0.0)
    asked = request(core, "r", prompts(20)[0], low(core.table))
    run(core, asked)
    assert len(asked.difficulty.entropies) == TOKENS
    below, above = sorted(asked.difficulty.entropies)[TOKENS // 2 - 1 : TOKENS // 2 + 1]
    return (below + above) / 2


def test_the_sampler_leaves_the_entropy_of_the_models_own_distribution() -> None:
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(0)) * 3
    logits[1, 7:] = -torch.inf
    logits[3] = torch.nan
    expected = [float(-(p * p.clamp_min(1e-30).log()).sum()) for p in logits[:3].double().softmax(-1)]
    parameters = SamplingParams(temperature=0.7, top_k=5, repetition_penalty=1.3, seed=1)
    asked = [Sequence(str(i), [1, 2], parameters, Blueprint("b", (), (), ())) for i in range(4)]
    for i in (0, 1, 3):
        asked[i].difficulty.threshold = 1.0
    alone = [Sequence(str(i), [1, 2], parameters, Blueprint("b", (), (), ())) for i in range(4)]
    tokens = sample(Scores(logits.clone(), likeliest(logits)), asked)
    assert tokens == sample(Scores(logits.clone(), likeliest(logits)), alone)
    assert tokens[3] is None
    assert asked[0].difficulty.entropies == pytest.approx(expected[:1], rel=1e-5)
    assert asked[1].difficulty.entropies == pytest.approx(expected[1:2], rel=1e-5)
    assert asked[2].difficulty.entropies == [] == alone[0].difficulty.entropies


def test_rows_are_runs_of_one_precision() -> None:
    b = Blueprint("b", (4, 4), (8, 16), (16,))
    assert b.full_activations.activation_bits == (16, 16)
    assert b.full_activations.weight_bits == b.weight_bits
    assert b.full_activations.full_activations is b.full_activations
    s = Sequence("s", list(range(10)), SamplingParams(), b)
    s.difficulty.threshold = 1.0
    for entropy in (0.5, 2.0, 3.0, 0.1, 1.5):
        s.difficulty.entropies.append(entropy)
        HighPrecisionTokens(Situation).advance(s, 7)
        s.append(7)
    assert s.difficulty.high_precision_positions == {11, 12, 14}
    assert s.rows(0, 15) == [(b, 11), (b.full_activations, 2), (b, 1), (b.full_activations, 1)]
    assert s.rows(12, 1) == [(b.full_activations, 1)]
    assert s.alike == 11
    s.computed = 12
    assert s.high_precision_computed == 1


def test_the_row_of_a_difficult_token_alone_has_16_bit_activations(threshold: float) -> None:
    core = core_with(threshold)
    first, second = prompts(20, 33)
    watched = request(core, "a", first, low(core.table))
    full = request(core, "b", second, low(core.table).full_activations)
    core.add(watched)
    core.add(full)
    assert full.difficulty.threshold is None
    seen = []
    while core.has_work():
        core.step()
        position = watched.computed - 1
        if position >= len(first):
            precision_words = core.plan.precision_words[0, :2].tolist()
            seen.append(precision_words[0] & EIGHT == 0)
            assert (position in watched.difficulty.high_precision_positions) == seen[-1]
            assert watched.difficulty.entropies[position - len(first)] > threshold or not seen[-1]
            if core.scheduler.get("b"):
                assert precision_words[1] & EIGHT == 0
    assert len(seen) == TOKENS - 1
    assert 0.2 < sum(seen) / len(seen) < 0.8
    assert full.difficulty.entropies == []


def test_every_token_difficult_is_a_blueprint_exchanged_after_the_prompt() -> None:
    core = core_with(-1.0)
    prompt = prompts(40)[0]
    watched = request(core, "a", prompt, low(core.table))
    (ids,) = run(core, watched)
    assert len(watched.difficulty.high_precision_positions) == TOKENS
    plain = core_with(None)
    exchanged = request(plain, "b", prompt, low(plain.table))
    plain.add(exchanged)
    plain.step()
    exchanged.blueprint = exchanged.blueprint.full_activations
    while plain.has_work():
        plain.step()
    assert exchanged.output_ids == ids
    assert exchanged.difficulty.entropies == []


@pytest.mark.parametrize("sizes", [{}, {"max_batch_tokens": 16, "max_sequences": 4}])
def test_computed_again_it_is_what_it_was(threshold: float, sizes: dict[str, int]) -> None:
    """After a preemption the whole sequence is a prompt; its rows keep the precision they had."""
    prompt = prompts(70)[0]
    undisturbed = core_with(threshold)
    expected = request(undisturbed, "a", prompt, low(undisturbed.table))
    undisturbed.add(expected)
    first: list[torch.Tensor] = []
    while undisturbed.has_work():
        first[:] = stepped(undisturbed, expected)
    core = core_with(threshold, **sizes)
    asked = request(core, "a", prompt, low(core.table))
    core.add(asked)
    snapshots, precision_words, schedule = [], core.plan.precision_words, core.scheduler.schedule
    work: list[ScheduledTokens] = []
    again: list[torch.Tensor] = []

    def scheduled() -> list[ScheduledTokens]:
        work[:] = schedule()
        return work

    core.scheduler.schedule = scheduled  # type: ignore[method-assign]
    while core.has_work():
        if len(asked.output_ids) in (30, 65) and asked.remaining == 1:
            snapshots.append((len(asked.token_ids), set(asked.difficulty.high_precision_positions)))
            core.scheduler.restart(asked)
        again[:] = stepped(core, asked)
        (own,) = work
        at = range(own.start, own.start + own.count)
        assert [w & EIGHT == 0 for w in precision_words[0, : own.count].tolist()] == [
            p in asked.difficulty.high_precision_positions for p in at
        ]
    assert [n for n, _ in snapshots] == [100, 135]
    for n, before in snapshots:
        assert {p for p in asked.difficulty.high_precision_positions if p < n} == {p for p in before if p < n}
    assert 0 < len(asked.difficulty.high_precision_positions) < TOKENS
    same = next((i for i in range(TOKENS) if asked.output_ids[i] != expected.output_ids[i]), TOKENS)
    assert same >= 30  # nothing was computed again before
    # The first layer's keys and values come from the token and its precision alone, those of tokens computed once and
    # of tokens computed three times.
    alike = len(prompt) + next(
        (i for i in range(same) if high_precision_positions(asked, i) != high_precision_positions(expected, i)), same
    )
    for once, thrice in zip(first, again, strict=True):
        assert len(once) == len(thrice) == len(prompt) + TOKENS - 1
        torch.testing.assert_close(thrice[:alike], once[:alike], rtol=1e-5, atol=1e-5)
    # A sequence that begins with all of that as its prompt goes on exactly as this one does.
    afresh = core_with(threshold, **sizes)
    length, known = snapshots[-1]
    rest = request(afresh, "b", asked.token_ids[:length], low(afresh.table), len(prompt) + TOKENS - length)
    rest.difficulty.high_precision_positions = known
    run(afresh, rest)
    assert rest.difficulty.entropies == asked.difficulty.entropies[length - len(prompt) :]
    assert rest.output_ids == asked.output_ids[length - len(prompt) :]
    assert rest.difficulty.high_precision_positions == asked.difficulty.high_precision_positions
    # One that was never computed again: deeper down a number whose last bit differs may be rounded to another byte, and
    # all tokens that see it are other ones (on an H200 one of them, in the second layer, changes entropies by 0.3 %).
    # Last bits depend on how many rows are multiplied on a GPU, and on a CPU where torch multiplies many.
    if DEVICE == "cpu" and many_rows(torch.float32) == sys.maxsize:
        assert asked.output_ids == expected.output_ids
        assert asked.difficulty.high_precision_positions == expected.difficulty.high_precision_positions


def stepped(core: Core, sequence: Sequence) -> list[torch.Tensor]:
    """Keys and values [tokens, numbers] that the first layer has of a sequence after one more step."""
    pages = sequence.pages
    core.step()
    found = core.pool.read(0, torch.tensor(block_ids_of(pages, 0), device=DEVICE))
    return [x.transpose(1, 2).flatten(0, 1)[: sequence.computed].flatten(1).cpu() for x in found]


def high_precision_positions(sequence: Sequence, token: int) -> bool:
    """Whether a token of the answer is read with 16-bit activations."""
    return len(sequence.token_ids) - len(sequence.output_ids) + token in sequence.difficulty.high_precision_positions


def test_decode_steps_of_fixed_shape_and_packed_ones_agree(threshold: float) -> None:
    core, packed = core_with(threshold), core_with(threshold)
    if core.runner.decode is None:
        pytest.skip("decode steps run packed here")
    packed.runner.decode = None
    texts = prompts(20, 50, 9)
    pairs = [[request(c, str(i), t, low(c.table)) for i, t in enumerate(texts)] for c in (core, packed)]
    assert run(core, *pairs[0]) == run(packed, *pairs[1])
    marked = [[r.difficulty.high_precision_positions for r in requests] for requests in pairs]
    assert marked[0] == marked[1]


def test_pages_with_such_tokens_are_nobody_elses(threshold: float) -> None:
    core = core_with(threshold)
    prompt = prompts(70)[0]
    first = request(core, "a", prompt, low(core.table))
    run(core, first)
    assert min(first.difficulty.high_precision_positions) < 128
    again = request(core, "b", first.token_ids[:-1], low(core.table), 1)
    run(core, again)
    # The prompt's first page; the second one holds tokens that were computed in another way.
    assert again.paging.cached == 64
    same = request(core, "c", prompt, low(core.table))
    run(core, same)
    assert same.paging.cached == 64
    assert same.output_ids == first.output_ids


def test_a_hybrid_has_such_tokens_too() -> None:
    core = core_with(0.0, "granite-moe-hybrid")
    asked = request(core, "a", prompts(12)[0], low(core.table), 6)
    run(core, asked)
    assert asked.difficulty.high_precision_positions == set(range(12, 18))


def test_models_of_one_sequence_a_forward_refuse_them() -> None:
    core = core_with(0.0)
    asked = request(core, "a", prompts(12)[0], low(core.table), 6)
    with pytest.raises(QBEError, match=r"high_precision_tokens does nothing here, because .* a forward of its own"):
        HighPrecisionTokens(lambda: Situation(alone=True)).admit(asked)


def test_results_and_records_tell_the_shares(tmp_path: Path) -> None:
    engine = qbe.Engine(tiny_llama(vocabulary=320), tokenizer=byte_tokenizer(), device=DEVICE, records=tmp_path / "r")
    assert engine.table.difficult_entropy is not None
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    eight = engine.generate(
        "a first prompt", params, budget=Budget(bits=6, activation_bits=8, high_precision_tokens=True)
    )
    full = engine.generate("a first prompt", params, budget=Budget(bits=6))
    engine.close()
    records = RecordStore(tmp_path / "r").list()
    assert len(records) == 2
    entropies = records[1].entropies
    assert entropies is not None
    assert len(entropies) == 24
    hard = sum(e > engine.table.difficult_entropy for e in entropies[:-1])  # the last token is not computed
    assert eight.high_precision_tokens == hard
    assert eight.describe()["usage"]["completion_tokens_details"]["careful_tokens"] == hard
    shares = records[1].tokens_by_activation_bits
    assert sum(shares.values()) == sum(records[0].tokens_by_activation_bits.values()) == 14 + 23
    assert shares.get(16, 0) >= hard
    assert full.high_precision_tokens == 0
    assert records[0].tokens_by_activation_bits == {16: 14 + 23}
    assert records[0].entropies is None
