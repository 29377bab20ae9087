"""Two servers with QBE: one computes prompts, the other fetches keys and values over NIXL and writes the answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
pytest.importorskip("nixl", reason="needs NIXL: pip install nixl")

from vllm_serving import PROMPTS, Halves, Server, assert_as_embedded, free_port, serving, split_model

CONFIG = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"})
LONG = "abcdefgh " * 30  # more than a block


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def halves(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Halves]:
    with ExitStack() as running, ThreadPoolExecutor(2) as pool:

        def start(name: str) -> Server:
            more = ("--tensor-parallel-size", "1", "--kv-transfer-config", CONFIG)
            side = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
            home = tmp_path_factory.mktemp(name)
            return running.enter_context(serving(model, home, free_port(), *more, **side))

        found = Halves(*pool.map(start, ("prompts", "answers")))
        found.complete("a", 1)  # they meet: for that vLLM leaves 5 s, too few where two cores answer many requests
        yield found


def test_answers_are_those_of_the_embedded_engine(halves: Halves, model: Path) -> None:
    assert_as_embedded(halves, model)


def test_a_prompt_is_computed_once_at_the_precision_that_its_server_chose(halves: Halves) -> None:
    moved = halves.computed(LONG, service_tier="flex")
    answer = halves.answers.complete(LONG, kv_transfer_params=moved, service_tier="flex")
    assert answer.status_code == 200
    record = halves.answers.record("flex")
    assert sum(record.tokens_by_bits.values()) == pytest.approx(8, abs=2), "those of the prompt came from elsewhere"


def test_a_prompt_of_another_precision_is_refused(halves: Halves) -> None:
    low, high = ({"vllm_xargs": {"qbe_bits": b, "qbe_policy": "uniform"}} for b in (4, 8))
    moved = halves.computed(PROMPTS[0], **low)
    for params, said in (
        (moved, "was computed for"),
        ({k: v for k, v in moved.items() if k != "qbe"}, "without QBE"),
        (moved | {"qbe": moved["qbe"] | {"digest": "x"}}, "another model"),
    ):
        answer = halves.answers.complete(PROMPTS[0], kv_transfer_params=params, **high)
        assert answer.status_code == 400
        assert said in answer.json()["error"]["message"]
    broken = moved | {"qbe": moved["qbe"] | {"weight_bits": "zz"}}
    assert "no blueprint" in halves.answers.complete(PROMPTS[0], kv_transfer_params=broken, **low).text
    for odd in ({"do_remote_prefill": True}, {"do_remote_prefill": True, "remote_block_ids": [[1]], "qbe": 3}):
        assert halves.answers.complete(PROMPTS[0], kv_transfer_params=odd, **low).status_code == 400
    assert halves.answers.complete(PROMPTS[0], kv_transfer_params=moved, **low).status_code == 200
