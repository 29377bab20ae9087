"""Which door is open to whom: metrics' own port, operators' keys, CORS, TLS; what answers say; the ledger's state."""

from __future__ import annotations

import io
import logging
import select
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from qbe.cli.main import main
from qbe.records.ledger import Ledger
from qbe.server.app import make_app
from qbe.server.keys import new_key
from qbe.server.observe import logs
from server_process import save_tiny, start
from server_running import LIMIT_S, Running, running, until

LONG = {"prompt": "x" * 300, "max_tokens": 4}


@pytest.fixture(scope="module")
def keys() -> dict[str, str]:
    return {}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, keys: dict[str, str]) -> Path:
    path, text = tmp_path_factory.mktemp("config") / "serve.toml", ""
    for name, more in (("one", ""), ("two", ""), ("shared", "shared_prefixes = true\n"), ("boss", "operator = true\n"),
                       ("alike", "shared_prefixes = true\n"), ("spent", "tokens_per_day = 50\n")):  # fmt: skip
        keys[name], lines = new_key(name)
        text += lines + more
    path.write_text(text + '[http]\nprivate = true\ncors_origins = ["https://example.org"]\n')
    return path


@pytest.fixture(scope="module")
def server(config: Path) -> Iterator[Running]:
    with running(config=config) as found:
        yield found


def ask(server: Running, key: str, body: Any = LONG, **headers: str) -> httpx2.Response:
    return server.post("completions", body, Authorization=f"Bearer {key}", **headers)


def test_prefixes_are_found_by_their_own_key_alone(server: Running, keys: dict[str, str]) -> None:
    def cached(name: str) -> int:
        usage = ask(server, keys[name]).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached("one") == 0
    assert cached("one") > 200
    assert cached("two") == 0
    assert cached("shared") == 0
    assert cached("alike") > 200  # both ask for it


def test_metrics_and_the_document_want_an_operator(server: Running, keys: dict[str, str]) -> None:
    for path in ("/metrics", "/openapi.json"):
        assert server.http.get(path).status_code == 401
        assert server.http.get(path, headers={"Authorization": f"Bearer {keys['one']}"}).status_code == 403
        assert server.http.get(path, headers={"Authorization": f"Bearer {keys['boss']}"}).status_code == 200
    assert server.http.get("/ready").status_code == 200


def test_sites_that_are_named_may_use_the_api(server: Running, keys: dict[str, str]) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    path = "/v1/completions"
    assert server.http.options(path, headers={"Origin": "https://example.org", **asks}).status_code == 200
    assert server.http.options(path, headers={"Origin": "https://evil.example", **asks}).status_code == 400
    found = ask(server, keys["one"], Origin="https://example.org")
    assert found.headers["access-control-allow-origin"] == "https://example.org"
    assert "X-Request-Id" in found.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in ask(server, keys["one"], Origin="https://evil.example").headers


def test_answers_and_lines_have_the_requests_id(server: Running, keys: dict[str, str]) -> None:
    stream = io.StringIO()
    handler, logger = logging.StreamHandler(stream), logging.getLogger("qbe.server")
    handler.setFormatter(logs.Lines(lambda: server.service.settings))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        assert ask(server, keys["one"], **{"X-Request-Id": "my-id_1"}).headers["x-request-id"] == "my-id_1"
        bad = ask(server, keys["one"], {"prompt": 5}, **{"X-Request-Id": "a b\tc"})
        assert bad.headers["x-request-id"].startswith("req_")
        until(lambda: "request_id=my-id_1" in stream.getvalue(), "the request's line")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    line = next(x for x in stream.getvalue().splitlines() if x.startswith("qbe: refused"))
    for part in ("key=one", "address=127.0.0.1", "path=/v1/completions", "time=20", bad.headers["x-request-id"]):
        assert part in line


def test_a_budget_that_is_spent_ends_service(server: Running, keys: dict[str, str]) -> None:
    body = {"prompt": "x" * 20, "max_tokens": 10, "ignore_eos": True}
    assert ask(server, keys["spent"], body).status_code == 200
    until(lambda: not server.service.quotas._reserved["spent", "tokens"], "it has ended")
    late = ask(server, keys["spent"], body)
    assert (late.status_code, late.json()["error"]["code"]) == (429, "insufficient_quota")
    assert "20 are left" in late.json()["error"]["message"]
    assert int(late.headers["Retry-After"]) > 0


def test_a_file_without_keys_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qbe.server.service._RELOAD_S", 0.02)
    _, lines = new_key("me")
    config = tmp_path / "serve.toml"
    config.write_text(lines)
    with running(config=config) as own:  # on loopback
        config.write_text("[limits]\nqueue = 3\n")
        until(lambda: own.metric("qbe:settings_ok") == 0, "it is refused")
        assert own.post("completions", LONG).status_code == 401
        assert own.service.settings.limits.queue == 64
        config.write_text(lines + "[limits]\nqueue = 3\n")
        until(lambda: own.service.settings.limits.queue == 3, "one with keys is taken over")


def test_a_ledger_that_is_taken_away_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qbe.server.billing._PAUSE_S", 0.05)
    book = tmp_path / "ledger.sqlite"
    with running(ledger=book) as own:
        assert own.post("completions", LONG).status_code == 200
        kept = [p.rename(tmp_path / f"kept-{p.name}") for p in list(tmp_path.glob("ledger.sqlite*"))]
        until(lambda: own.http.get("/ready").status_code == 503, "it says that it is not ready, though nobody asks")
        assert own.http.get("/health").status_code == 200
        assert own.metric("qbe:ledger_ok") == 0
        assert own.post("completions", LONG).json()["error"]["code"] == "ledger"
        for path in kept:
            path.rename(tmp_path / path.name.removeprefix("kept-"))
        until(lambda: own.http.get("/ready").status_code == 200, "it goes on")
        assert own.post("completions", LONG).status_code == 200
        assert own.metric("qbe:ledger_ok") == 1
    assert sum(t.requests for t in Ledger(book).totals()) == 2


def test_two_answers_that_nobody_waits_for_leave_no_open_row(tmp_path: Path) -> None:
    """The second one begins when the first has a token; the client is gone before."""
    book = tmp_path / "ledger.sqlite"
    from server_running import tiny_engine

    with running(lambda: tiny_engine(max_sequences=1), ledger=book) as own:
        body = {"prompt": "x", "max_tokens": 3000, "n": 2, "stream": True, "ignore_eos": True}
        with own.http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        until(lambda: not own.engine.core.has_work(), "it is cancelled")
        until(lambda: Ledger(book).totals() and not Ledger(book).totals()[0].unfinished, "its row is final")
        (entry,) = Ledger(book).entries()
        assert set((entry.finish or "").split(",")) == {"cancelled"}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    try:
        subprocess.run(command + more, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no openssl to make a certificate with: {error}")
    return cert, key


def test_https_and_a_port_for_metrics(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate

    model = save_tiny(tmp_path / "model")
    options = ("--model", str(model), "--policy", "uniform", "--ssl-certfile", str(cert), "--ssl-keyfile", str(key))
    process = start(*options, "--metrics-port", "0", home=tmp_path)
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], LIMIT_S)[0]
        url, metrics = (process.stdout.readline().split()[-1] for _ in range(2))
        assert url.startswith("https://")
        with httpx2.Client(verify=ssl.create_default_context(cafile=str(cert)), timeout=LIMIT_S) as http:
            until(lambda: http.get(f"{url}/ready").status_code == 200, "it is ready")
            assert http.get(f"{url}/v1/models").status_code == 200
            assert http.get(f"{url}/metrics").status_code == http.get(f"{metrics}/v1/models").status_code == 404
            assert http.get(f"{metrics}/metrics").status_code == http.get(f"{metrics}/health").status_code == 200
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def test_wrong_tls_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, said in ((("--ssl-keyfile", "x"), "--ssl-certfile"), (("--ssl-certfile", "/no/such"), "/no/such")):
        with pytest.raises(SystemExit) as ended:
            main(["serve", *options])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


def test_the_document_has_the_bodies() -> None:
    document = make_app(lambda: None).openapi()  # type: ignore[arg-type, return-value]
    for path, name in (("/v1/completions", "CompletionRequest"), ("/v1/chat/completions", "ChatRequest")):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{name}"}
        assert name in document["components"]["schemas"]
