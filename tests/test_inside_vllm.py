"""The tests inside vLLM, as one of this run's: what they wait for, the other worker uses.

CI asks for it (`.ci/run`); whoever wants them alone says `make test-vllm`.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

LOCK = os.environ.get("QBE_TEST_VLLM", "")  # a file that is locked while vLLM's environment is being made
LIMIT_S = 2400


@pytest.mark.skipif(not LOCK, reason="vLLM has an environment of its own: make test-vllm")
def test_inside_vllm() -> None:
    ours = ("QBE_RECORDS", "QBE_LEDGER", "QBE_BLUEPRINTS", "QBE_TEST_VLLM", "PYTEST_", "MAKE", "MFLAGS")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    for command in (["flock", LOCK, "make", "setup-vllm"], ["make", "test-vllm"]):
        done = subprocess.run(
            command, cwd=Path(__file__).parents[1], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=LIMIT_S,
        )  # fmt: skip
        print(done.stdout)
        assert done.returncode == 0, done.stdout[-20000:]
