"""A canary on a server, through HTTP: a candidate that is worse is off within a hundred requests, and none fails."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from qbe.records import RecordStore
from qbe.records.ledger import Ledger
from qbe.server.keys import new_key
from qbe.server.settings_file import load
from server_running import Running, running, tiny_engine, until

CALM = "[health]\nsample = 0.0\nladder = false\n"
STEPS = "steps = [{{weight = 50, minutes = {0}}}, {{weight = 80, minutes = {0}}}]"
TIGHT = """sample = 1.0
[rollout.limits]
live_kl = 1e-3
flip_margin = 1e3
top1_agreement = 0.0
loops = 1.0
ttft = 100.0
itl = 100.0
"""
TIERS = "[tiers.default]\nbits = [8.0, 8.0]\n[prices]\noutput = 8.0\ninput = 8.0\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rollout")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    (folder / "serve.toml").write_text(TIERS + CALM)
    make = lambda: tiny_engine(records=folder / "records.sqlite")  # noqa: E731
    with running(make, folder / "serve.toml", folder / "ledger.sqlite") as found:
        yield found


def begin(server: Running, folder: Path, salt: str, candidate: str, more: str = "", rest: str = CALM,
          minutes: float = 60) -> None:  # fmt: skip
    """Another rollout: its salt makes it one."""
    (folder / "serve.toml").write_text(
        f'{TIERS}{rest}[rollout]\nsalt = "{salt}"\n{STEPS.format(minutes)}\n{more}\n[rollout.candidate]\n{candidate}\n'
    )
    wanted = load(folder / "serve.toml").rollout
    until(lambda: server.service.settings.rollout == wanted, "the settings are read")


def ask(server: Running, talk: str, **body: Any) -> Any:
    asked = {"prompt": f"of {talk}", "max_tokens": 8, "ignore_eos": True, "temperature": 0, "prompt_cache_key": talk}
    answer = server.post("completions", asked | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def arm(answer: Any) -> str:
    return answer["usage"]["qbe"]["arm"]


def rollout(server: Running) -> Any:
    return server.http.get("/v1/qbe/rollout").json()["rollout"]


def test_a_worse_canary_is_off_within_a_hundred_requests_and_none_fails(
    server: Running, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qbe.server.worker._QUIET_S", 0.0)
    begin(server, folder, "worse", "bits = [4.0, 4.0]", TIGHT)
    arms, bits, asked = Counter[str](), dict[str, float](), 0
    while rollout(server)["weight"]:
        assert asked < 100, rollout(server)
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda i: ask(server, f"talk {i}"), range(asked, asked + 4)))
        asked += 4
        time.sleep(0.05)  # nobody is there for a moment, as at night
        arms.update(map(arm, answers))
        bits |= {arm(a): a["usage"]["qbe"]["average_weight_bits"] for a in answers}
    print(asked, "requests until the abort;", dict(arms), rollout(server)["cause"])
    assert bits == {"candidate": 4, "stable": 8}
    assert rollout(server)["cause"].startswith("live_kl: ")
    assert {arm(ask(server, f"talk {i}")) for i in range(asked)} == {"stable"}
    assert server.metric('qbe:rollout_aborts_total{cause="live_kl"') == 1
    assert server.metric('qbe:rollout_phase{model_name="tiny",phase="aborted"}') == 1


def test_a_good_canary_goes_up_to_everything(server: Running, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the limits that the worse one did not keep to."""
    monkeypatch.setattr("qbe.server.worker._QUIET_S", 0.0)
    begin(server, folder, "good", "bits = [16.0, 16.0]", f"least = 8\nleast_scored = 4\n{TIGHT}", minutes=0.02)
    weights, asked = list[float](), 0
    while (weight := rollout(server)["weight"]) < 100:
        assert asked < 400, rollout(server)
        weights.append(weight)
        answers = [ask(server, f"talk {i}") for i in range(asked, asked + 4)]
        asked += 4
        time.sleep(0.1)
    assert weights == sorted(weights)
    assert set(weights) == {50, 80}
    assert rollout(server)["phase"] == "successful"
    assert {arm(a) for a in answers} <= {"stable", "candidate"}
    assert {arm(ask(server, f"talk {i}")) for i in range(8)} == {"candidate"}


def test_clients_ratings_abort_it(server: Running, folder: Path) -> None:
    begin(server, folder, "rated", "bits = [4.0, 4.0]", "sample = 0.0")
    asked = 0
    while rollout(server)["weight"]:
        assert asked < 100, rollout(server)
        answer = ask(server, f"talk {asked}")
        asked += 1
        body = {"id": answer["id"], "success": arm(answer) == "stable"}
        until(lambda b=body: server.post("qbe/feedback", b).status_code == 200, "it can be told of")
    assert rollout(server)["cause"].startswith("failures: candidate 1, stable 0")


def test_a_candidate_that_cannot_choose_fails_no_request(server: Running, folder: Path) -> None:
    before = server.metric("qbe:arm_fallbacks_total{")
    begin(server, folder, "cannot", 'policy = "paq"')  # which was not trained for this model
    answers = [ask(server, f"talk {i}") for i in range(100) if rollout(server)["weight"]]
    assert rollout(server)["cause"].startswith("errors: candidate 1, stable 0")
    assert len(answers) < 100
    assert {arm(a) for a in answers} == {"stable"}, "that is what served them"
    assert server.metric("qbe:arm_fallbacks_total{") - before >= 20


def test_what_runs_at_an_abort_goes_on(server: Running, folder: Path) -> None:
    begin(server, folder, "runs", "bits = [4.0, 4.0]")
    talk = next(f"talk {i}" for i in range(50) if arm(ask(server, f"talk {i}")) == "candidate")
    body = {"prompt": "long", "max_tokens": 400, "ignore_eos": True, "stream": True, "prompt_cache_key": talk,
            "stream_options": {"include_usage": True}}  # fmt: skip
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        next(lines)
        assert server.post("qbe/rollout", {"action": "abort"}).json()["rollout"]["weight"] == 0
        assert arm(ask(server, talk)) == "stable", "whoever comes now is out of it"
        rest = [line.removeprefix("data: ") for line in lines]
    assert rest[-1] == "[DONE]"
    last = json.loads(rest[-2])
    assert (last["usage"]["completion_tokens"], arm(last)) == (400, "candidate")
    assert last["usage"]["qbe"]["average_weight_bits"] == 4


def test_everything_says_the_arm(server: Running, folder: Path) -> None:
    begin(server, folder, "says", "bits = [4.0, 4.0]")
    answers = {f"talk {i}": ask(server, f"talk {i}") for i in range(12)}
    found = {talk: arm(answer) for talk, answer in answers.items()}
    assert set(found.values()) == {"stable", "candidate"}
    assert {talk: arm(ask(server, talk)) for talk in found} == found, "a conversation stays"
    chat = server.post("responses", {"input": "hello", "max_output_tokens": 2, "prompt_cache_key": "talk 0"})
    assert chat.json()["usage"]["qbe"]["arm"] == found["talk 0"]
    assert "arm" not in ask(server, "talk 0", service_tier="flex", qbe={"bits": 6})["usage"]["qbe"], "it chose itself"
    entries = {entry.request: entry.arm for entry in Ledger(folder / "ledger.sqlite").entries()}
    assert {talk: entries[answer["id"]] for talk, answer in answers.items()} == found
    store = RecordStore(folder / "records.sqlite")
    until(lambda: Counter(r.arm for r in store.list(26))["candidate"] >= 2, "it is in the records")
    rows = {row["id"]: row["arm"] for row in server.http.get("/v1/qbe/live").json()["requests"]}
    assert {
        talk: rows[answer["id"]] for talk, answer in answers.items() if answer["id"] in rows
    }.items() <= found.items()
    for name, count in Counter(found.values()).items():
        assert server.metric(f'qbe:arm_answers_total{{arm="{name}"') >= 2 * count
        assert server.metric(f'qbe:arm_time_to_first_token_seconds_count{{arm="{name}"') > 0
    assert server.metric("qbe:rollout_weight{") == 50
    metrics = rollout(server)["metrics"]
    assert metrics["errors"]["answers"]["stable"] >= 2 * Counter(found.values())["stable"]


def test_operators_steer_it(server: Running, folder: Path) -> None:
    begin(server, folder, "steer", "bits = [4.0, 4.0]")

    def act(action: str) -> Any:
        return server.post("qbe/rollout", {"action": action})

    assert act("pause").json()["rollout"]["phase"] == "paused"
    assert act("pause").status_code == 409
    assert act("resume").json()["rollout"]["phase"] == "progressing"
    assert act("promote").json()["rollout"]["weight"] == 100
    assert arm(ask(server, "anybody")) == "candidate"
    assert act("abort").json()["rollout"]["phase"] == "aborted"
    warnings = server.http.get("/v1/qbe/live").json()["warnings"]
    assert "The candidate was aborted and gets no requests: an operator aborted it." in warnings
    assert act("fly").status_code == 400
    assert act("resume").json()["rollout"]["weight"] == 50
    (folder / "serve.toml").write_text(TIERS + CALM)
    until(lambda: rollout(server) is None, "there is none")
    assert act("abort").status_code == 409
    assert "arm" not in ask(server, "anybody")["usage"]["qbe"]


def test_the_ladder_aborts_the_arm_first(server: Running, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qbe.server.worker._QUIET_S", 0.0)
    health = "[health]\nsample = 1.0\nleast = 4\nwindow = 8\nlive_kl = 1e-9\ntop1_agreement = 0.0\nopening_kl = 100.0\n"
    begin(server, folder, "ladder", "bits = [4.0, 4.0]", 'off = ["live_kl", "top1_agreement", "flip_margin"]', health)

    def actions() -> Any:
        return {a["action"]: a for a in server.http.get("/v1/qbe/health").json()["actions"] if a["in_force"]}

    for i in range(6):
        ask(server, f"talk {i}")
    until(lambda: "arm_aborted" in actions(), "the candidate is off")
    assert set(actions()) == {"arm_aborted"}, "and nothing else is done yet"
    assert rollout(server)["cause"].startswith("health's live_kl is ")
    assert server.metric('qbe:health_action{action="arm_aborted"') == 1
    for i in range(6):
        ask(server, f"talk {i}")
    until(lambda: "floor_up" in actions(), "what still trips is not the candidate's")
    assert "arm_aborted" in actions()
    (folder / "serve.toml").write_text(TIERS + CALM)
    until(lambda: not actions(), "all is given back")


def test_keys_are_sticky_and_an_abort_outlives_the_server(tmp_path: Path) -> None:
    keys = {name: new_key(name) for name in ("boss", *(f"key{i}" for i in range(8)))}
    tables = "".join(lines + ("operator = true\n" if name == "boss" else "") for name, (_, lines) in keys.items())
    (tmp_path / "serve.toml").write_text(
        f"{TIERS}{CALM}[rollout]\n{STEPS.format(60)}\n[rollout.candidate]\nbits = [4.0, 4.0]\n{tables}"
    )

    def who(name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {keys[name][0]}"}

    def arms(server: Running) -> dict[str, str]:
        body = {"prompt": "hello", "max_tokens": 2}
        found = {}
        for name in keys:
            answers = [server.post("completions", body | {"prompt_cache_key": f"{i}"}, **who(name)) for i in range(2)]
            one, other = (arm(answer.json()) for answer in answers)
            assert one == other, "whatever its conversation"
            found[name] = one
        return found

    with running(tiny_engine, tmp_path / "serve.toml", tmp_path / "ledger.sqlite") as server:
        before = arms(server)
        assert set(before.values()) == {"stable", "candidate"}
        assert server.http.get("/v1/qbe/rollout", headers=who("key0")).status_code == 403
        assert server.post("qbe/rollout", {"action": "abort"}, **who("key0")).status_code == 403
        assert server.http.get("/v1/qbe/rollout").status_code == 401
        assert arms(server) == before
        assert server.post("qbe/rollout", {"action": "abort"}, **who("boss")).status_code == 200
    with running(tiny_engine, tmp_path / "serve.toml", tmp_path / "ledger.sqlite") as server:
        assert set(arms(server).values()) == {"stable"}
        assert server.post("qbe/rollout", {"action": "resume"}, **who("boss")).status_code == 200
        assert arms(server) == before, "the same keys as before"
