"""GGUF files of many families, with every key that llama.cpp's converter writes: equal to the model they came from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gguf_families import FAMILIES
from gguf_writer import tiny, write
from qbe.models import load_model


@pytest.mark.parametrize("family", FAMILIES)
def test_file_equals_the_model_it_came_from(family: str, tmp_path: Path) -> None:
    original = tiny(FAMILIES[family][1]())
    loaded = load_model(
        write(tmp_path / "m.gguf", FAMILIES[family][0], original), dtype="float32", progress=False
    ).model
    ids = torch.randint(3, 200, (1, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want, got = original(ids).logits, loaded(ids).logits
    assert (want - got).abs().max() <= 2e-4 * want.abs().max()
