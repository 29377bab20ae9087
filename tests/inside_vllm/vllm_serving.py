"""Processes that the tests in this folder talk to: vLLM's server with QBE, and vllm-router before it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from qbe.records.thresholds import Thresholds, save

START_S = 600  # on a busy machine
LIMIT_S = 60


@dataclass
class Server:
    """A running server, or a router.

    Attributes:
        model: its name.
        records: what it writes its records to.
    """

    process: subprocess.Popen[bytes]
    url: str
    model: str
    records: Path

    def complete(self, prompt: str, tokens: int = 8, **more: object) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=self.body(prompt, tokens, **more), timeout=LIMIT_S)

    def body(self, prompt: str, tokens: int, **more: object) -> dict[str, object]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
        return {**body, **more}

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=LIMIT_S).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def serving(model: Path, home: Path, port: int, *more: str) -> Iterator[Server]:
    """A server that is ready; its cache and its records are in `home`."""
    # Every window of an answer is easy.
    save({str(model): Thresholds(1e3, 1e2, -2.0, -1.0, 99)}, home / "refresh.json")
    environment = dict(
        os.environ, QBE_CACHE=str(home), QBE_RECORDS=str(home / "records.sqlite"), VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
    )  # fmt: skip
    options = [
        "--model", str(model), "--quantization", "qbe", "--middleware", "qbe.vllm.service_tier.ServiceTier",
        "--tensor-parallel-size", "2", "--dtype", "float32", "--enforce-eager", "--max-model-len", "8192",
        "--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--kv-cache-memory-bytes", str(1 << 24),
        "--block-size", "32", "--scheduling-policy", "priority", *more,
    ]  # fmt: skip
    module = "vllm.entrypoints.openai.api_server"
    with _running(module, options, port, home / "log", environment) as process:
        yield Server(process, f"http://127.0.0.1:{port}", str(model), home / "records.sqlite")


@contextmanager
def routing(server: Server, home: Path) -> Iterator[Server]:
    """vllm-router before one server."""
    port = free_port()
    options = ["--worker-urls", server.url, "--policy", "consistent_hash", "--prometheus-port", str(free_port())]
    with _running("vllm_router.launch_router", options, port, home / "log", dict(os.environ)) as process:
        yield Server(process, f"http://127.0.0.1:{port}", server.model, server.records)


@contextmanager
def _running(
    module: str, options: list[str], port: int, log: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", module, "--host", "127.0.0.1", "--port", str(port), *options]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        end = time.monotonic() + START_S
        while not _healthy(f"http://127.0.0.1:{port}"):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.5)
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(LIMIT_S)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=LIMIT_S).status_code == 200
    except httpx.TransportError:
        return False
