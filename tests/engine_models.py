"""Tiny random models for the engine's tests, and transformers' own answers to compare with."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from qbe.blueprint import Blueprint
from qbe.engine.core import Core
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.engine.scheduling.sequence import Sequence
from qbe.sites import SiteTable

VOCABULARY = 199
NO_SITES = SiteTable(())
NO_BLUEPRINT = Blueprint("none", (), (), ())
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

FACT = "What is the capital of France?"
ARITHMETIC = "Tom has 3 apples, buys 5 more and gives 2 away. How many are left? Explain each step."
CODE = "Write a Python function that reverses a linked list."

_TOKENS: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    **_TOKENS,
}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
_DENSE: dict[str, Any] = {**_COMMON, **_HEADS, "intermediate_size": 96}
_SSM: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _DENSE),
    "qwen3": ("Qwen3Config", {**_DENSE, "head_dim": 24}),
    "mistral-sliding": ("MistralConfig", {**_DENSE, "sliding_window": 8}),
    "gemma2-softcap": (
        "Gemma2Config",
        {**_DENSE, "head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 5.0},
    ),
    "gemma3-text": (
        "Gemma3TextConfig",
        {
            **_DENSE,
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
    ),
    "mixtral": ("MixtralConfig", {**_DENSE, "num_local_experts": 4}),
    "phi3-longrope": (
        "Phi3Config",
        {**_DENSE, "pad_token_id": 0, "original_max_position_embeddings": 32, "rope_parameters": _LONGROPE},
    ),
    "mamba2": (
        "Mamba2Config",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
            "tie_word_embeddings": False,
            **_TOKENS,
        },
    ),
    "mamba": (
        "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3, "state_size": 8, **_TOKENS},
    ),
    "lfm2": (
        "Lfm2Config",
        {**_DENSE, "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "block_multiple_of": 8},
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            **_DENSE,
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "jamba": (
        "JambaConfig",
        {
            **_DENSE,
            "num_experts": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
        },
    ),
    "bamba": ("BambaConfig", {**_DENSE, **_SSM, "attn_layer_indices": [1]}),
    "granite-moe-hybrid": (
        "GraniteMoeHybridConfig",
        {
            **_DENSE,
            **_SSM,
            "intermediate_size": 32,
            "shared_intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "falcon-h1": ("FalconH1Config", {**_DENSE, **_SSM, "head_dim": 16, "mamba_d_ssm": 128}),
    "gemma3n": (  # the last two layers read the pages of the two before
        "Gemma3nTextConfig",
        {
            **_DENSE,
            "pad_token_id": 0,
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "intermediate_size": [96] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
        },
    ),
    "gpt-oss": ("GptOssConfig", {**_DENSE, "head_dim": 16, "num_local_experts": 4, "sliding_window": 8}),
    "deepseek-v3": (
        "DeepseekV3Config",
        {
            **_COMMON,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "first_k_dense_replace": 1,
        },
    ),
}


def build(name: str, **changes: Any) -> PreTrainedModel:
    """A float32 model whose weights are large enough that its answers vary; `changes` of its configuration."""
    torch.manual_seed(0)
    kind, arguments = CONFIGS[name]
    config = getattr(transformers, kind)(**arguments | changes)
    # transformers' SDPA has no soft cap: before 5.20 it dropped it silently.
    attention = {"attn_implementation": "eager"} if "softcap" in name else {}
    model = transformers.AutoModelForCausalLM.from_config(config, **attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.2)
    return model.float().eval().to(DEVICE)


def prompts(*lengths: int) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def greedy(model: PreTrainedModel, prompt: list[int], tokens: int) -> list[int]:
    """What `generate` of transformers writes.

    LongRoPE without a cache: some versions keep keys of the short frequencies in it.
    """
    ids = torch.tensor([prompt], device=DEVICE)
    cached = "longrope" not in str(model.config)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, use_cache=cached
    )
    return out[0, len(prompt) :].tolist()


def request(name: str, prompt: list[int], blueprint: Blueprint = NO_BLUEPRINT, **params: Any) -> Sequence:
    """A request with these sampling parameters."""
    return Sequence(name, prompt, SamplingParams(**params), blueprint)


def run(core: Core, *requests: Sequence) -> list[list[int]]:
    """Serve the requests together; their answers."""
    for r in requests:
        core.add(r)
    for _ in range(10_000):
        if not core.has_work():
            return [r.output_ids for r in requests]
        core.step()
    raise AssertionError("the core did not finish")
