"""Fields that the configs of many architectures share, from GGUF metadata."""

from __future__ import annotations

from typing import Any

from qbe.errors import QBEError
from qbe.models.gguf_keys import Keys
from qbe.models.gguf_rope import rope_parameters

Fields = dict[str, Any]


def decoder(keys: Keys, eps: str = "rms_norm_eps") -> Fields:
    """The fields of nearly all decoders. `eps` is the config's name of the norms' epsilon."""
    heads = keys.count("attention.head_count")
    return {
        "hidden_size": keys.count("embedding_length"),
        "num_hidden_layers": keys.layers(),
        "intermediate_size": keys.count("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "max_position_embeddings": keys.count("context_length"),
        eps: epsilon(keys, "rms" if eps == "rms_norm_eps" else ""),
    }


def epsilon(keys: Keys, kind: str) -> float:
    """The norms' epsilon; the key of the other kind of norm may repeat it."""
    mine, other = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
    mine, other = (mine, other) if kind == "rms" else (other, mine)
    value = float(keys.number(mine))
    keys.same(other, value)
    return value


def head_dim(keys: Keys, fields: Fields) -> int:
    """Size of a head: the file's, and what else it says of it must agree."""
    heads = fields["num_attention_heads"]
    if not heads:
        raise QBEError(f"{keys.header.path} is corrupt: {keys.architecture}.attention.head_count is 0")
    rotated = keys.count("rope.dimension_count", 0)
    size = keys.count("attention.key_length", rotated or fields["hidden_size"] // heads)
    keys.same("attention.value_length", size)
    return size


def plain_head(keys: Keys, fields: Fields, stated: bool = True) -> int:
    """Heads that are rotated whole and scaled by the root of their size; `stated`: the config has a field for it."""
    size = head_dim(keys, fields)
    if not stated and size * fields["num_attention_heads"] != fields["hidden_size"]:
        keys.refuse("attention.key_length", "but this architecture's heads divide the hidden size")
    keys.same("rope.dimension_count", size)
    plain_scale(keys, size)
    if stated:
        fields["head_dim"] = size
    return size


def plain_scale(keys: Keys, size: int) -> None:
    if keys.number("attention.scale", 0.0):
        keys.same("attention.scale", size**-0.5)


def rope(keys: Keys, fields: Fields, rotary: int) -> None:
    fields["rope_parameters"] = rope_parameters(keys, rotary)


def partial_rope(keys: Keys, fields: Fields, size: int) -> None:
    """Rotary embeddings of a part of each head."""
    rotary = keys.count("rope.dimension_count", size)
    plain_scale(keys, size)
    fields["rope_parameters"] = rope_parameters(keys, rotary) | {"partial_rotary_factor": rotary / size}


def experts(keys: Keys, fields: Fields) -> Fields:
    gate = keys.header.tensors.get("blk.0.ffn_gate_exps.weight")
    width = gate.shape[-2] if gate is not None and len(gate.shape) == 3 else None
    return fields | {
        "num_experts": keys.experts(),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length", width),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def windows(keys: Keys, layers: int, default: int) -> list[str]:
    """Which layers have a sliding window: a flag each, or all but every n-th."""
    pattern = keys.get("attention.sliding_window_pattern", default)
    if isinstance(pattern, list):
        if len(pattern) < layers:
            keys.refuse("attention.sliding_window_pattern", f"but there are {layers} layers")
        sliding = [bool(flag) for flag in pattern[:layers]]
    else:
        every = keys.count("attention.sliding_window_pattern", default)
        sliding = [every == 0 or (i + 1) % every != 0 for i in range(layers)]
    return ["sliding_attention" if s else "full_attention" for s in sliding]


def all_heads(keys: Keys) -> int:
    """Heads of a model in which each query head has a key head."""
    heads = keys.count("attention.head_count")
    keys.same("attention.head_count_kv", heads)
    return heads
