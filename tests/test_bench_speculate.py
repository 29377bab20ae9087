"""`qbe bench speculate` on tiny shapes. No speed."""

# ruff: noqa: I001
from __future__ import annotations

import qbe  # noqa: F401  (before torch: it sets how torch's threads wait)

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench_samples import CPU, LIMITS, THIN, described
from qbe.bench import speculate


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model's folder; its nested store goes into a cache of the test's own."""
    monkeypatch.setenv("QBE_CACHE", str(tmp_path / "cache"))
    return tiny_folder


def test_speculate(folder: Path, device: torch.device) -> None:
    sizes = speculate.Sizes(folder, speculate.PROMPTS[:2], 20, targets=(8,), batches=(1, 2), compile=False, rounds=3)
    rows = described(speculate.run(CPU, LIMITS, sizes), CPU)
    ways = [speculate.CHOSEN, "drafts at 4 bits", "drafts at 6 bits", speculate.READ]
    assert [r["shape"].split(", ", 1)[1] for r in rows] == [f"batch {n}, {way}" for n in (1, 2) for way in ways]
    assert all(r["note"].endswith("2 of 2 answers the same") for r in rows)
    assert all(
        r["note"].startswith("accepted") and "no guesses" not in r["note"] for r in rows if "draft" in r["shape"]
    )
    random = replace(sizes, model=THIN, rates={8: {4: 1.0, 6: 0.0}}, batches=(1,), guesses=2)
    rows = described(speculate.run(device, LIMITS, random), device)
    assert [r["note"].split()[1] for r in rows if "drafts" in r["shape"]] == ["100.0%", "0.0%"]
