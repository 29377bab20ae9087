"""Ten turns through HTTP: at a tier, a conversation reuses what it reuses at fixed bits; what usage and records say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qbe.budget import Budget
from qbe.engine.result import Request
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.records import RecordStore
from server_running import Running, running, tiny_engine

SYSTEM = "You are a helpful assistant. " * 18  # a page and more than a stretch of pages
TURNS = (
    "Write a long and detailed essay about the history of philosophy, with many examples, and compare the schools.",
    "Hi.",
    "Thanks!",
    "What is 2+2?",
    "Write a Python function that reverses a linked list, then prove that it is right, step by step, in every case.",
    "Why?",
    "Explain in depth how a compiler allocates registers, and discuss the trade-offs between the known algorithms.",
    "Is 7 a prime number?",
    "Tell me a story about a fox, a crow and a river; it should have three parts, and each should end with a question.",
    "Bye.",
)
PRICES = "[prices]\ninput = 10.0\ncached_input = 1.0\noutput = 40.0\n"
Usage = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("conversations")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    (folder / "serve.toml").write_text(PRICES)
    make = lambda: tiny_engine(policy="tiered", records=folder / "records.sqlite")  # noqa: E731
    with running(make, config=folder / "serve.toml") as found:
        yield found


def converse(server: Running, system: str, turns: tuple[str, ...] = TURNS, **more: Any) -> list[Usage]:
    """The usage of each turn; answers are letters, so that they are the same tokens in the history."""
    messages, found = [{"role": "system", "content": system}], []
    for text in turns:
        messages.append({"role": "user", "content": text})
        body = {"messages": messages, "max_tokens": 12, "temperature": 0,
                "response_format": {"type": "grammar", "grammar": "start: /[a-z ]{12}/"}, **more}  # fmt: skip
        answer = server.post("chat/completions", body)
        assert answer.status_code == 200, answer.text
        messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
        found.append(answer.json()["usage"])
    return found


def cached(usages: list[Usage]) -> int:
    return sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)


def test_ten_turns_at_the_default_tier_reuse_what_fixed_bits_reuse(server: Running, folder: Path) -> None:
    fixed = converse(server, f"A. {SYSTEM}", qbe={"bits": 6})
    default = converse(server, f"B. {SYSTEM}")
    assert cached(fixed) > 4000
    assert cached(default) >= 0.95 * cached(fixed)
    asked, read = ([u["qbe"][f"{name}_weight_bits"] for u in default] for name in ("asked", "average"))
    assert len(set(asked)) > 1, "its turns' scores would have given it several blueprints"
    assert set(read) == {asked[0]}, "and it kept the first"
    assert {u["qbe"]["cached_weight_bits"] for u in default[1:]} == {asked[0]}
    for usage, a, r in zip(default, asked, read, strict=True):
        known = usage["prompt_tokens_details"]["cached_tokens"]
        tokens = (usage["prompt_tokens"] - known) * 10 + known + usage["completion_tokens"] * 40
        assert usage["cost"] == pytest.approx(tokens / 1e6 * min(a, r) / 16, rel=1e-4), "no more than was asked for"
    assert any(a < r for a, r in zip(asked, read, strict=True))
    last = RecordStore(folder / "records.sqlite").list(1)[0]
    assert last.cached_tokens == default[-1]["prompt_tokens_details"]["cached_tokens"]
    assert round(last.asked_weight_bits or 0, 4) == asked[-1]
    assert round(last.cached_weight_bits or 0, 4) == round(last.average_weight_bits or 0, 4) == read[-1]


def test_others_with_the_same_system_prompt_have_the_bits_of_their_own_score(server: Running) -> None:
    usages = [converse(server, f"C. {SYSTEM}", (text,))[0] for text in (TURNS[4], TURNS[3], TURNS[1], "Hello there.")]
    assert all(u["qbe"]["average_weight_bits"] == u["qbe"]["asked_weight_bits"] for u in usages)
    high, low = (u["qbe"]["average_weight_bits"] for u in usages[:2])
    assert high > low
    assert [cached([u]) for u in usages] == [0, 512, 512, 512]
    assert usages[1]["qbe"]["cached_weight_bits"] == high, "more bits than it asks for serve it, too"


def test_a_client_that_fixes_bits_gets_these_whatever_its_conversation_had(server: Running) -> None:
    first = converse(server, f"D. {SYSTEM}", TURNS[:1], qbe={"min_bits": 7.5, "max_bits": 8})[0]
    assert first["qbe"]["average_weight_bits"] > 7.4
    messages = [{"role": "system", "content": f"D. {SYSTEM}"}, {"role": "user", "content": TURNS[0]}]
    body = {"messages": [*messages, {"role": "assistant", "content": "x"}, messages[1]], "max_tokens": 4}
    exact = server.post("chat/completions", body | {"qbe": {"bits": 6}}).json()["usage"]
    assert (cached([exact]), exact["qbe"]["average_weight_bits"]) == (0, 6.0)
    least = server.post("chat/completions", body | {"qbe": {"min_bits": 6.5}}).json()["usage"]
    assert cached([least]) == 512, "8 bits are no fewer than 6.5"
    assert least["qbe"]["average_weight_bits"] >= 6.45


def test_python_callers_begin_on_pages_with_more_bits_and_salts_part_them() -> None:
    with tiny_engine() as engine:
        prompt, params = [*range(1, 250)] * 3, SamplingParams(max_tokens=4, ignore_eos=True)

        def ask(salt: bytes = b"", **budget: Any) -> tuple[int, float | None, float]:
            request = Request(prompt, params, Budget(**budget), cache_salt=salt)
            found = engine.generate_batch([request])[0]
            return found.cached_tokens, found.cached_weight_bits, found.average_weight_bits

        assert ask(tier="priority") == (0, None, 8.0)
        assert ask(tier="flex") == (704, 8.0, 4.0)
        assert ask(tier="flex", salt=b"another") == (0, None, 4.0)
        assert ask(bits=4) == (0, None, 4.0), "who fixes bits gets no others"
        assert ask(tier="flex") == (704, 4.0, 4.0), "its own where there are"
        assert ask(tier="priority") == (704, 8.0, 8.0)
        assert ask(bits=8) == (704, 8.0, 8.0)
