"""Verdicts and model folders for the tests of releases: small files that stand for models."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from qbe.store.provenance import content_digest


def model(folder: Path, weights: str = "weights") -> Path:
    """A transformers folder, as far as files go."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text(weights)
    return folder


def verdict(folder: Path, of: Path, verdict: str = "pass") -> Path:
    """What `qbe regress -o` leaves about a model."""
    folder.mkdir(parents=True, exist_ok=True)
    items = '{"item": "a"}\n'
    (folder / "items.jsonl").write_text(items)
    because = [] if verdict == "pass" else ["logic.loss"]
    found = {
        "format": 1, "verdict": verdict, "because": because, "suite": {"name": "quick"},
        "candidate": {"digest": content_digest(of), "settings": None},
        "items_sha256": hashlib.sha256(items.encode()).hexdigest(),
    }  # fmt: skip
    (folder / "verdict.json").write_text(json.dumps(found))
    return folder
