"""Tiny random mixtures of experts of many families, made offline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from conftest import byte_tokenizer

BASE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
GROUPED: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1,
    "first_k_dense_replace": 0, "n_group": 4, "topk_group": 2, "num_key_value_heads": 4, "kv_lora_rank": 32,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
SIXTEEN = {"head_dim": 16}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}

FAMILIES: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: tf.MixtralConfig(**BASE, **LOCAL),
    "qwen2_moe": lambda: tf.Qwen2MoeConfig(**BASE, **SPARSE, shared_expert_intermediate_size=64),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**BASE, **SPARSE, **SIXTEEN, mlp_only_layers=[]),
    "gpt_oss": lambda: tf.GptOssConfig(**BASE | LOCAL | SIXTEEN | {"intermediate_size": 64}),
    "deepseek_v2": lambda: tf.DeepseekV2Config(**BASE | GROUPED, topk_method="group_limited_greedy", q_lora_rank=None),
    "deepseek_v3": lambda: tf.DeepseekV3Config(**BASE | GROUPED, q_lora_rank=32),
    "granitemoe": lambda: tf.GraniteMoeConfig(**BASE, **LOCAL),
    "granitemoehybrid": lambda: tf.GraniteMoeHybridConfig(
        **BASE, **LOCAL, shared_intermediate_size=64, layer_types=["mamba", "attention"], mamba_n_heads=8,
        mamba_d_head=16, mamba_d_state=16, mamba_n_groups=1, mamba_expand=2, mamba_chunk_size=8,
        position_embedding_type="nope",
    ),
    "olmoe": lambda: tf.OlmoeConfig(**BASE, num_experts=4, num_experts_per_tok=2),
    "phimoe": lambda: tf.PhimoeConfig(**BASE, **LOCAL),
    "gemma4": lambda: tf.Gemma4TextConfig(
        **BASE | SIXTEEN, num_experts=4, top_k_experts=2, moe_intermediate_size=64, enable_moe_block=True,
        layer_types=["full_attention"] * 2, hidden_size_per_layer_input=0, vocab_size_per_layer_input=320,
    ),
    "llama4": lambda: tf.Llama4TextConfig(
        **BASE | LOCAL | SIXTEEN | {"num_experts_per_tok": 1}, intermediate_size_mlp=64, interleave_moe_layer_step=1
    ),
    "nemotron_h": lambda: tf.NemotronHConfig(
        **BASE | SIXTEEN, hybrid_override_pattern="E*", n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=64, moe_shared_expert_intermediate_size=64,
    ),
}  # fmt: skip


def tiny_moe(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model of this family with random weights, large enough for its routers to have opinions."""
    torch.manual_seed(seed)
    config = FAMILIES[family]()
    for key, value in changes.items():
        setattr(config, key, value)
    model = tf.AutoModelForCausalLM.from_config(config).to(dtype).eval().requires_grad_(False)
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or name.endswith("_bias"):
            parameter.copy_((torch.randn(parameter.shape, generator=draw) * 0.1).to(dtype))
    return model


def tiny_moe_folder(folder: Path, family: str = "qwen3_moe", **changes: Any) -> Path:
    """The same as a checkpoint."""
    tiny_moe(family, **changes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
