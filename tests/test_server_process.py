"""`qbe serve` as a process of its own: start, answer, drain, refuse to start."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from qbe.cli.main import main
from qbe.server.keys import digest
from server_process import save_tiny, serving
from server_running import LIMIT_S, until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("served") / "model")


def test_it_drains_when_it_is_told_to_end(folder: Path, tmp_path: Path) -> None:
    """What ends within the time does, the rest is cut, and nobody else comes in."""
    config = tmp_path / "serve.toml"
    config.write_text("[limits]\ndrain_s = 3\n")
    options = ("--model", str(folder), "--policy", "uniform", "--config", str(config))
    with serving(*options, home=tmp_path) as (process, url), httpx2.Client(timeout=LIMIT_S) as http:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0)
        assert client.models.list().data[0].id == "model"
        body = {"prompt": "x", "max_tokens": 4000, "n": 16, "stream": True, "ignore_eos": True}
        asked: Any = dict(model="model", prompt="x", max_tokens=60, extra_body={"ignore_eos": True}, stream=True)
        with (
            client.completions.create(**asked) as stream,
            http.stream("POST", f"{url}/v1/completions", json=body) as long,
        ):
            chunks, lines = iter(stream), long.iter_lines()
            next(chunks)
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [c.choices[0].finish_reason for c in chunks][-1] == "length"
            assert "shutting_down" in list(lines)[-2]
        assert process.wait(LIMIT_S) == 0
        with pytest.raises(openai.APIConnectionError):
            client.models.list()


@pytest.mark.parametrize("signals", [1, 2])
def test_what_is_cut_at_the_end_hears_why(folder: Path, tmp_path: Path, signals: int) -> None:
    """When the time to drain is over, or with the second signal: no traceback, no plain 500, no stream that breaks."""
    config = tmp_path / "serve.toml"
    config.write_text(f"[limits]\ndrain_s = {1 if signals == 1 else 60}\n")
    options = ("--model", str(folder), "--policy", "uniform", "--config", str(config))
    with serving(*options, home=tmp_path) as (process, url), httpx2.Client(timeout=LIMIT_S) as http:
        body = {"prompt": "x", "max_tokens": 4000, "n": 16, "ignore_eos": True}
        with (
            ThreadPoolExecutor(1) as pool,
            http.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as stream,
        ):
            whole = pool.submit(httpx2.post, f"{url}/v1/completions", json=body, timeout=LIMIT_S)
            lines = stream.iter_lines()
            next(lines)
            until(lambda: len(http.get(f"{url}/v1/qbe/live").json()["requests"]) == 2, "the other one is taken")
            for _ in range(signals):
                process.send_signal(signal.SIGTERM)
                time.sleep(0.2)
            assert "shutting_down" in list(lines)[-2]
            answer = whole.result(LIMIT_S)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert process.wait(LIMIT_S) == 0
        assert process.stderr is not None
        said = process.stderr.read()
        assert "Traceback" not in said
        assert said.count("drain_s is over: 2 requests are cut") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--host", "0.0.0.0"), "there are no keys"),
        (("--host", "no.such.host.invalid"), "no keys"),
        (("--model", "/no/such/model"), "no/such/model"),
        (("--config", "/no/such/file.toml"), "cannot be read"),
        (("--keys", "/no/such/keys.toml"), "/no/such/keys.toml cannot be read"),
        (("--port", "99999"), "out of range"),
        (("--ledger", "/proc/no/ledger.sqlite"), "cannot be written"),
        (("--new-key", "a b"), "letters"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--port", "0", *options])
    errors = capsys.readouterr().err
    assert ended.value.code == 2, errors
    assert said in errors
    assert errors.count("\n") == 1
    assert errors.startswith("qbe: ")


def test_a_new_key_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--new-key", "me"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    key = lines[0].split()[-1]
    assert lines[1:] == ["[keys.me]", f'sha256 = "{digest(key)}"']
