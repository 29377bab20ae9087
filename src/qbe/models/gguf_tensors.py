"""Which tensors of a GGUF file make which parameter of the model, and what undoes llama.cpp's changes to them.

Names are those of the `gguf` package's tables. Every tensor of the file has its place, is part of a block that only
drafts tokens, or is refused by its name; so is a parameter without a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, TensorNameMap, get_tensor_name_map
from transformers import PreTrainedModel

from qbe.errors import QBEError
from qbe.models import gguf_rope
from qbe.models.gguf_header import GGUFHeader, GGUFTensor

Convert = Callable[[list[np.ndarray], Any], np.ndarray]  # (tensors in fp32, text config) -> the parameter


@dataclass(frozen=True)
class Source:
    """What a parameter is made of: `convert` of the tensors, or the one tensor as it is; zeros if there is none."""

    tensors: tuple[GGUFTensor, ...]
    convert: Convert | None = None


def sources(header: GGUFHeader, skeleton: PreTrainedModel) -> dict[str, Source]:
    """Parameter name -> its source. Tied parameters without a tensor are left out.

    Args:
        header: of the file.
        skeleton: the model on the meta device.

    Raises:
        QBEError: a tensor or a parameter that has no counterpart, or another number of weights.
    """
    config = skeleton.config.get_text_config()
    architecture = next(k for k, v in MODEL_ARCH_NAMES.items() if v == header.architecture)
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    expected = {k: tuple(v.shape) for k, v in skeleton.state_dict().items()}
    tied = set(getattr(skeleton, "all_tied_weights_keys", {}))
    found: dict[str, Source] = {}
    for name, shape in expected.items():
        source = _source(header, names, name)
        if source is not None:
            found[name] = source
            _check_size(header, name, source, int(np.prod(shape, dtype=object)))
        elif name not in tied:
            raise QBEError(f"{header.path} does not fit its own metadata: {name} is missing; download it again")
    used = {t.name for s in found.values() for t in s.tensors} | gguf_rope.TENSORS
    drafting = tuple(f"blk.{i}." for i in _drafting_blocks(header, config.num_hidden_layers))
    for name in header.tensors:
        if name not in used and not name.startswith(drafting):
            raise QBEError(
                f"{header.path}: tensor {name[:60]} has no place in transformers' {type(skeleton).__name__}; "
                "use the model's safetensors checkpoint"
            )
    return found


def _check_size(header: GGUFHeader, name: str, source: Source, want: int) -> None:
    split = len(source.tensors) == 1 and ".norms." in name  # one tensor for several parameters
    have = sum(t.numel for t in source.tensors)
    if source.tensors and have != want and not split:
        raise QBEError(
            f"{header.path} does not fit its own metadata: {name} has {have} weights instead of {want}; "
            "download it again"
        )


def _drafting_blocks(header: GGUFHeader, layers: int) -> range:
    """Blocks after the model's own that predict further tokens, to draft with."""
    drafting = header.metadata.get(f"{header.architecture}.nextn_predict_layers", 0)
    return range(layers, layers + drafting) if isinstance(drafting, int) else range(0)


def _source(header: GGUFHeader, names: TensorNameMap, name: str) -> Source | None:
    tensors = header.tensors
    for pattern, parts, convert in _JOINED.get(header.architecture, ()):
        if match := re.fullmatch(pattern, name):
            options = [[p.format(*match.groups()) for p in option] for option in parts]
            for wanted in options:
                if all(w in tensors for w in wanted):
                    made = partial(convert, part=match) if convert is _head_of else convert
                    return Source(tuple(tensors[w] for w in wanted), made)
            return None
    optional = None
    for gguf_name in _candidates(names, name):
        if gguf_name in tensors:
            return Source((tensors[gguf_name],), _conversion(header.architecture, gguf_name))
        if header.architecture in _ZERO_BIASES and _PROJECTION_BIAS.fullmatch(gguf_name):
            optional = Source(())
    return optional


def _candidates(names: TensorNameMap, name: str) -> Iterator[str]:
    """Names that a parameter may have in the file; some models were converted without their outermost module."""
    stem, _, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        stem, suffix = name, ""
    while True:
        if (gguf_name := names.get_name(stem)) is not None:
            yield from (f"{gguf_name}.{suffix}",) if suffix else (gguf_name, f"{gguf_name}.weight")
        _, dot, stem = stem.partition(".")
        if not dot:
            return


def _conversion(architecture: str, gguf_name: str) -> Convert | None:
    for pattern, convert in _CHANGED.get(architecture, ()):
        if re.fullmatch(pattern, gguf_name):
            return convert
    return None


def _unpermute(weights: list[np.ndarray], config: Any, heads: str) -> np.ndarray:
    """llama.cpp takes neighbours where transformers takes halves of a head."""
    (w,), n = weights, getattr(config, heads)
    return w.reshape(n, w.shape[0] // n // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def _minus_one(weights: list[np.ndarray], config: Any) -> np.ndarray:
    return weights[0] - 1


def _transposed(weights: list[np.ndarray], config: Any) -> np.ndarray:
    return weights[0].T


def _kernel(weights: list[np.ndarray], config: Any) -> np.ndarray:
    """A convolution of each channel by itself."""
    return weights[0].reshape(weights[0].shape[0], 1, -1)


def _log_of_negative(weights: list[np.ndarray], config: Any) -> np.ndarray:
    return np.log(-weights[0])


def _one_row(weights: list[np.ndarray], config: Any) -> np.ndarray:
    return weights[0].reshape(1, -1)


def _bloom_qkv(weights: list[np.ndarray], config: Any) -> np.ndarray:
    """All queries, keys, values -> query, key, value of each head."""
    (w,), heads = weights, config.n_head
    return w.reshape(3, heads, w.shape[0] // heads // 3, *w.shape[1:]).swapaxes(0, 1).reshape(w.shape)


def _falcon_qkv(weights: list[np.ndarray], config: Any) -> np.ndarray:
    """All queries, keys, values -> queries, key, value of each key head."""
    (w,), kv, size = weights, 1 if config.multi_query else config.num_kv_heads, config.head_dim
    groups = w.reshape(-1, size, *w.shape[1:])
    q, k, v = groups[: -2 * kv], groups[-2 * kv : -kv], groups[-kv:]
    q = q.reshape(kv, -1, *q.shape[1:])
    return np.concatenate([q, k[:, None], v[:, None]], axis=1).reshape(w.shape)


def _grouped(w: np.ndarray, config: Any, size: int) -> np.ndarray:
    """Rows of value heads, those of all key heads' first one first -> by key head."""
    keys = config.linear_num_key_heads
    return w.reshape(-1, keys, size, *w.shape[1:]).swapaxes(0, 1).reshape(w.shape)


def _value_heads(weights: list[np.ndarray], config: Any, size: str | int = 1) -> np.ndarray:
    return _grouped(weights[0], config, size if isinstance(size, int) else getattr(config, size))


def _value_heads_after_qk(weights: list[np.ndarray], config: Any) -> np.ndarray:
    (w,), qk = weights, 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return np.concatenate([w[:qk], _grouped(w[qk:], config, config.linear_value_head_dim)])


def _value_columns(weights: list[np.ndarray], config: Any) -> np.ndarray:
    return _grouped(weights[0].T, config, config.linear_value_head_dim).T


def _qwen35_decay(weights: list[np.ndarray], config: Any) -> np.ndarray:
    return np.log(-_grouped(weights[0], config, 1))


def _qwen35_kernel(weights: list[np.ndarray], config: Any) -> np.ndarray:
    return _kernel([_value_heads_after_qk(weights, config)], config)


def _gate_and_up(weights: list[np.ndarray], config: Any) -> np.ndarray:
    return np.concatenate(weights, axis=1)


def _alternating(weights: list[np.ndarray], config: Any) -> np.ndarray:
    """Gate and up `[experts, out, in]` or `[experts, out]` -> `[experts, in, 2 out]`, column by column."""
    return np.stack([np.moveaxis(w, 1, -1) for w in weights], axis=-1).reshape(
        *np.moveaxis(weights[0], 1, -1).shape[:-1], -1
    )


def _experts_transposed(weights: list[np.ndarray], config: Any) -> np.ndarray:
    return weights[0].swapaxes(1, 2)


def _head_of(weights: list[np.ndarray], config: Any, part: re.Match[str]) -> np.ndarray:
    return weights[0][int(part[3])]


_HEADS = (
    (r"blk\.\d+\.attn_q\.\w+", partial(_unpermute, heads="num_attention_heads")),
    (r"blk\.\d+\.attn_k\.\w+", partial(_unpermute, heads="num_key_value_heads")),
)
_SHIFTED = ((r".*norm\.weight", _minus_one),)
_SHARED = ((r"blk\.\d+\.ffn_gate_inp_shexp\.weight", _one_row),)
_QWEN35 = (
    (r"blk\.\d+\.ssm_norm\.weight", lambda weights, config: weights[0]),
    *_SHIFTED,
    (r"blk\.\d+\.attn_qkv\.weight", _value_heads_after_qk),
    (r"blk\.\d+\.attn_gate\.weight", partial(_value_heads, size="linear_value_head_dim")),
    (r"blk\.\d+\.ssm_(alpha|beta)\.weight", _value_heads),
    (r"blk\.\d+\.ssm_a", _qwen35_decay),
    (r"blk\.\d+\.ssm_conv1d\.weight", _qwen35_kernel),
    (r"blk\.\d+\.ssm_out\.weight", _value_columns),
)
# Architecture -> (pattern of the file's name, what undoes the converter's change).
_CHANGED: dict[str, tuple[tuple[str, Convert], ...]] = {
    "bloom": ((r"blk\.\d+\.attn_qkv\.\w+", _bloom_qkv),),
    "falcon": ((r"blk\.\d+\.attn_qkv\.\w+", _falcon_qkv),),
    "gemma": _SHIFTED,
    "gemma2": _SHIFTED,
    "gemma3": _SHIFTED,
    "gpt2": ((r"blk\.\d+\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight", _transposed),),
    "lfm2": ((r"blk\.\d+\.shortconv\.conv\.weight", _kernel),),
    "llama": _HEADS,
    "mamba": ((r"blk\.\d+\.ssm_conv1d\.weight", _kernel), (r"blk\.\d+\.ssm_a", _log_of_negative)),
    "nemotron": _SHIFTED,
    "qwen2moe": _SHARED,
    "qwen35": _QWEN35,
    "qwen35moe": (*_QWEN35, *_SHARED),
}
_MIXTURE = (
    (
        r".*layers\.(\d+)\.mlp\.experts\.gate_up_proj",
        (("blk.{0}.ffn_gate_exps.weight", "blk.{0}.ffn_up_exps.weight"), ("blk.{0}.ffn_gate_up_exps.weight",)),
        _gate_and_up,
    ),
)
_DELTA = ((r".*layers\.(\d+)\.linear_attn\.dt_bias", (("blk.{0}.ssm_dt.bias",),), _value_heads),)
# Architecture -> (pattern of the parameter's name, tensors of the file in one form or another, what joins them).
_JOINED: dict[str, tuple[tuple[str, tuple[tuple[str, ...], ...], Any], ...]] = {
    "gpt-oss": (
        (
            r".*layers\.(\d+)\.mlp\.experts\.gate_up_proj",
            (("blk.{0}.ffn_gate_exps.weight", "blk.{0}.ffn_up_exps.weight"),),
            _alternating,
        ),
        (
            r".*layers\.(\d+)\.mlp\.experts\.gate_up_proj_bias",
            (("blk.{0}.ffn_gate_exps.bias", "blk.{0}.ffn_up_exps.bias"),),
            _alternating,
        ),
        (r".*layers\.(\d+)\.mlp\.experts\.down_proj", (("blk.{0}.ffn_down_exps.weight",),), _experts_transposed),
        (
            r".*layers\.(\d+)\.mlp\.experts\.down_proj_bias",
            (("blk.{0}.ffn_down_exps.bias",),),
            lambda weights, config: weights[0],
        ),
    ),
    "llama": _MIXTURE,
    "minimax-m2": (
        *_MIXTURE,
        (
            r".*layers\.(\d+)\.mlp\.e_score_correction_bias",
            (("blk.{0}.exp_probs_b.bias",), ("blk.{0}.exp_probs_b",)),
            lambda weights, config: weights[0],
        ),
    ),
    "qwen2moe": _MIXTURE,
    "qwen35": _DELTA,
    "qwen35moe": (*_DELTA, *_MIXTURE),
    "qwen3moe": _MIXTURE,
    "stablelm": (
        (
            r".*layers\.(\d+)\.self_attn\.(q|k)_layernorm\.norms\.(\d+)\.weight",
            (("blk.{0}.attn_{1}_norm.weight",),),
            _head_of,
        ),
    ),
}
# Where a projection without a bias beside others that have one is llama.cpp's way to say zero.
_ZERO_BIASES = {"falcon", "llama", "nemotron", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "stablelm", "starcoder2"}
_PROJECTION_BIAS = re.compile(r"blk\.\d+\.(attn_(q|k|v|qkv|output)|ffn_(gate|up|down))\.bias")
