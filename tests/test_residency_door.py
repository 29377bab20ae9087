"""A bound on device memory through the command line and HTTP."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from cli_process import qbe
from moe_models import tiny_moe_folder
from qbe import Engine
from qbe.residency.size import parse_size
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.quantise import quantise_to
from server_running import running

ASK = ("generate", "The house", "--policy", "uniform", "--bits", "8", "--max-tokens", "12", "--greedy", "--kv-tokens",
       "256", "--device", "cpu")  # fmt: skip


@pytest.fixture(scope="module")
def store(home: Path) -> Path:
    source = tiny_moe_folder(home / "source", "qwen3_moe")
    return quantise_to(
        str(source), home / "store", NestedWeightConfig(), torch.device("cpu"), measure=False, progress=False
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def ask(home: Path, store: Path, *options: str) -> dict[str, object]:
    done = qbe(*ASK, "--model", str(store), "--json", *options, home=home)
    assert done.returncode == 0, done.stderr.decode()
    return dict(json.loads(done.stdout))


def least(home: Path, store: Path, *options: str) -> str:
    """The bound that the refusal of another says is the least."""
    refused = qbe(*ASK, "--model", str(store), "--device-memory", "1kB", *options, home=home)
    assert refused.returncode == 2
    (line,) = refused.stderr.decode().strip().splitlines()
    assert "a smaller --kv-tokens" in line
    found = re.search(r"--device-memory is 1000 bytes, but what always stays on the device takes (\S+):", line)
    assert found is not None, line
    return found[1]


def test_the_command_line_bounds_memory_and_says_what_was_read(home: Path, store: Path) -> None:
    whole = ask(home, store, "--originals", "none")
    bounded = ask(home, store, "--device-memory", least(home, store))
    assert len(bounded["token_ids"]) == 12  # type: ignore[arg-type]
    usage: dict[str, float] = bounded["usage"]  # type: ignore[assignment]
    assert usage["precision_misses"] > 0
    assert usage["read_weight_bits"] < usage["average_weight_bits"]
    waits = ask(home, store, "--device-memory", least(home, store, "--miss", "wait"), "--miss", "wait")
    assert waits["token_ids"] == whole["token_ids"]
    said = qbe(*ASK, "--model", str(store), "--device-memory", least(home, store), home=home)
    assert re.search(r"8\.\d\d bits \([4-7]\.\d\d read, \d+ misses\)", said.stderr.decode())


def test_info_says_what_will_be_where(home: Path, store: Path) -> None:
    """As an engine has it when it has started, but for its plan, whose bytes are not known before."""
    bound = parse_size("least", least(home, store))
    done = qbe("info", "--model", str(store), "--device", "cpu", "--device-memory", str(bound), "--kv-tokens", "256",
               "--json", home=home)  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)["residency"]
    with Engine(str(store), device="cpu", device_memory=bound, kv_tokens=256, records=False) as engine:
        numbers = engine.residency
        assert numbers is not None
        assert found["device_bytes"] + found["file_bytes"] == numbers.stored_bytes
        more = found["device_bytes"] - numbers.resident_bytes
        assert 0 <= more <= engine.memory.workspace + 4096  # a slice more may just fit
        assert found["host_bytes"] == 0 < found["file_bytes"]
    said = qbe("info", "--model", str(store), "--device", "cpu", "--device-memory", str(bound), "--kv-tokens", "256",
               home=home)  # fmt: skip
    assert re.search(r"\d\.\d\d GB on the device, .* in host memory, .* in the store's file", said.stdout.decode())


def test_the_command_line_refuses_in_one_line(home: Path, store: Path) -> None:
    for options, why in (
        (("--miss", "wait"), "--device-memory leaves out"),
        (("--device-memory", "lots"), "must be a size such as 12GiB"),
        (("--device-memory", "1GB", "--miss", "never"), "must be lower or wait"),
    ):
        refused = qbe(*ASK, "--model", str(store), *options, home=home)
        assert refused.returncode == 2
        (line,) = refused.stderr.decode().strip().splitlines()
        assert why in line
    refused = qbe("serve", "--model", str(store), "--device-memory", "1kB", "--port", "0", home=home)
    assert refused.returncode == 2
    assert b"what always stays on the device takes" in refused.stderr


def test_http_charges_for_what_was_read(home: Path, store: Path, tmp_path: Path) -> None:
    bound = parse_size("least", least(home, store))
    config = tmp_path / "serve.toml"
    config.write_text("[prices]\noutput = 1000.0\ninput = 1000.0\n")

    def make() -> Engine:
        return Engine(
            str(store), policy="uniform", device="cpu", records=False, kv_tokens=256, device_memory=bound,
            max_sequences=1,
        )  # fmt: skip

    with running(make, config) as server:
        body = {"prompt": "The house", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        usage = server.post("completions", body | {"qbe": {"bits": 8}}).json()["usage"]
        found = usage["qbe"]
        assert found["precision_misses"] > 0
        assert found["read_weight_bits"] < found["average_weight_bits"] - 1
        at_full = usage["total_tokens"] * 1000.0 / 1e6
        assert usage["cost"] == pytest.approx(at_full * found["read_weight_bits"] / 16, rel=1e-4)
        assert server.metric("qbe:precision_misses_total") == found["precision_misses"]
        assert server.metric("qbe:slice_bytes_fetched_total") == 0
        assert server.metric("qbe:memory_bytes") <= bound
