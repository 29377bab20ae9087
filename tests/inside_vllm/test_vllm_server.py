"""One `vllm serve --quantization qbe` with two workers, and what its clients see. Tensor parallel: every matrix of the
model is split in two, so each test of an answer is one of the shards, too. The last tests kill it and start it again,
this time with too few blocks for its requests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import httpx
import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import qbe
from models_tiny import TOKENS, tiny_tokenizer
from qbe.records import RecordStore
from qbe.records.thresholds import Thresholds, save
from qbe.store.nested_tensor import NestedWeightConfig
from qbe.store.prepare import quantise_to

START_S = 300  # on a busy machine
LIMIT_S = 60
LONG = 170  # tokens of an answer
WIDTHS = (4, 6, 8, 16)
PROMPTS = ["The capital of", "def f(x):", "Once upon a time", "1 + 1 ="]


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[bytes]
    url: str
    model: str
    records: Path

    def complete(self, prompt: str, tokens: int = 8, **more: object) -> httpx.Response:
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
        return httpx.post(f"{self.url}/v1/completions", json={**body, **more}, timeout=LIMIT_S)

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=LIMIT_S).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `qbe quantize` wrote, of a model that can be split in two."""
    home = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=1, eos_token_id=0,
    )  # fmt: skip
    plain = LlamaForCausalLM(config).eval()
    for weight in plain.parameters():  # so that answers differ, and no two tokens are nearly as likely
        weight.data *= 3
    plain.save_pretrained(home / "plain")
    tiny_tokenizer().save_pretrained(home / "plain")
    return quantise_to(
        str(home / "plain"), home / "qbe", NestedWeightConfig(), torch.device("cpu"), measure=True, progress=False
    )


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving(model, tmp_path_factory.mktemp("home"), port) as found:
        yield found


@pytest.fixture(scope="module")
def again(server: Server, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Another server on the port of the first, which must have ended; 17 blocks of 32 tokens."""
    assert server.process.poll() is not None
    port = int(server.url.rpartition(":")[2])
    with serving(model, tmp_path_factory.mktemp("again"), port, "--num-gpu-blocks-override", "18") as found:
        yield found


@pytest.fixture(scope="module")
def roomy(server: Server) -> list[list[int]]:
    """What the first server answers to the long requests."""
    found = long_answers(server)
    assert server.metric("vllm:num_preemptions_total") == 0
    return found


def long_answers(server: Server) -> list[list[int]]:
    """Of four requests at once, 6 blocks each; the last is refreshed after 96 tokens, and the first to be preempted."""
    asked: list[dict[str, object]] = [{"qbe_bits": bits, "qbe_policy": "uniform"} for bits in (4, 8, 16)]
    asked.append({"qbe_refresh": 1, "service_tier": "priority"})

    def ask(job: tuple[str, dict[str, object]]) -> list[int]:
        last = "qbe_refresh" in job[1]
        answer = server.complete(job[0], LONG, vllm_xargs=job[1], ignore_eos=True, priority=int(last))
        return list(answer.json()["choices"][0]["token_ids"])

    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(ask, zip(PROMPTS, asked, strict=True)))


@contextmanager
def serving(model: Path, home: Path, port: int, *more: str) -> Iterator[Server]:
    """A server that is ready; its cache and its records are in `home`."""
    # Every window of an answer is easy.
    save({str(model): Thresholds(1e3, 1e2, -2.0, -1.0, 99)}, home / "refresh.json")
    environment = dict(
        os.environ, QBE_CACHE=str(home), QBE_RECORDS=str(home / "records.sqlite"), VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
    )  # fmt: skip
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--quantization", "qbe",
        "--middleware", "qbe.vllm.service_tier.ServiceTier", "--tensor-parallel-size", "2", "--dtype", "float32",
        "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8", "--max-num-batched-tokens", "128",
        "--kv-cache-memory-bytes", str(1 << 24), "--block-size", "32", "--scheduling-policy", "priority",
        "--host", "127.0.0.1", "--port", str(port), *more,
    ]  # fmt: skip
    log = (home / "log").open("wb")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    found = Server(process, f"http://127.0.0.1:{port}", str(model), home / "records.sqlite")
    try:
        end = time.monotonic() + START_S
        while not _healthy(found.url):
            assert process.poll() is None, (home / "log").read_text()[-4000:]
            assert time.monotonic() < end, (home / "log").read_text()[-4000:]
            time.sleep(0.5)
        yield found
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(LIMIT_S)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=LIMIT_S).status_code == 200
    except httpx.TransportError:
        return False


def test_a_mixed_batch_is_answered_as_by_the_embedded_engine(server: Server, model: Path) -> None:
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
    assert len({tuple(f) for f in found[:4]}) > 1, "precision makes a difference to this model"


@pytest.mark.parametrize("args", [{"qbe_bits": 40}, {"qbe_bit": 4}, {"service_tier": "gold"}, {"qbe_policy": "none"}])
def test_what_cannot_be_is_a_bad_request(server: Server, args: dict[str, object]) -> None:
    answer = server.complete("a", vllm_xargs=args)
    assert answer.status_code == 400
    assert "\n" not in answer.json()["error"]["message"]


def test_a_tier_is_counted_and_recorded(server: Server) -> None:
    before = server.metric('qbe:requests_total{policy="tiered",tier="flex"}')
    assert server.complete("Why is the sky blue?", service_tier="flex").status_code == 200
    assert server.metric('qbe:requests_total{policy="tiered",tier="flex"}') == before + 1
    assert server.metric("qbe:weight_bits_count") >= 1
    record = _record(server, "flex")
    assert 4.3 <= (record.average_weight_bits or 0) <= 5.5
    assert record.completion_tokens == 8
    assert sum(record.tokens_by_bits.values()) == pytest.approx(record.prompt_tokens + 7, abs=2)


def test_a_prefix_is_reused_only_at_its_own_precision(server: Server) -> None:
    prompt = "abcdefgh " * 30  # more than a block

    def hits(bits: int) -> float:
        before = server.metric("vllm:prefix_cache_hits_total")
        server.complete(prompt, 1, vllm_xargs={"qbe_bits": bits, "qbe_policy": "uniform"})
        return server.metric("vllm:prefix_cache_hits_total") - before

    assert hits(4) == 0
    assert hits(8) == 0, "computed at 4 bits, and not good enough"
    assert hits(4) > 0
    assert hits(8) > 0


def test_a_refresh_reaches_the_workers_and_the_record(server: Server) -> None:
    answer = server.complete(
        "Once upon a time", 130, vllm_xargs={"qbe_refresh": 1, "service_tier": "priority"}, ignore_eos=True
    )
    assert answer.status_code == 200
    record = _record(server, "priority")
    assert [r["kind"] for r in record.refreshes or ()] == ["easy"]
    assert (record.refreshes or [{}])[0]["token"] == 96
    assert len(record.entropies or ()) == 130
    assert record.average_weight_bits is not None


def test_a_worker_that_dies_is_an_error_and_no_hang(server: Server, roomy: list[list[int]]) -> None:
    assert len(roomy) == 4, "asked before there is no server any more"
    body = {
        "model": server.model, "prompt": "Once", "max_tokens": 400, "stream": True, "ignore_eos": True,
        "vllm_xargs": {"qbe_bits": 8, "qbe_policy": "uniform"},
    }  # fmt: skip
    lines: list[str] = []
    started = time.monotonic()
    try:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=LIMIT_S) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                if len(lines) == 5:
                    children = psutil.Process(server.process.pid).children(recursive=True)
                    workers = [p for p in children if "Worker" in " ".join(p.cmdline())]
                    assert len(workers) == 2
                    workers[-1].kill()
    except httpx.TransportError:
        pass
    assert time.monotonic() - started < LIMIT_S
    whole = sum(1 for line in lines if line.startswith("data: {") and not json.loads(line[6:]).get("error"))
    assert whole < 400, "the answer broke off"
    assert server.process.wait(LIMIT_S) is not None, "the server ends, for whoever runs it to start it again"


def test_a_server_started_again_answers_as_before(again: Server, roomy: list[list[int]]) -> None:
    for prompt, bits, before in zip(PROMPTS, (4, 8, 16), roomy, strict=False):
        answer = again.complete(prompt, vllm_xargs={"qbe_bits": bits, "qbe_policy": "uniform"})
        assert answer.json()["choices"][0]["token_ids"] == before[:8]


def test_preempted_requests_are_answered_as_with_room_for_all(again: Server, roomy: list[list[int]]) -> None:
    assert long_answers(again) == roomy
    assert again.metric("vllm:num_preemptions_total") >= 2
    record = _record(again, "priority")
    assert [r["token"] for r in record.refreshes or ()] == [96]
    computed = sum(record.tokens_by_bits.values())
    assert computed > record.prompt_tokens + LONG, "the refreshed one was preempted, and much of it computed again"


def _record(server: Server, tier: str):  # type: ignore[no-untyped-def]
    """The latest record of that tier; it is written when the client has its answer, by another process."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        for record in RecordStore(server.records).list(20):
            if record.tier == tier:
                return record
        time.sleep(0.1)
    raise AssertionError(f"no record of tier {tier}")
