"""Tiny configs of the families that GGUF files are read of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as tf

from models_tiny import TOKENS

BASE: dict[str, Any] = {
    "vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0],
}  # fmt: skip


def _mamba_size(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(TOKENS), "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "eos_token_id": 0,
        "tie_word_embeddings": False, **changes,
    }  # fmt: skip


_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2, "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0], "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
_PLAIN_HEADS = {k: v for k, v in BASE.items() if k != "num_key_value_heads"}
_GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 24, "hidden_size": 64, "tie_word_embeddings": True}
# family -> (GGUF architecture, config)
FAMILIES: dict[str, tuple[str, Callable[[], tf.PreTrainedConfig]]] = {
    "llama": ("llama", lambda: tf.LlamaConfig(**BASE, head_dim=24)),
    "llama-tied": ("llama", lambda: tf.LlamaConfig(**BASE | {"tie_word_embeddings": True})),
    "llama-3.1": ("llama", lambda: tf.LlamaConfig(**BASE, head_dim=16, rope_parameters=LLAMA3)),
    "llama-linear": (
        "llama",
        lambda: tf.LlamaConfig(**BASE, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    ),
    "llama-yarn": ("llama", lambda: tf.LlamaConfig(**BASE, rope_parameters=YARN)),
    "llama-yarn-tuned": (
        "llama", lambda: tf.LlamaConfig(
            **BASE, rope_parameters=YARN | {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}
        )
    ),
    "llama-biases": ("llama", lambda: tf.LlamaConfig(**BASE, attention_bias=True, mlp_bias=True)),
    "mistral": ("llama", lambda: tf.MistralConfig(**BASE, sliding_window=None, head_dim=16)),
    "mixtral": ("llama", lambda: tf.MixtralConfig(**BASE, num_local_experts=4, num_experts_per_tok=2)),
    "qwen2": ("qwen2", lambda: tf.Qwen2Config(**BASE)),
    "qwen2-yarn": ("qwen2", lambda: tf.Qwen2Config(**BASE, rope_parameters=YARN)),
    "qwen2_moe": ("qwen2moe", lambda: tf.Qwen2MoeConfig(**BASE, **MIXTURE, shared_expert_intermediate_size=48)),
    "qwen3": ("qwen3", lambda: tf.Qwen3Config(**BASE, head_dim=24)),
    "qwen3_moe": ("qwen3moe", lambda: tf.Qwen3MoeConfig(**BASE, **MIXTURE, head_dim=24, norm_topk_prob=True)),
    "qwen3_5": ("qwen35", lambda: tf.Qwen3_5TextConfig(**BASE | _LINEAR)),
    "qwen3_5_moe": (
        "qwen35moe", lambda: tf.Qwen3_5MoeTextConfig(**BASE | _LINEAR | MIXTURE, shared_expert_intermediate_size=48)
    ),
    "gemma": ("gemma", lambda: tf.GemmaConfig(**BASE | {"head_dim": 24, "tie_word_embeddings": True})),
    "gemma2": (
        "gemma2", lambda: tf.Gemma2Config(
            **BASE | _GEMMA, sliding_window=8, attn_logit_softcapping=5.0, final_logit_softcapping=3.0
        )
    ),
    "gemma3": (
        "gemma3", lambda: tf.Gemma3TextConfig(
            **BASE | _GEMMA | {"num_hidden_layers": 7}, sliding_window=8, rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            }
        )
    ),
    "phi3": ("phi3", lambda: tf.Phi3Config(**BASE, original_max_position_embeddings=256, sliding_window=8)),
    "phi3-longrope": (
        "phi3", lambda: tf.Phi3Config(
            **BASE, original_max_position_embeddings=32, rope_parameters=LONG | {"partial_rotary_factor": 0.5}
        )
    ),
    "gpt2": (
        "gpt2", lambda: tf.GPT2Config(
            vocab_size=len(TOKENS), n_embd=64, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=0
        )
    ),
    "bloom": (
        "bloom", lambda: tf.BloomConfig(
            vocab_size=len(TOKENS), hidden_size=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=0
        )
    ),
    "falcon": ("falcon", lambda: tf.FalconConfig(
        **{k: v for k, v in _PLAIN_HEADS.items() if k != "intermediate_size"}, multi_query=True, bias=False
    )),
    "falcon-40b": ("falcon", lambda: tf.FalconConfig(
        **{k: v for k, v in _PLAIN_HEADS.items() if k != "intermediate_size"}, num_kv_heads=2, multi_query=False,
        new_decoder_architecture=True, bias=False
    )),
    "stablelm": ("stablelm", lambda: tf.StableLmConfig(**BASE, use_qkv_bias=True, use_parallel_residual=False)),
    "stablelm-12b": (
        "stablelm", lambda: tf.StableLmConfig(
            **BASE, qk_layernorm=True, use_parallel_residual=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        )
    ),
    "starcoder2": (
        "starcoder2", lambda: tf.Starcoder2Config(**BASE, rope_parameters=DEFAULT | {"rope_theta": 99999.0})
    ),
    "nemotron": ("nemotron", lambda: tf.NemotronConfig(**BASE)),
    "mamba": ("mamba", lambda: tf.MambaConfig(**_mamba_size())),
    "falcon_mamba": ("mamba", lambda: tf.FalconMambaConfig(**_mamba_size())),
    "lfm2": (
        "lfm2", lambda: tf.Lfm2Config(
            **BASE, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False
        )
    ),
    "gpt-oss": ("gpt-oss", lambda: tf.GptOssConfig(
        **BASE, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, rope_parameters=YARN | {
            "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0
        }
    )),
    "minimax-m2": ("minimax-m2", lambda: tf.MiniMaxM2Config(
        **BASE, head_dim=16, rotary_dim=8, num_local_experts=4, num_experts_per_tok=2
    )),
}  # fmt: skip
