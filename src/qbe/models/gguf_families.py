"""GGUF metadata as fields of transformers' config, one function for each architecture.

What the file says is taken, never a config class's default in its place; what llama.cpp's converter leaves unsaid is
llama.cpp's own constant. A key that has no place in the config is not read here, so that `Keys.finish` refuses it.
"""

from __future__ import annotations

from collections.abc import Callable

from qbe.models import gguf_recurrent
from qbe.models.gguf_fields import (
    Fields,
    all_heads,
    decoder,
    epsilon,
    experts,
    head_dim,
    partial_rope,
    plain_head,
    rope,
    windows,
)
from qbe.models.gguf_keys import Keys
from qbe.models.gguf_rope import rope_parameters


def _llama(keys: Keys) -> Fields:
    fields = decoder(keys)
    rope(keys, fields, plain_head(keys, fields))
    window = keys.count("attention.sliding_window", 0)
    if keys.count("expert_count", 0):
        mixture = {"num_local_experts": keys.experts(), "num_experts_per_tok": keys.count("expert_used_count")}
        keys.same("expert_feed_forward_length", fields["intermediate_size"])
        return fields | mixture | {"model_type": "mixtral", "sliding_window": window or None}
    if window:
        return fields | {"model_type": "mistral", "sliding_window": window}
    biases = {
        "attention_bias": keys.has_tensor(r"blk\.\d+\.attn_(q|k|v|output)\.bias"),
        "mlp_bias": keys.has_tensor(r"blk\.\d+\.ffn_(gate|up|down)\.bias"),
    }
    return fields | biases | {"model_type": "llama"}


def _qwen2(keys: Keys) -> Fields:
    fields = decoder(keys)
    rope(keys, fields, plain_head(keys, fields))
    return fields | {"model_type": "qwen2", "use_sliding_window": False}


def _qwen3(keys: Keys) -> Fields:
    return _qwen2(keys) | {
        "model_type": "qwen3",
        "attention_bias": keys.has_tensor(r"blk\.\d+\.attn_(q|k|v|output)\.bias"),
    }


def _qwen2moe(keys: Keys) -> Fields:
    shared = keys.header.tensors.get("blk.0.ffn_gate_shexp.weight")
    fields = experts(keys, _qwen2(keys))
    width = keys.count("expert_shared_feed_forward_length", shared.shape[0] if shared is not None else None)
    norm = bool(keys.get("expert_weights_norm", False))  # llama.cpp's constant for this architecture
    return fields | {
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": width,
        "norm_topk_prob": norm,
        "qkv_bias": keys.has_tensor(r"blk\.\d+\.attn_(q|k|v)\.bias"),
    }


def _qwen3moe(keys: Keys) -> Fields:
    norm = bool(keys.get("expert_weights_norm", True))  # llama.cpp's constant for this architecture
    return experts(keys, _qwen3(keys)) | {"model_type": "qwen3_moe", "norm_topk_prob": norm}


def _gemma_head(keys: Keys, fields: Fields, layers_of_27b: int | None) -> int:
    """Heads of a size of their own. Their scale is not in the file: llama.cpp goes by the number of layers."""
    size = fields["head_dim"] = head_dim(keys, fields)
    keys.same("rope.dimension_count", size)
    scalar: float = size
    if fields["num_hidden_layers"] == layers_of_27b:
        scalar = fields["hidden_size"] // fields["num_attention_heads"]
    if scale := keys.number("attention.scale", 0.0):
        scalar = round(scale**-2, 3)
    if layers_of_27b is None:
        keys.same("attention.scale", size**-0.5)
    elif scalar != int(scalar):
        keys.refuse("attention.scale", f"1/sqrt({scalar:g}), and this architecture takes the root of a whole number")
    else:
        fields["query_pre_attn_scalar"] = int(scalar)
    return size


def _gemma(keys: Keys) -> Fields:
    fields = decoder(keys)
    rope(keys, fields, _gemma_head(keys, fields, None))
    return fields | {"model_type": "gemma"}


def _gemma2(keys: Keys) -> Fields:
    fields = decoder(keys)
    rope(keys, fields, _gemma_head(keys, fields, 46))
    if "rope.freq_base_swa" in keys:
        keys.same("rope.freq_base_swa", fields["rope_parameters"]["rope_theta"])
    return fields | {
        "model_type": "gemma2",
        "sliding_window": keys.count("attention.sliding_window", 4096),
        "layer_types": windows(keys, fields["num_hidden_layers"], 2),
        "attn_logit_softcapping": float(keys.number("attn_logit_softcapping", 50.0)) or None,
        "final_logit_softcapping": float(keys.number("final_logit_softcapping", 30.0)) or None,
    }


def _gemma3(keys: Keys) -> Fields:
    fields = decoder(keys)
    size = _gemma_head(keys, fields, 62)
    window = keys.count("attention.sliding_window", 0)
    layers = windows(keys, fields["num_hidden_layers"], 6)
    local = {"rope_type": "default", "rope_theta": float(keys.number("rope.freq_base_swa", 10000.0))}
    return fields | {
        "model_type": "gemma3_text",
        "rope_parameters": {"full_attention": rope_parameters(keys, size), "sliding_attention": local},
        "sliding_window": window or 4096,
        "layer_types": layers if window else ["full_attention"] * len(layers),
        "final_logit_softcapping": float(keys.number("final_logit_softcapping", 0.0)) or None,
    }


def _phi3(keys: Keys) -> Fields:
    fields = decoder(keys)
    size = fields["hidden_size"] // max(1, fields["num_attention_heads"])
    for length in ("attention.key_length", "attention.value_length"):
        keys.same(length, size)
    partial_rope(keys, fields, size)
    scaling = fields["rope_parameters"]
    if scaling["rope_type"] not in ("default", "longrope"):
        keys.refuse("rope.scaling.type", "but only longrope is read for this architecture")
    original = scaling.get("original_max_position_embeddings", fields["max_position_embeddings"])
    return fields | {
        "model_type": "phi3",
        "original_max_position_embeddings": original,
        "sliding_window": keys.count("attention.sliding_window", 0) or None,
    }


def _gpt2(keys: Keys) -> Fields:
    return {
        "model_type": "gpt2",
        "n_positions": keys.count("context_length"),
        "n_embd": keys.count("embedding_length"),
        "n_layer": keys.layers(),
        "n_head": all_heads(keys),
        "n_inner": keys.count("feed_forward_length"),
        "layer_norm_epsilon": epsilon(keys, ""),
    }


def _bloom(keys: Keys) -> Fields:
    hidden = keys.count("embedding_length")
    keys.same("feed_forward_length", 4 * hidden)
    keys.get("context_length")  # its positions have no end
    keys.same("attention.max_alibi_bias", 8.0)
    return {
        "model_type": "bloom",
        "hidden_size": hidden,
        "n_layer": keys.layers(),
        "n_head": all_heads(keys),
        "layer_norm_epsilon": epsilon(keys, ""),
    }


def _falcon(keys: Keys) -> Fields:
    fields = decoder(keys, "layer_norm_epsilon")
    rope(keys, fields, plain_head(keys, fields, stated=False))
    kv_heads, two_norms = fields.pop("num_key_value_heads"), keys.has_tensor(r"blk\.\d+\.attn_norm_2\.weight")
    return fields | {
        "model_type": "falcon",
        "ffn_hidden_size": fields.pop("intermediate_size"),
        "num_kv_heads": kv_heads,
        "multi_query": kv_heads == 1,
        "new_decoder_architecture": two_norms or kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
        "parallel_attn": True,
        "alibi": False,
        "bias": keys.has_tensor(r"blk\.\d+\.(attn_qkv|ffn_up)\.bias"),
    }


def _stablelm(keys: Keys) -> Fields:
    fields = decoder(keys, "layer_norm_eps")
    size = fields["hidden_size"] // max(1, fields["num_attention_heads"])
    for length in ("attention.key_length", "attention.value_length"):
        keys.same(length, size)
    partial_rope(keys, fields, size)
    two_norms = keys.has_tensor(r"blk\.\d+\.ffn_norm\.weight")
    if two_norms and keys.get("use_parallel_residual") is True:
        keys.refuse("use_parallel_residual", "but the file has ffn_norm tensors")
    return fields | {
        "model_type": "stablelm",
        "use_parallel_residual": bool(keys.get("use_parallel_residual", not two_norms)),
        "use_qkv_bias": keys.has_tensor(r"blk\.\d+\.attn_(q|k|v)\.bias"),
        "qk_layernorm": keys.has_tensor(r"blk\.\d+\.attn_(q|k)_norm\.weight"),
    }


def _starcoder2(keys: Keys) -> Fields:
    fields = decoder(keys, "norm_epsilon")
    rope(keys, fields, plain_head(keys, fields, stated=False))
    return fields | {
        "model_type": "starcoder2",
        "sliding_window": keys.count("attention.sliding_window", 0) or None,
        "use_bias": keys.has_tensor(r"blk\.\d+\.(attn_\w+|ffn_\w+)\.bias"),
    }


def _nemotron(keys: Keys) -> Fields:
    fields = decoder(keys, "norm_eps")
    heads = fields["num_attention_heads"]
    size = fields["head_dim"] = keys.count("attention.key_length", fields["hidden_size"] // max(1, heads))
    keys.same("attention.value_length", size)
    partial_rope(keys, fields, size)
    return fields | {
        "model_type": "nemotron",
        "attention_bias": keys.has_tensor(r"blk\.\d+\.attn_(q|k|v|output)\.bias"),
        "mlp_bias": keys.has_tensor(r"blk\.\d+\.ffn_(up|down)\.bias"),
    }


def _gpt_oss(keys: Keys) -> Fields:
    fields = decoder(keys)
    rope(keys, fields, plain_head(keys, fields))
    if fields["rope_parameters"]["rope_type"] == "yarn":
        fields["rope_parameters"]["truncate"] = False  # as every checkpoint of this family
    keys.same("expert_feed_forward_length", fields["intermediate_size"])
    return fields | {
        "model_type": "gpt_oss",
        "num_local_experts": keys.experts(),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "sliding_window": keys.count("attention.sliding_window"),
        "layer_types": windows(keys, fields["num_hidden_layers"], 2),
    }


def _minimax_m2(keys: Keys) -> Fields:
    fields = decoder(keys)
    size = fields["head_dim"] = head_dim(keys, fields)
    partial_rope(keys, fields, size)
    keys.same("expert_feed_forward_length", fields["intermediate_size"])
    keys.same("expert_gating_func", 2)  # a sigmoid
    return fields | {
        "model_type": "minimax_m2",
        "num_local_experts": keys.experts(),
        "num_experts_per_tok": keys.count("expert_used_count"),
    }


FAMILIES: dict[str, Callable[[Keys], Fields]] = {
    "bloom": _bloom,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "gpt2": _gpt2,
    "lfm2": gguf_recurrent.lfm2,
    "llama": _llama,
    "mamba": gguf_recurrent.mamba,
    "minimax-m2": _minimax_m2,
    "nemotron": _nemotron,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "qwen35": gguf_recurrent.qwen35,
    "qwen35moe": gguf_recurrent.qwen35moe,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}
