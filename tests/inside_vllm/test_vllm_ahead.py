"""Steps that are scheduled before the last one's tokens are there, as on a GPU: answers, and a refresh on its way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm_serving import START_S, environment, split_model

from qbe.records import Record, RecordStore


def run(model: Path, home: Path, when: str) -> tuple[dict[str, Any], Record]:
    """What the engine says, and the record of the refreshed request."""
    command = [sys.executable, str(Path(__file__).with_name("ahead_engine.py")), str(model), when]
    variables = {**environment(model, home), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr[-4000:]
    (record,) = [r for r in RecordStore(home / "records.sqlite").list(9) if r.tier == "priority"]
    return json.loads(done.stdout.splitlines()[-1]), record


def test_a_refresh_comes_a_step_later_and_changes_nothing_else(tmp_path: Path) -> None:
    model = split_model(tmp_path)
    found = {}
    for when in ("after", "ahead"):
        (tmp_path / when).mkdir()
        found[when] = run(model, tmp_path / when, when)
    (after, record), (ahead, later) = found["after"], found["ahead"]
    assert after["scheduler"].endswith("PlannedScheduler")
    assert ahead["scheduler"].endswith("PlannedAsyncScheduler")
    refreshed, plain = zip(after["answers"], ahead["answers"], strict=True)
    assert plain[0] == plain[1]
    assert refreshed[0][:96] == refreshed[1][:96]
    assert record.refreshes == later.refreshes
    assert [(r["kind"], r["token"]) for r in record.refreshes or ()] == [("easy", 96)]
    assert (record.entropies or ())[:96] == pytest.approx((later.entropies or ())[:96], abs=1e-4)
    assert len(record.entropies or ()) == len(later.entropies or ()) == 130
    (refresh,) = record.refreshes or ()
    more = later.average_weight_bits - record.average_weight_bits
    late = more * (record.prompt_tokens + 129) / (refresh["bits_before"] - refresh["bits"])
    assert late == pytest.approx(round(late), abs=0.05)
    assert round(late) in (1, 2), "tokens that were on their way have the blueprint from before"
