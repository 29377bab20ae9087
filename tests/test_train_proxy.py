"""The proxy scorer: what it learns of a policy from records, and what it leaves to it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cli_process import qbe
from qbe import QBEError, policies
from qbe.analysis.classifier import default_classifier
from qbe.analysis.features import FEATURES, LOGARITHMIC
from qbe.analysis.profile import CLASSES, QueryProfile
from qbe.analysis.thresholds import MARKS
from qbe.budget import Budget
from qbe.cli.main import main
from qbe.learning import proxy, scored
from qbe.policies import learned
from qbe.policies.proxy import ProxyPolicy, nearest
from qbe.records import Record
from qbe.sites import FULL_BITS, SiteTable
from qbe.store.prepare import prepare
from test_policies import smollm2_like

TABLE = smollm2_like(4)
TIERS = ("default", "flex")


def requests(n: int, seed: int) -> Iterator[tuple[QueryProfile, Budget]]:
    """Made-up queries: around the mean of the classifier's training prompts in two directions, and some of tier 1."""
    rng, draw, c = np.random.default_rng(seed), random.Random(seed), default_classifier()
    directions = np.random.default_rng(0).standard_normal((2, len(FEATURES))) * c.scale / 2
    for i in range(n):
        budget = Budget(tier=draw.choice(TIERS))
        if i % 4 == 0:
            marks = dict.fromkeys(MARKS, 0.0) | {m: draw.random() for m in MARKS[:2]}
            score = min(1.0, 0.3 + sum(c.thresholds[m] * v for m, v in marks.items()))
            yield QueryProfile(max(0.0, score), "code", 1, marks, 500), budget
            continue
        x = np.maximum(rng.standard_normal(2) @ directions + c.mean, 0)
        raw = np.where(np.isin(FEATURES, LOGARITHMIC), np.expm1(x), x)
        z = c.standardise(raw)
        p = c.probabilities(z)
        features = dict(zip(FEATURES, raw.tolist(), strict=True))
        yield QueryProfile(float(c.score(z, p)), CLASSES[int(p.argmax())], 2, features, 500), budget


def records(n: int, seed: int, policy: str = "tiered", table: SiteTable = TABLE) -> list[Record]:
    chooser = policies.load("tiered")
    found = []
    for profile, budget in requests(n, seed):
        chosen = chooser.blueprint(profile, budget, table)
        found.append(Record(
            model=table.model_name, policy=policy, tier=budget.tier, prompt_tokens=400, completion_tokens=100,
            finish_reason="stop", score=profile.score, prompt_class=profile.prompt_class, analysis_tier=profile.tier,
            features=profile.features, weight_bits=chosen.weight_bits, activation_bits=chosen.activation_bits,
        ))  # fmt: skip
    return found


@pytest.fixture(scope="module")
def past() -> list[Record]:
    return records(700, 0)


@pytest.fixture(scope="module")
def trained(past: list[Record], tmp_path_factory: pytest.TempPathFactory) -> Iterator[learned.Learned]:
    pytest.importorskip("sklearn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QBE_CACHE", str(tmp_path_factory.mktemp("proxy")))
        found = proxy.train(past, "tiered", TABLE)
        learned.write("proxy", TABLE, found)
        yield found


def test_it_agrees_with_the_policy_where_it_answers(trained: learned.Learned) -> None:
    assert trained.about["parameters"] < 1_000_000
    assert trained.about["handled"] > 0.5
    real, policy = policies.load("tiered"), ProxyPolicy()
    apart = []
    for profile, budget in requests(300, 7):
        before, found = policy.handled, policy.blueprint(profile, budget, TABLE)
        wanted = real.blueprint(profile, budget, TABLE)
        if policy.handled == before:
            assert found == wanted
        else:
            assert found.policy == "proxy"
            assert found.kv_bits == wanted.kv_bits
            apart.append(abs(found.average_weight_bits(TABLE) - wanted.average_weight_bits(TABLE)))
    assert policy.handled + policy.passed == 300
    assert len(apart) > 150
    assert np.mean(np.array(apart) <= 0.1) > 0.95


def test_it_leaves_to_the_policy_what_it_does_not_know(trained: learned.Learned) -> None:
    policy = ProxyPolicy()
    profile, _ = next(p for p in requests(300, 7) if p[0].tier == 2 and _answered(*p))
    far = replace(profile, features={**profile.features, "digit_density": 50.0})
    for of, budget in (
        (profile, Budget(bits=5)), (profile, Budget(kv_bits=4)), (profile, Budget(within=(5.0, 7.0))),
        (profile, Budget(tier="priority")), (far, Budget(tier="default")),
    ):  # fmt: skip
        assert policy.blueprint(of, budget, TABLE).policy == "tiered", budget
    assert policy.handled == 0
    eight = policy.blueprint(profile, Budget(tier="default", activation_bits=8), TABLE)
    assert (eight.policy, set(eight.activation_bits)) == ("proxy", {8, FULL_BITS})


def _answered(profile: QueryProfile, budget: Budget) -> bool:
    policy = ProxyPolicy()
    policy.blueprint(profile, budget, TABLE)
    return bool(policy.handled) and budget.tier == "default"


def test_a_proxy_of_another_version_of_the_policy_is_refused(
    trained: learned.Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QBE_CACHE", str(tmp_path))
    table = smollm2_like(5)
    learned.write("proxy", table, replace(trained, about={**trained.about, "policy_version": "0"}))
    with pytest.raises(QBEError, match="another version of the policy 'tiered': run 'qbe train proxy --model like'"):
        ProxyPolicy().prepare(table)


def answered(past: list[Record], seed: int, spread: float, table: SiteTable = TABLE) -> list[Record]:
    """The records with scores: what their sensitivities say, times what a feature says of the query, and noise."""
    draw, mean = np.random.default_rng(seed), default_classifier().mean
    place = FEATURES.index(names[0]) if (names := list(LOGARITHMIC)) else 0
    found = []
    for r in past:
        damage = scored.damages([r.weight_bits], table)[0]
        feature = np.log1p(r.features[names[0]]) - mean[place] if r.analysis_tier == 2 else 0.0
        kl = damage * np.exp(spread * feature + draw.normal(0, 0.3))
        found.append(replace(r, quality={"kl": float(kl), "tokens": 128, "reference_bits": 16.0}))
    return found


def test_queries_that_diverge_more_than_their_bits_say_get_more(past: list[Record]) -> None:
    pytest.importorskip("sklearn")
    plain = proxy.train(past, "tiered", TABLE)
    assert not any(tier["quality"]["used"] for tier in plain.about["tiers"])
    found = proxy.train(answered(past, 0, 3.0), "tiered", TABLE)
    quality = next(t["quality"] for t in found.about["tiers"] if t["analysis_tier"] == 2)
    assert quality["scored"] > 400
    assert quality["used"]
    assert quality["ratio_interval"][1] < 1
    assert found.about["handled"] > 0.5
    noise = proxy.train(answered(past, 0, 0.0), "tiered", TABLE)
    assert all(t["quality"]["moved"] < 0.5 for t in noise.about["tiers"] if t["quality"]["used"])


def test_the_command_learns_from_exported_scores(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setenv("QBE_CACHE", str(tmp_path))
    table = prepare(str(tiny_folder), device=torch.device("cpu"), progress=False).table
    past = answered(records(700, 0, table=table), 0, 3.0, table)
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(r.describe()) + "\n" for r in past))
    done = qbe("train", "proxy", "--model", str(tiny_folder), "--records", str(tmp_path / "r.jsonl"), home=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    assert "scored answers: bits by how hard queries proved diverge" in " ".join(done.stdout.decode().split())


def test_bits_are_evened_out_at_the_same_average() -> None:
    pytest.importorskip("sklearn")
    draw = np.random.default_rng(0)
    n, averages = 800, np.array([4.5, 5.0, 5.5, 6.0, 6.5])
    choices = averages, np.exp(-1.5 * averages)
    z, places = draw.standard_normal((n, 5)), draw.choice(4, n)
    bits, harder = averages[places], 1.2 * z[:, 2]
    ranges = np.array([(4.5, 6.0), (4.8, 6.6)])[np.arange(n) % 2]
    kl = choices[1][places] * np.exp(harder + draw.normal(0, 0.3, n))
    kl[draw.random(n) < 0.7] = np.nan  # a sample was scored
    held = np.arange(n) >= 600
    wanted, report = scored.corrected(z, kl, ranges, places, choices, held)
    assert report["used"]
    assert report["ratio_interval"][1] < 1
    for i, allowed in ((0, averages[:4]), (1, averages[1:])):
        assert (wanted[i::2].min(), wanted[i::2].max()) == (allowed[0], allowed[-1])
        assert wanted[i::2].mean() == pytest.approx(bits[i::2].mean(), abs=0.05)
        assert np.corrcoef(wanted[i::2], harder[i::2])[0, 1] > 0.8
    assert np.var(-1.5 * wanted + harder) < 0.5 * np.var(-1.5 * bits + harder)
    few = np.where(np.arange(n) < 60, kl, np.nan)
    assert (scored.corrected(z, few, ranges, places, choices, held)[0] == bits).all()
    turned = np.where(held, choices[1][places] * np.exp(-harder), kl)  # the newest say the opposite
    unchanged, report = scored.corrected(z, turned, ranges, places, choices, held)
    assert (unchanged == bits).all()
    assert not report["used"]
    assert report["ratio"] > 1


@pytest.mark.parametrize("quality", ["high", [], {}, {"kl": None}, {"kl": float("nan")}, {"kl": "0.1"}], ids=str)
def test_a_score_that_is_none_is_refused_by_its_record(quality: object) -> None:
    with pytest.raises(QBEError, match=r"^record r7: quality is .*, but must be a score with a finite kl"):
        scored.divergence(quality, "r7")
    assert scored.divergence({"kl": 0.25}, "r7") == 0.25
    assert np.isnan(scored.divergence(None, "r7"))


def test_which_records_count(past: list[Record]) -> None:
    real = policies.load("tiered")
    other = [replace(past[0], policy="uniform"), replace(past[0], model="another"), replace(past[1], features={})]
    asked = replace(past[2], budget_bits=5.0)
    old = replace(past[3], weight_bits=tuple(s.gears[-1] for s in TABLE.nested))
    pairs, distinct, left = proxy.pairs_of([*other, asked, old, *past[4:9]], real, TABLE)
    assert left == {"other": 3, "asked_for": 1, "outdated": 1}
    assert [distinct[p.gears] for p in pairs] == [tuple(r.weight_bits) for r in past[4:9]]
    with pytest.raises(QBEError, match="10 records of 'tiered' on like are too few, 50 are needed"):
        proxy.train(past[:10], "tiered", TABLE)
    with pytest.raises(QBEError, match="the policy 'random' reads more than a record holds"):
        proxy.train(past, "random", TABLE)


def test_centres_and_the_nearest_of_them() -> None:
    averages = np.array([5.0, 5.04, 5.2, 6.0, 5.02])
    centres = proxy.clusters(averages, np.array([1, 9, 1, 1, 2]))
    assert averages[centres].tolist() == [5.04, 5.2, 6.0]
    assert [nearest([1.0, 2.0, 4.0], x) for x in (0.0, 1.4, 1.6, 2.9, 3.1, 9.0)] == [0, 0, 1, 1, 2, 2]
    spread, agreed = np.array([0.1, 0.2, 0.3, 0.4]), np.array([True, True, False, True])
    assert proxy.harmless(spread, agreed) == 0.2
    assert proxy.harmless(spread, ~agreed) == -1


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    bad, cut = tmp_path / "bad.jsonl", tmp_path / "cut.jsonl"
    bad.write_text('\n{"prompt": "hello"}\n')
    cut.write_text('{"broken')
    for args, says in (
        (["--records", str(bad)], f"'{bad}', line 2: this is no record"),
        (["--records", str(cut)], f"'{cut}', line 1: this is no record"),
        (["--records", "nowhere"], "'nowhere' cannot be read"),
        (["--policy", "best"], "unknown policy 'best'"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["train", "proxy", *args])
        assert ended.value.code == 2
        said = capsys.readouterr().err.strip()
        assert says in said
        assert "\n" not in said


def test_exported_records_are_read(past: list[Record], tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(r.describe()) + "\n" for r in past[:5]))
    assert proxy.read_records(tmp_path / "r.jsonl") == past[:5]
