"""What a store is made on: the built-in text, files and sets, and how much of them is read."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from conftest import byte_tokenizer, tiny_llama
from models_tiny import tiny_tokenizer
from qbe.errors import QBEError
from qbe.store import calibration_set
from qbe.store.calibration_set import Passage
from qbe.store.calibration_text import BUILT_IN, CalibrationText, built_in, kinds, open_text


def passage(text: str) -> Passage:
    return Passage(text, "dialogue", "en", "text", "up to 2k", len(text), "log.jsonl", "CC0-1.0")


def test_the_built_in_text_has_64_passages_of_eight_kinds_in_turn() -> None:
    text = built_in()
    assert len(text.passages) == len(kinds()) == 64
    assert set(Counter(kinds()).values()) == {8}
    assert all(len(set(kinds()[at : at + 8])) == 8 for at in range(0, 64, 8))
    assert all(len(p.encode()) >= 300 and "===" not in p.split("\n") for p in text.passages)
    assert {"code", "mathematics", "json", "tools", "languages"} <= set(kinds())
    for kind, written in zip(kinds(), text.passages, strict=True):
        if kind == "json":
            assert any(_is_json(part) for part in (written, *written.split("\n"))), written[:60]


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict | list)
    except ValueError:
        return False


def test_it_suits_any_tokenizer_and_keeps_to_the_context() -> None:
    model = tiny_llama(max_position_embeddings=100)
    for tokenizer in (byte_tokenizer(), tiny_tokenizer()):
        assert built_in().smoothing(tokenizer).shape == BUILT_IN.smoothing
        assert built_in().sensitivity(tokenizer).shape == BUILT_IN.sensitivity
        assert built_in().kv(tokenizer).shape == BUILT_IN.kv
    assert built_in().kv(byte_tokenizer(), model).shape == (BUILT_IN.kv[0], 100)


def test_segments_are_of_all_passages_in_turn_and_not_of_their_beginnings_alone() -> None:
    tokenizer = byte_tokenizer()
    passages = tuple("You are a helpful assistant. " + letter * 3000 for letter in "abcdefgh")
    rows = CalibrationText("x", passages, "").segments(tokenizer, (8, 32))
    said = [tokenizer.decode(row) for row in rows]
    assert all(letter * 20 in one for letter, one in zip("bcdefgh", said[1:], strict=True))
    assert len({one[:10] for one in said}) == 8


def test_short_passages_make_a_segment_together_and_long_ones_go_first_for_the_cache() -> None:
    tokenizer = byte_tokenizer()
    text = CalibrationText("x", ("aaaa", "bbbb", "cccc", "d" * 400), "")
    assert [tokenizer.decode(row) for row in text.segments(tokenizer, (1, 10))] == ["aaaabbbbcc"]
    assert [tokenizer.decode(row) for row in text.segments(tokenizer, (2, 20), longest=True)] == ["d" * 20]
    assert text.segments(tokenizer, (2, 4000)).shape == (1, 412)  # all there is
    with pytest.raises(QBEError, match="fewer than 2 tokens"):
        CalibrationText("x", ("a",), "").segments(tokenizer, (1, 10))


def test_tokens_that_the_model_does_not_know_are_refused() -> None:
    model = tiny_llama()
    model.resize_token_embeddings(40)
    with pytest.raises(QBEError, match="but the model knows 0 to 39 only"):
        built_in().sensitivity(byte_tokenizer(), model)


def test_files_that_do_not_do_are_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(QBEError, match=r"cannot be read: No such file"):
        open_text(tmp_path / "none.txt")
    (tmp_path / "short.txt").write_text("a few words")
    with pytest.raises(QBEError, match=r"short.txt has \d+ tokens; give"):
        open_text(tmp_path / "short.txt").windows(tokenizer, 128)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00" * 1000)
    with pytest.raises(QBEError, match="not valid UTF-8"):
        open_text(tmp_path / "binary.txt")
    (tmp_path / "long.txt").write_text("he said a thing or two. " * 20_000)
    assert open_text(tmp_path / "long.txt").windows(tokenizer, 128).shape == (256, 128)


def test_codes_read_an_equal_part_of_each_passage_of_a_set(tmp_path: Path) -> None:
    calibration_set.write(tmp_path / "set", [passage(letter * 20_000) for letter in "abcd"], {"passages": 4})
    text = open_text(tmp_path / "set")
    assert text.name == "set"
    counts = torch.bincount(text.windows(byte_tokenizer(), 4096).flatten())
    assert sorted(counts[counts > 0].tolist()) == [8192] * 4
    assert text.windows(byte_tokenizer(), 4096).shape == (32, 1024)


def test_a_set_that_is_none_or_was_changed_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    about = calibration_set.write(folder, [passage("a text\u2028of two lines\n" * 3)], {"passages": 1})
    assert calibration_set.read(folder).passages[0].text == "a text\u2028of two lines\n" * 3
    assert open_text(folder).digest == about["digest"]
    with pytest.raises(QBEError, match="already exists"):
        calibration_set.write(folder, [], {})
    with pytest.raises(QBEError, match=r"is no calibration set: it has no set\.json"):
        open_text(tmp_path)
    lines = (folder / "passages.jsonl").read_text()
    (folder / "passages.jsonl").write_text(lines.replace("lines", "lives"))
    with pytest.raises(QBEError, match=r"is damaged: its digest is not that in set\.json"):
        open_text(folder)
    (folder / "passages.jsonl").unlink()
    with pytest.raises(QBEError, match=r"it has no passages\.jsonl"):
        open_text(folder)
    (folder / "set.json").write_text('{"format": "qbe-calibration-set", "version": 9}')
    (folder / "passages.jsonl").touch()
    with pytest.raises(QBEError, match="is of version 9"):
        open_text(folder)
    (folder / "set.json").write_text("{")
    with pytest.raises(QBEError, match="is damaged"):
        open_text(folder)
