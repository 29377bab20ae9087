"""Configs that ask for the impossible are refused at once, in one line, by whatever loads the model."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import byte_tokenizer, tiny_llama
from models_tiny import one_line, tiny_model, write_folder, write_gguf
from qbe import Engine
from qbe.errors import QBEError
from qbe.models import load_model
from qbe.models.config_check import check_counts
from qbe.models.folder_weights import lazy_state_dict


def folder(where: Path, **changes: Any) -> Path:
    write_folder(where)
    config = where / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return where


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_hidden_layers": 100_000}, "num_hidden_layers 100000"),
        ({"num_hidden_layers": 10**15}, "num_hidden_layers"),
        ({"num_hidden_layers": float("inf")}, "num_hidden_layers inf"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers"),
        ({"num_experts": 10**9}, "num_experts"),
        ({"num_hidden_layers": 400}, "M weights"),  # few enough to build, too many to fill
    ],
)
def test_more_parts_than_weights_are_refused_quickly(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    start = time.monotonic()
    with pytest.raises(QBEError) as e:
        load_model(folder(tmp_path, **changes), progress=False)
    assert time.monotonic() - start < 20  # it took minutes
    one_line(e, word, "config.json", "different models")


def test_unused_parts_of_a_config_do_not_count(tmp_path: Path) -> None:
    """Defaults for a tower that the checkpoint lacks, and experts that lie in one tensor."""
    write_folder(tmp_path)
    weights = lazy_state_dict(tmp_path)
    first = max(t.shape[0] for t in weights.values())
    for changes in ({"vision_config": {"depth": 32, "num_hidden_layers": 27}}, {"num_experts": first}, {"depth": None}):
        (tmp_path / "config.json").write_text(json.dumps(changes))
        check_counts(tmp_path, weights)


@pytest.mark.parametrize("field", ["max_position_embeddings", "num_hidden_layers"])
@pytest.mark.parametrize("value", [0, -1, "many", 2.5, True, [3]])
def test_limits_below_one_are_refused(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(QBEError) as e:
        load_model(folder(tmp_path, **{field: value}), progress=False)
    one_line(e, field, "config.json")


def test_a_gguf_without_room_for_a_token_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    add = gguf.GGUFWriter.add_context_length
    monkeypatch.setattr(gguf.GGUFWriter, "add_context_length", lambda self, _: add(self, 0))
    with pytest.raises(QBEError) as e:
        load_model(write_gguf(tmp_path / "m.gguf", tiny_model()), progress=False)
    one_line(e, "max_position_embeddings is 0", "m.gguf")


def test_a_model_in_memory_without_room_for_a_token_is_refused() -> None:
    model = tiny_llama()
    model.config.max_position_embeddings = 0
    with pytest.raises(QBEError) as e:
        Engine(model, tokenizer=byte_tokenizer(), device="cpu", policy="uniform", records=False)
    one_line(e, "max_position_embeddings is 0")
