"""KV sensitivities: the KL they claim to be, through the pages' own format, stored and read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from conftest import byte_tokenizer, tiny_llama
from engine_models import build
from explain_samples import plain, printed
from qbe import Engine
from qbe.errors import QBEError
from qbe.explain.terminal import render
from qbe.format.kv_blocks import PAGE_SIZE
from qbe.kernels.reference import kv_pages as reference
from qbe.kernels.reference.rotation import rotate
from qbe.sites import KV_BITS, KVSite, SiteTable
from qbe.store import kv_sensitivity, kv_table
from test_sensitivity import nested_model

TOKENS = (torch.arange(200) * 7 % 256)[None]


def test_pages_come_back_as_sealing_leaves_them(device: torch.device) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(3, 150, 32, device=device), torch.randn(3, 150, 24, device=device)
    back = kv_sensitivity.quantised(keys, values, (4, 16, 2))
    for x, b, per_channel in ((keys, back[0], True), (values, back[1], False)):
        assert torch.equal(b[:, 128:], x[:, 128:]), "what fills no page stays"
        assert torch.equal(b[1], x[1])
        for head, bits in ((0, 4), (2, 2)):
            for page in (slice(0, 64), slice(64, 128)):
                rows = rotate(x[head, page].cpu())
                rows = rows.T if per_channel else rows
                codes, scale, low = reference.quantise(rows.contiguous(), bits)
                expected = codes * scale.float()[:, None] + low.float()[:, None]
                expected = expected.T if per_channel else expected
                found = rotate(b[head, page].cpu())
                # One code further at most where a rounding falls the other way.
                torch.testing.assert_close(found, expected, rtol=1e-3, atol=float(scale.max()) * 1.01)
                assert (found - expected).abs().mean() < 1e-3
    assert kv_sensitivity.quantised(keys[:, :63], values[:, :63], (2, 2, 2))[0] is not None


def test_a_layers_measure_is_the_kl_of_a_full_pass_and_its_heads_share_it(device: torch.device) -> None:
    model, table = nested_model(device)
    done: list[int] = []
    sites = kv_sensitivity.measure(model, table, TOKENS, lambda: done.append(1))
    assert [(s.layer, s.head, s.query_heads, s.numbers) for s in sites] == [
        (layer, head, 2, 64) for layer in range(2) for head in range(2)
    ]
    assert len(done) == 2
    ids = TOKENS.to(device)
    with torch.inference_mode(), kv_sensitivity.probing(model, kv_sensitivity.Probe()) as probe:
        first = model(input_ids=ids).logits[0, : 2 * PAGE_SIZE]
        full = model(input_ids=ids).logits[0, 2 * PAGE_SIZE :].double().log_softmax(-1)
        for layer in range(2):
            for bits in (4, 2):
                probe.bits = {layer: (bits, bits)}
                every = model(input_ids=ids).logits[0]
                torch.testing.assert_close(
                    every[: 2 * PAGE_SIZE], first
                )  # of the quantised pages they see the first only
                lowered = every[2 * PAGE_SIZE :].double().log_softmax(-1)
                by_hand = float((full.exp() * (full - lowered)).sum(-1).mean())
                assert sum(s.sensitivity[bits] for s in sites if s.layer == layer) == pytest.approx(by_hand, rel=1e-3)
                assert by_hand > 0
    for site in sites:
        assert set(site.sensitivity) == set(KV_BITS)
        assert site.sensitivity[2] > site.sensitivity[4] > site.sensitivity[8] > site.sensitivity[16] == 0
        assert site.entropy is not None
        assert 0 < site.entropy[0] < 1
        assert site.entropy[1] > 0


def test_a_heads_share_is_near_what_it_does_alone(device: torch.device) -> None:
    """The approximation on which the allocation stands: right within a factor of two and in its order."""
    model, table = nested_model(device, 3)
    sites = kv_sensitivity.measure(model, table, TOKENS)
    ids, alone = TOKENS.to(device), []
    with torch.inference_mode(), kv_sensitivity.probing(model, kv_sensitivity.Probe()) as probe:
        full = model(input_ids=ids).logits[0, 2 * PAGE_SIZE :].log_softmax(-1)
        for site in sites:
            probe.bits = {site.layer: tuple(4 if head == site.head else 16 for head in range(2))}
            lowered = model(input_ids=ids).logits[0, 2 * PAGE_SIZE :].log_softmax(-1)
            alone.append(float((full.exp() * (full - lowered)).sum(-1).mean()))
    for site, kl in zip(sites, alone, strict=True):
        assert 0.5 < site.sensitivity[4] / kl < 2


def test_the_model_is_as_before_afterwards(device: torch.device) -> None:
    model, table = nested_model(device)
    before = model.config._attn_implementation
    logits = model(input_ids=TOKENS.to(device)).logits
    kv_sensitivity.measure(model, table, TOKENS)
    assert model.config._attn_implementation == before
    assert torch.equal(model(input_ids=TOKENS.to(device)).logits, logits)
    assert not any(hasattr(m, kv_sensitivity._PROBE) for m in model.modules())


ATTENTION = ["mistral-sliding", "gemma2-softcap", "qwen3", "jamba", "gpt-oss", "deepseek-v3", "gemma3n"]


@pytest.mark.parametrize("name", ATTENTION)
def test_the_probes_attention_is_the_models(name: str) -> None:
    """Windows, soft caps, sinks, latents, heads of odd sizes, layers without attention or with another's keys."""
    model = build(name)
    sites = kv_sensitivity.measure(model, SiteTable((), name, 4), TOKENS % 199)
    assert {s.layer for s in sites} == {"jamba": {1, 3}, "gemma3n": {0, 1}}.get(name, {0, 1, 2, 3})
    assert all(s.sensitivity[4] > 0 for s in sites)


def test_a_model_without_the_common_attention_has_none() -> None:
    assert kv_sensitivity.measure(build("mamba2"), SiteTable((), "mamba2", 4), TOKENS % 199) == ()


def test_what_fills_no_page_measures_nothing() -> None:
    model, table = nested_model(torch.device("cpu"))
    assert kv_sensitivity.measure(model, table, TOKENS[:, :64]) == ()
    model.config.max_position_embeddings = 64
    assert kv_sensitivity.measure(model, table, TOKENS) == ()


SITES = (
    KVSite(0, 0, 3, 128, {2: 0.1, 4: 0.01, 8: 1e-5, 16: 0.0}, (0.4, 0.05)),
    KVSite(2, 0, 1, 64, {2: 0.2, 4: 0.1, 8: 0.0, 16: 0.0}),
)


def test_what_is_stored_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kv_table.read(tmp_path) == ()
    kv_table.write(tmp_path, SITES, {"text": "this"})
    assert kv_table.read(tmp_path) == SITES
    monkeypatch.setattr(kv_table, "VERSION", kv_table.VERSION + 1)
    assert kv_table.read(tmp_path) == (), "what another version measured says nothing"


@pytest.mark.parametrize(
    "damage", ["", "[]", '{"version": 3}', '{"version": 3, "heads": [{"layer": 0}]}', "nan", "lacks"]
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    kv_table.write(tmp_path, SITES, {})
    path = tmp_path / kv_table.NAME
    raw = json.loads(path.read_text())
    if damage == "nan":
        raw["heads"][0]["kl"]["4"] = float("nan")
    elif damage == "lacks":
        del raw["heads"][1]["kl"]["2"]
    path.write_text(json.dumps(raw) if damage in ("nan", "lacks") else damage)
    with pytest.raises(QBEError, match=r"kv_sensitivity\.json is damaged .* delete it, and KV bits follow plain rules"):
        kv_table.read(tmp_path)


def test_a_store_without_them_goes_by_plain_rules_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    tiny_llama().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    monkeypatch.setenv("QBE_CACHE", str(tmp_path / "cache"))
    for measured in (True, False):
        with Engine(folder, device="cpu", records=False) as engine:
            explained = engine.explain("Count the stars. " * 20)
            assert engine.table.kv_measured is measured
            assert explained.describe()["kv_measured"] is measured
            assert ("not measured: by plain rules" in plain(printed(render(explained), 200))) is not measured
            found = explained.blueprint.average_kv_bits(engine.table)
            assert measured or found == 8
        for file in (tmp_path / "cache").rglob(kv_table.NAME):
            file.unlink()


def test_those_of_another_version_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    tiny_llama().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    monkeypatch.setenv("QBE_CACHE", str(tmp_path / "cache"))
    Engine(folder, device="cpu", records=False).close()
    (stored,) = (tmp_path / "cache").rglob(kv_table.NAME)
    weights = stored.with_name("sensitivity.json")
    before, unchanged = json.loads(stored.read_text()), weights.stat().st_mtime_ns
    stored.write_text(json.dumps(before | {"version": kv_table.VERSION - 1, "heads": []}))
    with Engine(folder, device="cpu", records=False) as engine:
        assert engine.table.kv_measured
    assert json.loads(stored.read_text()) == before
    assert weights.stat().st_mtime_ns == unchanged
