"""A mixture of experts through the command line, Python and HTTP: quantised, calibrated, generated from and billed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cli_process import qbe
from conftest import byte_tokenizer
from moe_models import tiny_moe, tiny_moe_folder
from qbe import Budget, Engine, SamplingParams
from qbe.errors import QBEError
from qbe.policies.routers import blocks_of
from qbe.sites import Site, SiteTable
from qbe.store import checkpoint, expert_use, sensitivity, sensitivity_table
from qbe.store.calibration_text import built_in
from qbe.store.expert_use import ExpertUse, count, shrunk, with_use
from qbe.store.experts import ExpertLayer, expert_layers, nested_experts, watched
from qbe.store.measure import measure_model
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.nesting import nest_model
from server_running import running

TEXT = "The house stood at the end of the lane, and nobody went there for 1 234 days. " * 16
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def store(home: Path) -> Path:
    """A tiny model quantised by the command line, its codes chosen on a text."""
    source = tiny_moe_folder(home / "source", "qwen3_moe")
    (home / "text.txt").write_text(TEXT)
    done = qbe(
        "quantize", str(source), "-o", str(home / "store"), "--calibrate", str(home / "text.txt"), "--json", home=home
    )
    assert done.returncode == 0, done.stderr.decode()
    described = json.loads(done.stdout)
    assert described["store"]["nested_sites"] == 8 + 1 + 2 * 2 * 4
    expert = next(row for row in described["roles"] if row["role"] == "moe_expert")
    assert expert["nested"] == expert["sites"] == 16
    assert expert["gears"] == [4, 6, 8, 16]
    assert described["parameters"] > described["parameters_read"]
    return home / "store"


def test_a_store_has_what_calibration_counted(store: Path) -> None:
    assert json.loads((store / "qbe.json").read_text())["format_version"] == 3
    use = expert_use.read(store)
    assert use is not None
    assert use.tokens == len(TEXT) // 512 * 512
    for counts in use.chosen.values():
        assert counts.sum() == 2 * use.tokens
    measured = sensitivity_table.read(store)
    assert measured is not None
    assert sensitivity_table.estimated(store)
    names = [name for name in measured.weights if ".experts." in name]
    assert len(names) == 16
    assert all(measured.weights[n][4] > measured.weights[n][8] > 0 for n in names)
    assert all(8 in measured.activations[n] for n in names)


def test_the_command_line_generates_at_an_average_over_all_weights(store: Path, home: Path) -> None:
    done = qbe(
        "generate", "The house", "--model", str(store), "--bits", "4.5", "--max-tokens", "4", "--json", home=home
    )
    assert done.returncode == 0, done.stderr.decode()
    usage = json.loads(done.stdout)["usage"]
    assert 4.4 <= usage["average_weight_bits"] <= 4.5
    assert usage["nested_weight_bits"] >= 4
    refused = qbe("generate", "x", "--model", str(store), "--bits", "4", "--max-tokens", "1", home=home)
    assert refused.returncode == 2
    assert b"all weights counted" in refused.stderr


def test_a_picture_shows_use_and_bits(store: Path, home: Path) -> None:
    picture = home / "heat.png"
    done = qbe("info", "--model", str(store), "--experts", str(picture), "--json", home=home)
    assert done.returncode == 0, done.stderr.decode()
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = json.loads(done.stdout)["experts"]
    assert shown["layers"] == [0, 1]
    assert np.shape(shown["use"]) == np.shape(shown["bits"]["flex"]) == (2, 4)
    assert np.sum(shown["use"]) == pytest.approx(4, abs=0.01)


def test_the_picture_shows_where_experts_live(store: Path, home: Path) -> None:
    picture = home / "live.png"
    bounded = ("--device", "cpu", "--kv-tokens", "256", "--experts", str(picture), "--json")
    done = qbe("info", "--model", str(store), "--device-memory", "1GB", *bounded, home=home)
    assert done.returncode == 0, done.stderr.decode()
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = json.loads(done.stdout)
    assert np.array(shown["experts"]["resident_bits"]).tolist() == np.full((2, 4), 8).tolist()
    assert shown["residency"]["file_bytes"] == 0 < shown["residency"]["device_bytes"]
    refused = qbe("info", "--model", str(store), "--device-memory", "1kB", *bounded, home=home)
    assert refused.returncode == 2
    (line,) = refused.stderr.decode().strip().splitlines()
    assert "what always stays on the device takes about" in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--experts", "heat.svg"], "--experts writes a PNG"),
        (["--device-memory", "1GiB", "--kv-tokens", "-5"], "must be a whole number, 1 or more"),
        (["--device", "cpu", "--kv-tokens", "0"], "must be a whole number, 1 or more"),
    ],
    ids=str,
)
def test_info_refuses_in_one_line(store: Path, home: Path, options: list[str], said: str) -> None:
    done = qbe("info", "--model", str(store), *options, home=home)
    assert done.returncode == 2
    (line,) = done.stderr.decode().strip().splitlines()
    assert said in line


def test_python_and_http_serve_rows_at_bits_of_their_own(store: Path) -> None:
    with Engine(str(store), records=False, policy="static") as engine:
        assert len(nested_experts(engine.model)) == 4
        alone = engine.generate("The house", GREEDY, budget=Budget(bits=4.5))
        high = engine.generate("The house", GREEDY, budget=Budget(bits=8))
    assert alone.average_weight_bits <= 4.5 < 7.5 < high.average_weight_bits <= 8
    assert alone.bytes_per_token < high.bytes_per_token

    def make() -> Engine:
        return Engine(str(store), records=False, policy="static", max_sequences=4)

    with running(make) as server:
        body = {"prompt": "The house", "max_tokens": 6, "temperature": 0, "qbe": {"bits": 4.5}}
        answer = server.post("completions", body).json()
    usage = answer["usage"]
    assert answer["choices"][0]["text"] == alone.text
    assert usage["qbe"]["average_weight_bits"] == pytest.approx(alone.average_weight_bits, abs=1e-3)
    assert set(usage["qbe"]["tokens_by_bits"]) <= {"4", "6", "8", "16"}
    assert "16" in usage["qbe"]["tokens_by_bits"]


def test_what_is_estimated_of_experts_is_near_what_is_measured(store: Path) -> None:
    """Summed over a layer, because a short text tells little of a single expert; of tokens that go to the same experts
    as at 16 bits. What sends a token elsewhere is a jump that no gradient shows (`qbe.store.estimate`)."""
    from qbe.models import load_model

    model = load_model(store, progress=False).model
    table = nest_model(model, "tiny", NestedWeightConfig(), progress=False)
    tokenizer = byte_tokenizer()
    from qbe.store.estimating import estimate_model

    found, _, use = estimate_model(model, tokenizer, table, torch.device("cpu"), progress=False)
    assert set(found.weights) == set(measure_model(model, tokenizer, table, progress=False).weights)
    tokens = built_in().sensitivity(tokenizer, model)
    for layer in use.chosen:
        sites = [s for s in table.nested if s.name.startswith(layer)]
        for gear in (4, 6):
            guessed = sum(found.weights[s.name][gear] for s in sites)
            assert guessed == pytest.approx(_measured_of_those_that_stay(model, table, sites, gear, tokens), rel=0.5)


@torch.inference_mode()
def _measured_of_those_that_stay(
    model: torch.nn.Module, table: SiteTable, sites: list[Site], gear: int, tokens: torch.Tensor
) -> float:
    """Summed divergence of experts' matrices lowered one at a time, of tokens that no layer sends to other experts."""
    chosen: dict[str, torch.Tensor] = {}

    def see(layer: ExpertLayer, ids: torch.Tensor) -> None:
        chosen[layer.name] = ids.sort(-1).values

    total = 0.0
    with sensitivity.full_bits(model, table), watched(expert_layers(model), see):
        reference = sensitivity.logits_of(model, tokens).float()
        before = dict(chosen)
        for site in sites:
            with sensitivity._reading(sensitivity.place_of_site(model, site), gear):
                logits = sensitivity.logits_of(model, tokens).float()
            stay = torch.stack([(chosen[n] == before[n]).all(-1) for n in before]).all(0)
            kl = sensitivity.divergence_of_rows(reference, reference.softmax(-1), logits)
            total += float(kl[stay].sum()) / len(kl)
    return total


def test_use_is_a_share_that_is_never_nothing(tmp_path: Path) -> None:
    use = ExpertUse(100, {"a.experts": np.array([100.0, 60.0, 40.0, 0.0])})
    shares = use.shares("a.experts")
    assert shares.sum() == pytest.approx(2)
    assert 0 < shares[3] < 0.01
    # An expert that the short text did not show has the layer's mean for each token that uses it.
    damage = shrunk(np.array([0.02, 0.01, 0.01, 0.0]), np.array([20.0, 10.0, 10.0, 0.0]), 20, shares)
    assert damage / shares == pytest.approx(np.full(4, 0.02), rel=1e-6)
    expert_use.write(tmp_path, use, {"text": "t"})
    again = expert_use.read(tmp_path)
    assert again is not None
    assert again.tokens == 100
    assert (again.chosen["a.experts"] == use.chosen["a.experts"]).all()
    (tmp_path / expert_use.NAME).write_text('{"tokens": 5, "chosen": {"a": [-1]}}')
    with pytest.raises(QBEError, match="damaged"):
        expert_use.read(tmp_path)


@pytest.mark.parametrize("family", ["mixtral", "llama4", "gpt_oss"])
def test_counting_sees_every_token_and_changes_nothing(family: str) -> None:
    model = tiny_moe(family)
    tokens = torch.arange(40).view(2, 20)
    before = model(input_ids=tokens, use_cache=False).logits
    use = count(model, tokens)
    per_token = 1 if family == "llama4" else 2
    assert use.tokens == 40
    assert all(c.sum() == per_token * 40 for c in use.chosen.values())
    assert torch.equal(model(input_ids=tokens, use_cache=False).logits, before)
    table = with_use(nest_model(model, "tiny", NestedWeightConfig(), progress=False), use)
    assert {round(sum(s.use for s in table.nested if s.expert is not None and s.layer == i), 6) for i in (0, 1)} == {
        round(2 * per_token, 6)
    }


def test_routers_of_policies_are_refused_by_name() -> None:
    table = nest_model(tiny_moe("mixtral"), "tiny", NestedWeightConfig(), progress=False)
    with pytest.raises(QBEError, match="nested experts, for which there are no routers"):
        blocks_of(table)


def test_checksums_cover_experts(store: Path) -> None:
    checkpoint.verify(store)
