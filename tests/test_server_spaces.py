"""Completions of a model whose tokenizer marks spaces, as Llama 2's: text, stops, offsets and logprobs agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from conftest import tiny_llama
from qbe.engine.engine import Engine
from server_running import Running, running

WORDS = ["▁the", "▁capital", "▁of", "▁France", "▁is", "▁Paris", "▁Rome"]
PROMPT = "the capital of France is"


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    pieces = ["<unk>", "<s>", "</s>", "<|x|>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += sorted({letter for word in WORDS for letter in word})
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        begun = word[0]
        for letter in word[1:]:
            if (begun, letter) not in merges:
                merges.append((begun, letter))
            begun += letter
            if begun not in pieces:
                pieces.append(begun)
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    found = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    found.add_special_tokens({"additional_special_tokens": ["<|x|>"]})
    return found


TOKENIZER = metaspace_tokenizer()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    def make() -> Engine:
        model = tiny_llama(vocabulary=len(TOKENIZER))
        return Engine(model, tokenizer=TOKENIZER, policy="uniform", records=False, max_sequences=4)

    with running(make) as found:
        yield found


@pytest.fixture(scope="module")
def api(server: Running) -> openai.OpenAI:
    return server.client


def asked(*tokens: str, **more: Any) -> Any:
    """A body whose answer repeats likely tokens."""
    ids = TOKENIZER.convert_tokens_to_ids(list(tokens))
    bias = {str(i): 100 - n for n, i in enumerate(ids)}
    return {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 3, "logit_bias": bias} | more


def test_the_first_space_is_there(api: openai.OpenAI) -> None:
    found = api.completions.create(**asked("▁Paris")).choices[0].text
    assert found == " Paris Paris Paris"
    ids = [*TOKENIZER(PROMPT)["input_ids"], *TOKENIZER.convert_tokens_to_ids(["▁Paris"] * 3)]
    assert TOKENIZER.decode(ids) == PROMPT + found
    streamed = api.completions.create(**asked("▁Paris"), stream=True)
    assert "".join(c.choices[0].text for c in streamed) == found
    by_ids = api.completions.create(**asked("▁Paris", prompt=TOKENIZER(PROMPT)["input_ids"]))
    assert by_ids.choices[0].text == found
    echoed = api.completions.create(**asked("▁Paris", echo=True)).choices[0].text
    assert echoed == PROMPT + found


@pytest.mark.parametrize("stop", [" Paris", " ", "s P", " Paris Paris", "ris P"])
def test_a_stop_string_may_begin_with_it(api: openai.OpenAI, stop: str) -> None:
    whole = " Paris Paris Paris"
    body = asked("▁Paris", stop=stop, logprobs=0)
    found = api.completions.create(**body).choices[0]
    assert (found.text, found.finish_reason) == (whole[: whole.index(stop)], "stop")
    tokens = [c.choices[0] for c in api.completions.create(**body, stream=True)]
    streamed = [t for c in tokens if c.logprobs for t in c.logprobs.tokens or ()]
    for shown in (found.logprobs.tokens, streamed):  # type: ignore[union-attr]
        # The tokens that the text is of, and none that lies in the stop string alone.
        assert len(shown or ()) == -(-len(found.text) // len(" Paris"))


def test_chat_logprobs_end_with_the_text(api: openai.OpenAI, server: Running) -> None:
    server.engine.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    body = asked("▁Paris", stop="Paris Paris", logprobs=True, max_tokens=5) | {
        "messages": [{"role": "user", "content": "is"}]
    }
    del body["prompt"]
    found = api.chat.completions.create(**body).choices[0]
    assert (found.message.content, found.finish_reason) == ("", "stop")
    assert found.logprobs.content == []  # type: ignore[union-attr]
    longer = api.chat.completions.create(**body | {"stop": "Rome"}).choices[0]
    assert len(longer.logprobs.content) == 5  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("prompt", [" ", "\n", " \t "])
def test_white_space_is_a_prompt(api: openai.OpenAI, prompt: str) -> None:
    found = api.completions.create(model="tiny", prompt=prompt, max_tokens=2, temperature=0)
    assert found.usage is not None
    assert found.usage.prompt_tokens > len(prompt)  # each byte, and where a text begins
    echoed = api.completions.create(model="tiny", prompt=prompt, max_tokens=1, echo=True, temperature=0)
    assert echoed.choices[0].text.startswith(prompt)


def test_offsets_are_those_of_the_text(api: openai.OpenAI) -> None:
    found = api.completions.create(**asked("▁Paris", logprobs=0)).choices[0]
    assert found.logprobs.text_offset == [0, 6, 12]  # type: ignore[union-attr]
    echoed = api.completions.create(**asked("▁Paris", logprobs=0, echo=True)).choices[0]
    offsets, text = echoed.logprobs.text_offset, echoed.text  # type: ignore[union-attr]
    assert [text[a:b] for a, b in zip(offsets, [*offsets[1:], None], strict=True)] == [  # type: ignore[misc]
        "the", " capital", " of", " France", " is", " Paris", " Paris", " Paris"
    ]  # fmt: skip
    ids = [1, *TOKENIZER(PROMPT)["input_ids"]]
    echoed = api.completions.create(**asked("▁Paris", logprobs=0, echo=True, prompt=ids)).choices[0]
    offsets, text = echoed.logprobs.text_offset, echoed.text  # type: ignore[union-attr]
    assert text[offsets[-1] :] == " Paris"  # type: ignore[index]
    alone = api.completions.create(**asked("▁Paris", logprobs=0, prompt=[1])).choices[0]
    assert (alone.text, alone.logprobs.text_offset) == ("Paris Paris Paris", [0, 5, 11])  # type: ignore[union-attr]


def test_special_tokens_take_no_place(api: openai.OpenAI) -> None:
    found = api.completions.create(**asked("<|x|>", logprobs=0)).choices[0]
    assert (found.text, found.logprobs.text_offset) == ("", [0, 0, 0])  # type: ignore[union-attr]
    stopped = api.completions.create(**asked("<|x|>", stop=["<|x|>"], logprobs=0))
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage.completion_tokens == 1  # type: ignore[union-attr]
