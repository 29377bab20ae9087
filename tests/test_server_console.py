"""The console: what it may show to whom, and the page in a real browser (Chromium, where there is one)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from qbe.server.keys import new_key
from server_running import Running, running, tiny_engine, until

LIMIT_MS = 30_000
TOML = """
[tiers.flex]
bits = [4.0, 4.0]
[tiers.priority]
bits = [8.0, 8.0]
[prices]
currency = "EUR"
output = 10.0
"""
SIZES = [(1280, 800), (390, 844)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = tmp_path_factory.mktemp("config") / "serve.toml"
    config.write_text(TOML)
    with running(tiny_engine, config) as found:
        yield found


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, dict[str, str]]]:
    """A server with keys."""
    config: Path = tmp_path_factory.mktemp("config") / "serve.toml"
    keys, text = {}, TOML
    for name, more in (("alice", ""), ("bob", ""), ("boss", "operator = true\n")):
        keys[name], lines = new_key(name)
        text += lines + more
    config.write_text(text)
    with running(tiny_engine, config) as found:
        yield found, keys


def test_the_page_is_three_files_and_nothing_from_elsewhere(server: Running) -> None:
    for path, kind in (("/", "text/html"), ("/console.css", "text/css"), ("/console.js", "text/javascript")):
        answer = server.http.get(path)
        assert answer.status_code == 200
        assert answer.headers["Content-Type"].startswith(kind)
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "http:" not in answer.text
        assert "https:" not in answer.text
    assert "/v1/qbe/live" in server.http.get("/openapi.json").json()["paths"]


def test_live_shows_what_runs_and_what_ran(server: Running) -> None:
    def live() -> Any:
        return server.http.get("/v1/qbe/live").json()

    body = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "service_tier": "flex"}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.post, "completions", body)
        (row,) = until(lambda: [r for r in live()["requests"] if r["state"] == "running"], "it runs")
        assert (row["tier"], row["key"], row["average_weight_bits"]) == ("flex", "anonymous", 4)
        assert [bits for bits, _ in row["strip"]] == [4, 4, 4]  # two layers and the head
        usage = asked.result(60).json()["usage"]
    done = until(lambda: [r for r in live()["requests"] if r["state"] == "length"], "it has ended")[0]
    assert done["tokens"] == usage["completion_tokens"]
    assert done["cost"] == usage["cost"]
    minute = live()["last_minute"]
    assert minute["flex"]["requests"] >= 1
    assert minute["flex"]["tokens"] >= 1500
    assert minute["flex"]["average_weight_bits"] == 4
    assert minute["priority"]["average_weight_bits"] is None


def test_each_key_sees_its_own_and_an_operator_all(keyed: tuple[Running, dict[str, str]]) -> None:
    server, keys = keyed
    assert server.http.get("/").status_code == 200
    assert server.http.get("/v1/qbe/live").status_code == 401

    def live(name: str) -> Any:
        return server.http.get("/v1/qbe/live", headers={"Authorization": f"Bearer {keys[name]}"}).json()

    for name in ("alice", "bob"):
        assert server.post("completions", {"prompt": name}, Authorization=f"Bearer {keys[name]}").status_code == 200
    until(lambda: len(live("boss")["requests"]) == 2, "both have ended")
    assert {r["key"] for r in live("alice")["requests"]} == {"alice"}
    assert live("alice")["last_minute"]["default"]["requests"] == 1
    assert {r["key"] for r in live("boss")["requests"]} == {"alice", "bob"}
    assert live("boss")["last_minute"]["default"]["requests"] == 2


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=sandbox, timeout=LIMIT_MS)
        yield found
        found.close()


def open_page(
    browser: Any, server: Running, size: tuple[int, int] = SIZES[0], scheme: str = "light"
) -> tuple[Any, list[str]]:
    """A page of the console that is connected, and what went wrong in it so far."""
    page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    page.set_default_timeout(LIMIT_MS)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.goto(server.url)
    return page, wrong


def expect(page: Any, selector: str, text: str, number: int = 0) -> None:
    """Wait until it says so. (Without a function in the page: its policy forbids `eval`.)"""
    from playwright.sync_api import expect as soon

    soon(page.locator(selector).nth(number)).to_contain_text(text, timeout=LIMIT_MS)


def contrast(page: Any, selector: str) -> float:
    """Of an element's text on its nearest ground."""
    from qbe.explain.palette import contrast as ratio

    found = page.evaluate("""selector => {  // in one go: the page renews its lists every second
        const element = document.querySelector(selector);
        let ground = element;
        while (getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)") ground = ground.parentElement;
        return [getComputedStyle(element).color, getComputedStyle(ground).backgroundColor];
    }""", selector)  # fmt: skip
    one, two = (tuple(int(float(n)) for n in c[c.index("(") + 1 : -1].split(",")[:3]) for c in found)
    return ratio(one, two)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_two_tiers_answer_side_by_side(browser: Any, server: Running, size: tuple[int, int], scheme: str) -> None:
    page, wrong = open_page(browser, server, size, scheme)
    expect(page, "#state", "ready")
    page.fill("#prompt", "Why?")
    page.fill("#tokens", "30")
    page.click("#go")
    sides = page.locator(".side")
    for number, (tier, bits) in enumerate((("flex", "4.00"), ("priority", "8.00"))):
        facts = sides.nth(number).locator(".facts")
        expect(page, ".facts", f"{tier}: ", number)
        assert f"{bits} bits" in facts.text_content()
        assert "EUR" in facts.text_content()
        assert sides.nth(number).locator(".answer").text_content() != ""
    page.locator("#requests li").nth(1).wait_for()
    assert page.locator("#requests li").first.locator(".strip i").count() == 3
    page.locator("#mix i").nth(1).wait_for(state="attached")
    assert not page.locator("#login").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "it does not scroll sideways"
    # Both at one moment: what the page shows of memory and of requests moves them.
    left, right = sides.evaluate_all("all => all.map(side => side.getBoundingClientRect().y)")
    assert (left == right) == (size[0] > 620)
    for selector in ("h1", ".numbers .soft", "#tiers li", ".requests .over", "#go", "#stop", ".facts", "#state"):
        assert contrast(page, selector) >= 4.5, selector
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 17, 20)"
    assert dark == (scheme == "dark")
    assert wrong == []
    page.close()


def test_a_key_is_asked_for_and_an_answer_can_be_stopped(browser: Any, keyed: tuple[Running, dict[str, str]]) -> None:
    server, keys = keyed
    page, _ = open_page(browser, server)
    page.wait_for_selector("#login:not([hidden])")
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    expect(page, "#state", "the key is unknown")
    page.fill("#key", keys["alice"])
    page.press("#key", "Enter")
    page.wait_for_selector("#login", state="hidden")
    page.fill("#tokens", "3000")
    page.click("#go")
    until(lambda: len(page.locator(".answer").first.text_content()) > 10, "it is being answered")
    page.click("#stop")
    expect(page, ".facts", "stopped")
    until(lambda: not server.engine.core.has_work(), "nothing runs on")
    page.fill("#prompt", "x" * 5000)  # the context has 4096 tokens
    page.click("#go")
    expect(page, ".facts.bad", "messages")
    page.close()


def test_what_the_server_says_is_text(browser: Any, server: Running) -> None:
    """Neither names nor answers become part of the page."""
    page, _ = open_page(browser, server)
    expect(page, "#state", "ready")
    evil = '<img src=x onerror="window.hit = 1">'
    real = server.http.get("/v1/qbe/live").json()
    row = {"id": evil, "key": evil, "tier": "flex", "state": evil, "seconds": 1, "prompt_tokens": 1, "tokens": 1,
           "average_weight_bits": 4, "cost": 0, "currency": evil, "strip": [[4, evil]]}  # fmt: skip
    said = real | {"model": evil, "currency": evil, "requests": [row]}
    page.route("**/v1/qbe/live", lambda route: route.fulfill(json=said))
    expect(page, "#model", "onerror")
    assert page.locator("img").count() == 0
    assert page.evaluate("window.hit") is None
    page.close()
