"""Peak memory while a model is loaded, in fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import qbe.models
from models_tiny import write_folder

PEAK = """
import sys, torch
torch.set_num_threads(2)
import transformers.models.llama.modeling_llama
from qbe.models import load_model
import qbe.models.load
(torch.ones(64, 64) @ torch.ones(64, 64)).sum()
import psutil
before = psutil.Process().memory_info().rss
model = load_model(sys.argv[1], dtype="bfloat16", progress=False).model
# Not ru_maxrss: that survives exec, so a large parent (a long test run) would be counted.
high = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
peak = int(high.split()[1]) * 1024
print((peak - before) / (2 * sum(p.numel() for p in model.parameters())))
"""


def peak_ratio(path: Path) -> float:
    """(Peak resident memory while loading - resident memory before) / 16-bit size, in a fresh process."""
    root = Path(qbe.models.__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, timeout=120, env=env, check=True
    )
    return float(done.stdout.split()[-1])


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_peak_memory_of_a_folder(tmp_path: Path, stored: torch.dtype) -> None:
    config = LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, num_attention_heads=8
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(stored)
    model = model.to_empty(device="cpu")
    size = 2 * sum(p.numel() for p in model.parameters())
    assert size > 200e6
    write_folder(tmp_path, model)
    del model
    assert 0.9 < peak_ratio(tmp_path) <= 1.3


@linux
@pytest.mark.model
def test_peak_memory_of_the_default_gguf(default_gguf: Path) -> None:
    assert 0.9 < peak_ratio(default_gguf) <= 1.3
