"""One `vllm serve --quantization qbe` with two workers, and what its clients see. Tensor parallel: every matrix of the
model is split in two, so each test of an answer is one of the shards, too. The last tests kill it and start it again,
this time as a pipeline and with too few blocks for its requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import httpx
import psutil
from vllm_serving import (
    LIMIT_S,
    PROMPTS,
    WIDTHS,
    Server,
    assert_as_embedded,
    assert_breaks_off,
    free_port,
    routing,
    serving,
    split_model,
)  # fmt: skip

from qbe.records import Record

LONG = 440  # tokens of the answer that is preempted
PLAIN = (4, 8, 16)  # bits of those beside it


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("home"), free_port()) as found:
        yield found


@pytest.fixture(scope="module")
def router(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with routing(server, tmp_path_factory.mktemp("router")) as found:
        yield found


@pytest.fixture(scope="module")
def again(server: Server, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Another server on the port of the first, which must have ended: a layer for each worker, 17 blocks of 32 tokens.

    Compiled, because vLLM 0.32 by itself cannot run a pipeline eagerly on a CPU.
    """
    assert server.process.poll() is not None
    port = int(server.url.rpartition(":")[2])
    pipeline = ("--tensor-parallel-size", "1", "--pipeline-parallel-size", "2", "--no-enforce-eager")
    few = ("--max-model-len", "512", "--num-gpu-blocks-override", "18")
    with serving(model, tmp_path_factory.mktemp("again"), port, *pipeline, *few) as found:
        yield found


@pytest.fixture(scope="module")
def roomy(server: Server) -> list[list[int]]:
    """What the first server answers to the long requests."""
    found = long_answers(server)
    assert server.metric("vllm:num_preemptions_total") == 0
    return found


def long_answers(server: Server) -> list[list[int]]:
    """Of one request that is refreshed after 96 tokens, and of three that come then and go before it.

    With 17 blocks these have room together, but not beside it.
    """
    args = {"qbe_refresh": 1, "service_tier": "priority"}
    first = server.body(PROMPTS[0], LONG, ignore_eos=True, stream=True, priority=1, vllm_xargs=args)
    found: list[int] = []
    with httpx.Client(base_url=server.url, timeout=LIMIT_S) as client, ThreadPoolExecutor(len(PLAIN)) as pool:

        def ask(job: tuple[str, int]) -> list[int]:
            args = {"qbe_bits": job[1], "qbe_policy": "uniform"}
            body = server.body((job[0] * 20)[:60], 100, ignore_eos=True, vllm_xargs=args)
            return list(client.post("/v1/completions", json=body).json()["choices"][0]["token_ids"])

        others = []
        with client.stream("POST", "/v1/completions", json=first) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    found += json.loads(line[6:])["choices"][0]["token_ids"] or ()
                if len(found) > 96 and not others:
                    others = [pool.submit(ask, job) for job in zip(PROMPTS[1:], PLAIN, strict=True)]
        return [found, *(o.result() for o in others)]


def test_a_mixed_batch_is_answered_as_by_the_embedded_engine(server: Server, model: Path) -> None:
    found = assert_as_embedded(server, model)
    assert len({tuple(f) for f in found[:4]}) > 1, "precision makes a difference to this model"


def test_a_long_text_to_analyse_is_cut(server: Server) -> None:
    assert server.complete("a", 1, vllm_xargs={"qbe_text": "def f(x): " * 10**6}).status_code == 200


@pytest.mark.parametrize(
    "args", [{"qbe_bits": True}, {"qbe_bits": 40}, {"qbe_bit": 4}, {"service_tier": "gold"}, {"qbe_policy": "none"}]
)
def test_what_cannot_be_is_a_bad_request(server: Server, args: dict[str, object]) -> None:
    answer = server.complete("a", vllm_xargs=args)
    assert answer.status_code == 400
    assert "\n" not in answer.json()["error"]["message"]


def test_a_tier_is_counted_and_recorded(server: Server) -> None:
    before = server.metric('qbe:requests_total{policy="tiered",tier="flex"}')
    assert server.complete("Why is the sky blue?", service_tier="flex").status_code == 200
    assert server.metric('qbe:requests_total{policy="tiered",tier="flex"}') == before + 1
    assert server.metric("qbe:weight_bits_count") >= 1
    record = server.record("flex")
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
    record = server.record("priority")
    assert [r["kind"] for r in record.refreshes or ()] == ["easy"]
    assert (record.refreshes or [{}])[0]["token"] == 96
    assert len(record.entropies or ()) == 130
    assert record.average_weight_bits is not None


def test_a_router_passes_on_what_is_asked_of_qbe(server: Server, router: Server) -> None:
    for bits in WIDTHS:
        args = {"qbe_bits": bits, "qbe_policy": "uniform"}
        found, direct = (s.complete(PROMPTS[0], vllm_xargs=args).json()["choices"][0] for s in (router, server))
        assert found["token_ids"] == direct["token_ids"]
    before = server.metric('qbe:requests_total{policy="tiered",tier="flex"}')
    assert router.complete("a", service_tier="flex").status_code == 200
    assert server.metric('qbe:requests_total{policy="tiered",tier="flex"}') == before + 1
    for bad in ({"vllm_xargs": {"qbe_bits": 40}}, {"service_tier": "gold"}):
        found, direct = (s.complete("a", **bad) for s in (router, server))
        assert found.status_code == 400
        assert found.json() == direct.json()
    body = router.body("a", 20, stream=True, ignore_eos=True, vllm_xargs={"qbe_bits": 4})
    with httpx.stream("POST", f"{router.url}/v1/completions", json=body, timeout=LIMIT_S) as answer:
        lines = [line for line in answer.iter_lines() if line]
    tokens = [t for line in lines[:-1] for c in json.loads(line[6:])["choices"] for t in c.get("token_ids") or ()]
    assert lines[-1] == "data: [DONE]"
    assert len(tokens) == 20


def test_a_worker_that_dies_is_an_error_and_no_hang(server: Server, router: Server, roomy: list[list[int]]) -> None:
    assert len(roomy) == 4, "asked before there is no server any more"
    children = psutil.Process(server.process.pid).children(recursive=True)
    workers = [p for p in children if "Worker" in " ".join(p.cmdline())]
    assert len(workers) == 2
    assert_breaks_off(server, workers[-1])
    assert router.complete("Once").status_code >= 500


def test_a_server_started_again_answers_as_before(again: Server, roomy: list[list[int]]) -> None:
    answer = again.complete(PROMPTS[0], vllm_xargs={"service_tier": "priority"})
    assert answer.json()["choices"][0]["token_ids"] == roomy[0][:8]


def test_preempted_requests_are_answered_as_with_room_for_all(again: Server, roomy: list[list[int]]) -> None:
    def computed_again(r: Record) -> bool:
        return sum(r.tokens_by_bits.values()) > r.prompt_tokens + LONG

    record = None
    for _ in range(5):  # the others may come too late to be in its way, or one of them be preempted in its place
        assert long_answers(again) == roomy
        record = again.find("priority", computed_again, 5)
        if record is not None:
            break
    assert record is not None, "the refreshed one was preempted, and some of it computed again"
    assert [r["token"] for r in record.refreshes or ()][:1] == [96]
