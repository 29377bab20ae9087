"""A record with every field, and processes that write records."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import forked
from qbe.records import Record

SRC = str(Path(__file__).parents[1] / "src")


def record(**changes: object) -> Record:
    full = Record(
        model="smollm2-135m-instruct",
        policy="tiered",
        tier="default",
        prompt_tokens=12,
        completion_tokens=40,
        finish_reason="stop",
        score=0.42,
        prompt_class="code",
        analysis_tier=2,
        features={"token_count": 12.0, "digit_density": 0.125},
        blueprint_key="0123456789abcdef",
        average_weight_bits=5.31,
        weight_bits=(4, 6, 8, 16),
        activation_bits=(16, 16, 16, 16),
        kv_bits=((4, 8), 16),
        bytes_per_token=98_000_000,
        bytes_moved=51 * 98_000_000,
        tokens_by_bits={4: 10, 8: 42},
        tokens_by_activation_bits={8: 40, 16: 12},
        entropies=(1.5, 0.25),
        analysis_ms=0.4,
        policy_ms=0.2,
        prefill_ms=30.5,
        decode_ms=400.25,
    )
    return replace(full, **changes)


def run(code: str, *args: object, **options: object) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": SRC}
    command = [sys.executable, "-c", code, *map(str, args)]
    return forked.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


APPEND = """
import sys
from pathlib import Path
from qbe.records import Record, RecordStore
store = RecordStore(Path(sys.argv[1]))
for i in range(int(sys.argv[3])):
    r = Record(model=sys.argv[2], policy="uniform", tier="default", prompt_tokens=i, finish_reason="stop")
    store.append(r)
    print(r.id, flush=True)
"""
