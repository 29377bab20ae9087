"""Folders whose tokenizer is a SentencePiece model alone: its own tokens, or one line."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from conftest import tiny_llama
from qbe import Engine, QBEError, SamplingParams
from qbe.models import load_config_and_tokenizer

WORDS = ["▁the", "▁capital", "▁of", "▁France", "▁is", "▁Paris"]
TEXT = "the capital of France is"


def write_model(path: Path, kind: int) -> int:
    """A SentencePiece model with bytes for what it does not know; 1 is unigram, 2 is BPE. Returns its size."""
    own = importlib.util.find_spec("sentencepiece") is not None  # only one of them can be imported
    name = "sentencepiece.sentencepiece_model_pb2" if own else "transformers.utils.sentencepiece_model_pb2_new"
    protobuf: Any = pytest.importorskip(name, reason="needs protobuf")
    model = protobuf.ModelProto()

    def add(piece: str, score: float, of: int) -> None:
        one = model.pieces.add()
        one.piece, one.score, one.type = piece, score, of

    for piece, of in (("<unk>", 2), ("<s>", 3), ("</s>", 3), *((f"<0x{b:02X}>", 6) for b in range(256))):
        add(piece, 0.0, of)
    pieces = dict.fromkeys(w[:n] for w in WORDS for n in range(2, len(w) + 1))
    pieces |= dict.fromkeys(sorted({letter for w in WORDS for letter in w}))
    for n, piece in enumerate(pieces):
        add(piece, -float(n + 1), 1)
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback = kind, True
    model.trainer_spec.unk_id, model.trainer_spec.bos_id, model.trainer_spec.eos_id = 0, 1, 2
    model.normalizer_spec.add_dummy_prefix = model.normalizer_spec.escape_whitespaces = True
    model.normalizer_spec.remove_extra_whitespaces = False
    path.write_bytes(model.SerializeToString())
    return len(model.pieces)


def folder_with(folder: Path, kind: int = 2) -> Path:
    folder.mkdir()
    tiny_llama(vocabulary=write_model(folder / "tokenizer.model", kind)).save_pretrained(folder)
    return folder


def test_its_own_tokens_and_spaces(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs sentencepiece")
    folder = folder_with(tmp_path / "model")
    own = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    _, tokenizer = load_config_and_tokenizer(folder)
    assert tokenizer(TEXT)["input_ids"] == [own.bos_id(), *own.encode(TEXT)]
    assert own.encode(TEXT, out_type=str) == WORDS[:5]
    for text in (" the", "the  the", "é\n the"):
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == own.encode(text)
    paris = own.piece_to_id("▁Paris")
    with Engine(str(folder), policy="uniform", records=False, blueprint_cache=False, kv_tokens=512) as engine:
        found = engine.generate(TEXT, SamplingParams(max_tokens=2, logit_bias={paris: 100.0}))
    assert found.text == " Paris Paris"


@pytest.mark.skipif(importlib.util.find_spec("sentencepiece") is not None, reason="sentencepiece is installed")
def test_a_missing_package_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(QBEError, match="pip install sentencepiece") as refused:
        load_config_and_tokenizer(folder_with(tmp_path / "model"))
    assert "\n" not in str(refused.value)


def test_what_transformers_makes_another_tokenizer_of_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece", reason="needs sentencepiece")
    folder = folder_with(tmp_path / "model", kind=1)
    with pytest.raises(QBEError, match=r"tokenizer\.json"):
        load_config_and_tokenizer(folder)
