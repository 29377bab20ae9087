"""`qbe train qaq`, `mobi` and `tokenwise`: the student, the step that keeps an average, and what is served of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_models import build
from qbe import Engine, QBEError, Request, policies
from qbe.analysis.profile import QueryProfile
from qbe.blueprint import DynamicPrecision
from qbe.budget import Budget
from qbe.cli.main import main
from qbe.datasets.items import Form, Item
from qbe.datasets.results import Results
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.engine.sampling.scoring import Scored, score
from qbe.engine.scheduling.sequence import Sequence
from qbe.eval.compare import Comparison, Setting
from qbe.learning import distil, mobi, qaq, tokenwise
from qbe.learning.distil import RouterNetworks, descend, sliced
from qbe.learning.gates import Gates
from qbe.policies import learned
from qbe.policies.learned import Learned
from qbe.policies.per_token import LEVELS
from qbe.policies.routers import blocks_of, gear_bits, static_gears
from qbe.sites import SiteTable
from qbe.store.nested_linears import nested_linears
from qbe.store.prepare import PreparedModel, prepare

PROMPT = "What is the capital of France, and how far is it from Rome?"
CPU = torch.device("cpu")


def items(n: int) -> list[Item]:
    return [Item("text", str(i), Form(f"prompt number {i}", f"and what follows {i * i}")) for i in range(n)]


@pytest.fixture(scope="module")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QBE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield tiny_folder


def loaded(folder: Path) -> PreparedModel:
    return prepare(folder, dtype="float32", device=CPU, progress=False)


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, Learned]:
    """Both policies' files, written; strong routers, so that queries and tokens differ whatever few steps gave."""
    found = {}
    trainers: tuple[tuple[str, Callable[..., Learned]], ...] = (
        ("qaq", qaq.train), ("mobi", mobi.train), ("tokenwise", tokenwise.train),
    )  # fmt: skip
    for name, train in trainers:
        prepared, ticks = loaded(folder), list[int]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(distil, "RATE", 0.3)
            found[name] = train(prepared, items(16), 6, 0, lambda ticks=ticks: ticks.append(1))
        assert len(ticks) == 6
        assert all("forward" not in vars(module) for _, module, _ in nested_linears(prepared.model))
        learned.write(name, prepared.table, found[name])
    return found


def test_a_student_with_gates_of_0_and_1_is_the_nested_model(folder: Path) -> None:
    prepared, ids = loaded(folder), torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))
    table, model = prepared.table, prepared.model
    weights = [w for _, _, w in nested_linears(model)]
    base = static_gears(table, distil.BASE)
    slices = {4: (0.0, 0.0), 6: (1.0, 0.0), 8: (1.0, 1.0)}
    gears = [(4, 6, 8)[i % 3] for i in range(14)] + list(base[14:])
    with sliced(prepared) as student:
        full = student.logits(ids).detach()
        student.full = False
        for site, gear in enumerate(gears[:14]):
            student.gates[site] = torch.tensor(slices[gear]).expand(2, 20, 2)
        lowered = student.logits(ids).detach()
    for bits, expected in (([16] * len(weights), full), (gears, lowered)):
        for weight, b in zip(weights, bits, strict=True):
            weight.set_bits(b)
        found = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(expected, found, rtol=1e-3, atol=1e-3 * float(found.abs().max()))


def test_a_step_goes_nowhere_by_bits_alone() -> None:
    """Worth that rises for every slice alike would only raise the threshold: no such step is made."""
    routers = RouterNetworks([4], [np.array([0.3, -0.2, 0.5])], 32, seed=0)
    x, threshold = torch.randn(50, 4, generator=torch.Generator().manual_seed(1)), torch.tensor(0.1, requires_grad=True)
    share = torch.tensor([1.0, 2.0, 0.5])
    gates = (routers.scores(0, x) - threshold).sigmoid()
    loss = ((1 - gates) * torch.tensor([3.0, 1.0, 0.2]) * x[:, :1].abs()).sum()
    value = descend(routers, torch.optim.SGD(routers.parameters(), lr=0.0), loss, (gates @ share).mean(), threshold)
    gradient = routers.get_parameter("outer_bias0").grad
    assert gradient is not None
    assert float(gradient.abs().max()) > 1e-3
    assert abs(float(gradient.sum())) < 1e-5
    assert gradient[0] < 0 < gradient[1], "the first slice gains most for its bits"
    assert value > 0, "a bit is worth something"


@pytest.mark.parametrize("policy", ["qaq", "mobi", "tokenwise"])
def test_routers_begin_with_the_measured_worth(folder: Path, policy: str) -> None:
    """Untrained, all tokens and queries have the same bits, and what is reported of them is so."""
    train = {"qaq": qaq.train, "mobi": mobi.train, "tokenwise": tokenwise.train}[policy]
    found = train(loaded(folder), items(16), 1)
    before = found.about["before"]
    assert [b["asked"] for b in before] == list(distil.HELD_AT)
    assert before[0]["kl"] > before[-1]["kl"]
    for entry in before:  # a few blocks, that all tokens and queries have alike, meet no average closely
        assert entry["bits"] == pytest.approx(entry["asked"], abs=0.7)


@pytest.mark.parametrize("policy", ["mobi", "tokenwise"])
def test_thresholds_meet_averages(trained: dict[str, Learned], policy: str) -> None:
    thresholds = trained[policy].tensors["thresholds"]
    assert thresholds.shape == (LEVELS,)
    assert (np.diff(thresholds) <= 0).all()
    for entry in trained[policy].about["after"]:
        assert entry["bits"] == pytest.approx(entry["asked"], abs=0.3)


@pytest.mark.parametrize("policy", ["mobi", "tokenwise"])
def test_a_per_token_policy_is_served_as_it_was_trained(folder: Path, trained: dict[str, Learned], policy: str) -> None:
    with Engine(folder, policy=policy, dtype="float32", device="cpu", records=False) as engine:
        table, ids = engine.table, engine.tokenizer(PROMPT)["input_ids"]
        assert engine.core.runner.routing is not None
        got = []
        for bits in (4.0, 4.5, 5.0, 6.0, 8.0):
            result = engine.generate(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True), budget=Budget(bits=bits))
            assert result.error is None
            assert result.blueprint.policy == policy
            assert result.blueprint.average_weight_bits(table) <= bits
            got.append(result.average_weight_bits)
            described = result.describe()
            assert described["usage"]["average_weight_bits"] == round(got[-1], 4)
            assert described["blueprint"]["dynamic_precision"]["by"] == "routers"
            assert sum(result.tokens_by_bits.values()) == pytest.approx(result.computed_tokens, abs=3)
        assert got == sorted(got)
        assert got[0] == 4
        assert got[-1] == 8
        blueprint = engine.explain(PROMPT, budget=Budget(bits=distil.BASE)).blueprint
        assert blueprint.dynamic_precision is not None
        found = torch.zeros(len(ids), engine.core.vocabulary)
        (read,) = score(
            engine.core, [Scored(ids, blueprint, 0, lambda at, rows: found[at : at + len(rows)].copy_(rows))]
        )
        with pytest.raises(QBEError, match="cannot be met"):
            engine.explain(PROMPT, budget=Budget(bits=3))
        with pytest.raises(QBEError, match="more than that allows"):
            engine.explain(PROMPT, budget=Budget(bits=12))
    prepared = loaded(folder)
    with sliced(prepared, blocks_of(prepared.table, head=policy == "tokenwise")) as student, torch.no_grad():
        routers = _of(trained[policy], len(student.blocks))
        tokens = Gates(prepared.table, student, routers)
        tokens.hard, tokens.threshold = (
            True,
            torch.tensor(trained[policy].tensors["thresholds"][blueprint.dynamic_precision.level]),
        )
        whole = torch.ones(1, len(ids), dtype=torch.bool)
        student.full, student.on_block = False, tokens._gate
        tokens._batch = distil.Batch(torch.tensor([ids]), whole, whole, whole, whole)
        expected = student.logits(torch.tensor([ids]))[0]
        bits = 4 + float(((tokens.seen() > tokens.threshold).float() @ tokens.share).mean())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    assert read is not None
    sizes, routed = [s.parameters for s in table.nested], 15 if policy == "tokenwise" else 14
    assert {s for b in student.blocks for s in b.sites} == set(range(routed))
    rest = sum(n * b for n, b in zip(sizes[routed:], blueprint.weight_bits[routed:], strict=True))
    assert read.average(table) == pytest.approx((bits * sum(sizes[:routed]) + rest) / sum(sizes), abs=1e-4)


def _of(found: Learned, count: int) -> RouterNetworks:
    """The file's routers of so many blocks as they were trained."""
    shapes = [found.tensors[f"{i}.inner"].shape for i in range(count)]
    begin = [found.tensors[f"{i}.outer_bias"] for i in range(count)]
    routers = RouterNetworks([inputs for inputs, _ in shapes], begin, shapes[0][1], seed=0)
    with torch.no_grad():
        for i in range(count):
            for name in ("inner", "inner_bias", "outer", "outer_bias"):
                routers.get_parameter(f"{name}{i}").copy_(torch.from_numpy(found.tensors[f"{i}.{name}"]))
    return routers


def test_qaq_chooses_for_the_answer_what_its_prompt_says(folder: Path, trained: dict[str, Learned]) -> None:
    tensors = trained["qaq"].tensors
    with Engine(folder, policy="qaq", dtype="float32", device="cpu", records=False) as engine:
        table, widths, budget = engine.table, np.array(gear_bits(engine.table)), Budget(bits=5)
        before = engine.explain(PROMPT, budget=budget).blueprint
        assert before.weight_bits == static_gears(table, 5)
        result, again = (engine.generate(PROMPT, SamplingParams(max_tokens=4), budget=budget) for _ in range(2))
        assert (result.error, result.blueprint.policy) == (None, "qaq")
        assert again.blueprint == result.blueprint
        assert again.cached_tokens == 0, "the answer's bits do not depend on what others left"
        plain = loaded(folder).model
        for site, gear in zip(table.nested, before.weight_bits, strict=True):
            plain.get_submodule(site.name).weight.set_bits(gear)
        seen: list[np.ndarray] = []
        for block in blocks_of(table):
            first = plain.get_submodule(table.nested[block.sites[0]].name)
            first.register_forward_pre_hook(lambda m, a: seen.append(a[0][0].mean(0).numpy()))
        with torch.inference_mode():
            plain(input_ids=torch.tensor([engine.tokenizer(PROMPT)["input_ids"]]), use_cache=False)
        sizes = np.array([sum(table.nested[s].parameters for s in b.sites) for b in blocks_of(table)])
        left = (5 * table.nested_parameters - sum(
            s.parameters * g for s, g in zip(table.nested[14:], before.weight_bits[14:], strict=True)
        )) / sizes.sum()  # fmt: skip
        price = _price(tensors["sample"], widths, sizes / sizes.sum(), left)
        for i, (block, x) in enumerate(zip(blocks_of(table), seen, strict=True)):
            z = (x - tensors[f"{i}.centre"]) / tensors[f"{i}.scale"]
            hidden = np.maximum(z @ tensors[f"{i}.inner"] + tensors[f"{i}.inner_bias"], 0)
            scores = hidden @ tensors[f"{i}.outer"] + tensors[f"{i}.outer_bias"]
            assert {result.blueprint.weight_bits[s] for s in block.sites} == {
                widths[(scores - price * widths).argmax()]
            }


def _price(sample: np.ndarray, widths: np.ndarray, share: np.ndarray, bits: float) -> float:
    """The lowest price of a fine grid at which the sample has so many bits at most."""
    for price in np.linspace(sample.min() - 50, sample.max() + 50, 200001):
        if (widths[(sample - price * widths).argmax(-1)] @ share).mean() <= bits + 1e-9:
            return float(price)
    raise AssertionError


def test_a_comparison_counts_what_was_routed(folder: Path, trained: dict[str, Learned], tmp_path: Path) -> None:
    settings = [Setting(p, 5.0) for p in ("static", "qaq", "mobi", "tokenwise")]
    with Engine(folder, dtype="float32", device="cpu", records=False) as engine:
        results = Results(["tiny"], tmp_path)
        outcome = Comparison(engine, items(3), settings, results).run()
        elsewhere = 0  # routing may come to the very average of the blueprint
        for query in outcome.queries:
            for setting in settings[2:]:
                routed, static = query.measured[setting], query.blueprints[setting].average_weight_bits(engine.table)
                assert routed.fidelity.bits == routed.bits
                elsewhere += routed.bits != static
            assert query.measured[settings[0]].fidelity.bits is None
            mobi, tokenwise = (query.measured[s].fidelity.kl for s in settings[2:])
            assert mobi != tokenwise, "each by its own routers"
        assert elsewhere > len(outcome.queries)
        alone = Comparison(engine, items(3), settings[3:], Results(["tiny"], tmp_path / "alone")).run()
        for query, again in zip(outcome.queries, alone.queries, strict=True):
            assert again.measured[settings[3]] == query.measured[settings[3]], "whoever was compared beside it"


def test_an_engine_runs_the_routers_of_one_policy_at_a_time(folder: Path, trained: dict[str, Learned]) -> None:
    """Others wait until their requests have ended, and what these left in the KV cache is not shared."""
    params, budget = SamplingParams(max_tokens=6, ignore_eos=True), Budget(bits=5)

    def ask(policy: str) -> Request:
        return Request("once upon a time " * 12, params, budget, policy)

    with Engine(folder, dtype="float32", device="cpu", records=False) as engine:
        first = engine.submit(ask("mobi"))
        engine.step()
        other = engine.submit(ask("tokenwise"))
        engine.step()
        again = engine.submit(ask("mobi"))
        while not engine.finished(other):
            assert not engine.started(other) or engine.finished(first)
            engine.step()
        assert not engine.finished(again), "it came when the other one was waiting"
        while not engine.finished(again):
            engine.step()
        one, two, three = map(engine.take_result, (first, other, again))
        assert (one.error, one.token_ids) == (three.error, three.token_ids)
        assert (two.error, two.cached_tokens) == (None, 0)
        assert three.cached_tokens > 0
        both = engine.generate_batch([ask(p) for p in ("tokenwise", "mobi", "tokenwise", "static")])
        assert [r.token_ids for r in both[:3]] == [two.token_ids, one.token_ids, two.token_ids]
        assert [r.blueprint.policy for r in both] == ["tokenwise", "mobi", "tokenwise", "static"]
        foreign = replace(one.blueprint, dynamic_precision=DynamicPrecision("routers", 9, "another engine's"))
        with pytest.raises(QBEError, match="has no such routers"):
            engine.core.add(Sequence("x", [1, 2, 3], params, foreign))


def test_refusals(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared = loaded(folder)
    for train in (qaq.train, mobi.train, tokenwise.train):
        with pytest.raises(QBEError, match="4 texts are too few"):
            train(prepared, items(4), 1)
    hybrid = PreparedModel(build("phi3-longrope"), prepared.tokenizer, prepared.table, "hybrid")
    with pytest.raises(QBEError, match="cannot have bits of their own"):
        tokenwise.train(hybrid, items(16), 1)
    untrained = SiteTable(prepared.table.sites, model_name="untrained", layers=2)
    for name in ("qaq", "mobi", "tokenwise"):
        with pytest.raises(QBEError, match=f"run 'qbe train {name} --model untrained'"):
            policies.load(name).blueprint(QueryProfile(0.5, "code", 2), Budget(), untrained)
        wrong = (
            [["--steps", "0"], "--steps is 0"],
            [["--limit", "0"], "--limit is 0"],
            [["--seed", "-1"], "--seed is -1"],
            [["--data", str(tmp_path)], "there is no text in"],
        )
        for args, says in wrong:
            with pytest.raises(SystemExit) as ended:
                main(["train", name, *args])
            assert ended.value.code == 2
            said = capsys.readouterr().err.strip()
            assert says in said
            assert "\n" not in said


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wikitext2_valid.txt").write_text("some words of a text " * 600)
    (tmp_path / "gsm8k_train4000.jsonl").write_text('{"question": "1 + 1?", "answer": "It is 2.\\n#### 2"}\n' * 4)
    task = {"id": "t", "instruction": "Add.", "instances": [{"input": "1, 2", "output": "3"}] * 4}
    (tmp_path / "alpaca_seed_tasks.jsonl").write_text(json.dumps(task) + "\n")
    args = ["--data", str(tmp_path), "--model", str(folder), "--limit", "4", "--steps", "1", "--device", "cpu"]
    with pytest.raises(SystemExit, match="0"):
        main(["train", "tokenwise", *args, "--json"])
    about = json.loads(capsys.readouterr().out)
    assert Path(about["file"]).is_file()
    assert about["texts"] == 16
    assert [e["asked"] for e in about["after"]] == list(distil.HELD_AT)
    with pytest.raises(SystemExit, match="0"):
        main(["train", "qaq", *args])
    assert "held-out texts at 4.5 bits over the blocks: got" in capsys.readouterr().out
