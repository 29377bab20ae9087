"""Planted damages, each found by the gate that should find it; equal models are not accused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qbe.engine.engine import Engine
from qbe.regress import identity, weights
from qbe.regress.gate import Gate
from qbe.regress.gates import Seen, judge
from qbe.regress.identity_gates import weights as gates_of
from qbe.regress.observe import Observed, observe
from qbe.regress.run import Outcome, Regression
from qbe.regress.sources import read
from qbe.regress.suite import load
from qbe.regress.target import Target
from qbe.store.checkpoint import sha256
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.quantise import quantise_to
from regress_samples import rows, write_suite
from server_process import save_tiny
from server_running import Running, running, tiny_engine, tiny_parts

FULL = {"qbe": {"bits": 16, "kv_bits": 16}}
EIGHT = {"qbe": {"bits": 8, "kv_bits": 16}}

pytestmark = pytest.mark.usefixtures("forked_servers")


def gate(gates: list[Gate], name: str) -> Gate:
    return next(g for g in gates if g.name == name)


def statuses(gates: list[Gate], status: str) -> set[str]:
    return {g.name for g in gates if g.status == status}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(lambda: tiny_engine(speculate=True)) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("regress")


def compared(server: Running, suite: Path, now: dict[str, Any], before: dict[str, Any] | None = None) -> Outcome:
    """The candidate is the same server, asked with other fields."""
    targets = Target(server.url, request=FULL if before is None else before), Target(server.url, request=now)
    return Regression(*targets, load(suite)).run()


def test_an_identical_candidate_passes(server: Running, folder: Path) -> None:
    outcome = compared(server, write_suite(folder / "same"), FULL)
    assert outcome.verdict == "pass", [g for g in outcome.gates if g.status not in ("pass", "not run")]
    assert not statuses(outcome.gates, "fail")
    assert gate(outcome.gates, "identity.divergence").saw.startswith("nats a token: 0,")
    assert {"sampler.min_p", "sampler.defaults", "logic.loss", "retrieval.loss"} <= statuses(outcome.gates, "pass")


def test_eight_bits_pass(server: Running, folder: Path) -> None:
    outcome = compared(server, write_suite(folder / "eight"), EIGHT)
    assert not statuses(outcome.gates, "fail") | statuses(outcome.gates, "anomalous")
    found = gate(outcome.gates, "identity.divergence")
    assert found.status == "pass"
    assert not found.saw.startswith("nats a token: 0,")


def attentive_engine() -> Engine:
    """Of the tiny model, with sharp attention and sharp distributions, as trained models have them."""
    model, tokenizer = tiny_parts()
    for name, weight in model.named_parameters():
        weight.mul_(4.0 if "q_proj" in name else 12.0 if "lm_head" in name else 1.0)
    return Engine(model, tokenizer=tokenizer, policy="uniform", records=False, max_sequences=4)


def test_keys_at_two_bits_are_found_where_context_is_long(folder: Path) -> None:
    suite = write_suite(folder / "keys", passages=1, prompts=0, long=1200)
    with running(attentive_engine) as made:
        eight = compared(made, suite, {"qbe": {"bits": 16, "kv_bits": 8}})
        outcome = compared(made, suite, {"qbe": {"bits": 16, "kv_bits": 2}})
    assert gate(eight.gates, "retrieval.long_divergence").status == "pass"
    found = gate(outcome.gates, "retrieval.long_divergence")
    assert found.status == "fail", found
    assert outcome.verdict == "fail"


def patched_sampling(change: Callable[[Any], Any], patch: pytest.MonkeyPatch) -> None:
    """The server makes other parameters of requests than they say."""
    from qbe.server import chat, completions
    from qbe.server.requests import sampling

    for module in (chat, completions):
        patch.setattr(module, "sampling", lambda body, *rest: change(sampling(body, *rest), body))


def observed(server: Running, suite: Path, request: dict[str, Any]) -> tuple[Any, list[Any], Observed]:
    made = load(suite)
    tasks, _ = read(made)
    return made, tasks, observe(Target(server.url, request=request), made, tasks, 0, lambda: None)


def judged(server: Running, suite: Path, before: Observed, request: dict[str, Any] | None = None) -> list[Gate]:
    made, tasks, now = observed(server, suite, FULL if request is None else request)
    return judge(Seen(made, tasks, before, now))


def test_another_default_temperature_is_found(
    server: Running, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    suite = write_suite(folder / "temperature", passages=1, long=0, items=rows(4))
    _, _, before = observed(server, suite, FULL)

    def change(params: Any, body: Any) -> Any:
        return params if body.temperature is not None else replace(params, temperature=0.6)

    patched_sampling(change, monkeypatch)
    assert statuses(judged(server, suite, before), "fail") == {"sampler.defaults"}


def test_a_sampler_without_min_p_is_found(server: Running, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qbe.engine.sampling import sampler

    suite = write_suite(folder / "min-p", passages=1, long=0, items=rows(4))
    _, _, before = observed(server, suite, FULL)
    whole = sampler.filtered

    def without(logits: torch.Tensor, sequences: Any) -> torch.Tensor:
        return whole(logits, [SimpleNamespace(params=replace(s.params, min_p=0.0)) for s in sequences])

    monkeypatch.setattr(sampler, "filtered", without)
    assert statuses(judged(server, suite, before), "fail") == {"sampler.min_p"}


def test_speculation_that_accepts_everything_is_found(
    server: Running, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qbe.engine import core

    suite = write_suite(folder / "draft", passages=1, long=0, items=rows(4))
    drafting = {"qbe": {"bits": 16, "kv_bits": 16, "speculate": True}}
    _, _, before = observed(server, suite, FULL)
    assert not statuses(judged(server, suite, before, drafting), "fail"), "as it is, speculation changes nothing"
    accept = core.accept_tokens

    @torch.inference_mode()
    def everything(rows: Any, scores: Any, advance: Any) -> None:
        seen: dict[Any, int] = {}
        for i, row in enumerate(rows):
            depth = seen[row.sequence] = seen.get(row.sequence, -1) + 1
            drafted = row.sequence.speculation.draft_tokens if row.sequence.speculation else []
            if depth < len(drafted):
                scores.best[i] = drafted[depth]
        accept(rows, scores, advance)

    monkeypatch.setattr(core, "accept_tokens", everything)
    found = judged(server, suite, before, drafting)
    assert "sampler.speculation" in statuses(found, "fail"), gate(found, "sampler.speculation")


def test_a_server_that_runs_past_the_end_is_found(
    server: Running, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this model no answer ends by itself: it gets a reason to."""
    ends = {"logit_bias": {str(server.engine.tokenizer.eos_token_id): 100.0}}
    suite = write_suite(folder / "stop", passages=1, long=0, prompts=0)
    _, _, before = observed(server, suite, FULL | ends)
    assert all(r.finish == "stop" for r in before.replies.values())
    patched_sampling(lambda params, _: replace(params, ignore_eos=True), monkeypatch)
    found = judged(server, suite, before, FULL | ends)
    assert "identity.ends" in statuses(found, "fail")


def test_equal_models_with_other_seeds_are_not_accused(server: Running, folder: Path) -> None:
    """Twenty pairs, drawn at temperature 1: one accusation at most."""
    suite = load(write_suite(folder / "seeds", passages=0, long=0, prompts=0, items=rows(30, tokens=4)))
    tasks = [t for t in read(suite)[0] if t.domain == "logic"]
    drawn = suite.model_copy(update={"sampling": suite.sampling.model_copy(update={"temperature": 1.0})})
    target = Target(server.url, request=FULL)
    seen = [observe(target, drawn, tasks, 1000 * i, lambda: None) for i in range(7)]
    pairs = [(a, b) for i, a in enumerate(seen) for b in seen[:i]][:20]
    accused = 0
    for before, now in pairs:
        found = judge(Seen(drawn, tasks, before, now))
        assert gate(found, "all.flips").status == "not run"
        wrongly = statuses(found, "fail") | statuses(found, "anomalous")
        accused += bool(wrongly)
        lost = gate(found, "logic.loss").items
        assert lost, "the pair differs"
    assert len(pairs) == 20
    assert accused <= 1


def test_a_changed_answer_key_is_anomalous(server: Running, folder: Path) -> None:
    suite = write_suite(folder / "keys-changed", passages=1, long=0, prompts=0)
    items = suite.with_name("rows.jsonl")
    pinned = suite.read_text().replace('path = "rows.jsonl"', f'path = "rows.jsonl"\nsha256 = "{sha256(items)}"')
    suite.write_text(pinned)
    assert compared(server, suite, FULL).verdict == "pass"
    changed = [json.loads(line) for line in items.read_text().splitlines()]
    changed[3]["regex"] = "[€]"
    items.write_text("".join(json.dumps(row) + "\n" for row in changed))
    outcome = compared(server, suite, FULL)
    assert outcome.verdict == "anomalous"
    found = gate(outcome.gates, "all.items")
    assert found.status == "anomalous"
    assert "rows.jsonl" in found.saw


def test_whoever_answers_by_a_wrong_key_has_seen_it(server: Running, folder: Path) -> None:
    suite = write_suite(folder / "trap", passages=0, long=0, prompts=0)
    made, tasks, before = observed(server, suite, FULL)
    trap = replace(tasks[0], trap=True)
    now = replace(before, grades=dict(before.grades))
    before.grades[trap.name] = replace(before.grades[trap.name], right=False)
    now.grades[trap.name] = replace(now.grades[trap.name], right=True)
    found = judge(Seen(made, [trap, *tasks[1:]], before, now))
    assert gate(found, "all.traps").items == (trap.name,)
    assert statuses(found, "anomalous") == {"all.traps"}


def test_gains_that_are_too_good_are_anomalous(server: Running, folder: Path) -> None:
    suite = write_suite(folder / "gains", passages=0, long=0, prompts=0)
    made, tasks, now = observed(server, suite, FULL)
    names = [t.name for t in tasks if t.domain == "logic"]
    before = replace(now, grades={n: replace(g, right=False) for n, g in now.grades.items()})
    now.grades.update({n: replace(now.grades[n], right=True) for n in names})
    found = judge(Seen(made, tasks, before, now))
    assert gate(found, "all.gains").status == "anomalous"
    assert set(names) <= set(gate(found, "all.gains").items)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def store(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("store") / "nested"
    return quantise_to(str(plain), made, NestedWeightConfig(), torch.device("cpu"), measure=False, progress=False)


def copied(of: Path, to: Path) -> Path:
    shutil.copytree(of, to)
    return to


def check(candidate: Path, store: Path, baseline: Path) -> weights.WeightCheck:
    return weights.check(candidate, store, baseline, lambda: None)


def test_weights_of_a_store_are_right(plain: Path, store: Path) -> None:
    found = check(store, store, plain)
    assert not found.wrong
    assert statuses(gates_of(found), "pass") == {"weights.codes", "weights.checkpoint"}
    assert not found.skipped
    assert found.sites == 15
    assert max(found.worst.values()) < 0.8


def test_one_layer_at_two_bits_is_found(plain: Path, tmp_path: Path) -> None:
    damaged = copied(plain, tmp_path / "model")
    tensors = load_file(damaged / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    groups = tensors[name].float().unflatten(1, (-1, 64))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / 3
    tensors[name] = (((groups - low) / step).round() * step + low).flatten(1).to(tensors[name].dtype).contiguous()
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    stored = quantise_to(
        str(damaged), tmp_path / "store", NestedWeightConfig(), torch.device("cpu"), measure=False, progress=False
    )
    found = check(damaged, stored, plain)
    assert len(found.wrong) == 1
    assert found.wrong[0].startswith(f"{name} in 16 bits")
    assert statuses(gates_of(found), "fail") == {"weights.checkpoint"}
    assert name in gate(gates_of(found), "weights.checkpoint").saw


def test_the_scale_of_one_group_is_found(plain: Path, store: Path, tmp_path: Path) -> None:
    damaged = copied(store, tmp_path / "store")
    file = damaged / "nested-00001-of-00001.safetensors"
    tensors = load_file(file)
    # The top gear's scale is a float of 4 bits of mantissa: 8 more is half as much again, or nearly.
    tensors["model.layers.0.self_attn.q_proj.meta"][0, 3, 1] += 8
    save_file(tensors, file, metadata={"format": "pt"})
    found = check(damaged, damaged, plain)
    assert found.wrong
    assert all(line.startswith("model.layers.0.self_attn.q_proj at ") for line in found.wrong)
    assert "output 3 group 1" in found.wrong[-1]
    assert statuses(gates_of(found), "fail") == {"weights.codes"}


def test_tokenizer_template_stop_tokens_and_defaults_are_compared(plain: Path, tmp_path: Path) -> None:
    assert [d.found for d in identity.differences(plain, plain)] == [""] * 4

    def found(damage: Callable[[Path], None], name: str) -> dict[str, str]:
        damaged = copied(plain, tmp_path / name)
        damage(damaged)
        return {d.name: d.found for d in identity.differences(plain, damaged) if d.found}

    def edit(file: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
        def damage(folder: Path) -> None:
            path = folder / file
            content = json.loads(path.read_text()) if path.exists() else {}
            change(content)
            path.write_text(json.dumps(content))

        return damage

    def swap(content: dict[str, Any]) -> None:
        vocabulary = content["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    swapped = found(edit("tokenizer.json", swap), "swapped")
    assert set(swapped) == {"tokenizer"}
    stops = found(edit("generation_config.json", lambda c: c.update(eos_token_id=5)), "stop")
    assert set(stops) == {"stop tokens"}
    assert "(5," in stops["stop tokens"]
    warm = found(edit("generation_config.json", lambda c: c.update(temperature=0.3, do_sample=True)), "warm")
    assert "temperature None and 0.3" in warm["sampler defaults"]

    def template(folder: Path) -> None:
        for file in ("chat_template.jinja", "tokenizer_config.json"):
            path = folder / file
            if path.exists():
                path.write_text(path.read_text().replace("assistant: ", "robot: "))

    changed = found(template, "template")
    assert set(changed) == {"chat template"}
    assert "robot" in changed["chat template"]
