"""Which tokens end an answer: by metadata and by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken

from conftest import byte_tokenizer, tiny_llama
from qbe import Engine, SamplingParams
from qbe.engine.stop_tokens import eos_ids, special_tokens


def tokenizer_with(*names: str, special: bool = True, eos: str | None = None) -> Any:
    found = byte_tokenizer()
    found.add_tokens([AddedToken(n, special=special, normalized=False) for n in names])
    if eos is not None:
        found.add_special_tokens({"eos_token": eos})
    return found


def model_with(**ids: Any) -> Any:
    return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ids.get("generation")),
                           config=SimpleNamespace(eos_token_id=ids.get("config")))  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|return|>", "<|endoftext|>", "</s>", "<|eom_id|>",
     "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<|eot|>", "<|eom|>", "<|EOT|>", "<turn|>",
     "<|tool_response>", "[|endofturn|]", "<|assistant_end|>", "<|role_end|>", "<seed:eos>", "[e~[", "[EOT]", "_<EOT>"],
)  # fmt: skip
@pytest.mark.parametrize("special", [True, False])
def test_names_that_end_a_turn(name: str, special: bool) -> None:
    tokenizer = tokenizer_with("<|start|>", name, special=special, eos="<other>")
    token, other = tokenizer.convert_tokens_to_ids([name, "<other>"])
    assert eos_ids(model_with(generation=[7]), tokenizer) == {7, token, other}
    assert eos_ids(model_with(config=8), tokenizer) == {8, token, other}


@pytest.mark.parametrize("names", [
    ("<|end|>", "<|return|>", "<|call|>"), ("<|end|>", "<|calls|>", "<|flush|>"), ("</s>", "<|tool_response>"),
])  # fmt: skip
def test_a_name_that_is_no_end_beside_others(names: tuple[str, ...]) -> None:
    tokenizer = tokenizer_with(*names)
    end, *ends = tokenizer.convert_tokens_to_ids(list(names))
    assert eos_ids(model_with(), tokenizer) == set(ends)
    assert eos_ids(model_with(generation=end), tokenizer) == {end, *ends}  # where the metadata says so


def test_roles_end_a_turn_where_the_next_one_begins_with_them() -> None:
    tokenizer = tokenizer_with("<|user|>", "<|assistant|>", "<|observation|>")
    assert eos_ids(model_with(), tokenizer) == set(tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"]))
    assert eos_ids(model_with(), tokenizer_with("<|user|>", "<|assistant|>")) == set()


def test_text_that_looks_like_a_name_is_text() -> None:
    assert eos_ids(model_with(), byte_tokenizer()) == set()


def test_special_tokens_have_names() -> None:
    tokenizer = tokenizer_with("<|x|>", eos="<eos>")
    assert special_tokens(tokenizer) == {tokenizer.convert_tokens_to_ids(n): n for n in ("<|x|>", "<eos>")}


@pytest.fixture(scope="module")
def engine() -> Engine:
    tokenizer = tokenizer_with("<|im_end|>", "<|other|>", eos="<eos>")
    return Engine(tiny_llama(), tokenizer=tokenizer, policy="uniform", records=False)


def bias(engine: Engine, name: str, value: float = 100.0) -> dict[int, float]:
    return {engine.tokenizer.convert_tokens_to_ids(name): value}


def test_an_answer_ends_at_them(engine: Engine) -> None:
    found = engine.generate("hello", SamplingParams(max_tokens=5, logit_bias=bias(engine, "<|im_end|>")))
    assert (found.text, found.finish_reason, len(found.token_ids)) == ("", "stop", 1)


@pytest.mark.parametrize("stop", ["<|other|>", "<|other|><|other|>"])
def test_a_special_token_stops_where_it_is_asked_to(engine: Engine, stop: str) -> None:
    params = SamplingParams(max_tokens=5, logit_bias=bias(engine, "<|other|>"), stop=(stop,))
    found = engine.generate("hello", params)
    assert (found.text, found.finish_reason, len(found.token_ids)) == ("", "stop", stop.count(">"))
    assert (
        engine.generate("hello", SamplingParams(max_tokens=5, logit_bias=params.logit_bias)).finish_reason == "length"
    )


def test_a_stop_string_of_the_end_token_stops_where_ends_are_ignored(engine: Engine) -> None:
    params = SamplingParams(max_tokens=5, logit_bias=bias(engine, "<eos>"), stop=("<eos>",), ignore_eos=True)
    assert engine.generate("hello", params).finish_reason == "stop"


def test_tokens_that_the_model_has_no_row_for_end_nothing() -> None:
    model, tokenizer = tiny_llama(), tokenizer_with("<|im_end|>")
    model.resize_token_embeddings(200)
    assert eos_ids(model, tokenizer) == set()
