"""Tiny random configurations of many architectures, each with the exact count of sites for every role."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as tf

BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
THREE = BASE | {"num_hidden_layers": 3}
FOUR = BASE | {"num_hidden_layers": 4}
MOE = {"num_experts_per_tok": 2}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1}
VISION = {"hidden_size": 16, "intermediate_size": 24}
SIGLIP = {**VISION, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
EXPERTS4 = {"num_experts": 4, "moe_intermediate_size": 16, **MOE}

# name -> (configuration, exact count of sites for each role)
REQUIRED: dict[str, tuple[Callable[[], Any], str]] = {
    "llama": (
        lambda: tf.LlamaConfig(**BASE),
        "embedding 1 attention_q 2 attention_k 2 attention_v 2 attention_o 2 ffn_gate 2 ffn_up 2 ffn_down 2 norm 5 "
        "output_head 1",
    ),
    "qwen3": (  # norms: 2 a layer, 2 in each attention, 1 final
        lambda: tf.Qwen3Config(**BASE, head_dim=8),
        "embedding 1 attention_q 2 attention_k 2 attention_v 2 attention_o 2 ffn_gate 2 ffn_up 2 ffn_down 2 norm 9 "
        "output_head 1",
    ),
    "gemma3_text": (
        lambda: tf.Gemma3TextConfig(**BASE, head_dim=8),
        "embedding 1 attention_q 2 attention_k 2 attention_v 2 attention_o 2 ffn_gate 2 ffn_up 2 ffn_down 2 norm 13 "
        "output_head 1",
    ),
    "mixtral": (
        lambda: tf.MixtralConfig(**BASE, num_local_experts=4, **MOE),
        "embedding 1 attention_q 2 attention_k 2 attention_v 2 attention_o 2 moe_router 2 moe_expert 4 norm 5 "
        "output_head 1",
    ),
    "qwen3_moe": (  # the first layer is dense
        lambda: tf.Qwen3MoeConfig(**BASE, head_dim=8, mlp_only_layers=[0], **EXPERTS4),
        "embedding 1 attention_q 2 attention_k 2 attention_v 2 attention_o 2 ffn_gate 1 ffn_up 1 ffn_down 1 "
        "moe_router 1 moe_expert 2 norm 9 output_head 1",
    ),
    "mamba2": (
        lambda: tf.Mamba2Config(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=4, n_groups=1
        ),
        "embedding 1 norm 3 ssm_state 2 ssm_conv 2 ssm_in 2 ssm_gate 2 ssm_out 2 output_head 1",
    ),
    "jamba": (  # layers 0 and 2 Mamba with experts, 1 and 3 attention with a dense feed-forward
        lambda: tf.JambaConfig(
            **FOUR,
            num_experts=4,
            **MOE,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=0,
            use_mamba_kernels=False,
            mamba_d_state=4,
        ),
        "embedding 1 attention_q 2 attention_k 2 attention_v 2 attention_o 2 ffn_gate 2 ffn_up 2 ffn_down 2 "
        "moe_router 2 moe_expert 4 ssm_state 2 ssm_conv 2 ssm_in 2 ssm_gate 4 ssm_out 2 norm 15 output_head 1",
    ),
    "bamba": (
        lambda: tf.BambaConfig(**THREE, attn_layer_indices=[1], **MAMBA2),
        "embedding 1 attention_q 1 attention_k 1 attention_v 1 attention_o 1 ffn_gate 3 ffn_up 3 ffn_down 3 "
        "ssm_state 2 ssm_conv 2 ssm_in 2 ssm_gate 2 ssm_out 2 norm 7 output_head 1",
    ),
    "granitemoehybrid": (  # the shared expert stores gate and up as one
        lambda: tf.GraniteMoeHybridConfig(
            **THREE,
            layer_types=["mamba", "attention", "mamba"],
            num_local_experts=4,
            **MOE,
            shared_intermediate_size=16,
            **MAMBA2,
        ),
        "embedding 1 attention_q 1 attention_k 1 attention_v 1 attention_o 1 ffn_gate_up 3 ffn_down 3 moe_router 3 "
        "moe_expert 6 ssm_state 2 ssm_conv 2 ssm_in 2 ssm_gate 2 ssm_out 2 norm 7 output_head 1",
    ),
    "gemma3": (
        lambda: tf.Gemma3Config(
            text_config=tf.Gemma3TextConfig(**BASE, head_dim=8).to_dict(),
            vision_config=SIGLIP,
            mm_tokens_per_image=4,
        ),
        "vision_encoder 25 projector 2 embedding 1 attention_q 2 attention_k 2 attention_v 2 attention_o 2 ffn_gate 2 "
        "ffn_up 2 ffn_down 2 norm 13 output_head 1",
    ),
    "llava": (
        lambda: tf.LlavaConfig(text_config=tf.LlamaConfig(**BASE), vision_config=tf.CLIPVisionConfig(**SIGLIP)),
        "vision_encoder 21 projector 2 embedding 1 attention_q 2 attention_k 2 attention_v 2 attention_o 2 ffn_gate 2 "
        "ffn_up 2 ffn_down 2 norm 5 output_head 1",
    ),
    "qwen2_5_vl": (  # the projector is the merger inside the vision tower
        lambda: tf.Qwen2_5_VLConfig(
            text_config={**BASE, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
            vision_config={**VISION, "depth": 2, "num_heads": 2, "out_hidden_size": 32, "fullatt_block_indexes": [1]},
        ),
        "vision_encoder 15 projector 3 embedding 1 attention_q 2 attention_k 2 attention_v 2 attention_o 2 ffn_gate 2 "
        "ffn_up 2 ffn_down 2 norm 5 output_head 1",
    ),
}
ALSO: dict[str, tuple[Callable[[], Any], str]] = {
    "mistral": (lambda: tf.MistralConfig(**BASE), REQUIRED["llama"][1]),
    "gemma2": (lambda: tf.Gemma2Config(**BASE, head_dim=8), REQUIRED["qwen3"][1]),
    "olmo2": (lambda: tf.Olmo2Config(**BASE), REQUIRED["qwen3"][1]),
    "phi3": (
        lambda: tf.Phi3Config(**BASE),
        "embedding 1 attention_qkv 2 attention_o 2 ffn_gate_up 2 ffn_down 2 norm 5 output_head 1",
    ),
    "gpt2": (
        lambda: tf.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
        ),
        "embedding 2 attention_qkv 2 attention_o 2 ffn_up 2 ffn_down 2 norm 5 output_head 1",
    ),
    "falcon": (
        lambda: tf.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
        "embedding 1 attention_qkv 2 attention_o 2 ffn_up 2 ffn_down 2 norm 3 output_head 1",
    ),
    "gpt_neox": (
        lambda: tf.GPTNeoXConfig(**{k: v for k, v in BASE.items() if k != "num_key_value_heads"}),
        "embedding 1 attention_qkv 2 attention_o 2 ffn_up 2 ffn_down 2 norm 5 output_head 1",
    ),
    "qwen3_next": (  # each mixture has a router and the gate of its shared expert
        lambda: tf.Qwen3NextConfig(
            **BASE,
            head_dim=8,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            shared_expert_intermediate_size=16,
            **EXPERTS4,
        ),
        "embedding 1 attention_q 1 attention_k 1 attention_v 1 attention_o 1 ffn_gate 2 ffn_up 2 ffn_down 2 "
        "moe_router 4 moe_expert 4 ssm_state 1 ssm_conv 1 ssm_in 1 ssm_gate 2 ssm_out 1 norm 7 output_head 1",
    ),
    "deepseek_v3": (  # latent attention: q_a, q_b are q; kv_a, kv_b hold keys and values together
        lambda: tf.DeepseekV3Config(
            **(BASE | {"num_key_value_heads": 4}),
            n_routed_experts=4,
            **MOE,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=16,
            first_k_dense_replace=1,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=8,
        ),
        "embedding 1 attention_q 4 attention_qkv 4 attention_o 2 ffn_gate 2 ffn_up 2 ffn_down 2 moe_router 1 "
        "moe_expert 2 norm 9 output_head 1",
    ),
    "gpt_oss": (  # the attention sinks of each layer count as normalisation
        lambda: tf.GptOssConfig(**BASE, head_dim=8, num_local_experts=4, **MOE),
        "embedding 1 attention_q 2 attention_k 2 attention_v 2 attention_o 2 moe_router 2 moe_expert 4 norm 7 "
        "output_head 1",
    ),
}
