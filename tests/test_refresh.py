"""Another blueprint while an answer is written: what gives cause, what it changes, and where it is told."""

from __future__ import annotations

import json
import math
import random
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import qbe
from conftest import byte_tokenizer, tiny_llama
from engine_models import build, prompts, request, run
from older_folder import without_provenance
from qbe.analysis.difficulty import difficulty
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.engine.core import Core
from qbe.engine.sampling.sampler import likeliest
from qbe.policies import Policy
from qbe.records import RecordStore
from qbe.refresh import thresholds
from qbe.refresh.monitor import Cause, Monitor, Pace
from qbe.refresh.thresholds import RUN, WINDOW, Thresholds, moved
from qbe.sites import NESTABLE_ROLES, TextDifficulty
from qbe.store.nested_linears import nest
from qbe.store.nesting import with_store
from qbe.tagger import tag
from records_samples import record

SOME = Thresholds(hard_entropy=2.0, easy_entropy=1.0, hard_margin=1.0, easy_margin=3.0, windows=99)
HARD_TOKEN, EASY_TOKEN, USUAL_TOKEN = (3.0, 0.5), (0.5, 5.0), (1.5, 2.0)


def causes(tokens: list[tuple[float, float]], step: int = 1) -> list[Cause]:
    """What a monitor finds when so many tokens come at once."""
    monitor, found = Monitor(SOME), []
    for end in range(step, len(tokens) + step, step):
        cause = monitor.look([e for e, _ in tokens[:end]], [m for _, m in tokens[:end]])
        found += [] if cause is None else [cause]
    return found


def test_three_windows_of_one_kind_are_cause_and_spikes_are_not() -> None:
    assert causes([HARD_TOKEN] * 95) == []
    (cause,) = causes([USUAL_TOKEN] * 32 + [HARD_TOKEN] * 96)
    assert cause == Cause("hard", 128, 3.0, 0.5)
    assert [c.kind for c in causes([HARD_TOKEN] * 96 + [EASY_TOKEN] * 96)] == ["hard", "easy"]
    assert causes([HARD_TOKEN] * 64 + [USUAL_TOKEN] * 32 + [HARD_TOKEN] * 64) == []
    both = [(3.0, 5.0)] * 96  # high entropy, but one token stands out: the two signs disagree
    assert causes(both) == []


@pytest.mark.parametrize("each", [1, 16, 32, 48, 64])
def test_alternating_text_causes_nothing(each: int) -> None:
    assert causes(([HARD_TOKEN] * each + [EASY_TOKEN] * each) * 12) == []


@settings(max_examples=200, deadline=None)
@given(
    kinds=st.lists(st.sampled_from([HARD_TOKEN, EASY_TOKEN, USUAL_TOKEN]), min_size=3, max_size=40),
    length=st.sampled_from([8, 32, 96]),
    step=st.integers(1, 7),
)
def test_never_more_than_one_cause_in_96_tokens(kinds, length, step) -> None:
    found = causes([kind for kind in kinds for _ in range(length)], step)
    at = [0, *(c.token for c in found)]
    assert all(later - earlier >= RUN * WINDOW for earlier, later in pairwise(at))


def test_the_samplers_numbers_are_entropy_and_margin(device: torch.device) -> None:
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(0)) * 4
    logits[1, 9:] = -torch.inf
    before, (first, second) = logits.clone(), logits.topk(2).values.T
    tokens, entropy, margin = difficulty(logits.to(device), likeliest(logits.to(device))).cpu()
    assert tokens.tolist() == logits.argmax(-1).tolist()
    p = logits.double().softmax(-1)
    torch.testing.assert_close(entropy, -torch.special.xlogy(p, p).sum(-1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(margin.float(), first - second)
    assert torch.equal(logits, before)


def test_thresholds_are_learned_per_model_and_kept(tmp_path: Path, store: RecordStore) -> None:
    windows = [(i / 10, 10 - i / 10) for i in range(thresholds.LEAST)]
    tokens = [pair for pair in windows for _ in range(WINDOW)]
    store.append(record(model="a", entropies=tuple(e for e, _ in tokens), margins=tuple(m for _, m in tokens)))
    store.append(record(model="few", entropies=(1.0,) * 40, margins=(2.0,) * 40))
    store.append(record(model="none", entropies=(1.0,) * 4000, margins=None))
    learned = thresholds.learn(store)
    assert set(learned) == {"a"}
    a = learned["a"]
    assert a.windows == thresholds.LEAST
    kinds = [a.kind(*w) for w in windows]
    assert kinds == ["easy"] * 8 + ["usual"] * 16 + ["hard"] * 8
    path = thresholds.save(learned, tmp_path / "new" / "refresh.json")
    thresholds.save({"b": SOME}, path)
    assert thresholds.load("a", path) == a
    assert thresholds.load("b", path) == SOME
    assert thresholds.load("c", path) is None
    path.write_text("[1")
    with pytest.raises(qbe.QBEError, match="learn-refresh"):
        thresholds.load("a", path)


def test_scored_windows_say_when_an_answer_is_hard(store: RecordStore) -> None:
    """Of answers that nobody watched: divergence grows with entropy and falls with the margin, at bits that differ."""
    draw = random.Random(0)
    for _ in range(40):
        bits, said = draw.choice([4.5, 6.0]), []
        for _ in range(2):
            entropy = draw.uniform(0.5, 3.5)
            margin = 4 - entropy + draw.gauss(0, 0.1)
            kl = 0.01 * math.exp(entropy - 2 - 1.2 * (bits - 5) + draw.gauss(0, 0.2))
            said.append([kl, entropy, margin])
        told = {"kl": 0.0, "windows": said}
        store.append(record(model="a", entropies=None, margins=None, average_weight_bits=bits, quality=told))
        unlike = {"kl": 0.0, "windows": [[draw.uniform(0.01, 0.02), e, m] for _, e, m in said]}
        store.append(record(model="b", entropies=None, margins=None, average_weight_bits=bits, quality=unlike))
    learned = thresholds.learn(store)
    a = learned["a"]
    assert (a.windows, a.scored) == (80, 80)
    assert a.hard_entropy - a.easy_entropy == pytest.approx(2 * math.log(thresholds.FACTOR), rel=0.15)
    assert a.hard_margin - a.easy_margin == pytest.approx(-2 * math.log(thresholds.FACTOR), rel=0.15)
    assert (a.hard_entropy + a.easy_entropy) / 2 == pytest.approx(2.0, abs=0.2)
    assert (a.kind(3.4, 0.6), a.kind(0.6, 3.4), a.kind(2.0, 2.0)) == ("hard", "easy", "usual")
    assert (learned["b"].windows, learned["b"].scored) == (80, 0)  # divergence has nothing to do with it: the quarters


def test_fixed_bits_cannot_be_refreshed() -> None:
    with pytest.raises(qbe.QBEError, match="leave out bits"):
        Budget(bits=5, refresh=True)


class ByScore(Policy):
    """4 bits below a score of a half, else 8."""

    name = "by_score"
    needs_sensitivity = False

    def blueprint(self, profile, budget, table) -> Blueprint:
        assert not budget.refresh
        return Blueprint.of(self.name, table, (4 if profile.score < 0.5 else 8,) * len(table.nested))


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QBE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("qbe.policies.load", lambda name: ByScore())
    always = Thresholds(hard_entropy=-1.0, easy_entropy=-1.0, hard_margin=1e9, easy_margin=1e9, windows=1)
    model = tiny_llama()
    thresholds.save({type(model).__name__: always})
    with qbe.Engine(model, tokenizer=byte_tokenizer(), policy="by_score", device="cpu",
                    records=tmp_path / "r.sqlite") as made:  # fmt: skip
        yield made


def test_a_refresh_changes_what_comes_and_is_told(engine: qbe.Engine, tmp_path: Path) -> None:
    assert thresholds.load(engine.name) is not None
    params = qbe.SamplingParams(max_tokens=200, ignore_eos=True)
    plain, asked = engine.generate_batch([
        qbe.Request("a b c d", params), qbe.Request("a b c d", params, Budget(refresh=True)),
    ])  # fmt: skip
    score = asked.profile.score
    assert score < 0.5 <= moved(score, "hard")
    (refresh,) = asked.refreshes  # the second cause leads to the same blueprint
    assert (refresh.kind, refresh.token, refresh.bits_before, refresh.bits) == ("hard", 96, 4, 8)
    assert plain.token_ids[:96] == asked.token_ids[:96]
    assert plain.token_ids != asked.token_ids
    # Position 96 of the answer is the last that was chosen at 4 bits, and the first that is read at 8.
    prompt = asked.prompt_tokens
    assert [(set(b.weight_bits), n) for b, n in asked.parts] == [({4}, prompt + 95), ({8}, 104)]
    assert asked.average_weight_bits == pytest.approx((4 * (prompt + 95) + 8 * 104) / (prompt + 199))
    assert sum(asked.tokens_by_bits.values()) == asked.computed_tokens
    low, high = (b.bytes_per_token(engine.table) for b, _ in asked.parts)
    told = RecordStore(tmp_path / "r.sqlite").get(asked.id)
    assert told.refreshes == (refresh.describe(),)
    assert told.bytes_moved == 96 * low + 104 * high
    assert told.entropies is not None
    assert told.margins is not None
    assert len(told.entropies) == len(told.margins) == 200
    assert min(told.margins) >= 0
    other = RecordStore(tmp_path / "r.sqlite").get(plain.id)
    assert other.entropies is other.margins is other.refreshes is None
    assert other.bytes_moved == 200 * low
    found = engine.explain("a b c d", budget=Budget(refresh=True))
    assert found.thresholds == thresholds.load(engine.name)
    assert found.pace == Pace()
    assert found.describe()["refresh"]["windows"] == 1


def test_pages_stay_and_a_preempted_answer_is_the_same() -> None:
    """The exchange at core level: written pages are left alone, and tokens computed again have the bits they had."""

    def core(pages: int) -> Core:
        plain = build("llama")
        table = tag(plain)
        nest(plain, [s.name for s in table if s.is_linear and s.role in NESTABLE_ROLES])
        return Core(plain, with_store(table, plain), kv_tokens=64 * pages, max_batch_tokens=128)

    def answers(made: Core, count: int) -> list[list[int]]:
        low, high = (Blueprint.of("b", made.table, (b,) * len(made.table.nested)) for b in (4, 8))
        high = high.with_kv_bits((8,) * made.table.layers)
        asked = [request(str(i), p, low, max_tokens=100) for i, p in enumerate(prompts(30, 33)[:count])]
        for s in asked:
            made.add(s)
        while made.has_work():
            made.step()
            for s in asked:
                if len(s.output_ids) >= 50 and not s.blueprint_history.earlier and s.finish_reason is None:
                    block_ids = [p.block_id for p in s.pages[: s.computed // 64]]
                    assert made.refresh(s, high)
                    assert not made.refresh(s, replace(high))
                    assert [p.block_id for p in s.pages[: s.computed // 64]] == block_ids
        assert [len(s.blueprint_history.earlier) for s in asked] == [1] * count
        preempted = [s.preemptions > 0 for s in asked]
        assert any(preempted) == (made.scheduler.allocator.num_pages == 4)
        return [s.output_ids for s in asked]

    roomy = answers(core(16), 2)
    assert answers(core(16), 1) == roomy[:1]
    assert answers(core(4), 2) == roomy
    alone = core(16)
    low = Blueprint.of("b", alone.table, (4,) * len(alone.table.nested))
    assert run(alone, request("r", prompts(30)[0], low, max_tokens=100))[0] != roomy[0]


def test_the_built_in_text_says_when_an_answer_is_hard() -> None:
    text = TextDifficulty(tuple(i / 100 for i in range(400)), tuple(4 - i / 100 for i in range(400)))
    for window in (1, 32, 64):
        found = thresholds.of_text(text, window)
        assert found is not None
        assert found.windows == 400 - window + 1
        middle = (window - 1) / 200
        assert found.hard_entropy == pytest.approx(middle + 0.75 * (400 - window) / 100)
        assert found.easy_entropy == pytest.approx(middle + 0.25 * (400 - window) / 100)
        assert found.kind(3.9, 0.1) == "hard"
        assert found.kind(0.1, 3.9) == "easy"
    assert thresholds.of_text(text, 370) is None
    assert thresholds.of_text(None) is None


def test_interval_and_count_are_set_by_engine_and_request() -> None:
    hard = [3.0] * 40, [0.5] * 40
    (cause,) = [c for c in [Monitor(SOME, Pace(8, 2)).look(*hard)] if c]
    assert (cause.kind, cause.token) == ("hard", 32)  # the last one of those that came at once
    assert Pace(8, 2).asked(Budget(refresh=True, refresh_count=5)) == Pace(8, 5)
    for wrong in (0, 1025, 1.0, True, "3"):
        with pytest.raises(qbe.QBEError, match=r"refresh_interval is .* whole number"):
            Budget(refresh=True, refresh_interval=wrong)  # type: ignore[arg-type]
    with pytest.raises(qbe.QBEError, match="refresh_count is for refresh"):
        Budget(refresh_count=2)


def test_a_first_start_can_refresh_and_so_can_a_store_of_an_older_version(
    tiny_folder: Path, nested: str, tmp_path: Path
) -> None:
    """Nothing was learned: the store says when an answer is hard; where it does not, the start finds out."""
    params = qbe.SamplingParams(max_tokens=64, ignore_eos=True, seed=0)
    budget = Budget(refresh=True, refresh_interval=1, refresh_count=1)
    older = without_provenance(Path(shutil.copytree(nested, tmp_path / "older")))
    table = older / "sensitivity.json"
    known = json.loads(table.read_text())
    assert len(known["text"]["entropies"]) == len(known["text"]["margins"]) > 64
    table.write_text(json.dumps({k: v for k, v in known.items() if k != "text"}))
    for model in (str(older), str(older), str(tiny_folder)):
        with qbe.Engine(model, device="cpu", records=False, blueprint_cache=False) as engine:
            assert engine.table.text is not None
            assert engine.generate("a b c d", params, budget=budget).refreshes
    assert "text" not in json.loads(table.read_text()), "a folder that somebody made is left as it is"
