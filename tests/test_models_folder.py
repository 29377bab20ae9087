"""Transformers folders: loaded as transformers loads them; damage is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from models_tiny import one_line, tiny_model, write_folder
from qbe.errors import QBEError
from qbe.models import load_model


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["auto", "float16", "float32"])
def test_folder_loads_and_casts(tmp_path: Path, stored: torch.dtype, dtype: str) -> None:
    original = tiny_model().to(stored)
    write_folder(tmp_path, original)
    (tmp_path / "nested-00001.safetensors").write_bytes(b"not read here")
    (tmp_path / "qbe.json").write_text("{}")
    loaded = load_model(tmp_path, dtype=dtype, progress=False)
    wanted = stored if dtype == "auto" else getattr(torch, dtype)
    assert loaded.dtype is wanted
    assert loaded.name == tmp_path.name
    for name, tensor in original.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor.to(wanted)), name
    tied = loaded.model
    assert tied.lm_head.weight.data_ptr() == tied.model.embed_tokens.weight.data_ptr()


def test_sharded_folder(tmp_path: Path) -> None:
    original = tiny_model()
    write_folder(tmp_path, original)
    (tmp_path / "model.safetensors").unlink()
    original.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = load_model(tmp_path, progress=False)
    assert torch.equal(loaded.model.model.norm.weight, original.model.norm.weight)
    next(tmp_path.glob("model-*.safetensors")).unlink()
    with pytest.raises(QBEError) as e:
        load_model(tmp_path, progress=False)
    one_line(e, "is missing")


def test_mixture_of_experts_and_state_space_folders(tmp_path: Path) -> None:
    """transformers' own conversions (fused experts, parameters kept in fp32) work on the lazy tensors."""
    from transformers import Mamba2Config, Mamba2ForCausalLM, MixtralConfig, MixtralForCausalLM

    small = dict(vocab_size=300, hidden_size=32, num_hidden_layers=2, bos_token_id=1, eos_token_id=0, pad_token_id=0)
    models = [
        MixtralForCausalLM(
            MixtralConfig(
                **small, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4
            )
        ),
        Mamba2ForCausalLM(Mamba2Config(**small, num_heads=4, head_dim=16, state_size=8, n_groups=1)),
    ]
    for i, model in enumerate(models):
        folder = write_folder(tmp_path / str(i), model)
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        ours = load_model(folder, dtype="bfloat16", progress=False)
        assert type(ours.model) is type(theirs)
        for name, tensor in theirs.state_dict().items():
            mine = ours.model.state_dict()[name]
            assert mine.dtype is tensor.dtype, name
            assert torch.equal(mine, tensor), name


@pytest.mark.parametrize(
    "damage", ["cut", "header", "empty", "config", "index", "pickle", "quantised", "shape", "lost"]
)
def test_damaged_folder(tmp_path: Path, damage: str) -> None:
    write_folder(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    raw = weights.read_bytes()
    words = {
        "pickle": "safetensors",
        "quantised": "already quantised",
        "shape": "different models",
        "lost": "incomplete",
    }
    if damage == "cut":
        weights.write_bytes(raw[:-100])
    elif damage == "header":
        weights.write_bytes(raw[:8] + b"XXXX" + raw[12:])
    elif damage == "empty":
        weights.write_bytes(b"")
    elif damage == "config":
        config.write_text("{")
    elif damage == "index":
        weights.unlink()
        (tmp_path / "model.safetensors.index.json").write_text("[]")
    elif damage == "pickle":
        weights.rename(tmp_path / "pytorch_model.bin")
    elif damage == "lost":
        model = tiny_model()
        state = {k: v for k, v in model.state_dict().items() if "layers.1.mlp.up" not in k}
        model.save_pretrained(tmp_path, state_dict=state)
    else:
        fields = json.loads(config.read_text())
        change = (
            {"quantization_config": {"quant_method": "awq"}} if damage == "quantised" else {"intermediate_size": 97}
        )
        config.write_text(json.dumps(fields | change))
    with pytest.raises(QBEError) as e:
        load_model(tmp_path, progress=False)
    one_line(e, words.get(damage, "corrupt" if damage != "config" else "config.json"))
