"""Processes that the tests in this folder talk to: vLLM's server with QBE, also on two nodes, and vllm-router."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import qbe
from models_tiny import TOKENS, tiny_tokenizer
from qbe.records import Record, RecordStore
from qbe.refresh.thresholds import Thresholds, save
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.quantise import quantise_to

START_S = 600  # on a busy machine
LIMIT_S = 60
WHOLE = 7000  # tokens of an answer that is broken off
WIDTHS = (4, 6, 8, 16)
PROMPTS = ["The capital of", "def f(x):", "Once upon a time", "1 + 1 ="]
EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_two_nodes.sh"
SMALL = (  # exact: answers are compared with those of requests that are alone
    "--additional-config", '{"qbe_rows": "exact"}',
    "--dtype", "float32", "--max-model-len", "8192", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(1 << 24),
    # On a GPU with its graphs, and whoever else uses it.
    *(("--gpu-memory-utilization", "0.3") if torch.cuda.is_available() else ("--enforce-eager",)),
)  # fmt: skip


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

    def record(self, tier: str, fits: Callable[[Record], bool] = lambda _: True) -> Record:
        """The latest record of that tier that fits."""
        found = self.find(tier, fits)
        assert found is not None, f"no such record of tier {tier}"
        return found

    def find(self, tier: str, fits: Callable[[Record], bool], limit_s: float = LIMIT_S) -> Record | None:
        """The same, if there is one in time: another process writes it when the client has its answer."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            for record in RecordStore(self.records).list(20):
                if record.tier == tier and fits(record):
                    return record
            time.sleep(0.1)
        return None


@dataclass
class Halves:
    """A server that computes prompts and one that writes the answers, as a proxy before both would ask them."""

    prompts: Server
    answers: Server

    def complete(self, prompt: str, tokens: int = 8, **more: object) -> httpx.Response:
        moved = self.computed(prompt, **more)
        return self.answers.complete(prompt, tokens, kv_transfer_params=moved, **more)

    def computed(self, prompt: str, **more: object) -> dict[str, Any]:
        """What the first says of the prompt's keys and values."""
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        return dict(self.prompts.complete(prompt, 1, kv_transfer_params=asked, **more).json()["kv_transfer_params"])


def assert_as_embedded(server: Server | Halves, model: Path) -> list[list[int]]:
    """A batch of all widths is answered as by the embedded engine; the answers."""

    def ask(job: tuple[str, int]) -> list[int]:
        args = {"qbe_bits": job[1], "qbe_policy": "uniform"}
        return list(server.complete(job[0], vllm_xargs=args).json()["choices"][0]["token_ids"])

    jobs = [(p, b) for p in PROMPTS for b in WIDTHS]
    with ThreadPoolExecutor(len(jobs)) as pool:
        found = list(pool.map(ask, jobs))
    with qbe.Engine(str(model), policy="uniform", dtype="float32", records=False) as engine:
        params = qbe.SamplingParams(temperature=0, max_tokens=8)
        expected = engine.generate_batch([qbe.Request(p, params, qbe.Budget(bits=b)) for p, b in jobs])
    assert found == [e.token_ids for e in expected]
    return found


def assert_breaks_off(server: Server, worker: psutil.Process) -> None:
    """An answer whose worker is killed is an error and no hang; the server ends, for whoever runs it to start again."""
    # The whole answer takes so long that whoever reads it may be late.
    args = {"qbe_bits": 8, "qbe_policy": "uniform"}
    body = server.body("Once", WHOLE, stream=True, ignore_eos=True, vllm_xargs=args)
    lines: list[str] = []
    started = time.monotonic()
    stream = httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=LIMIT_S)
    with suppress(httpx.TransportError), stream as answer:
        for line in answer.iter_lines():
            lines.append(line)
            if len(lines) == 5:
                worker.kill()
    assert time.monotonic() - started < LIMIT_S
    parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    tokens = sum(len(c["token_ids"] or ()) for p in parts if not p.get("error") for c in p["choices"])
    assert 0 < tokens < WHOLE, "the answer broke off"
    assert server.process.wait(LIMIT_S) is not None


def split_model(home: Path) -> Path:
    """A folder that `qbe quantize` wrote, of a model that can be split in two."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=1, eos_token_id=0,
    )  # fmt: skip
    plain = LlamaForCausalLM(config).eval()
    for weight in plain.parameters():  # so that answers differ, and no two tokens are nearly as likely
        weight.data *= 3
    plain.save_pretrained(home / "plain")
    tiny_tokenizer().save_pretrained(home / "plain")
    return quantise_to(
        str(home / "plain"), home / "qbe", NestedWeightConfig(), torch.device("cpu"), measure=True, progress=False
    )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def serving(model: Path, home: Path, port: int, *more: str, **variables: str) -> Iterator[Server]:
    """A server that is ready; its cache and its records are in `home`."""
    options = [
        "--model", str(model), "--quantization", "qbe", "--middleware", "qbe.vllm.service_tier.ServiceTier",
        "--tensor-parallel-size", "2", "--max-num-batched-tokens", "128", "--block-size", "32",
        "--scheduling-policy", "priority", *SMALL, *more,
    ]  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", *options]
    with _running([*command, "--port", str(port)], home / "log", environment(model, home) | variables) as process:
        yield _ready(Server(process, f"http://127.0.0.1:{port}", str(model), home / "records.sqlite"), home / "log")


@contextmanager
def serving_on_two_nodes(model: Path, home: Path) -> Iterator[tuple[Server, subprocess.Popen[bytes]]]:
    """The example with Ray, both of its machines on this one: the server, and the second node."""
    address, port = f"127.0.0.1:{free_port()}", free_port()
    variables = environment(model, home) | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }  # fmt: skip
    head = ["bash", str(EXAMPLE), "head", address, str(model), *SMALL, "--host", "127.0.0.1", "--port", str(port)]
    node = ["bash", str(EXAMPLE), "node", address, "--node-ip-address", "127.0.0.2"]
    with (
        _running(head, home / "log", variables) as process,
        _running(node, home / "node.log", variables) as second,
    ):
        server = Server(process, f"http://127.0.0.1:{port}", "model", home / "records.sqlite")
        yield _ready(server, home / "log"), second


@contextmanager
def routing(server: Server, home: Path) -> Iterator[Server]:
    """vllm-router before one server."""
    port = free_port()
    command = [
        sys.executable, "-m", "vllm_router.launch_router", "--worker-urls", server.url, "--policy", "consistent_hash",
        "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()),
    ]  # fmt: skip
    with _running(command, home / "log", dict(os.environ)) as process:
        yield _ready(Server(process, f"http://127.0.0.1:{port}", server.model, server.records), home / "log")


def environment(model: Path, home: Path) -> dict[str, str]:
    """Variables of a process that serves the model; its cache and its records are in `home`."""
    # Every window of an answer is easy.
    save({str(model): Thresholds(1e3, 1e2, -2.0, -1.0, 99)}, home / "refresh.json")
    return dict(
        os.environ, QBE_CACHE=str(home), QBE_RECORDS=str(home / "records.sqlite"), VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
    )  # fmt: skip


@contextmanager
def _running(command: list[str], log: Path, variables: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with all that it has started."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=variables, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        started: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            started = psutil.Process(process.pid).children(recursive=True)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for each in started:  # those with a session of their own
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait(LIMIT_S)


def _ready(server: Server, log: Path) -> Server:
    end = time.monotonic() + START_S
    while not _healthy(server.url):
        assert server.process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < end, log.read_text()[-4000:]
        time.sleep(0.5)
    return server


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=LIMIT_S).status_code == 200
    except httpx.TransportError:
        return False
