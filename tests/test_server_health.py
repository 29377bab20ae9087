"""A server that watches its answers: live quality, detectors, the ladder; through HTTP, on the default path."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli_process import qbe
from qbe import Budget, Request, SamplingParams
from qbe.engine.engine import Engine
from qbe.engine.sampling.answer_scoring import AnswerScoring, widest
from qbe.errors import QBEError
from qbe.eval.fidelity import Teacher
from qbe.records import RecordStore
from qbe.server.errors import APIError
from qbe.server.health.feedback import Answered, FeedbackRequest, Told
from qbe.server.health.monitor import _classes
from qbe.server.health.syndromes import DETECTORS, LADDER, SYNDROMES
from qbe.server.keys import Client
from qbe.server.settings import Key
from qbe.server.settings_file import load
from qbe.store import calibration_set
from qbe.store.calibration_set import Passage
from server_running import Running, running, tiny_engine, until

QUIET = {
    "sample": 1.0, "least": 4, "window": 8, "hold_s": 3600.0, "live_kl": 100.0, "top1_agreement": 0.0,
    "opening_kl": 100.0, "activation_range": 1e6, "loops": 1.0, "parity": 1.0, "errors": 1.0, "retries": 1e3,
    "failures": 1.0, "structured_failures": 1.0, "acceptance": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("health")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    write(folder)

    def make() -> Engine:
        return tiny_engine(records=folder / "records.sqlite", rows="shared", speculate=True)

    with running(make, folder / "serve.toml") as found:
        yield found


@pytest.fixture(autouse=True)
def calm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test begins without an action in force."""
    yield
    if "server" in request.fixturenames:
        found, folder = request.getfixturevalue("server"), request.getfixturevalue("folder")
        configure(found, folder, ladder=False)
        until(lambda: not in_force(found), "all actions are given back")
        configure(found, folder)


def write(folder: Path, **changes: Any) -> None:
    (folder / "set.txt").write_text("How do I bake bread? Write a function that sorts a list. " * 90)
    changes = {"calibration": str(folder / "set.txt"), "drift": 1e3} | changes
    lines = [f"{k} = {json.dumps(v)}\n" for k, v in (QUIET | changes).items()]
    (folder / "serve.toml").write_text("[prices]\noutput = 8.0\ninput = 8.0\n[health]\n" + "".join(lines))


def configure(server: Running, folder: Path, **changes: Any) -> None:
    write(folder, **changes)
    wanted = load(folder / "serve.toml").health
    until(lambda: server.service.settings.health == wanted, "the settings are read")


def ask(server: Running, **body: Any) -> Any:
    asked = {"prompt": "what is scored?", "max_tokens": 24, "ignore_eos": True, "temperature": 0} | body
    answer = server.post("completions", asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


def health(server: Running) -> Any:
    return server.http.get("/v1/qbe/health").json()


def in_force(server: Running) -> set[str]:
    return {a["action"] for a in health(server)["actions"] if a["in_force"]}


def scores(server: Running) -> float:
    return server.metric("qbe:live_kl_count{")


def test_live_divergence_is_what_teacher_forcing_says_offline(server: Running, folder: Path) -> None:
    before, prompts = scores(server), {bits: f"question {bits}, which is asked once" for bits in (4, 6, 8)}
    for bits, prompt in prompts.items():
        ask(server, prompt=prompt, qbe={"bits": bits})
    until(lambda: scores(server) == before + 3, "all are scored")
    store = RecordStore(folder / "records.sqlite")
    records = until(lambda: (r := store.list(3)) and all(x.quality for x in r) and r, "they are in the records")
    with tiny_engine() as offline:
        for record in records:
            budget, prompt = Budget(bits=record.budget_bits), prompts[round(record.budget_bits)]
            ids, chosen = offline.choose(Request(prompt, budget=budget))
            written = offline.generate(prompt, SamplingParams(max_tokens=24, ignore_eos=True), budget=budget)
            teacher = Teacher(offline.core, widest(offline.table), ids, written.token_ids, offline.table)
            told = teacher.compare(chosen.blueprint)
            assert record.quality is not None
            assert record.quality["kl"] == pytest.approx(told.kl / told.tokens, rel=0.01)
            assert record.quality["top1"] == pytest.approx(told.agreed / told.tokens)
            assert record.quality["tokens"] == 24
            assert record.quality["reference_bits"] == 16
    shown = server.http.get("/metrics").text
    assert set(re.findall(r'qbe:live_kl_count\{model_name="tiny",prompt_class="\w+",tier="(\w+)"\}', shown))
    assert server.metric("qbe:scored_tokens_total{") >= 3 * 24
    assert 0 < server.metric("qbe:scored_tokens_agreed_total{") <= server.metric("qbe:scored_tokens_total{")
    assert server.metric("qbe:scoring_seconds_total{") > 0


def test_refresh_is_learned_from_scored_answers_that_nobody_watched(server: Running, folder: Path) -> None:
    before = scores(server)
    for i in range(16):  # more would not wait to be scored
        ask(server, prompt=f"window {i}", max_tokens=64, qbe={"bits": 4})
    until(lambda: scores(server) == before + 16, "all are scored")
    store = RecordStore(folder / "records.sqlite")
    records = until(lambda: (r := store.list(16)) and all(x.quality for x in r) and r, "they are in the records")
    assert [len(r.quality["windows"]) for r in records if r.quality] == [2] * 16
    assert not any(r.entropies for r in records)
    done = qbe("records", "--learn-refresh", "--json", home=folder)
    assert done.returncode == 0, done.stderr.decode()
    (learned,) = json.loads(done.stdout).values()
    assert learned["windows"] >= 32
    assert learned["hard_entropy"] > learned["easy_entropy"]


def test_who_asks_one_thing_after_the_other_waits_for_no_scoring(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is scored before nobody was there for a while: a step of it would be in each one's way."""
    scored, steps = scores(server), server.metric("qbe:scoring_seconds_total{")
    monkeypatch.setattr("qbe.server.worker._QUIET_S", 3600.0)
    for _ in range(5):
        ask(server)
    assert server.service._worker._scorer.waiting
    assert (scores(server), server.metric("qbe:scoring_seconds_total{")) == (scored, steps)
    monkeypatch.setattr("qbe.server.worker._QUIET_S", 0.0)
    ask(server)  # the engine's thread looks again
    until(lambda: scores(server) == scored + 6, "all are scored")


def test_scoring_steps_aside_for_a_request(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, beside, left = server.service._worker, list[int](), list[bool]()
    step, leave = AnswerScoring.step, AnswerScoring.leave

    def slow(self: AnswerScoring) -> Any:
        beside.append(len(worker._jobs))
        time.sleep(0.05)
        return step(self)

    def watched(self: AnswerScoring) -> None:
        left.append(self._running is not None)
        leave(self)

    monkeypatch.setattr(AnswerScoring, "step", slow)
    monkeypatch.setattr(AnswerScoring, "leave", watched)
    before = scores(server)
    ask(server, prompt="a long prompt " * 60, max_tokens=64)
    until(lambda: len(beside) > 1, "it is being scored")
    ask(server, prompt="somebody comes", max_tokens=8)
    until(lambda: scores(server) == before + 2, "both are scored in the end")
    assert any(left), "it gave up what it held"
    assert not any(beside), "no step of it ran beside a request"
    assert not server.engine.core.has_work()


def test_divergence_raises_the_floor_and_then_everything(server: Running, folder: Path) -> None:
    plain = ask(server, qbe={"max_bits": 6})
    assert plain["usage"]["qbe"]["average_weight_bits"] <= 6
    usual = ask(server, prompt="a price")["usage"]
    configure(server, folder, live_kl=1e-7)

    def until_it_acts(action: str) -> None:
        for i in range(4):
            ask(server, prompt=f"{action} {i}")
        until(lambda: action in in_force(server), f"{action} is in force")

    until_it_acts("floor_up")
    raised, bounded = ask(server, prompt="a price")["usage"], ask(server, qbe={"max_bits": 6})["usage"]["qbe"]
    assert raised["qbe"]["average_weight_bits"] == 8 > usual["qbe"]["average_weight_bits"]
    assert raised["qbe"]["asked_weight_bits"] == usual["qbe"]["average_weight_bits"]
    assert raised["cost"] == pytest.approx(usual["cost"]), "it is charged what it asked for"
    assert bounded["average_weight_bits"] <= 6, "who bounds its bits keeps them"
    until_it_acts("widest_gear")
    assert in_force(server) == {"floor_up", "widest_gear"}
    everything = ask(server, qbe={"max_bits": 6, "kv_bits": 4, "activation_bits": 8})["usage"]["qbe"]
    assert everything["average_weight_bits"] == everything["average_kv_bits"] == 16
    assert everything["asked_weight_bits"] <= 6
    assert {"qbe.max_bits", "qbe.kv_bits", "qbe.activation_bits"} <= set(everything["ignored"])
    assert server.metric('qbe:health_action{action="widest_gear"') == 1
    assert server.metric("qbe:health_actions_total{") >= 2
    told = health(server)
    assert {a["cause"] for a in told["actions"] if a["in_force"]} == {"live_kl"}
    warnings = server.http.get("/v1/qbe/live").json()["warnings"]
    assert "Answers got worse (live_kl), so tiers give at least `floor_bits`." in warnings
    for i in range(4):
        ask(server, prompt=f"at the widest {i}")
    until(lambda: health(server)["detectors"]["live_kl"]["value"] is not None, "it is judged anew")
    assert health(server)["detectors"]["live_kl"]["value"] < 1e-6, "scored by what it was served at"


def test_draft_tokens_that_are_wrong_turn_speculation_off(server: Running, folder: Path) -> None:
    asked = {"prompt": "one two three one two three one two", "qbe": {"speculate": True}, "max_tokens": 48}
    for i in range(8):
        ask(server, **asked | {"prompt": f"{asked['prompt']} {i}"})
    assert server.metric("vllm:spec_decode_num_draft_tokens_total{") > 0
    configure(server, folder, acceptance=1.0)
    until(lambda: in_force(server) == {"speculation_off"}, "it is off")
    before = server.metric("vllm:spec_decode_num_draft_tokens_total{")
    answer = ask(server, **asked)
    assert answer["usage"]["qbe"]["ignored"] == ["qbe.speculate"]
    assert server.metric("vllm:spec_decode_num_draft_tokens_total{") == before


def test_greedy_answers_with_draft_tokens_are_what_their_bits_find_likeliest(server: Running) -> None:
    before = scores(server)
    for i in range(6):
        ask(server, prompt=f"one two three one two three {i}", qbe={"speculate": True, "bits": 16}, max_tokens=48)
    until(lambda: scores(server) == before + 6, "all are scored")
    parity = until(lambda: health(server)["detectors"]["parity"]["value"] is not None and health(server), "replayed")
    assert parity["detectors"]["parity"]["value"] == 0


def test_the_cache_at_16_bits(server: Running) -> None:
    ladder = server.service.observer.health.ladder
    asked = {"prompt": "words of a prompt " * 12, "qbe": {"kv_bits": 4}}
    before = ask(server, **asked)["usage"]["qbe"]["average_kv_bits"]
    ladder.taken = {"kv_16_bits": "kv_raised"}
    full = ask(server, **asked)["usage"]["qbe"]
    assert before < 16 == full["average_kv_bits"]
    assert full["ignored"] == ["qbe.kv_bits"]
    most = server.engine.core.pool.num_pages * 64
    long = {"prompt": [7] * (most - 100), "max_tokens": 200, "qbe": {"kv_bits": 4}, "stream": False}
    if server.engine.core.context is None or server.engine.core.context >= most + 100:
        kept = ask(server, **long)["usage"]["qbe"]
        assert kept["average_kv_bits"] < 16, "one that the cache could not hold keeps its bits"


def test_feedback_is_counted_once_and_acts(server: Running, folder: Path) -> None:
    def tell(**body: Any) -> Any:
        return server.post("qbe/feedback", body)

    wrong = [
        ({"id": "cmpl-nobody", "success": True}, 404), ({"id": "x"}, 400), ({"success": True}, 400),
        ({"id": "x", "success": True, "overridden": True}, 400), ({"id": "x", "success": True, "colour": 1}, 400),
        ({"id": "x", "success": "yes"}, 400), ({"id": "x", "retries": -1}, 400),
    ]  # fmt: skip
    for body, status in wrong:
        answer = tell(**body)
        assert answer.status_code == status, (body, answer.text)
        assert "error" in answer.json()
    answers = [ask(server, prompt=f"of use? {i}") for i in range(4)]
    for i, answer in enumerate(answers):
        told = until(
            lambda a=answer, i=i: (r := tell(id=a["id"], success=i > 2, retries=i)).status_code != 404 and r, ""
        )
        assert told.status_code == 200, told.text
    assert tell(id=answers[0]["id"], success=True).status_code == 409
    detectors = health(server)["detectors"]
    assert detectors["failures"]["value"] == 0.75
    assert detectors["retries"]["value"] == 1.5
    cost = sum(a["usage"]["cost"] for a in answers)
    assert detectors["cost_per_success"]["value"] == pytest.approx(cost)
    assert server.metric('qbe:feedback_total{model_name="tiny",outcome="failure"') == 3
    assert server.metric("qbe:feedback_cost_total{") == pytest.approx(cost)
    configure(server, folder, cost_per_success=cost / 2)
    until(lambda: in_force(server) == {"floor_up"}, "the floor is up")
    assert {a["cause"] for a in health(server)["actions"] if a["in_force"]} == {"cost_per_success"}


def test_loops_are_noticed_of_every_answer(server: Running, folder: Path) -> None:
    configure(server, folder, sample=0.0, loops=0.4)
    bias = {"logit_bias": {"65": 100}, "max_tokens": 64}
    for i in range(8):
        ask(server, prompt=f"again {i}", **(bias if i % 2 else {}))
    until(lambda: health(server)["detectors"]["loops"]["tripped"], "it tells")
    assert health(server)["detectors"]["loops"]["value"] >= 0.5
    assert server.metric('qbe:detector_tripped{detector="loops"') == 1
    assert not in_force(server), "fewer bits are seldom the cause"
    configure(server, folder, sample=0.0, loops=0.4, off=["loops"])
    until(lambda: server.metric('qbe:detector_tripped{detector="loops"') == 0, "it says nothing any more")
    assert "loops" not in health(server)["detectors"]


def test_prompts_are_compared_with_the_calibration_set(server: Running, folder: Path) -> None:
    for i in range(16):
        ask(server, prompt=f"Sum up what follows, please: {i}", max_tokens=1)
    seen = health(server)["detectors"]["drift"]
    assert seen["value"] > 0
    assert seen["action"] is None
    configure(server, folder, drift=1e-9)
    until(lambda: health(server)["detectors"]["drift"]["tripped"], "it tells")
    assert not in_force(server)
    assert server.metric('qbe:detector_tripped{detector="drift"') == 1


def test_a_key_tells_of_its_own_answers_only() -> None:
    answered, mine = Answered(), Client("mine", Key(sha256="0" * 64))
    answered.add("a", Told("mine", "default", False, 0.0, "USD", 0))
    with pytest.raises(APIError) as refused:
        answered.tell(Client("other", Key(sha256="1" * 64)), FeedbackRequest(id="a", success=True))
    assert refused.value.status == 404
    assert answered.tell(mine, FeedbackRequest(id="a", success=True)).key == "mine"
    answered.add("b", Told("mine", "default", False, 0.0, "USD", 0))
    answered.tell(Client("who runs it", Key(sha256="2" * 64, operator=True)), FeedbackRequest(id="b", retries=1))


def test_every_syndrome_has_a_detector_or_a_reason() -> None:
    assert len(SYNDROMES) == len({s.name for s in SYNDROMES}) == 14
    assert all(s.detectors or s.why_not for s in SYNDROMES)
    named = {d for s in SYNDROMES for d in s.detectors}
    assert named == set(DETECTORS)


def test_every_action_has_its_alert_and_its_part_of_the_page() -> None:
    yaml, root = pytest.importorskip("yaml"), Path(__file__).parents[1]
    (group,) = yaml.safe_load((root / "deploy/helm/qbe/files/alerts.yml").read_text())["groups"]
    rules, page = {rule["alert"]: rule["expr"] for rule in group["rules"]}, (root / "docs/health.md").read_text()
    for action, rung in LADDER.items():
        assert rules[rung.alert] == f'qbe:health_action{{action="{action}"}} == 1'
        assert f"`{action}`, alert `{rung.alert}`" in page
    assert "QBEHealthExhausted" in rules
    assert all(alert in page for alert in rules if alert.startswith(("QBEHealth", "QBEDetector", "QBENot")))


def test_a_calibration_set_says_its_classes(server: Running, tmp_path: Path) -> None:
    """The folder that `qbe calibrate build` wrote, as `qbe quantize --calibrate` takes it."""
    parts = ("code", "en", "text", "up to 2k", 9, "log.jsonl", "MIT")
    calibration_set.write(tmp_path / "set", [Passage(f"passage {i}", *parts) for i in range(3)], {})
    assert _classes(tmp_path / "set", server.engine) == {"code": 3}
    (tmp_path / "log.jsonl").write_text("{}")
    with pytest.raises(QBEError, match=r"health\.calibration: .* is a log"):
        _classes(tmp_path / "log.jsonl", server.engine)


def test_settings_that_cannot_be_watched_by_stop_the_server(tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text('[health]\ncalibration = "/nowhere.txt"\n')
    with pytest.raises(AssertionError, match=r"health\.calibration: .*/nowhere\.txt cannot be read"):  # noqa: SIM117
        with running(tiny_engine, tmp_path / "serve.toml"):
            pass
