"""Tiny random checkpoints for the tests of `qbe.models`: a GGUF file and a transformers folder."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from qbe.errors import QBEError

HIDDEN, LAYERS, HEADS, KV_HEADS, FFN = 64, 2, 4, 2, 96
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<|end|>", "<|start|>", *ALPHABET, "Ġa", "he"]
MERGES = ["Ġ a", "h e"]
TEMPLATE = "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"


def tiny_model(tie: bool = True, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        tie_word_embeddings=tie,
        bos_token_id=1,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    merges = [tuple(m.split(" ")) for m in MERGES]
    backend = Tokenizer(models.BPE({t: i for i, t in enumerate(TOKENS)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", bos_token="<|start|>")


def write_folder(folder: Path, model: LlamaForCausalLM | None = None) -> Path:
    model = tiny_model() if model is None else model
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def _permute(w: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of q and k."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def write_gguf(
    path: Path,
    model: LlamaForCausalLM | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    block_count: int = LAYERS,
    tokenizer: bool = True,
) -> Path:
    """A GGUF file of the model; matrices stored as `kind`, norms as F32."""
    model = tiny_model() if model is None else model
    w = gguf.GGUFWriter(path, architecture)
    w.add_name("tiny")
    w.add_block_count(block_count)
    w.add_context_length(128)
    w.add_embedding_length(HIDDEN)
    w.add_feed_forward_length(FFN)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_rope_dimension_count(HIDDEN // HEADS)
    w.add_vocab_size(len(TOKENS))
    if tokenizer:
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre("gpt-2")
        w.add_add_space_prefix(False)
        w.add_token_list(TOKENS)
        w.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
        w.add_token_merges(MERGES)
        w.add_eos_token_id(0)
        w.add_eot_token_id(1)
        w.add_bos_token_id(1)
        w.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        data = tensor.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            data = _permute(data, HEADS if "q_proj" in name else KV_HEADS)
        stored = kind if data.ndim == 2 else gguf.GGMLQuantizationType.F32
        packed = gguf.quantize(np.ascontiguousarray(data), stored)
        stem, suffix = name.rsplit(".", 1)
        w.add_tensor(f"{names.get_name(stem)}.{suffix}", packed, raw_dtype=stored)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def one_line(error: pytest.ExceptionInfo[QBEError], *words: str) -> None:
    """The error is one line and says these words."""
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text
