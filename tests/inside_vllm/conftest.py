"""The model of the tests with servers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models_tiny import TOKENS, tiny_tokenizer
from qbe.store.nested_tensor import NestedWeightConfig
from qbe.store.prepare import quantise_to


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `qbe quantize` wrote, of a model that can be split in two."""
    home = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=1, eos_token_id=0,
    )  # fmt: skip
    plain = LlamaForCausalLM(config).eval()
    for weight in plain.parameters():  # so that answers differ, and no two tokens are nearly as likely
        weight.data *= 3
    plain.save_pretrained(home / "plain")
    tiny_tokenizer().save_pretrained(home / "plain")
    return quantise_to(
        str(home / "plain"), home / "qbe", NestedWeightConfig(), torch.device("cpu"), measure=True, progress=False
    )
