"""Decoder layers with two attention layers each (LongCat): every one's key heads are measured, by its own number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from cli_process import qbe
from conftest import byte_tokenizer
from qbe.format.kv_blocks import PAGE_SIZE
from qbe.sites import SiteTable
from qbe.store import kv_sensitivity
from qbe.store.calibration_text import built_in
from qbe.store.estimating import estimate_model
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.nesting import nest_model

SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "num_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": 8, "n_routed_experts": 4, "zero_expert_num": 2,
    "moe_topk": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip


def longcat(**changes: Any) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(tf.LongcatFlashConfig(**SIZES | changes))
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0, 0.2)
    return model.float().eval().requires_grad_(False)


def saved(folder: Path, **changes: Any) -> str:
    longcat(**changes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def nested() -> tuple[tf.PreTrainedModel, SiteTable]:
    model = longcat()
    return model, nest_model(model, "longcat", NestedWeightConfig(), progress=False)


def test_each_attention_layer_has_its_own_measure(nested: tuple[tf.PreTrainedModel, SiteTable]) -> None:
    model, table = nested
    ids = built_in().kv(byte_tokenizer(), model)[:1, : 3 * PAGE_SIZE]
    sites = kv_sensitivity.measure(model, table, ids)
    assert [s.layer for s in sites] == [0, 1, 2, 3]
    with (
        torch.inference_mode(), kv_sensitivity.full_bits(model, table),
        kv_sensitivity.probing(model, kv_sensitivity.Probe()) as probe,
    ):  # fmt: skip
        full = model(input_ids=ids).logits[0, 2 * PAGE_SIZE :].double().log_softmax(-1)
        for site in sites:
            probe.bits = {site.layer: (4,)}
            lowered = model(input_ids=ids).logits[0, 2 * PAGE_SIZE :].double().log_softmax(-1)
            by_hand = float((full.exp() * (full - lowered)).sum(-1).mean())
            assert site.sensitivity[4] == pytest.approx(by_hand, rel=1e-3)
            assert by_hand > 0


def test_estimates_are_of_the_same_heads(nested: tuple[tf.PreTrainedModel, SiteTable]) -> None:
    model, table = nested
    tokenizer = byte_tokenizer()
    known = kv_sensitivity.measure(model, table, built_in().kv(tokenizer, model))
    found = estimate_model(model, tokenizer, table, torch.device("cpu"), progress=False)[1]
    assert [(s.layer, s.head, s.numbers) for s in found] == [(s.layer, s.head, s.numbers) for s in known]
    for site, measured in zip(found, known, strict=True):
        assert site.sensitivity[4] == pytest.approx(measured.sensitivity[4], rel=0.9)


def test_a_store_of_it_answers(tmp_path: Path, home: Path) -> None:
    folder, out = saved(tmp_path / "model"), str(tmp_path / "out")
    done = qbe("quantize", folder, "-o", out, home=home)
    assert done.returncode == 0, done.stderr.decode()
    done = qbe("generate", "--model", out, "hello", "--max-tokens", "3", "--greedy", "--json", home=home)
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout)["usage"]["completion_tokens"] == 3


def test_a_model_whose_own_code_fails_is_one_line(tmp_path: Path, home: Path) -> None:
    folder, out = saved(tmp_path / "model", head_dim=64), tmp_path / "out"  # rotary embeddings of another size
    done = qbe("quantize", folder, "-o", str(out), home=home)
    assert done.returncode == 2
    said = done.stderr.decode()
    assert "LongcatFlashForCausalLM (model type 'longcat_flash')" in said
    assert "Traceback" not in said
    assert not out.exists()
