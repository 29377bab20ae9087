"""Families that look supported and are not are refused at load; those that are right never are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from cli_process import qbe as run
from conftest import byte_tokenizer, tiny_llama
from models_tiny import one_line
from qbe.engine import self_check
from qbe.engine.core import Core
from qbe.errors import QBEError
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.nesting import nest_model
from qbe.tagger import tag
from tagger_architectures import ALSO, BASE, REQUIRED

WRONG: dict[str, Callable[[], Any]] = {
    "openai-gpt": lambda: tf.OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "rwkv": lambda: tf.RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, context_length=64),
    "diffllama": lambda: tf.DiffLlamaConfig(**BASE),
    "zamba2": lambda: tf.Zamba2Config(
        **{k: v for k, v in BASE.items() if k != "num_key_value_heads"}, mamba_d_state=8, n_mamba_heads=8,
        mamba_headdim=8, mamba_ngroups=1, chunk_size=8, layers_block_type=["mamba", "hybrid"], hybrid_layer_ids=[1],
        num_mem_blocks=1, use_shared_attention_adapter=False,
    ),
    "recurrent_gemma": lambda: tf.RecurrentGemmaConfig(
        **BASE | {"num_hidden_layers": 3}, head_dim=8, lru_width=32, attention_window_size=16,
        block_types=["recurrent", "recurrent", "attention"],
    ),
    "minimax": lambda: tf.MiniMaxConfig(
        **BASE, num_local_experts=4, head_dim=8, block_size=8, layer_types=["linear_attention", "full_attention"]
    ),
    "xlstm": lambda: tf.xLSTMConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_heads=2),
}  # fmt: skip
_OWN_ATTENTION = ("falcon", "deepseek_v3")  # refused for that
RIGHT: dict[str, Callable[[], Any]] = {
    name: config for name, (config, _) in (REQUIRED | ALSO).items() if name not in _OWN_ATTENTION
} | {
    "gemma2-window": lambda: tf.Gemma2Config(**BASE, head_dim=8, sliding_window=2, attn_logit_softcapping=5.0),
    "mistral-window": lambda: tf.MistralConfig(**BASE, sliding_window=2),
    "llama-dynamic": lambda: tf.LlamaConfig(
        **BASE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    ),
    "phi3-longrope": lambda: tf.Phi3Config(
        **BASE, original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 16,
        },
    ),
    "dropout": lambda: tf.LlamaConfig(**BASE, attention_dropout=0.5),
    "opt": lambda: tf.OPTConfig(
        vocab_size=64, hidden_size=32, word_embed_proj_dim=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48,
        max_position_embeddings=64,
    ),
    "mamba": lambda: tf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4),
    "lfm2": lambda: tf.Lfm2Config(**BASE, layer_types=["conv", "full_attention"]),
    "cohere": lambda: tf.CohereConfig(**BASE, use_qk_norm=True),
    "granitemoe": lambda: tf.GraniteMoeConfig(**BASE, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": lambda: tf.OlmoeConfig(**BASE, num_experts=4, num_experts_per_tok=2),
}  # fmt: skip


def model(config: Any, seed: int = 0) -> nn.Module:
    """A random model in which what a token says depends on those before it."""
    torch.manual_seed(seed)
    auto = tf.AutoModelForCausalLM
    try:
        made = auto.from_config(config)
    except ValueError:
        made = tf.AutoModelForImageTextToText.from_config(config)
    made = made.float().eval().requires_grad_(False)
    for name, p in made.named_parameters():
        if p.dim() >= 2 and "A_log" not in name:
            p.normal_(0, 0.5 if "embed" in name else 0.2)
    return made


def core(made: nn.Module, **options: Any) -> Core:
    return Core(made, tag(made), kv_tokens=256, **options)


@pytest.mark.parametrize("family", WRONG)
def test_wrong_families_are_refused_by_name(family: str) -> None:
    made = model(WRONG[family]())
    with pytest.raises(QBEError) as e:
        core(made)
    one_line(e, "QBE cannot run this", type(made).__name__)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", RIGHT)
def test_right_families_are_not(family: str, dtype: torch.dtype) -> None:
    core(model(RIGHT[family]()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding_alone_stays_far_below_the_limit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty models each: what is right lies below a half of the limit, what is wrong far above."""
    seen: list[float] = []
    compare = self_check.compare
    monkeypatch.setattr(self_check, "compare", lambda *a: seen.append(compare(*a)) or seen[-1])
    for seed in range(20):
        core(model(tf.LlamaConfig(**BASE), seed).to(dtype))
    assert len(seen) == 20
    assert max(seen) < 0.5
    with pytest.raises(QBEError):
        core(model(WRONG["diffllama"]()).to(dtype))
    assert min(seen[20:]) > 3


def test_nested_models_compare_with_themselves() -> None:
    made = tiny_llama()
    nest_model(made, "tiny", NestedWeightConfig(), progress=False)
    core(made)


def test_a_small_fault_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of one layer 2 % off, from when the engine's steps begin."""
    made = tiny_llama()
    check = self_check.check

    def with_fault(*args: Any) -> None:
        made.model.layers[0].self_attn.v_proj.weight.mul_(1.02)
        monkeypatch.setattr(self_check, "_TRIES", 1)
        check(*args)

    monkeypatch.setattr(self_check, "check", with_fault)
    with pytest.raises(QBEError, match="rounding explains"):
        core(made)


@pytest.mark.parametrize(
    "options", [{"max_batch_tokens": 1, "max_sequences": 1}, {"max_batch_tokens": 4, "max_sequences": 2}]
)
def test_small_engines(options: dict[str, int]) -> None:
    core(tiny_llama(), **options)


def test_one_page() -> None:
    Core(tiny_llama(), tag(tiny_llama()), kv_tokens=16)


def test_a_tie_of_experts_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter([40.0, 0.1])
    monkeypatch.setattr(self_check, "compare", lambda *a: next(results))
    core(tiny_llama())
    assert next(results, None) is None


def test_the_command_names_the_family(tmp_path: Path, home: Path) -> None:
    config = WRONG["openai-gpt"]()
    config.vocab_size = 256
    model(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    done = run("generate", "--model", str(tmp_path), "hello", home=home)
    error = done.stderr.decode()
    assert done.returncode == 2
    assert "openai-gpt" in error
    assert "Traceback" not in error


def test_the_command_names_tokens_that_the_model_lacks(tmp_path: Path, home: Path) -> None:
    model(tf.LlamaConfig(**BASE)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    done = run("generate", "--model", str(tmp_path), "hello", home=home)
    error = done.stderr.decode()
    assert done.returncode == 2
    assert "the model knows 0 to 63 only" in error
    assert "Traceback" not in error
