"""MXFP4 checkpoints, as gpt-oss comes, read into 16 bits and nested."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moe_models import tiny_moe_folder
from qbe import Budget, Engine, SamplingParams
from qbe.errors import QBEError
from qbe.models import load_model
from qbe.models.mxfp4 import dequantise
from qbe.store.nested_experts import NestedExperts
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.quantise import quantise_to

POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def random_blocks(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks uint8 [*shape, 16] and scales uint8 [*shape] of numbers about as large as weights are."""
    draw = torch.Generator().manual_seed(sum(shape))
    blocks = torch.randint(256, (*shape, 16), generator=draw, dtype=torch.uint8)
    return blocks, torch.randint(119, 125, shape, generator=draw).to(torch.uint8)


def by_hand(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Number by number, float32 [rows, 32 * blocks] of blocks [rows, blocks, 16]."""
    rows = []
    for row, exponents in zip(blocks.tolist(), scales.tolist(), strict=True):
        numbers = []
        for block, exponent in zip(row, exponents, strict=True):
            for byte in block:
                for code in (byte % 16, byte // 16):
                    sign = -1.0 if code >= 8 else 1.0
                    numbers.append(sign * math.ldexp(POSITIVE[code % 8], exponent - 127))
        rows.append(numbers)
    return torch.tensor(rows)


def as_mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """Gives a tiny gpt-oss's experts as its checkpoints have them; what they are in bfloat16."""
    tensors, plain = load_file(folder / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks, scales = random_blocks(experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        plain[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return plain


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_moe_folder(tmp_path / "mxfp4", "gpt_oss", dtype=torch.bfloat16)


def test_numbers_are_those_written_out() -> None:
    blocks, scales = random_blocks(3, 4)
    scales[0, :2] = torch.tensor([0, 254])  # powers of two at the ends of their range
    assert torch.equal(dequantise(blocks, scales, torch.float32), by_hand(blocks, scales))
    theirs = convert_moe_packed_tensors(blocks[None, 1:], scales[None, 1:])[0].T
    assert torch.equal(dequantise(blocks[1:], scales[1:], torch.bfloat16), theirs)


def test_a_checkpoint_is_read_as_transformers_dequantises_it(folder: Path) -> None:
    plain = as_mxfp4(folder)
    model = load_model(folder, progress=False).model
    assert model.dtype is torch.bfloat16
    found = dict(model.named_parameters())
    assert len(plain) == 4
    for name, expected in plain.items():
        assert torch.equal(found[name], expected)
    assert getattr(model.config, "quantization_config", None) is None


def test_it_is_nested_and_answers(folder: Path, tmp_path: Path) -> None:
    as_mxfp4(folder)
    store = quantise_to(
        str(folder), tmp_path / "store", NestedWeightConfig(), torch.device("cpu"), measure=False, progress=False
    )
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    given = {"policy": "uniform", "records": False, "blueprint_cache": False, "kv_tokens": 256, "device": "cpu"}
    with Engine(str(store), **given) as engine:
        assert sum(isinstance(m, NestedExperts) for m in engine.model.modules()) == 4
        assert len(engine.generate("The house", params, budget=Budget(bits=8)).token_ids) == 4
        full = engine.generate("The house", params, budget=Budget(bits=16))
    with torch.inference_mode():
        loaded = load_model(folder, progress=False)
        ids = loaded.tokenizer("The house", return_tensors="pt").input_ids
        theirs = loaded.model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
    assert full.token_ids == theirs.tolist()


@pytest.mark.parametrize(
    ("damage", "why"),
    [("no scales", "scales: missing"), ("other shape", "is not a matrix of MXFP4 blocks"), ("nan", "is no number")],
)
def test_damaged_blocks_are_one_line(folder: Path, damage: str, why: str) -> None:
    as_mxfp4(folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if n.endswith("down_proj_scales"))
    if damage == "no scales":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:, :-1].contiguous() if damage == "other shape" else tensors[name].fill_(255)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QBEError, match=why) as refused:
        load_model(folder, progress=False)
    assert "\n" not in str(refused.value)
