"""Requests of one step that share what they read, as by default: the lower ones are answered as the highest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm_serving import START_S, environment, split_model

from qbe.records import RecordStore

ANSWER = """
import json, sys
from vllm import LLM, SamplingParams
rows = json.loads(sys.argv[2])
llm = LLM(sys.argv[1], dtype="float32", quantization="qbe", enforce_eager=True, max_model_len=256, max_num_seqs=8,
          kv_cache_memory_bytes=1 << 24, **({"additional_config": {"qbe_rows": rows}} if rows else {}))
params = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True,
                         extra_args={"qbe_bits": b, "qbe_policy": "uniform"}) for b in (4, 8)]
answers = llm.generate(["Once upon a time"] * 2, params, use_tqdm=False)
print(json.dumps([list(a.outputs[0].token_ids) for a in answers]))
"""


@pytest.mark.parametrize("rows", [None, "exact"])
def test_a_mix_reads_what_its_highest_row_asks_for(rows: str | None, tmp_path: Path) -> None:
    model = split_model(tmp_path)
    variables = {**environment(model, tmp_path), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, "-c", ANSWER, str(model), json.dumps(rows)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr[-4000:]
    low, high = json.loads(done.stdout.splitlines()[-1])
    assert (low == high) == (rows is None)
    records = {r.average_weight_bits: r for r in RecordStore(tmp_path / "records.sqlite").list()}
    assert {b: r.read_weight_bits for b, r in records.items()} == {4: 8 if rows is None else 4, 8: 8}
    assert (records[4].bytes_moved == records[8].bytes_moved) == (rows is None)
