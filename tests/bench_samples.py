"""Tiny sizes for the benchmarks' tests, and what every row of a result has to be."""

# ruff: noqa: I001
from __future__ import annotations

import qbe  # noqa: F401  (before torch: it sets how torch's threads wait)

import json
from typing import Any

import pytest
import torch

from qbe.bench import linears
from qbe.bench.machine import Roofline, hardware
from qbe.bench.report import HIGHER_IS_BETTER, BenchmarkReport, Row
from qbe.bench.weights import LinearGroup, Token

LIMITS = Roofline(bandwidth=1e9, flops=1e10)
TOKEN = Token("tiny", 2, (LinearGroup("a", 64, 128, 2), LinearGroup("b", 96, 256)), LinearGroup("head", 256, 128))
THIN = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 128, "max_position_embeddings": 512,
}  # fmt: skip
LINEARS = linears.LinearSizes(TOKEN, rows=(1, 5), rounds=3)
CPU = torch.device("cpu")


def described(rows: list[Row], device: torch.device) -> list[dict[str, Any]]:
    """The rows as they come back from strict JSON, each checked."""
    report = BenchmarkReport("test", hardware(device, LIMITS), {}, rows)
    found = json.loads(json.dumps(report.describe(), allow_nan=False))
    assert {"hardware", "conditions", "rows"} <= set(found)
    assert found["rows"]
    for row in found["rows"]:
        assert {"what", "shape", "bits", "ours", "peer", "peer_value", "ratio", "limit_ratio", "unit", "spread"} <= set(
            row
        )
        if row["peer_value"] is None:
            assert row["ratio"] is None
            assert row["limit_ratio"] is None
            assert row["note"], "a missing peer says why"
        if row["ours"] is not None:
            assert row["spread"][0] <= row["ours"] <= row["spread"][1]
            assert row["rounds"] >= 1
        if row["ours"] and row["peer_value"]:
            higher = row["unit"] in HIGHER_IS_BETTER
            ratio = row["ours"] / row["peer_value"] if higher else row["peer_value"] / row["ours"]
            assert row["ratio"] == pytest.approx(ratio)
            if row["limit"] is not None:
                limit = row["limit"] / row["peer_value"] if higher else row["peer_value"] / row["limit"]
                assert row["limit_ratio"] == pytest.approx(limit)
    return found["rows"]
