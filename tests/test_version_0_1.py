"""What version 0.1 left behind still works: files that its own code wrote (`tests/version_0_1`), what its clients sent,
the names they used. Through the commands and the server, as its users would."""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import sqlite3
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

import forked
import qbe
from cli_process import qbe as run
from qbe import Budget, Engine, SamplingParams
from server_process import serving

MADE = Path(__file__).parent / "version_0_1"
PROMPT = "Explain step by step how a nested weight is read at four, six and eight bits."
GREEDY = ("--model", "store", "--greedy", "--max-tokens", "24", "--json")
# The average that 0.1 took for the prompt's score, 6.8276, to a twentieth. A tier has two or three averages since.
ITS_AVERAGE = ("--bits", "6.85")
ANSWERS: dict[str, tuple[str, ...]] = {
    "generate": ITS_AVERAGE,
    "generate_6_bits": ("--bits", "6"),
    "generate_careful": ("--bits", "5", "--activation-bits", "8", "--careful-tokens"),
    "generate_kv_4_bits": ("--bits", "8", "--kv-bits", "4"),
}
OF_THIS_RUN = {"id", "time", "created", "system_fingerprint", "timings", "energy", "file", "bytes", "versions",
               "cache"}  # fmt: skip


def was(name: str) -> Any:
    return json.loads((MADE / "files" / "json" / f"{name}.json").read_text())


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Version 0.1's files in a folder of their own, named by its environment variables."""
    shutil.copytree(MADE / "files", tmp_path, dirs_exist_ok=True)
    for name in ("serve.toml", "traffic.jsonl", "http.json"):
        shutil.copy(MADE / name, tmp_path)
    for variable, file in (("CACHE", "cache"), ("RECORDS", "records.sqlite"), ("BLUEPRINTS", "blueprints.sqlite"),
                           ("LEDGER", "ledger.sqlite")):  # fmt: skip
        monkeypatch.setenv(f"QBE_{variable}", str(tmp_path / file))
    monkeypatch.setenv("QBE_CPU_KERNEL", "torch")  # as they were made: of near ties each kernel's rounding decides
    return tmp_path


def said(home: Path, *args: str) -> Any:
    """What a command prints as JSON; it warns of nothing."""
    done = run(*args, cwd=home)
    assert done.returncode == 0, done.stderr.decode()
    assert b"Warning" not in done.stderr
    return json.loads(done.stdout)


def covers(now: Any, before: Any, values: bool, where: str = "") -> None:
    """Every key of before is there now and holds the same kind of thing; with `values`, the same thing."""
    if isinstance(before, Mapping):
        for key, value in before.items():
            assert key in now, f"{where}.{key} is gone"
            covers(now[key], value, values and key not in OF_THIS_RUN, f"{where}.{key}")
    elif isinstance(before, list) and before and isinstance(before[0], (dict, list)):
        assert len(now) >= len(before) or not values, where
        for one, other in zip(now, before, strict=False):
            covers(one, other, values, f"{where}[]")
    elif values and isinstance(before, float):
        assert now == pytest.approx(before, rel=2e-3, abs=1e-4), where
    elif values:
        assert now == before, where


@pytest.mark.parametrize("name", ANSWERS)
def test_a_saved_store_gives_the_same_greedy_tokens_at_the_same_blueprint(name: str, home: Path) -> None:
    now, before = said(home, "generate", PROMPT, *GREEDY, *ANSWERS[name]), was(name)
    assert now["token_ids"] == before["token_ids"]
    covers(now, before | {"bytes_per_token": now["bytes_per_token"]}, values=False)
    covers(now["blueprint"], before["blueprint"], values=True)
    covers(now["usage"], before["usage"], values=True)


def test_the_variable_of_the_kernel_is_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QBE_CPU_KERNEL", "none such")
    done = run("generate", PROMPT, *GREEDY, cwd=home)
    assert done.returncode == 2
    assert b"QBE_CPU_KERNEL" in done.stderr


def test_nothing_of_a_saved_store_is_measured_or_written_again(home: Path) -> None:
    before = {p.name: p.read_bytes() for p in (home / "store").iterdir()}
    now, explained = said(home, "explain", PROMPT, "--model", "store", "--json", *ITS_AVERAGE), was("explain")
    covers(now, explained | {"budget": explained["budget"] | {"bits": 6.85, "target_bits": 6.85}}, values=True)
    said(home, "info", "--model", "store", "--verify", "--json")
    assert {p.name: p.read_bytes() for p in (home / "store").iterdir()} == before
    assert {"sensitivity.json", "kv_sensitivity.json", "smoothing.safetensors"} <= set(before)


def test_the_json_of_commands_has_every_key_that_it_had(home: Path) -> None:
    covers(said(home, "info", "--model", "store", "--json"), was("info"), values=False)
    covers(said(home, "info", "--model", "store", "--json"), was("quantize"), values=False)  # it prints the same
    covers(said(home, "cache", "info", "--json"), was("cache_info"), values=False)


def test_cached_blueprints_of_other_code_lie_aside_and_new_ones_join_them(home: Path) -> None:
    old = said(home, "cache", "info", "--json")["versions"]
    assert old[0]["version"] == was("cache_info")["versions"][0]["version"]
    covers(said(home, "cache", "warm", "traffic.jsonl", "--model", "store", "--json"),
           was("cache_warm"), values=True)  # fmt: skip
    versions = said(home, "cache", "info", "--json")["versions"]
    assert all(v in versions for v in old)
    assert [v["entries"] for v in versions if v not in old] == [4]


def test_a_cached_row_is_read_where_it_still_is_of_use(home: Path) -> None:
    """What the rows hold did not change: only the digest of the code keeps them from being served."""
    from qbe.cache.disk import _blueprint

    with Engine(home / "store", records=False) as engine:
        table = engine.table
    with closing(sqlite3.connect(home / "blueprints.sqlite")) as db:
        rows = db.execute("SELECT hash, body FROM blueprints").fetchall()
    read = [_blueprint(hash_, body, table) for hash_, body in rows]
    assert read
    assert None not in read
    assert {b.policy for b in read if b is not None} <= {"tiered", "uniform"}


def test_records_are_listed_exported_and_used(home: Path) -> None:
    shown = {x["id"]: x for x in said(home, "records", "--json")}
    covers([shown[x["id"]] for x in was("records")], was("records"), values=True)  # the server's came later
    assert run("records", "--export", "now.jsonl", cwd=home).returncode == 0
    now, before = ([json.loads(x) for x in (home / n).read_text().splitlines()] for n in ("now.jsonl", "records.jsonl"))
    listed = {x["id"]: x for x in now}
    covers([listed[x["id"]] for x in before], before, values=True)
    assert said(home, "cache", "warm", "records.jsonl", "--model", "store", "--json")["requests"] == len(before)
    few = run("train", "proxy", "--model", "store", "--records", "records.jsonl", cwd=home)  # 50 are needed
    assert few.returncode == 2
    assert b"Traceback" not in few.stderr


def test_a_parquet_export_has_the_same_columns(home: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert run("records", "--export", "now.parquet", "--format", "parquet", cwd=home).returncode == 0
    now, before = (parquet.read_schema(home / n) for n in ("now.parquet", "records.parquet"))
    assert [(f.name, f.type) for f in now][: len(before)] == [(f.name, f.type) for f in before]


def test_the_ledger_sums_up_what_it_did(home: Path) -> None:
    covers(said(home, "ledger", "--file", "ledger.sqlite", "--json"), was("ledger"), values=True)
    covers(said(home, "ledger", "--json"), was("ledger"), values=True)  # QBE_LEDGER


def test_a_learned_file_serves(home: Path) -> None:
    from qbe.policies.learned import path_of, read

    with Engine(home / "store", records=False) as engine:
        here = path_of("proxy", engine.table)  # it names the folder by where it lies
    shutil.move(next((home / "cache" / "learned").glob("proxy-*")), here)
    assert read("proxy", engine.table).tensors
    assert said(home, "generate", PROMPT, *GREEDY, "--policy", "proxy", "--analysis-tier", "2")["token_ids"]


def test_tuned_kernels_and_thresholds_are_found(home: Path) -> None:
    from qbe.kernels.tuning.store import TunedStore
    from qbe.refresh import thresholds

    assert TunedStore().get("nested_linear 8x64x32", "a card") == {"BN": 32, "DEQUANTISE": False}
    learned = thresholds.load("store")
    assert learned is not None
    assert (learned.hard_entropy, learned.easy_margin, learned.windows) == (4.5, 2.0, 40)
    plain, refreshed = (said(home, "generate", PROMPT, *GREEDY, *more) for more in ((), ("--refresh",)))
    assert refreshed["token_ids"] == plain["token_ids"]  # which is less hard than the thresholds say


def test_a_server_takes_the_settings_and_the_requests_of_its_clients(home: Path) -> None:
    head = {"Authorization": "Bearer a key of version 0.1"}
    options = ("--model", str(home / "store"), "--config", str(home / "serve.toml"),
               "--ledger", str(home / "ledger.sqlite"))  # fmt: skip
    with serving(*options, home=home / "cache") as (process, url):
        again = 0
        for asked in was("http"):
            body, before = asked["body"], asked["answer"]

            def ask(body: Any, path: str = asked["path"]) -> Any:
                answer = httpx2.post(url + path, json=body, headers=head, timeout=60, verify=False)
                assert answer.status_code == 200, answer.text
                return answer.json()

            now = ask(body)
            covers(now, before, values=False)
            given = body.get("qbe", {})
            if given.get("refresh"):
                continue  # its bits are the tier's, which has two or three averages since, and nobody else's
            if not {"bits", "policy"} & given.keys():
                again += 1
                its_average = math.ceil(before["usage"]["qbe"]["average_weight_bits"] / 0.05) * 0.05
                now = ask(body | {"qbe": given | {"bits": round(its_average, 2)}})
            covers(now["usage"], before["usage"], values=True)
            # 8-bit activations are rounded for each kernel by itself: the other requests' tokens are the same.
            if before["service_tier"] == "default":
                covers(now["choices"], before["choices"], values=True)
        metrics = httpx2.get(f"{url}/metrics", headers=head, timeout=60, verify=False).text
        covers(
            httpx2.get(f"{url}/v1/models", headers=head, timeout=60, verify=False).json(), was("models"), values=True
        )
        process.terminate()
        lines = [json.loads(x) for x in process.communicate(timeout=60)[1].splitlines() if x.startswith("{")]
    names = {line.split("{")[0].split(" ")[0] for line in metrics.splitlines() if line[:1] != "#"}
    assert not set(was("metrics")) - names
    covers([x for x in lines if x["message"] == "request"], was("log"), values=False)
    now = said(home, "ledger", "--json")  # it goes on in the same file
    assert sum(x["requests"] for x in now) == again + 2 * sum(x["requests"] for x in was("ledger"))


def test_names_in_python_are_there() -> None:
    exported = ("Blueprint", "Budget", "Engine", "NestedTensor", "NestedWeightConfig", "QBEError", "Request", "Result",
                "SamplingParams", "native_config", "pull", "quantize_")  # fmt: skip
    assert set(exported) <= set(qbe.__all__)
    assert all(hasattr(qbe, name) for name in exported)
    assert callable(importlib.import_module("qbe.cli").main)
    assert Budget(5.0, "flex", 8, 4, True, 0.1) == Budget(
        bits=5.0, tier="flex", activation_bits=8, kv_bits=4, high_precision_tokens=True, kv_error=0.1
    )


def test_a_result_and_a_budget_tell_of_careful_tokens(home: Path) -> None:
    budget = Budget(bits=5.0, activation_bits=8, careful_tokens=True)
    assert budget == Budget(bits=5.0, activation_bits=8, high_precision_tokens=True)
    assert budget.careful_tokens is True
    assert Budget().careful_tokens is False
    assert not replace(budget, high_precision_tokens=False).careful_tokens
    with Engine(home / "store", records=False) as engine:
        result = engine.generate(PROMPT, SamplingParams(max_tokens=24, temperature=0.0), budget=budget)
    # How many there are is compared where a command of its own reads QBE_CPU_KERNEL, which a process reads once.
    assert result.careful_tokens == result.high_precision_tokens > 0


def test_the_harness_is_a_module_that_runs() -> None:
    done = forked.run([sys.executable, "-m", "qbe.eval.harness", "--help"], env=os.environ | {"NO_COLOR": "1"},
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    if importlib.util.find_spec("lm_eval") is None:
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "pip install 'qbe[lm-eval]'" in done.stderr
    else:
        assert done.returncode == 0


def test_qbe_data_names_the_data_sets(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QBE_DATA", str(home / "no data here"))
    done = run("train", "paq", "--model", "store", "--limit", "1", cwd=home)
    assert done.returncode == 2
    assert b"no data here" in done.stderr


def test_both_names_of_a_field_are_refused() -> None:
    from pydantic import ValidationError

    from qbe.server.protocol import Contract

    assert Contract.model_validate({"careful_tokens": True}).high_precision_tokens
    with pytest.raises(ValidationError, match="older name of high_precision_tokens: give one of them"):
        Contract.model_validate({"careful_tokens": True, "high_precision_tokens": False})
