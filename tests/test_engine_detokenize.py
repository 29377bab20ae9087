"""Streaming text: whole characters, stop strings, and the same text as decoding everything at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from qbe.engine.detokenize import Detokenizer

CORPUS = ["the quick brown fox jumps over the lazy dog", "don't stop now, stopping is not an option"] * 3
EOS = "<eos>"


def _byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=[EOS], show_progress=False),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)


def _sentencepiece_like() -> PreTrainedTokenizerFast:
    """As Llama 2 and Mistral: a mark for the space, bytes for what is not in the vocabulary."""
    pieces = [f"<0x{i:02X}>" for i in range(256)] + list("▁abcdefghijklmnopqrstuvwxyz',")
    vocabulary = {EOS: 0, **{p: i for i, p in enumerate(pieces, 1)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([EOS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)


TOKENIZERS = {"byte-level": _byte_level(), "sentencepiece-like": _sentencepiece_like()}
KINDS = pytest.mark.parametrize("kind", TOKENIZERS)


def stream(kind: str, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    tokenizer = TOKENIZERS[kind]
    detokenizer = Detokenizer(tokenizer, stop, [tokenizer.eos_token_id])
    pieces = []
    for i in ids:
        pieces.append(detokenizer.push(i))
        if detokenizer.stopped is not None:
            break
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == detokenizer.text
    return pieces, detokenizer


def ids_of(kind: str, text: str) -> list[int]:
    return TOKENIZERS[kind](text, add_special_tokens=False)["input_ids"]


@KINDS
@settings(deadline=None, max_examples=60)
@given(text=st.text(st.sampled_from("the fox, don't é 漢 👍🏽 \n"), max_size=40))
def test_pieces_join_to_the_text(kind: str, text: str) -> None:
    ids = ids_of(kind, text)
    pieces, _ = stream(kind, ids)
    assert "".join(pieces) == TOKENIZERS[kind].decode(ids, clean_up_tokenization_spaces=False)
    assert not any("�" in p for p in pieces)


# A sentencepiece decoder takes back characters when a later byte of their run is invalid, which no stream can do.
@settings(deadline=None, max_examples=60)
@given(ids=st.lists(st.integers(0, len(TOKENIZERS["byte-level"]) - 1), max_size=30))
def test_any_ids_join_to_what_decoding_them_gives(ids: list[int]) -> None:
    kind = "byte-level"
    expected = TOKENIZERS[kind].decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(stream(kind, ids)[0]) == expected


@KINDS
def test_a_character_of_many_tokens_comes_whole(kind: str) -> None:
    ids = ids_of(kind, "a👍b")
    assert len(ids) >= 6
    pieces = [p for p in stream(kind, ids)[0] if p]
    assert pieces == ["a", "👍", "b"]


def test_an_unfinished_character_at_the_end_is_shown_as_such() -> None:
    ids = ids_of("byte-level", "a👍")[:-1]
    pieces, _ = stream("byte-level", ids)
    assert pieces[0] == "a"
    assert pieces[-1] == "�"


def test_noise_does_not_pile_up_for_ever() -> None:
    first_byte = ids_of("byte-level", "👍")[0]
    detokenizer = Detokenizer(TOKENIZERS["byte-level"])
    assert "".join(detokenizer.push(first_byte) for _ in range(100))


@KINDS
def test_the_end_token_is_not_text(kind: str) -> None:
    ids = [*ids_of(kind, "the fox"), TOKENIZERS[kind].eos_token_id]
    assert "".join(stream(kind, ids)[0]) == "the fox"


@KINDS
@settings(deadline=None, max_examples=80)
@given(
    text=st.text(st.sampled_from("stop s, not"), max_size=40),
    stop=st.lists(st.text(st.sampled_from("stop "), min_size=1, max_size=5), max_size=3),
)
def test_text_ends_before_the_first_stop_string(kind: str, text: str, stop: list[str]) -> None:
    ids = ids_of(kind, text)
    whole = TOKENIZERS[kind].decode(ids, clean_up_tokenization_spaces=False)
    _, detokenizer = stream(kind, ids, tuple(stop))
    found = [whole.find(s) for s in stop if s in whole]
    if found:
        assert detokenizer.stopped in stop
        # With stop strings inside one another the first that is complete ends the text.
        assert not any(s in detokenizer.text for s in stop)
        assert whole.startswith(detokenizer.text)
        assert any(whole.startswith(detokenizer.text + s) for s in stop)
    else:
        assert detokenizer.stopped is None
        assert detokenizer.text == whole


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(TOKENIZERS["sentencepiece-like"], ("stop",))
    pieces = [detokenizer.push(i) for i in ids_of("sentencepiece-like", "a stab st")]
    assert "".join(pieces) == "a stab "
    assert detokenizer.finish() == "st"
    detokenizer = Detokenizer(TOKENIZERS["sentencepiece-like"], ("stop",))
    pieces = [detokenizer.push(i) for i in ids_of("sentencepiece-like", "a stop, no")]
    assert "".join(pieces) + detokenizer.finish() == "a "
    assert detokenizer.stopped == "stop"


@KINDS
@settings(deadline=None, max_examples=60)
@given(
    before=st.text(st.sampled_from("the fox "), min_size=1, max_size=12),
    after=st.text(st.sampled_from("the fox, é "), min_size=1, max_size=12),
)
def test_what_continues_a_prompt_adds_to_its_text(kind: str, before: str, after: str) -> None:
    """The space before a word is there where the word does not begin the text."""
    tokenizer = TOKENIZERS[kind]
    prompt, answer = ids_of(kind, before), ids_of(kind, after)
    detokenizer = Detokenizer(tokenizer, prompt=prompt)
    found = "".join(map(detokenizer.push, answer)) + detokenizer.finish()
    whole = tokenizer.decode([*prompt, *answer], clean_up_tokenization_spaces=False)
    assert tokenizer.decode(prompt, clean_up_tokenization_spaces=False) + found == whole


def test_a_stop_string_may_begin_with_the_space_of_the_first_word() -> None:
    tokenizer = TOKENIZERS["sentencepiece-like"]
    detokenizer = Detokenizer(tokenizer, (" fox",), prompt=ids_of("sentencepiece-like", "the"))
    assert "".join(map(detokenizer.push, ids_of("sentencepiece-like", "fox jumps"))) == ""
    assert detokenizer.stopped == " fox"


def test_a_prompt_that_ends_within_a_character() -> None:
    first, *rest = ids_of("byte-level", "👍 ok")
    detokenizer = Detokenizer(TOKENIZERS["byte-level"], prompt=[first])
    assert ("".join(map(detokenizer.push, rest)) + detokenizer.finish()).endswith(" ok")


@KINDS
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ((EOS,), "the fox"),
        (("fox" + EOS,), "the "),
        ((EOS + " lazy",), "the fox"),
        ((EOS + " dog", "azy"), "the fox l"),
    ],
)
def test_a_stop_string_may_have_special_tokens(kind: str, stop: tuple[str, ...], text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    detokenizer = Detokenizer(tokenizer, stop)  # as with `ignore_eos`
    ids = [*ids_of(kind, "the fox"), tokenizer.eos_token_id, *ids_of(kind, " lazy dog")]
    if kind == "sentencepiece-like":
        ids = tokenizer(f"the fox{EOS} lazy dog", add_special_tokens=False)["input_ids"]
    found = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
    assert (found, detokenizer.stopped) == (text, stop[-1] if "l" in text else stop[0])


def test_a_special_token_that_ends_nothing_is_no_text() -> None:
    kind = "byte-level"
    ids = [*ids_of(kind, "the"), TOKENIZERS[kind].eos_token_id, *ids_of(kind, " fox")]
    assert "".join(stream(kind, ids, (EOS + "x", "<"))[0]) == "the fox"


@KINDS
@settings(deadline=None, max_examples=60)
@given(
    text=st.text(st.sampled_from("stop s, nté"), max_size=30),
    stop=st.lists(st.text(st.sampled_from("stop "), min_size=1, max_size=4), max_size=2),
)
def test_tokens_are_shown_with_their_text(kind: str, text: str, stop: list[str]) -> None:
    ids = ids_of(kind, text)
    detokenizer = Detokenizer(TOKENIZERS[kind], tuple(stop))
    before = 0
    for n, token in enumerate(ids):
        detokenizer.push(token)
        assert before <= detokenizer.shown <= n + 1
        before = detokenizer.shown
        if detokenizer.stopped is not None:
            break
    detokenizer.finish()
    if detokenizer.stopped is None:
        assert detokenizer.shown == len(ids)
    else:  # the fewest tokens that have all of the text
        shown = TOKENIZERS[kind].decode(ids[: detokenizer.shown], clean_up_tokenization_spaces=False)
        assert shown.startswith(detokenizer.text)
        less = TOKENIZERS[kind].decode(ids[: max(0, detokenizer.shown - 1)], clean_up_tokenization_spaces=False)
        assert len(less.rstrip("�")) < max(1, len(detokenizer.text))
