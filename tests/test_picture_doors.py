"""Pictures through the doors: the command line, chat completions, responses, messages."""

from __future__ import annotations

import base64
import concurrent.futures
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from cli_process import qbe
from picture_models import drawn, encoded, save, tiny
from qbe.engine.engine import Engine
from server_running import LIMIT_S, Running, running
from test_pictures import BOMBS, damaged

GREEDY: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0, "extra_body": {"qbe": {"bits": 16}}}


def uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def said(*parts: bytes | str) -> list[dict[str, Any]]:
    """A message of the user in OpenAI's form."""
    content: list[dict[str, Any]] = []
    for p in parts:
        if isinstance(p, str):
            content.append({"type": "text", "text": p})
        else:
            content.append({"type": "image_url", "image_url": {"url": uri(p)}})
    return [{"role": "user", "content": content}]


def make() -> Engine:
    model, tokenizer, processor = tiny("smolvlm")
    about: dict[str, Any] = {"policy": "uniform", "records": False, "max_sequences": 4, "blueprint_cache": False}
    return Engine(model, tokenizer=tokenizer, processor=processor, **about)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(make) as found:
        yield found


ONE, TWO = encoded(drawn(1)), encoded(drawn(2))


def answer(server: Running, *parts: bytes | str, **more: Any) -> Any:
    messages: Any = said(*parts)
    return server.client.chat.completions.create(messages=messages, **GREEDY | more)


def test_chat_completions_read_pictures(server: Running) -> None:
    first, other, again = (answer(server, "What is ", p, "?") for p in (ONE, TWO, ONE))
    assert first.choices[0].message.content == again.choices[0].message.content != other.choices[0].message.content
    plain = answer(server, "What is ?")
    assert first.usage.prompt_tokens > plain.usage.prompt_tokens + 16  # rows are tokens, in usage as in prices
    assert first.usage.prompt_tokens == other.usage.prompt_tokens
    stream = answer(server, "What is ", ONE, "?", stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == first.choices[0].message.content


def test_jpeg_webp_and_gif(server: Running) -> None:
    for kind in ("JPEG", "WEBP", "GIF"):
        assert answer(server, encoded(drawn(3), kind), "x").usage.completion_tokens == 8


def test_responses_and_messages_read_the_same(server: Running) -> None:
    wanted = answer(server, "What is ", ONE, "?")
    parts: Any = [{"type": "input_text", "text": "What is "},
                  {"type": "input_image", "image_url": uri(ONE), "detail": "auto"},
                  {"type": "input_text", "text": "?"}]  # fmt: skip
    response = server.client.responses.create(
        model="tiny", input=[{"role": "user", "content": parts}], max_output_tokens=16, temperature=0,
        extra_body={"qbe": {"bits": 16}},
    )  # fmt: skip
    assert response.usage is not None
    assert response.usage.input_tokens == wanted.usage.prompt_tokens
    kept = server.client.responses.input_items.list(response.id).data[0].to_dict()
    assert [p["type"] for p in kept["content"]] == ["input_text", "input_image", "input_text"]  # type: ignore[attr-defined]
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(ONE).decode()}
    blocks: Any = [{"type": "text", "text": "What is "}, {"type": "image", "source": source},
                   {"type": "text", "text": "?"}]  # fmt: skip
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=LIMIT_S)
    turn: Any = [{"role": "user", "content": blocks}]
    message = client.messages.create(model="tiny", max_tokens=8, messages=turn)
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == wanted.usage.prompt_tokens
    assert client.messages.count_tokens(model="tiny", messages=turn).input_tokens == wanted.usage.prompt_tokens


@pytest.mark.parametrize(("part", "words"), [
    ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "nothing is fetched"),
    ({"type": "image_url", "image_url": "file:///etc/passwd"}, "nothing is fetched"),
    ({"type": "image_url"}, "data: URI"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@"}}, "no base64"),
    ({"type": "image_url", "image_url": {"url": uri(b"\x89PNG\r\n\x1a\n")}}, "picture 1"),
    ({"type": "video_url", "video_url": {"url": "data:"}}, "the type 'text' or 'image_url'"),
])  # fmt: skip
def test_what_cannot_be_read_is_one_line(server: Running, part: dict[str, Any], words: str) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}], "max_tokens": 1}
    refused = server.post("chat/completions", body)
    error = refused.json()["error"]
    assert (refused.status_code, "\n" in error["message"]) == (400, False)
    assert words in error["message"]
    assert error["param"].startswith("messages")


def test_other_roles_have_none(server: Running) -> None:
    body = {"messages": [{**said(ONE)[0], "role": "system"}, *said("x")], "max_tokens": 1}
    refused = server.post("chat/completions", body)
    assert (refused.status_code, "one of the user" in refused.json()["error"]["message"]) == (400, True)
    output = {"type": "function_call_output", "call_id": "1",
              "output": [{"type": "input_image", "image_url": uri(ONE)}]}  # fmt: skip
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    refused = server.post("responses", {"input": [call, output], "max_output_tokens": 16})
    assert (refused.status_code, "one of the user" in refused.json()["error"]["message"]) == (400, True)


def test_hostile_pictures_harm_nobody(server: Running) -> None:
    """Bombs and damage: 200 or 400 in one line, and the server goes on."""
    whole = encoded(drawn(4), "JPEG")
    files = [data for data, _ in BOMBS.values()] + [damaged(whole, seed) for seed in range(100)]
    for data in files:
        if not data:
            continue
        found = server.post("chat/completions", {"messages": said(data), "max_tokens": 1})
        assert found.status_code in (200, 400)
        if found.status_code == 400:
            assert "\n" not in found.json()["error"]["message"]
    assert answer(server, "What is ", ONE, "?").usage.completion_tokens == 8


def test_text_does_not_wait_for_pictures(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are decoded in a thread of their own."""
    tower: Any = server.engine.core.runner.tower
    prepare = tower.processor.prepare

    def slow(picture: Any) -> Any:
        time.sleep(3)
        return prepare(picture)

    monkeypatch.setattr(tower.processor, "prepare", slow)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pictured = pool.submit(answer, server, encoded(drawn(50)), "x")
        answer(server, "x")
        assert not pictured.done()
        assert pictured.result(LIMIT_S).usage.completion_tokens == 8


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("pictures")
    save("smolvlm", found / "model")
    (found / "one.png").write_bytes(ONE)
    (found / "two.jpg").write_bytes(encoded(drawn(2), "JPEG"))
    (found / "cut.png").write_bytes(ONE[:200])
    return found


def generate(home: Path, *images: str, model: str = "model") -> Any:
    options = [o for image in images for o in ("--image", str(home / image))]
    return qbe(
        "generate", "What is it?", "--model", str(home / model), "--policy", "uniform", "--bits", "16", "--greedy",
        "--max-tokens", "8", "--json", *options, home=home,
    )  # fmt: skip


def test_the_command_line_reads_pictures(home: Path) -> None:
    one, two = generate(home, "one.png"), generate(home, "one.png", "two.jpg")
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    tokens = [json.loads(found.stdout)["usage"]["prompt_tokens"] for found in (one, two)]
    assert tokens[1] > tokens[0] + 16


def test_a_quantised_folder_reads_them_too(home: Path) -> None:
    """`qbe quantize` takes the processor along, and `qbe info` says what becomes of pictures."""
    made = qbe("quantize", str(home / "model"), "-o", str(home / "quantised"), home=home)
    assert made.returncode == 0, made.stderr
    found = generate(home, "one.png", model="quantised")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["token_ids"] == json.loads(generate(home, "one.png").stdout)["token_ids"]
    about = json.loads(qbe("info", "--model", str(home / "quantised"), "--json", home=home).stdout)["pictures"]
    assert (about["read"], about["why"], about["tower_nested"]) == (True, None, False)
    assert "tower and projector" in qbe("info", "--model", str(home / "quantised"), home=home).stdout.decode()
    (home / "quantised" / "processor_config.json").unlink()
    refused = qbe("generate", "x", "--model", str(home / "quantised"), "--image", str(home / "one.png"), home=home)
    assert refused.returncode == 2


def test_the_command_line_refuses_in_one_line(home: Path) -> None:
    for file, words in (
        ("cut.png", "cannot be read"),
        ("none.png", "cannot read the picture"),
        ("model", "cannot read"),
    ):
        refused = generate(home, file)
        assert (refused.returncode, refused.stdout) == (2, b"")
        assert words in refused.stderr.decode()
        assert len(refused.stderr.strip().splitlines()) == 1


def test_a_model_of_text_refuses_in_one_line(home: Path) -> None:
    from server_process import save_tiny

    save_tiny(home / "text")
    refused = generate(home, "one.png", model="text")
    assert (refused.returncode, refused.stdout) == (2, b"")
    assert "reads no pictures here: it is a model of text" in refused.stderr.decode()


def test_openai_says_what_was_wrong(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="at most 25000000"):
        answer(server, BOMBS["just too many pixels"][0])
