"""`benchmarks/expert_serving.py` on a model of a few kilobytes: every part of it prints its numbers."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks/expert_serving.py"


def test_every_part_says_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--device", "cpu", "--tiny", "--rounds", "1", "--steps", "2",
                                      "--resident-steps", "4", "--folder", str(tmp_path)])  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ended.value.code == 0, lines
    found = {}
    for line in lines:
        found.setdefault(line.get("what"), []).append(line)
    assert 0.25 < found["memory"][0]["ratio"] < 0.4
    assert [line["batch"] for line in found["4 bits over own 16"]] == [1, 8, 32]
    assert all(line["ratio"] > 0 for line in found["4+6+8 over all at 8"])
    assert [(line["slices"], line["part"]) for line in found["residency"][::2]] == [
        ([4, 2, 2], 0.5), ([4, 2, 2], 0.25), ([2, 2, 2, 2], 0.25)
    ]  # fmt: skip
    assert all(line["failure"] is None and line["misses"] > 0 for line in found["residency"])
    assert not list(tmp_path.iterdir())
