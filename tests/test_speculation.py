"""Speculation: what is written is what would have been written without it, whoever drafts and whoever is
beside."""

from __future__ import annotations

from collections import Counter
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

import qbe
from conftest import byte_tokenizer, tiny_llama
from engine_models import NO_SITES, build, prompts, request, run
from qbe.blueprint import Blueprint
from qbe.engine.core import Core
from qbe.engine.execution.decode import DecodeStep
from qbe.engine.sampling.sampler import accept
from qbe.engine.sampling.scoring import Scored, score
from qbe.engine.scheduling.sequence import Sequence
from qbe.engine.setup import StepSizes, speculator_of
from qbe.engine.speculation import acceptance_statistics
from qbe.engine.speculation.acceptance_statistics import (
    PRIOR_RATE,
    PRIOR_WEIGHT,
    RETRY_INTERVAL,
    AcceptanceStats,
    Costs,
    Speculation,
    progress,
)
from qbe.engine.speculation.speculator import Speculator
from qbe.sites import NESTABLE_ROLES
from qbe.store.nested_linears import nest
from qbe.store.nesting import with_store
from qbe.tagger import tag

TOKENS = 150


class Fixed(Costs):
    """Steps whose cost is known: those of checks cost as much as one row, draft steps a part of it."""

    def __init__(self, draft: float) -> None:
        super().__init__()
        self.draft = draft

    def of(self, rows: int, bits: float) -> float | None:
        return 1.0 if bits >= 7 else self.draft


OWN, READ = Fixed(0.01), Fixed(9.0)  # what pays: own drafts; only what the text says


def core_of(costs: Costs | None = None, device: torch.device | str = "cpu", **sizes: Any) -> Core:
    model = build("llama").to(device)
    table = tag(model)
    nest(model, [s.name for s in table if s.is_linear and s.role in NESTABLE_ROLES])
    made = Core(model, with_store(table, model), speculate=True, **{"max_sequences": 4, "kv_tokens": 2048, **sizes})
    assert made.speculator is not None
    if costs is not None:
        made.speculator.costs = costs
    return made


def at(core: Core, bits: int = 8, kv: int = 16) -> Blueprint:
    return Blueprint.of("b", core.table, (bits,) * len(core.table.nested), kv_bits=(kv,) * core.table.layers)


def told(s: Sequence) -> Speculation:
    assert s.speculation is not None
    return s.speculation


@pytest.mark.parametrize("costs", [OWN, READ])
@pytest.mark.parametrize("kv", [16, 8])
def test_greedy_answers_are_those_without(costs: Fixed, kv: int, device: torch.device) -> None:
    """Two of them of few different tokens, so that their text is worth reading."""
    bias = [None, dict.fromkeys((5, 9, 11), 40.0), dict.fromkeys((7, 8), 40.0)]

    acceptance: list[set[int]] = []

    def answers(speculate: bool) -> list[Sequence]:
        made = core_of(costs, device)
        assert made.speculator is not None
        asked = [request(str(i), p, at(made, kv=kv), max_tokens=TOKENS, speculate=speculate, logit_bias=b)
                 for i, (p, b) in enumerate(zip(prompts(20, 61, 7), bias, strict=True))]  # fmt: skip
        run(made, *asked)
        acceptance.append({gear for (gear, _), o in made.speculator.acceptance.items() if o.rate != PRIOR_RATE})
        return asked

    plain, made = answers(False), answers(True)
    assert [s.output_ids for s in made] == [s.output_ids for s in plain]
    assert all(told(s).drafted >= told(s).accepted for s in made)
    assert bool(acceptance[-1]) == (costs is OWN)
    assert sum(told(s).accepted for s in made) > 60


def test_keys_and_values_of_draft_tokens_are_those_of_plain_steps() -> None:
    """Bit for bit on a CPU: what draft rows wrote is overwritten, also where draft tokens were refused."""
    (prompt,) = prompts(30)
    kept: list[list[torch.Tensor]] = []
    for speculate in (False, True):
        made = core_of(OWN)
        s = request("r", prompt, at(made), max_tokens=80, speculate=speculate)
        made.add(s)
        while len(s.output_ids) < 70:
            made.step()
        block_ids = torch.tensor([p.block_id for p in s.pages])
        kept.append([t[0, :, :99].clone() for layer in range(4) for t in made.pool.read(layer, block_ids)])
        assert s.computed >= 99
        if speculate:
            assert 0 < told(s).accepted < told(s).drafted
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


def test_plain_rows_and_speculating_ones_share_steps_of_known_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: set[int] = set()
    served = DecodeStep.run
    monkeypatch.setattr(DecodeStep, "run", lambda self, work: sizes.add(len(work)) or served(self, work))
    made = core_of(READ)

    def asked(speculate: bool) -> list[Sequence]:
        few = dict.fromkeys((5, 9, 11), 40.0)
        return [request(str(i), p, at(made, b), max_tokens=90, logit_bias=few, speculate=speculate and i != 1)
                for i, (p, b) in enumerate(zip(prompts(24, 24, 30), (8, 4, 16), strict=True))]  # fmt: skip

    expected = run(made, *asked(False))
    assert max(sizes) == 3
    mixed = asked(True)
    assert run(made, *mixed) == expected
    assert mixed[1].speculation is None
    assert min(told(mixed[0]).accepted, told(mixed[2]).accepted) > 0
    assert max(sizes) == 8


@pytest.mark.parametrize("costs", [OWN, READ])
def test_a_seed_gives_the_same_answer(costs: Fixed) -> None:
    params = [
        dict(temperature=1.0, seed=3),
        dict(temperature=0.6, top_p=0.8, seed=4, repetition_penalty=1.2),
        dict(temperature=0.8, top_k=9, seed=5, logprobs=2, frequency_penalty=0.3),
    ]
    texts = prompts(18, 33, 40)
    texts[2] = texts[2][:10] * 4

    def answers(speculate: bool) -> list[Sequence]:
        made = core_of(costs)
        asked = [request(str(i), p, at(made), max_tokens=70, speculate=speculate, **kinds)
                 for i, (p, kinds) in enumerate(zip(texts, params, strict=True))]  # fmt: skip
        run(made, *asked)
        return asked

    plain, made = answers(False), answers(True)
    assert [s.output_ids for s in made] == [s.output_ids for s in plain]
    assert made[2].sampling.logprobs == plain[2].sampling.logprobs
    if costs is OWN:
        assert sum(told(s).accepted for s in made) > 20


def test_rejection_sampling_keeps_a_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, other = (torch.randn(8, generator=generator) * 1.5 for _ in range(2))
    q = other.softmax(-1)
    draft_tokens = torch.multinomial(q, 8000, replacement=True, generator=generator).tolist()
    found = Counter(accept(logits, g, q, generator) for g in draft_tokens)
    expected = logits.double().softmax(-1) * len(draft_tokens)
    assert chisquare([found[i] for i in range(8)], expected / expected.sum() * len(draft_tokens)).pvalue > 1e-3
    same = sum(accept(logits, g, logits.softmax(-1), generator) == g for g in draft_tokens[:500])
    assert same == 500


@pytest.mark.parametrize("costs", [OWN, READ])
def test_sampled_answers_have_the_models_distribution(costs: Fixed) -> None:
    """Three tokens of three choices each, drafted at 4 bits or read in the answers before, and taken at 8: a chi-square
    test on the 27 answers."""
    made = core_of(costs)
    (prompt,) = prompts(9)
    params = dict(temperature=1.5, top_k=3, max_tokens=4)

    def next_of(ids: list[int]) -> dict[int, float]:
        rows: list[torch.Tensor] = []
        score(made, [Scored(ids, at(made), len(ids) - 1, lambda _, logits: rows.append(logits[-1].clone()))])
        top = (rows[-1] / 1.5).topk(3)
        return dict(zip(top.indices.tolist(), top.values.double().softmax(-1).tolist(), strict=True))

    expected: dict[tuple[int, ...], float] = {}
    for first, p in next_of(prompt).items():
        for second, q in next_of([*prompt, first]).items():
            for third, r in next_of([*prompt, first, second]).items():
                expected[first, second, third] = p * q * r
    found: Counter[tuple[int, ...]] = Counter()
    drafted = accepted = 0
    for part in range(250):
        asked = [request(f"{part}.{i}", prompt, at(made), speculate=True, **params) for i in range(4)]
        for answer in run(made, *asked):
            found[tuple(answer[:3])] += 1
        drafted += sum(told(s).drafted for s in asked)
        accepted += sum(told(s).accepted for s in asked)
    assert set(found) <= set(expected)
    assert 0.2 * drafted < accepted < drafted
    # Rare answers together, so that every class is large enough for the test.
    names = {a: a if p * 1000 >= 8 else "rare" for a, p in expected.items()}
    counts, rates = Counter[Any](), Counter[Any]()
    for answer, name in names.items():
        counts[name] += found[answer]
        rates[name] += expected[answer] * 1000  # type: ignore[assignment]
    assert chisquare([counts[n] for n in rates], list(rates.values())).pvalue > 1e-3


def test_preempted_and_late_sequences_write_the_same() -> None:
    texts = prompts(50, 40, 61)

    def answers(pages: int, speculate: bool) -> list[list[int]]:
        made = core_of(OWN, kv_tokens=64 * pages)
        asked = [request(str(i), p, at(made), max_tokens=120, speculate=speculate) for i, p in enumerate(texts)]
        made.add(asked[0])
        for _ in range(7):
            made.step()
        found = [asked[0], *asked[1:]]
        made.add(asked[1])
        for _ in range(2):
            made.step()
        made.add(asked[2])
        while made.has_work():
            made.step()
        assert pages > 4 or any(s.preemptions for s in asked)
        return [s.output_ids for s in found]

    expected = answers(16, False)
    assert answers(16, True) == expected
    assert answers(4, True) == expected


def test_expected_progress_is_that_of_a_simulation() -> None:
    generator = torch.Generator().manual_seed(0)
    for rate, draft_tokens in product((0.0, 0.3, 0.8, 1.0), (0, 1, 4)):
        right = torch.rand(20000, draft_tokens, generator=generator) < rate
        written = 1 + right.int().cumprod(-1).sum(-1).double()
        assert progress(rate, draft_tokens) == pytest.approx(float(written.mean()), abs=0.03)


def test_a_drafter_that_loses_rests_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    o = AcceptanceStats()
    assert o.rate == PRIOR_RATE
    for _ in range(PRIOR_WEIGHT):
        o.add(0, True)
    assert o.rate == 0.0
    o.pass_by(RETRY_INTERVAL - 1)
    assert o.rate == 0.0
    o.pass_by(1)
    assert o.rate == PRIOR_RATE
    o.add(30, False)
    o.add(1, True)
    assert o.rate == pytest.approx(31 / 32)

    monkeypatch.setattr(acceptance_statistics, "RETRY_INTERVAL", 128)
    draft = Speculator.draft

    def wrong(self: Speculator, sequences: list[Sequence], logits: torch.Tensor, best: torch.Tensor) -> None:
        draft(self, sequences, logits, (best + 1) % logits.shape[-1])

    monkeypatch.setattr(Speculator, "draft", wrong)
    made = core_of(Fixed(0.5))
    assert made.speculator is not None
    made.speculator.drafters = {4, 6}
    s = request("r", prompts(20)[0], at(made), max_tokens=200, speculate=True)
    made.add(s)
    drafted = [0] * 201
    while made.has_work():
        made.step()
        drafted[len(s.output_ids)] = told(s).drafted
    assert s.output_ids == run(core_of(), request("r", prompts(20)[0], at(made), max_tokens=200))[0]
    assert told(s).accepted == 0
    early = max(drafted[:70])
    assert PRIOR_WEIGHT <= early == max(drafted[:120]) < max(drafted)  # both drafters, then none for a while


def test_a_request_says_what_was_drafted_and_stops_where_it_would(tmp_path) -> None:
    with qbe.Engine(tiny_llama(), tokenizer=byte_tokenizer(), policy="uniform", device="cpu", max_sequences=1,
                    speculate=True, records=tmp_path / "r.sqlite") as engine:  # fmt: skip
        assert engine.core.speculator is not None
        engine.core.speculator.costs = OWN
        budget = qbe.Budget(bits=8)
        plain = engine.generate("one two one two", qbe.SamplingParams(max_tokens=60), budget=budget)
        whole = engine.generate("one two one two", qbe.SamplingParams(max_tokens=60, speculate=True), budget=budget)
        assert whole.token_ids == plain.token_ids
        assert whole.accepted_tokens > 0
        for end in (20, 21, 22, 23):
            stop = (plain.text[end : end + 2],)
            a, b = (engine.generate("one two one two", qbe.SamplingParams(max_tokens=60, stop=stop, speculate=x),
                                    budget=budget) for x in (False, True))  # fmt: skip
            assert (b.text, b.token_ids, b.finish_reason) == (a.text, a.token_ids, a.finish_reason)
            assert b.computed_tokens == a.computed_tokens
        bounded = engine.generate("one two", qbe.SamplingParams(max_tokens=9, speculate=True),
                                  budget=qbe.Budget(bits=8, kv_bits=8, kv_error=0.1))  # fmt: skip
        assert bounded.drafted_tokens == 0
    record = qbe.records.RecordStore(tmp_path / "r.sqlite").get(whole.id)
    assert (record.drafted_tokens, record.accepted_tokens) == (whole.drafted_tokens, whole.accepted_tokens)
    assert whole.describe()["usage"]["completion_tokens_details"]["accepted_tokens"] == whole.accepted_tokens
    assert record.bytes_moved > (60 - whole.accepted_tokens) * whole.bytes_per_token


@pytest.mark.parametrize(("device", "shared", "rows"), [("cuda", True, 4), ("cuda", False, 16), ("cpu", True, 16)])
def test_rows_that_share_on_a_gpu_are_checked_as_few_as_come_out_like_one(device: str, shared: bool, rows: int) -> None:
    runner: Any = SimpleNamespace(
        decode=SimpleNamespace(size_of=lambda n: n), device=torch.device(device),
        plan=SimpleNamespace(shared=object() if shared else None),
    )  # fmt: skip
    sizes = StepSizes(512, 512, 16, 16, 512)
    speculator = speculator_of(NO_SITES, runner, sizes, ready=True)
    assert speculator is not None
    assert speculator.rows == rows
