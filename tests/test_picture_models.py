"""Models that read pictures, tiny and random, through the engine: transformers' answers, steps, prefixes, caches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from picture_models import FAMILIES, drawn, greedy, save, tiny
from qbe.budget import Budget
from qbe.engine.engine import Engine, Request
from qbe.engine.sampling.answer_scoring import AnswerScoring
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.errors import QBEError
from qbe.models.load import quiet
from qbe.pictures import Picture

TOKENS = 16
FULL = Budget(bits=16)
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
ONE, TWO = drawn(1), drawn(2, (33, 70))


def asked(*parts: str | Image.Image) -> list[dict[str, Any]]:
    """A message of the user."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    return [{"role": "user", "content": content}]


def expected(model: Any, tokenizer: Any, processor: Any, *parts: str | Image.Image) -> list[int]:
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    return greedy(model, processor, text, [p for p in parts if not isinstance(p, str)], TOKENS)


def engine_of(family: str, **options: Any) -> Engine:
    model, tokenizer, processor = tiny(family)
    more = {"policy": "uniform", "records": False, "blueprint_cache": False, "device": "cpu"} | options
    return Engine(model, tokenizer=tokenizer, processor=processor, **more)


def written(engine: Engine, messages: list[dict[str, Any]]) -> list[int]:
    return engine.generate(messages, GREEDY, budget=FULL).token_ids


@pytest.fixture(scope="module")
def smol() -> Iterator[Engine]:
    with engine_of("smolvlm", max_batch_tokens=48) as engine:
        yield engine


CASES: list[tuple[str | Image.Image, ...]] = [
    ("What is ", ONE, " and\n", TWO, "? " * 20), (ONE, "x"), ("the same twice: ", TWO, TWO), ("no picture",),
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_transformers(family: str) -> None:
    """Alone, together in steps of 32 tokens that cut pictures, and again on the pages that the first have left."""
    with quiet():
        model, tokenizer, processor = tiny(family)
        wanted = [expected(model, tokenizer, processor, *case) for case in CASES]
    assert len({tuple(w) for w in wanted}) == len(CASES)
    with engine_of(family, max_batch_tokens=32) as engine:
        assert [written(engine, asked(*case)) for case in CASES] == wanted
    with engine_of(family, max_batch_tokens=32) as engine:
        for _ in range(2):
            results = engine.generate_batch([Request(asked(*case), GREEDY, FULL) for case in CASES])
            assert [r.token_ids for r in results] == wanted
        assert any(r.cached_tokens for r in results) or engine.core.states is not None


@pytest.mark.parametrize("family", ["idefics3", "llava_next", "pixtral", "qwen3_vl", "qwen3_5"])
def test_folders_bring_their_processors(family: str, tmp_path: Path) -> None:
    """Of every way in which processors are loaded; the model is the class that has the tower."""
    with quiet():
        model, tokenizer, processor = tiny(family)
        wanted = expected(model, tokenizer, processor, "What? ", ONE)
        save(family, tmp_path)
    if family == "pixtral":  # as in older folders
        template = tmp_path / "chat_template.jinja"
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template.read_text()}))
        template.unlink()
    about: dict[str, Any] = {"policy": "uniform", "records": False, "blueprint_cache": False, "device": "cpu"}
    with Engine(tmp_path, **about) as engine:
        assert written(engine, asked("What? ", ONE)) == wanted


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_of_three_dimensions_matter(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(family) as engine:
        tower: Any = engine.core.runner.tower
        picture = Picture.of(ONE)
        rows = tower.features(picture)
        assert rows.shape[1] == (3 if family == "qwen3_vl" else 1) * 64  # two more layers have rows of their own
        positions = tower.positions([5, *tower.token_ids(picture), 6], [picture])
        assert positions[:, 0].tolist() == [0, 0, 0]
        assert positions[0, 1:-1].unique().tolist() == [1]  # of one moment
        assert positions[:, -1].unique().numel() == 1
        assert int(positions[0, -1]) < positions.shape[1] - 1  # a picture takes fewer positions than rows
        right = written(engine, asked(ONE, "x"))
    with engine_of(family) as engine:
        tower = engine.core.runner.tower
        monkeypatch.setattr(tower, "positions", lambda *_: None)
        assert written(engine, asked(ONE, "x")) != right


def test_another_picture_is_another_prefix(smol: Engine) -> None:
    """Same tokens, same places: only the digest tells them apart."""
    text = "x" * 100
    messages = [asked(text, drawn(seed), text) for seed in (3, 4)]
    first, second = (smol.generate(m, GREEDY, budget=FULL) for m in messages)
    assert first.prompt_tokens == second.prompt_tokens
    assert first.token_ids != second.token_ids
    assert second.cached_tokens == 64  # before the picture
    again = smol.generate(messages[0], GREEDY, budget=FULL)
    assert again.token_ids == first.token_ids
    assert again.cached_tokens > 128


def test_the_tower_runs_once_for_a_picture(smol: Engine) -> None:
    tower: Any = smol.core.runner.tower
    before = tower.runs
    for i in range(3):
        smol.generate(asked(f"{i}: ", drawn(5), drawn(6)), GREEDY, budget=FULL)
    assert tower.runs == before + 2


def test_rows_that_were_let_go_are_made_again(smol: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tower: Any = smol.core.runner.tower
    wanted = written(smol, asked("a", drawn(7)))
    for cache in (tower.rows, tower._prepared, tower._tokens):
        monkeypatch.setattr(cache, "most", 0)
        cache.put(b"", None, 0)
    assert tower.rows.nbytes == 0
    assert written(smol, asked("b", drawn(7))) != wanted
    assert written(smol, asked("a", drawn(7))) == wanted


def test_preemption(smol: Engine) -> None:
    """Three that do not fit together: who gives its pages up computes its picture again."""
    requests = [Request(asked("y" * 150, drawn(seed), "z" * 90), SamplingParams(100, 0, ignore_eos=True), FULL)
                for seed in (8, 9, 10)]  # fmt: skip
    wanted = [smol.generate_batch([r])[0].token_ids for r in requests]
    with engine_of("smolvlm", max_batch_tokens=48, kv_tokens=896) as engine:
        assert [r.token_ids for r in engine.generate_batch(requests)] == wanted
        assert engine.core.scheduler.preempted


def test_an_answer_is_scored_with_its_pictures(smol: Engine) -> None:
    """At its own bits a greedy answer's tokens are the likeliest, if what it saw is seen again."""
    key = smol.submit(Request(asked("What is ", TWO, "?"), GREEDY, budget=FULL))
    sequence = smol.sequence(key)
    while not smol.finished(key):
        smol.step()
    smol.take_result(key)
    scoring, found = AnswerScoring(smol.core, sequence, TOKENS), None
    while found is None:
        found = smol.run_idle(lambda _: scoring.step())
    assert max(found.behind) < 1e-3
    assert found.kl < 1e-5


def test_several_answers_share_the_prompt(smol: Engine) -> None:
    first, second = smol.answers(asked("which? ", drawn(11), "q" * 64), 2, GREEDY, budget=FULL)
    assert first.token_ids == second.token_ids
    assert second.cached_tokens


def test_a_last_row_of_a_picture_is_no_decode_step() -> None:
    """On known pages one row of the prompt is left, and it is a picture's."""
    model, tokenizer, processor = tiny("llava")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
        "{% if p['type'] == 'image' %}<image>{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    about: dict[str, Any] = {"policy": "uniform", "records": False, "blueprint_cache": False, "device": "cpu"}
    with Engine(model, tokenizer=tokenizer, processor=processor, **about) as engine:
        first, again, other = (
            engine.generate(asked("p" * 113, picture), GREEDY, budget=FULL) for picture in (ONE, ONE, TWO)
        )
        assert (first.prompt_tokens, first.cached_tokens, again.cached_tokens) == (129, 0, 128)
        assert first.token_ids == again.token_ids != other.token_ids


def test_draft_tokens_beside_pictures() -> None:
    """Answers that repeat themselves, with positions of three dimensions."""
    with engine_of("qwen2_5_vl", speculate=True) as engine:
        plain = SamplingParams(48, 0, ignore_eos=True)
        wanted = engine.generate(asked(ONE, "again and again"), plain, budget=FULL)
        drafted = engine.generate(
            asked(ONE, "again and again"), replace(plain, speculate=True), budget=FULL
        )  # fmt: skip
        assert drafted.token_ids == wanted.token_ids


def test_lower_bits_and_kv_bits_run(smol: Engine) -> None:
    for budget in (Budget(bits=4), Budget(bits=6, kv_bits=4)):
        result = smol.generate(asked("w" * 100, drawn(13), "v" * 90), GREEDY, budget=budget)
        assert (len(result.token_ids), result.error) == (TOKENS, None)


def test_what_people_type_is_no_picture(smol: Engine) -> None:
    typed = smol.generate(asked("<image> ", drawn(14), " <image>"), GREEDY, budget=FULL)
    assert typed.error is None
    count = typed.prompt_tokens - smol.generate(asked(drawn(14)), GREEDY, budget=FULL).prompt_tokens
    assert count == len("<image>  <image>")


def test_a_failing_tower_ends_one_request(smol: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tower: Any = smol.core.runner.tower
    features = tower.features

    def fails(picture: Picture) -> torch.Tensor:
        if picture.data == bad:
            raise RuntimeError("out of\nluck")
        return features(picture)

    bad = Picture.of(drawn(15)).data
    monkeypatch.setattr(tower, "features", fails)
    one, other = smol.generate_batch([Request(asked(drawn(s)), GREEDY, FULL) for s in (15, 16)])
    assert one.finish_reason == "error"
    assert "a picture could not be read" in str(one.error)
    assert (other.finish_reason, len(other.token_ids)) == ("length", TOKENS)
    assert not smol.core.has_work()


@pytest.mark.parametrize(("content", "said"), [
    ([{"type": "image", "image": object()}], "is a object"),
    ([{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}], "nothing is fetched"),
    ([{"type": "image", "image": b"no picture at all"}], "is no PNG"),
    ([{"type": "image", "image": drawn(1, (8, 8))}] * 33, "more than 32 pictures"),
    ([{"type": "image", "image": drawn(1)}, {"type": "text", "text": "z" * 99}] * 20, "the model's context"),
])  # fmt: skip
def test_what_cannot_be_read_is_refused(smol: Engine, content: Any, said: str) -> None:
    with pytest.raises(QBEError, match=said):
        smol.generate([{"role": "user", "content": content}], GREEDY)


def test_pictures_are_the_users(smol: Engine) -> None:
    with pytest.raises(QBEError, match="one of the user"):
        smol.generate([{"role": "system", "content": [{"type": "image", "image": ONE}]}, *asked("x")], GREEDY)
