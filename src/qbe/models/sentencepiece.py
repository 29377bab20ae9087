"""Tokenizers of folders that have a SentencePiece model and nothing that transformers has made of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import normalizers
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerBase

from qbe.errors import QBEError

_MODEL = "tokenizer.model"
_BPE = 2
_SAMPLES = ("the first word of a text", "Two  spaces, a line\nand 12345 €", " begins with a space", "word")


def is_alone(folder: Path) -> bool:
    """Whether a folder's tokenizer is a SentencePiece model, which begins with another byte than tiktoken's."""
    if not (folder / _MODEL).is_file() or (folder / "tokenizer.json").is_file():
        return False
    with (folder / _MODEL).open("rb") as file:
        return file.read(1) == b"\n"


def load(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer, the way of building it that gives SentencePiece's own tokens.

    Raises:
        QBEError: there is none, or the package `sentencepiece` is missing.
    """
    if importlib.util.find_spec("sentencepiece") is None:
        raise QBEError(f"{folder / _MODEL} needs the package sentencepiece: 'pip install sentencepiece protobuf'")
    from sentencepiece import SentencePieceProcessor

    own: Any = SentencePieceProcessor(model_file=str(folder / _MODEL))
    for tokenizer in _candidates(folder):
        if all(tokenizer(s, add_special_tokens=False)["input_ids"] == own.encode(s) for s in _SAMPLES):
            return tokenizer
    raise QBEError(
        f"transformers makes another tokenizer of {folder / _MODEL} than SentencePiece: add the model's tokenizer.json"
    )


def _candidates(folder: Path) -> Iterator[PreTrainedTokenizerBase]:
    # Nothing else says whether prompts begin with its token; models with such a file alone are of Llama's kind.
    more: dict[str, Any] = {} if (folder / "tokenizer_config.json").is_file() else {"add_bos_token": True}
    with suppress(Exception):  # of a class that cannot read it
        yield AutoTokenizer.from_pretrained(folder, local_files_only=True, **more)
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

    if ModelProto.FromString((folder / _MODEL).read_bytes()).trainer_spec.model_type != _BPE:
        return
    yield (found := LlamaTokenizer.from_pretrained(folder, local_files_only=True, **more))
    # SentencePiece puts a space in front of a text that begins with one, too.
    found.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    found.backend_tokenizer.pre_tokenizer = None
    yield found
