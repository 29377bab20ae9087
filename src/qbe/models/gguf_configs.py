"""The transformers config of a GGUF file."""

from __future__ import annotations

from transformers import AutoConfig, PreTrainedConfig

from qbe.errors import QBEError
from qbe.models.gguf_families import FAMILIES
from qbe.models.gguf_fields import Fields
from qbe.models.gguf_header import GGUFHeader
from qbe.models.gguf_keys import Keys


def config_of(header: GGUFHeader) -> PreTrainedConfig:
    """The config that the metadata describes.

    Raises:
        QBEError: an architecture or a key that is not read, or impossible numbers.
    """
    build = FAMILIES.get(header.architecture)
    if build is None:
        raise QBEError(
            f"{header.path}: GGUF architecture '{header.architecture[:60]}' is not supported; "
            f"use the model's safetensors checkpoint (supported: {', '.join(sorted(FAMILIES))})"
        )
    keys = Keys(header)
    try:
        fields = build(keys) | _common(keys)
        keys.finish()
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    except QBEError:
        raise
    except Exception as e:
        line = (str(e).strip().splitlines() or [type(e).__name__])[0][:160]
        raise QBEError(f"{header.path} is corrupt: its metadata makes no config ({line}); download it again") from e
    config.name_or_path = str(header.path)
    return config


def generation_ids(header: GGUFHeader) -> Fields:
    """Token ids for a GenerationConfig: every id that ends a turn is an `eos_token_id`."""
    get = header.metadata.get
    ends = [get(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(i for i in ends if isinstance(i, int)))
    ids = {"bos_token_id": get("tokenizer.ggml.bos_token_id"), "pad_token_id": get("tokenizer.ggml.padding_token_id")}
    ids = {k: v for k, v in ids.items() if isinstance(v, int)}
    return ids | ({"eos_token_id": eos[0] if len(eos) == 1 else eos} if eos else {})


def _common(keys: Keys) -> Fields:
    """Vocabulary, ties and token ids."""
    embedding = keys.header.tensors.get("token_embd.weight")
    tokens = keys.header.metadata.get("tokenizer.ggml.tokens")
    rows = embedding.shape[0] if embedding is not None else len(tokens) if isinstance(tokens, list) else None
    ids = generation_ids(keys.header)
    return {
        "vocab_size": keys.count("vocab_size", rows),
        "tie_word_embeddings": "output.weight" not in keys.header.tensors,
        **{name: ids.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
