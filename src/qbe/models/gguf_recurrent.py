"""Fields of the configs of recurrent architectures and hybrids, as `qbe.models.gguf_families` has them for others."""

from __future__ import annotations

from qbe.errors import QBEError
from qbe.models.gguf_fields import Fields, epsilon, plain_head, plain_scale, rope
from qbe.models.gguf_keys import Keys
from qbe.models.gguf_rope import rope_parameters


def mamba(keys: Keys) -> Fields:
    hidden, inner = keys.count("embedding_length"), keys.count("ssm.inner_size")
    if hidden == 0 or inner % hidden:
        keys.refuse("ssm.inner_size", f"but must be a multiple of the hidden size, {hidden}")
    for unused in ("context_length", "feed_forward_length", "attention.head_count"):
        keys.get(unused)  # llama.cpp wants them; they mean nothing in a recurrent model
    return {
        # Falcon-Mamba normalises what the state's step, input and output are made of.
        "model_type": "falcon_mamba" if keys.get("ssm.dt_b_c_rms", False) else "mamba",
        "hidden_size": hidden,
        "num_hidden_layers": keys.layers(),
        "expand": inner // hidden,
        "conv_kernel": keys.count("ssm.conv_kernel"),
        "state_size": keys.count("ssm.state_size"),
        "time_step_rank": keys.count("ssm.time_step_rank"),
        "layer_norm_epsilon": epsilon(keys, "rms"),
        "use_bias": keys.has_tensor(r"blk\.\d+\.ssm_(in|out)\.bias"),
        "use_conv_bias": keys.has_tensor(r"blk\.\d+\.ssm_conv1d\.bias"),
    }


def lfm2(keys: Keys) -> Fields:
    kv_heads = keys.get("attention.head_count_kv")
    layers = keys.layers()
    if not isinstance(kv_heads, list) or len(kv_heads) != layers or not any(kv_heads):
        keys.refuse("attention.head_count_kv", "but must be one number for each layer")
    attention = [n for n in kv_heads if n]
    if any(n != attention[0] for n in attention):
        keys.refuse("attention.head_count_kv", "but all attention layers must have as many")
    fields: Fields = {
        "hidden_size": keys.count("embedding_length"),
        "num_hidden_layers": layers,
        "intermediate_size": keys.count("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,  # the width is what it is
        "num_attention_heads": keys.count("attention.head_count"),
        "num_key_value_heads": attention[0],
        "layer_types": ["full_attention" if n else "conv" for n in kv_heads],
        "max_position_embeddings": keys.count("context_length"),
        "norm_eps": epsilon(keys, "rms"),
        "conv_L_cache": keys.count("shortconv.l_cache"),
        "conv_bias": keys.has_tensor(r"blk\.\d+\.shortconv\.\w+\.bias"),
    }
    rope(keys, fields, plain_head(keys, fields, stated=False))
    return fields | {"model_type": "lfm2"}


def qwen35(keys: Keys) -> Fields:
    size, drafting = keys.count("attention.key_length"), keys.count("nextn_predict_layers", 0)
    keys.same("attention.value_length", size)
    rotary, value_heads = keys.count("rope.dimension_count"), keys.count("ssm.time_step_rank")
    sections = keys.get("rope.dimension_sections")
    if not isinstance(sections, list) or any(sections[3:]) or not size or not value_heads:
        raise QBEError(f"{keys.header.path} is corrupt: its heads have no size or no rotary sections")
    plain_scale(keys, size)
    layers, every = keys.layers() - drafting, keys.count("full_attention_interval", 4)
    turned = rope_parameters(keys, rotary) | {"mrope_section": sections[:3], "mrope_interleaved": True}
    return {
        "model_type": "qwen3_5_text",
        "max_position_embeddings": keys.count("context_length"),
        "hidden_size": keys.count("embedding_length"),
        "intermediate_size": keys.count("feed_forward_length", 1 if keys.architecture == "qwen35moe" else None),
        "num_hidden_layers": layers,  # the file counts the block that drafts tokens, too
        "num_attention_heads": keys.count("attention.head_count"),
        "num_key_value_heads": keys.count("attention.head_count_kv"),
        "head_dim": size,
        "rms_norm_eps": epsilon(keys, "rms"),
        "layer_types": [
            "linear_attention" if every == 0 or (i + 1) % every else "full_attention" for i in range(layers)
        ],
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel"),
        "linear_key_head_dim": keys.count("ssm.state_size"),
        "linear_num_key_heads": keys.count("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": keys.count("ssm.inner_size") // value_heads,
        "rope_parameters": turned | {"partial_rotary_factor": rotary / size},
    }


def qwen35moe(keys: Keys) -> Fields:
    return qwen35(keys) | {
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length"),
        "num_experts": keys.experts(),
        "num_experts_per_tok": keys.count("expert_used_count"),
    }
