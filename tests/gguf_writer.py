"""Tiny random models and the GGUF files that llama.cpp's converter would write for them, key by key."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers as tf
from gguf import RopeScalingType

from models_tiny import MERGES, TEMPLATE, TOKENS


def tiny(config: tf.PreTrainedConfig, seed: int = 0) -> tf.PreTrainedModel:
    """A random model whose logits depend on everything: biases, norms and sinks are not their defaults."""
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(config).float().eval().requires_grad_(False)
    for name, p in model.named_parameters():
        if "A_log" in name:
            p.uniform_(0, 1)
        elif p.dim() >= 2:
            p.normal_(0, 0.5 if "embed" in name or "wte" in name else 0.15)
        else:
            p.add_(torch.randn_like(p) * 0.2)
    return model


class Writer:
    """One file: `number` and the like write keys of the architecture, `tensor` a tensor under the file's name."""

    def __init__(self, path: Path, architecture: str) -> None:
        self.path, self.architecture = path, architecture
        self.file = gguf.GGUFWriter(path, architecture)

    def keys(self, **values: Any) -> None:
        """Keys of the architecture: `a__b` is `a.b`."""
        for key, value in values.items():
            name = f"{self.architecture}.{key.replace('__', '.')}"
            if isinstance(value, bool):
                self.file.add_bool(name, value)
            elif isinstance(value, int):
                self.file.add_uint32(name, value)
            elif isinstance(value, float):
                self.file.add_float32(name, value)
            elif isinstance(value, str):
                self.file.add_string(name, value)
            else:
                self.file.add_array(name, value)

    def tensor(self, name: str, data: np.ndarray) -> None:
        self.file.add_tensor(name, np.ascontiguousarray(data, dtype=np.float32))

    def tokenizer(self) -> None:
        w = self.file
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre("gpt-2")
        w.add_token_list(TOKENS)
        w.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
        w.add_token_merges(MERGES)
        w.add_eos_token_id(0)
        w.add_bos_token_id(1)
        w.add_add_bos_token(False)
        w.add_chat_template(TEMPLATE)

    def close(self) -> Path:
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()
        return self.path


def write(path: Path, architecture: str, model: tf.PreTrainedModel, **extra: Any) -> Path:
    """The model's file; `extra` keys of the architecture on top."""
    w = Writer(path, architecture)
    w.file.add_type("model")
    w.file.add_name("Tiny")
    w.file.add_size_label("1K")
    w.file.add_license("apache-2.0")
    w.file.add_tags(["text-generation"])
    w.file.add_file_type(0)
    w.file.add_quantization_version(2)
    config = model.config
    w.keys(**_usual(config))
    if more := KEYS.get(architecture):
        w.keys(**more(config))
    w.keys(**extra)
    w.tokenizer()
    for name, data in _tensors(architecture, model):
        w.tensor(name, data)
    return w.close()


def _usual(config: Any) -> dict[str, Any]:
    """What the converter writes for any text model."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    full = rope.get("full_attention", rope)
    get = lambda *names: next((v for n in names if (v := getattr(config, n, None)) is not None), None)  # noqa: E731
    values: dict[str, Any] = {
        "block_count": get("num_hidden_layers"),
        "context_length": get("max_position_embeddings", "n_positions") or 256,
        "embedding_length": get("hidden_size"),
        "feed_forward_length": get("intermediate_size", "n_inner") or 4 * get("hidden_size"),
        "attention__head_count": get("num_attention_heads"),
        "attention__head_count_kv": get("num_key_value_heads"),
        "attention__layer_norm_rms_epsilon": get("rms_norm_eps", "norm_eps"),
        "attention__layer_norm_epsilon": get("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
        "rope__freq_base": full.get("rope_theta"),
        "rope__freq_base_swa": rope.get("sliding_attention", {}).get("rope_theta"),
        "expert_count": get("num_local_experts", "num_experts"),
        "expert_used_count": get("num_experts_per_tok"),
        "attention__key_length": config.__dict__.get("head_dim"),
        "attention__value_length": config.__dict__.get("head_dim"),
    }
    kind = full.get("rope_type")
    if kind in ("linear", "yarn"):
        scaling = RopeScalingType.LINEAR if kind == "linear" else RopeScalingType.YARN
        values |= {"rope__scaling__type": scaling.value, "rope__scaling__factor": full["factor"]}
    if kind == "yarn":
        values["rope__scaling__original_context_length"] = full["original_max_position_embeddings"]
        values |= {
            f"rope__scaling__yarn_{key}": float(full[name])
            for name, key in (
                ("attention_factor", "attn_factor"),
                ("beta_fast", "beta_fast"),
                ("beta_slow", "beta_slow"),
            )
            if full.get(name) is not None
        }
    if kind == "longrope":
        values["rope__scaling__type"] = RopeScalingType.LONGROPE.value
    return {k: v for k, v in values.items() if v is not None}


def _rotated(config: Any) -> int:
    size = config.__dict__.get("head_dim") or config.hidden_size // config.num_attention_heads
    return int(size * config.rope_parameters.get("partial_rotary_factor", 1.0))


def _llama_keys(c: Any) -> dict[str, Any]:
    return {"vocab_size": c.vocab_size, "rope__dimension_count": _rotated(c)}


def _phi3_keys(c: Any) -> dict[str, Any]:
    keys = {"rope__dimension_count": _rotated(c), "attention__sliding_window": c.sliding_window or 0}
    original = c.rope_parameters.get("original_max_position_embeddings", c.original_max_position_embeddings)
    keys["rope__scaling__original_context_length"] = original
    if c.rope_parameters["rope_type"] == "longrope":
        scale = c.max_position_embeddings / original
        keys["rope__scaling__attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original))
    return keys


def _mamba_keys(c: Any) -> dict[str, Any]:
    return {
        "context_length": 2**20, "feed_forward_length": 0, "attention__head_count": 0,
        "ssm__conv_kernel": c.conv_kernel, "ssm__inner_size": c.intermediate_size, "ssm__state_size": c.state_size,
        "ssm__time_step_rank": c.time_step_rank, "ssm__dt_b_c_rms": c.model_type == "falcon_mamba",
        "attention__layer_norm_rms_epsilon": c.layer_norm_epsilon,
    }  # fmt: skip


def _qwen35_keys(c: Any) -> dict[str, Any]:
    keys = {
        "ssm__conv_kernel": c.linear_conv_kernel_dim, "ssm__state_size": c.linear_key_head_dim,
        "ssm__group_count": c.linear_num_key_heads, "ssm__time_step_rank": c.linear_num_value_heads,
        "ssm__inner_size": c.linear_value_head_dim * c.linear_num_value_heads, "full_attention_interval": 2,
        "rope__dimension_count": _rotated(c), "rope__dimension_sections": [*c.rope_parameters["mrope_section"], 0],
    }  # fmt: skip
    if c.model_type.endswith("moe_text"):
        keys["expert_feed_forward_length"] = c.moe_intermediate_size
        keys["expert_shared_feed_forward_length"] = c.shared_expert_intermediate_size
    return keys


KEYS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "llama": _llama_keys,
    "qwen2moe": lambda c: {
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_shared_feed_forward_length": c.shared_expert_intermediate_size,
    },
    "qwen3moe": lambda c: {"expert_feed_forward_length": c.moe_intermediate_size},
    "qwen35": _qwen35_keys,
    "qwen35moe": _qwen35_keys,
    "gemma2": lambda c: {
        "attn_logit_softcapping": c.attn_logit_softcapping,
        "final_logit_softcapping": c.final_logit_softcapping,
        "attention__sliding_window": c.sliding_window,
    },
    "gemma3": lambda c: {"attention__sliding_window": c.sliding_window},
    "phi3": _phi3_keys,
    "gpt2": lambda c: {"feed_forward_length": 4 * c.n_embd},
    "bloom": lambda c: {"feed_forward_length": 4 * c.hidden_size, "attention__head_count_kv": c.n_head},
    "falcon": lambda c: {
        "context_length": 2048, "tensor_data_layout": "jploski",
        "attention__head_count_kv": 1 if c.multi_query else c.num_kv_heads,
    },
    "stablelm": lambda c: {
        "rope__dimension_count": _rotated(c), "use_parallel_residual": c.use_parallel_residual,
    },
    "nemotron": lambda c: {
        "attention__layer_norm_epsilon": c.norm_eps, "vocab_size": c.vocab_size,
        "rope__dimension_count": _rotated(c), "rope__scaling__type": "none",
    },
    "mamba": _mamba_keys,
    "lfm2": lambda c: {
        "attention__head_count_kv": [c.num_key_value_heads if t != "conv" else 0 for t in c.layer_types],
        "vocab_size": c.vocab_size, "shortconv__l_cache": c.conv_L_cache,
        "attention__layer_norm_rms_epsilon": c.norm_eps,
    },
    "gpt-oss": lambda c: {
        "attention__sliding_window": c.sliding_window, "expert_feed_forward_length": c.intermediate_size,
    },
    "minimax-m2": lambda c: {
        "expert_feed_forward_length": c.intermediate_size, "rope__dimension_count": _rotated(c),
        "expert_gating_func": 2,
    },
}  # fmt: skip


def _permuted(w: np.ndarray, heads: int) -> np.ndarray:
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def _tiled(w: np.ndarray, keys: int, values: int, size: int) -> np.ndarray:
    """Value heads by key head -> the first of all key heads first."""
    order = [k * (values // keys) + v for v in range(values // keys) for k in range(keys)]
    return np.concatenate([w[h * size : (h + 1) * size] for h in order])


def _qwen35(name: str, w: np.ndarray, c: Any) -> np.ndarray:
    keys, values, size = c.linear_num_key_heads, c.linear_num_value_heads, c.linear_value_head_dim
    qk = 2 * keys * c.linear_key_head_dim
    if "in_proj_qkv" in name or "conv1d" in name:
        w = w.squeeze(1) if "conv1d" in name else w
        return np.concatenate([w[:qk], _tiled(w[qk:], keys, values, size)])
    if "in_proj_z" in name:
        return _tiled(w, keys, values, size)
    if "in_proj_a" in name or "in_proj_b" in name or "dt_bias" in name:
        return _tiled(w, keys, values, 1)
    if "A_log" in name:
        return -np.exp(_tiled(w, keys, values, 1))
    if "linear_attn.out_proj" in name:
        return _tiled(w.T, keys, values, size).T
    return w + 1 if name.endswith("norm.weight") and "linear_attn.norm" not in name else w


def _changed(architecture: str, name: str, w: np.ndarray, c: Any) -> np.ndarray:
    """What the converter does to a tensor."""
    if architecture == "llama" and re.search(r"\.(q|k)_proj\.", name):
        return _permuted(w, c.num_attention_heads if ".q_proj." in name else c.num_key_value_heads)
    if architecture in ("gemma", "gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
        return w + 1
    if architecture.startswith("qwen35"):
        return _qwen35(name, w, c)
    if architecture == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight", name):
        return w.T
    if architecture == "bloom" and "query_key_value" in name:
        each = w.reshape(c.n_head, 3, w.shape[0] // c.n_head // 3, *w.shape[1:])
        return np.concatenate([each[:, i].reshape(-1, *w.shape[1:]) for i in range(3)])
    if architecture == "falcon" and "query_key_value" in name:
        kv = 1 if c.multi_query else c.num_kv_heads
        each = w.reshape(kv, c.num_attention_heads // kv + 2, c.head_dim, *w.shape[1:])
        parts = each[:, :-2], each[:, -2:-1], each[:, -1:]
        return np.concatenate([p.reshape(-1, *w.shape[1:]) for p in parts])
    if architecture == "mamba":
        return -np.exp(w) if "A_log" in name else w.squeeze(1) if "conv1d.weight" in name else w
    if architecture == "lfm2" and "conv.conv" in name:
        return w.squeeze(1)
    return w


def _named(architecture: str, names: gguf.TensorNameMap, name: str) -> str:
    name = name.replace("linear_attn.dt_bias", "linear_attn.dt_proj.bias")
    stem, suffix = name.rsplit(".", 1) if name.endswith((".weight", ".bias")) else (name, "")
    found = names.get_name(stem) or names.get_name(stem.removeprefix("transformer."))
    assert found is not None, name
    suffix = suffix or ("weight" if stem.endswith("sinks") else "")
    return f"{found}.{suffix}" if suffix else found


def _tensors(architecture: str, model: tf.PreTrainedModel) -> Iterator[tuple[str, np.ndarray]]:
    enum = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
    names = gguf.get_tensor_name_map(enum, model.config.num_hidden_layers)
    config, norms = model.config, {}
    for name, tensor in model.state_dict().items():
        w = tensor.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        layer = re.search(r"\.(\d+)\.", name)
        block = f"blk.{layer[1]}" if layer else ""
        if ".experts.gate_up_proj" in name:
            suffix, end = (".bias", name.removesuffix("_bias")) if name.endswith("_bias") else (".weight", name)
            if architecture == "gpt-oss":
                w = w if suffix == ".bias" else w.swapaxes(1, 2)
                gate, up = w[:, ::2], w[:, 1::2]
            else:
                gate, up = np.split(w, 2, axis=1)
            assert end.endswith("gate_up_proj")
            yield f"{block}.ffn_gate_exps{suffix}", gate
            yield f"{block}.ffn_up_exps{suffix}", up
        elif ".experts.down_proj" in name:
            bias = name.endswith("_bias")
            w = w.swapaxes(1, 2) if architecture == "gpt-oss" and not bias else w
            yield f"{block}.ffn_down_exps.{'bias' if bias else 'weight'}", w
        elif name.endswith("e_score_correction_bias"):
            yield f"{block}.exp_probs_b.bias", w
        elif ".norms." in name:
            key = f"{block}.attn_{'q' if 'q_layernorm' in name else 'k'}_norm.weight"
            norms.setdefault(key, []).append(w)
        else:
            yield _named(architecture, names, name), _changed(architecture, name, w, config)
    yield from ((key, np.stack(rows)) for key, rows in norms.items())
    yield from _rotary(model)


def _rotary(model: tf.PreTrainedModel) -> Iterator[tuple[str, np.ndarray]]:
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        size = _rotated(model.config)
        plain = rope["rope_theta"] ** (-np.arange(0, size, 2) / size)
        yield "rope_freqs.weight", plain / model.model.rotary_emb.inv_freq.numpy()
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", np.array(rope["long_factor"])
        yield "rope_factors_short.weight", np.array(rope["short_factor"])
