"""How few tokens a text can have, which is known before it is tokenized."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conftest import byte_tokenizer
from qbe.engine.context_limit import ContextLimit
from qbe.engine.token_length import token_length_bound
from qbe.engine.tokenize import encode
from qbe.errors import QBEError

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def merging(alphabet: list[str] = BYTES, normalizer: Any = None) -> PreTrainedTokenizerFast:
    """Byte-level, with tokens of up to four spaces and eight a."""
    space, a = "\u0120", "a"
    merges = [(space, space), (space * 2, space * 2), (a, a), (a * 2, a * 2), (a * 4, a * 4)]
    words = [*alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(["<a long special token>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


PARTS = st.sampled_from([" " * 9, "a" * 30, "<a long special token>", "\x04" * 7, "\u00e4", "e\u0301", "\U000f0000"])
TOKENIZERS = [
    byte_tokenizer(), merging(), merging([b for b in BYTES if b not in "\u0104\u00f3"]),
    merging(normalizer=normalizers.NFC()),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(TOKENIZERS)))
@given(st.lists(PARTS | st.text(max_size=9), max_size=9).map("".join))
def test_no_text_has_fewer_tokens(number: int, text: str) -> None:
    tokenizer = TOKENIZERS[number]
    found = token_length_bound(tokenizer)
    assert found is not None
    assert len(tokenizer(text)["input_ids"]) >= found.least_tokens(text)


def test_nothing_is_said_of_tokenizers_that_take_text_away() -> None:
    strips = merging()
    strips.add_tokens([AddedToken("<x>", lstrip=True)])
    words = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    for one in (strips, merging(normalizer=normalizers.Strip()), PreTrainedTokenizerFast(tokenizer_object=words)):
        assert token_length_bound(one) is None


def test_what_cannot_fit_is_not_tokenized() -> None:
    class Silent:
        chat_template = "x"

        def __call__(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("it was tokenized")

        def apply_chat_template(self, messages: Any, **_: Any) -> str:
            return str(messages[0]["content"])

    context_limit = ContextLimit(100, token_length_bound(byte_tokenizer()))
    for prompt in ("x" * 100, [{"role": "user", "content": "x" * 100}]):
        with pytest.raises(QBEError, match="100 characters") as refused:
            encode(prompt, Silent(), "tiny", None, context_limit)
        assert refused.value.field == "prompt"
    assert encode("x" * 99, byte_tokenizer(), "tiny", None, context_limit)[2]
