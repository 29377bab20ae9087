"""A GGUF file's metadata, read so that nothing of it is dropped.

Every key is read by what builds the config or the tokenizer, known to mean nothing for what a model computes, or
refused by its name. Keys and their meanings: `gguf.constants.Keys` and llama.cpp's `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

import math
import re
from typing import Any, NoReturn

from qbe.errors import QBEError
from qbe.models.gguf_header import GGUFHeader

_MAX_EXPERTS = 1 << 16

# Namespaces and keys about the file, its origin, and ways of prompting that no one asks this engine for.
_NO_MEANING = re.compile(
    r"general\.(?!type$).*|GGUF\..*|split\..*|quantize\..*|imatrix\..*|mradermacher\..*"
    r"|tokenizer\.huggingface\.json|tokenizer\.ggml\.(seperator|mask|cls|prefix|suffix|middle|fim_\w+)_token_id"
    r"|tokenizer\.ggml\.token_type_count"
)
# What `qbe.models.gguf_tokenizer` reads. `add_space_prefix` means something for SentencePiece alone: llama.cpp's
# byte-pair encoding (`llama_vocab::impl::tokenize`) puts no space before a text, whatever the key says.
_TOKENIZER = re.compile(
    r"tokenizer\.ggml\.(model|pre|tokens|token_type|scores|merges|precompiled_charsmap|add_bos_token|add_eos_token"
    r"|add_space_prefix|(bos|eos|eot|eom|unknown|padding)_token_id)|tokenizer\.chat_templates?(\..+)?"
)
# Keys whose meaning is read for some architectures only: (in `general.architecture`'s namespace, or whole) -> values
# with which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "activation_sparsity_scale": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0, 1),
    "attention.value_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "embedding_length_per_layer_input": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "moe_every_n_layers": (0, 1),
    "n_deepstack_layers": (0,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0,),
    "rope.scaling.finetuned": (True, False),
    "router_logit_softcapping": (0,),
    "swin_norm": (False,),
    "tensor_data_layout": ("Meta AI original pth", "jploski"),
    "use_parallel_residual": (False,),
    "general.type": ("model",),
    "tokenizer.ggml.add_sep_token": (False,),
    "tokenizer.ggml.normalizer.lowercase": (False,),
    "tokenizer.ggml.normalizer.strip_accents": (False,),
    "tokenizer.ggml.remove_extra_whitespaces": (False,),
    "tokenizer.ggml.suppress_tokens": ([],),
}


class Keys:
    """The keys of the file's architecture, by what follows its name, and which of them were read.

    Args:
        header: of the file.

    Attributes:
        architecture: `general.architecture`.
    """

    def __init__(self, header: GGUFHeader) -> None:
        self.header, self.architecture = header, header.architecture
        self._read: set[str] = {"general.architecture", "general.alignment"}

    def __contains__(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.header.metadata

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is stored."""
        self._read.add(f"{self.architecture}.{key}")
        return self.header.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: float | None = None) -> Any:
        """A finite number; a list of one value for all layers counts as it.

        Raises:
            QBEError: something else, or no such key and no default.
        """
        value = self.get(key, default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        if isinstance(value, list):
            self.refuse(key, "a value of its own for each layer is not read for this architecture")
        if value is None:
            raise QBEError(f"{self.header.path} has no {self.architecture}.{key}; download it again")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise QBEError(
                f"{self.header.path} is corrupt: {self.architecture}.{key} is {str(value)[:60]!r}, no number"
            )
        return value

    def count(self, key: str, default: int | None = None, most: int | None = None) -> int:
        """A whole number from 0 on, at most `most`.

        Raises:
            QBEError: as `number`.
        """
        value = self.number(key, default)
        if value != int(value) or value < 0 or (most is not None and value > most):
            raise QBEError(f"{self.header.path} is corrupt: {self.architecture}.{key} is {value}")
        return int(value)

    def same(self, key: str, value: float) -> None:
        """Refuses another value than this one, which the model computes with; the key may be missing."""
        if key in self and not math.isclose(self.number(key), value, rel_tol=1e-5):
            self.refuse(key, f"but what else the file says makes it {value:.6g}")

    def layers(self) -> int:
        """Blocks of the file; every one has a tensor."""
        return self.count("block_count", most=len(self.header.tensors))

    def experts(self) -> int:
        """Experts of a layer."""
        return self.count("expert_count", most=_MAX_EXPERTS)

    def has_tensor(self, pattern: str) -> bool:
        """Whether the whole name of any tensor matches."""
        return any(re.fullmatch(pattern, name) for name in self.header.tensors)

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raises QBEError that names a key of the architecture and its value."""
        _refuse(self.header, f"{self.architecture}.{key}", why)

    def finish(self) -> None:
        """Refuses the first key that nothing has read, unless it is known to change nothing.

        Raises:
            QBEError: such a key.
        """
        for key, value in self.header.metadata.items():
            if key in self._read or _NO_MEANING.fullmatch(key) or _TOKENIZER.fullmatch(key):
                continue
            neutral = _NEUTRAL.get(key.removeprefix(f"{self.architecture}."), ())
            if not any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral):
                _refuse(self.header, key, "which QBE does not read")


def _refuse(header: GGUFHeader, key: str, why: str) -> NoReturn:
    value = " ".join(str(header.metadata.get(key)).split())[:60]
    raise QBEError(f"{header.path}: {key[:100]} is {value}, {why}; use the model's safetensors checkpoint")
