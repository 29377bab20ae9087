"""The example with two nodes and Ray, run as a person would, with both nodes on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import psutil
from vllm_serving import Server, assert_as_embedded, assert_breaks_off, serving_on_two_nodes, split_model


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
    assert_as_embedded(server, model)
    assert server.complete("a", service_tier="flex").status_code == 200
    assert server.metric('qbe:requests_total{policy="tiered",tier="flex"}') == 1


def test_a_node_that_dies_is_an_error_and_no_hang(nodes: tuple[Server, Popen[bytes]]) -> None:
    server, second = nodes
    (worker,) = workers(second)
    assert_breaks_off(server, worker)


def workers(node: Popen[bytes]) -> list[psutil.Process]:
    """Of vLLM, on that node."""
    found = psutil.Process(node.pid).children(recursive=True)
    return [p for p in found if "RayWorkerProc" in " ".join(p.cmdline())]
