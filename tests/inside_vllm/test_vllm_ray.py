"""The example with two nodes and Ray, run as a person would, with both nodes on this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from subprocess import Popen

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import httpx
import psutil
from vllm_serving import LIMIT_S, Server, serving_on_two_nodes, split_model

import qbe

WIDTHS = (4, 6, 8, 16)
PROMPTS = ["The capital of", "def f(x):", "Once upon a time", "1 + 1 ="]
WHOLE = 7000  # tokens of the answer that is broken off


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def nodes(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Popen[bytes]]]:
    with serving_on_two_nodes(model, tmp_path_factory.mktemp("nodes")) as found:
        yield found


def test_two_nodes_answer_as_the_embedded_engine(nodes: tuple[Server, Popen[bytes]], model: Path) -> None:
    server, second = nodes
    assert len(workers(second)) == 1

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
    assert server.complete("a", service_tier="flex").status_code == 200
    assert server.metric('qbe:requests_total{policy="tiered",tier="flex"}') == 1


def test_a_node_that_dies_is_an_error_and_no_hang(nodes: tuple[Server, Popen[bytes]]) -> None:
    server, second = nodes
    (worker,) = workers(second)
    body = server.body("Once", WHOLE, stream=True, ignore_eos=True, vllm_xargs={"qbe_bits": 8})
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
    assert server.process.wait(LIMIT_S) is not None, "the server ends, for whoever runs it to start it again"


def workers(node: Popen[bytes]) -> list[psutil.Process]:
    """Of vLLM, on that node."""
    found = psutil.Process(node.pid).children(recursive=True)
    return [p for p in found if "RayWorkerProc" in " ".join(p.cmdline())]
