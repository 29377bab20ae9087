"""A tokenizer with more tokens than the model has rows, and one that the grammar library cannot read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import httpx2
import llguidance.hf
import pytest
from transformers import AutoTokenizer

from qbe.server.errors import APIError
from qbe.server.grammar import Grammars, json_schema
from server_process import save_tiny, serving
from server_running import LIMIT_S, tiny_parts

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}


def engine(tokenizer: object, vocabulary: int) -> SimpleNamespace:
    eos = frozenset([tokenizer.eos_token_id])  # type: ignore[attr-defined]
    return SimpleNamespace(tokenizer=tokenizer, core=SimpleNamespace(vocabulary=vocabulary, eos_ids=eos))


def test_tokens_without_a_row_are_never_allowed() -> None:
    _, tokenizer = tiny_parts()
    size = len(tokenizer)
    tokenizer.add_tokens(["<|extra|>", "<|more|>"])

    async def compiled() -> None:
        grammars = Grammars(engine(tokenizer, size))  # type: ignore[arg-type]
        try:
            grammar = json_schema(SCHEMA, "response_format")
            constraint = grammars.constraint(await grammars.compile(grammar, 60, 1 << 16, "response_format"))
        finally:
            await grammars.close()
        allowed = constraint.allowed()
        assert allowed.shape == (size,)
        assert allowed.any()

    asyncio.run(compiled())


def test_a_tokenizer_that_cannot_be_read_costs_grammars_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        pass

    def broken(*_: object, **__: object) -> None:
        raise Panic("index out of bounds")

    monkeypatch.setattr(llguidance.hf, "from_tokenizer", broken)
    _, tokenizer = tiny_parts()
    grammars = Grammars(engine(tokenizer, len(tokenizer)))  # type: ignore[arg-type]
    assert grammars.tokenizer is None
    with pytest.raises(APIError, match=r"cannot read this model.s tokenizer \(index out of bounds\)"):
        asyncio.run(grammars.compile("{}", 1, 100, "tools"))


def test_a_larger_tokenizer_serves(tmp_path: Path, home: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    tokenizer.add_tokens([f"<|extra{i}|>" for i in range(200)])
    config = json.loads((folder / "config.json").read_text())
    assert len(tokenizer) > config["vocab_size"]
    tokenizer.save_pretrained(folder)
    message = [{"role": "user", "content": "hello"}]
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    with serving("--model", str(folder), home=home) as (_, url):
        for body in ({"max_tokens": 16}, {"max_tokens": 40, "response_format": format}):
            answer = httpx2.post(
                f"{url}/v1/chat/completions", json={"model": "model", "messages": message} | body, timeout=LIMIT_S
            )
            assert answer.status_code == 200, answer.text
        assert json.loads(answer.json()["choices"][0]["message"]["content"])["a"] in ("x", "y")
