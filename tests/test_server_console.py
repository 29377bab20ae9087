"""The console: what it may show to whom, and the page in a real browser (Chromium, where there is one)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from qbe.server.keys import ANYONE, Client, new_key
from qbe.server.observe.live import LiveView
from qbe.server.observe.overview import warnings
from qbe.server.settings import Key
from server_running import Running, running, tiny_engine, until

LIMIT_MS = 30_000
TOML = """
[tiers.flex]
bits = [4.0, 4.0]
[tiers.priority]
bits = [8.0, 8.0]
[prices]
currency = "EUR"
input = 1.0
output = 10.0
"""
SIZES = [(1440, 900), (390, 844)]
FILES = ("console.css", "console.js", "differences.js", "format.js", "playground.js")


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
    for name, more in (("alice", ""), ("bob", 'tiers = ["flex"]\n'), ("boss", "operator = true\n")):
        keys[name], lines = new_key(name)
        text += lines + more
    config.write_text(text)
    with running(tiny_engine, config) as found:
        yield found, keys


def test_the_page_is_a_few_files_and_nothing_from_elsewhere(server: Running) -> None:
    for path in ("/", *(f"/{name}" for name in FILES)):
        answer = server.http.get(path)
        assert answer.status_code == 200
        kind = {"css": "text/css", "js": "text/javascript"}.get(path.rpartition(".")[2], "text/html")
        assert answer.headers["Content-Type"].startswith(kind)
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "http:" not in answer.text
        assert "https:" not in answer.text
    assert "/v1/qbe/live" in server.http.get("/openapi.json").json()["paths"]


def test_live_shows_what_runs_and_what_ran(server: Running) -> None:
    def live() -> Any:
        return server.http.get("/v1/qbe/live").json()

    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "service_tier": "flex"}
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
    assert minute["flex"]["tokens"] >= 500
    assert minute["flex"]["average_weight_bits"] == 4
    assert minute["priority"]["average_weight_bits"] is None
    history = live()["history"]
    assert len(history) == 60
    assert sum(m["flex"] for m in history[-3:]) >= 500
    assert sum(m["cost"] for m in history) >= usage["cost"] > 0
    assert done["ended"] is not None


def test_the_last_hour_is_kept_by_minute_and_the_last_minute_by_second() -> None:
    now = 960.0  # a minute begins
    view = LiveView(lambda: now)
    view.wrote("alice", "flex", 10, 4.0, 1.0)
    now += 30
    view.wrote("bob", "flex", 30, 8.0, 1.0)
    alice = Client("alice", Key(sha256="0" * 64))
    minute = view.describe(ANYONE)["last_minute"]["flex"]
    assert (minute["tokens"], minute["average_weight_bits"], minute["joules"]) == (40, 7.0, 2.0)
    assert view.describe(alice)["last_minute"]["flex"]["tokens"] == 10
    now += 3 * 60
    assert view.describe(ANYONE)["last_minute"]["flex"]["tokens"] == 0
    assert [i for i, m in enumerate(view.describe(ANYONE)["history"]) if m["flex"]] == [56]
    now += 57 * 60
    assert not any(m["flex"] for m in view.describe(ANYONE)["history"])


def test_refusals_are_told_for_five_minutes() -> None:
    now = 1000.0
    view = LiveView(lambda: now)
    for code in ("queue_full", "queue_full", None):
        view.turned_away(429, code)
    assert view.refusals() == {"queue_full": 2, "429": 1}
    now += 6 * 60
    assert view.refusals() == {}


def test_operators_are_warned_and_nobody_else(keyed: tuple[Running, dict[str, str]]) -> None:
    server, keys = keyed

    def warned(name: str) -> list[str]:
        headers = {"Authorization": f"Bearer {keys[name]}"}
        found: list[str] = server.http.get("/v1/qbe/live", headers=headers).json()["warnings"]
        return found

    assert server.post("completions", {"prompt": ""}, Authorization="Bearer wrong").status_code == 401
    server.service.observer.settings_read("serve.toml: tiers: no")
    try:
        assert any("serve.toml: tiers: no" in line for line in warned("boss"))
        assert server.metric("qbe:settings_ok") == 0
        assert any("invalid_api_key" in line for line in warned("boss"))
        assert warned("alice") == []
    finally:
        server.service.observer.settings_read(None)
    assert not any("serve.toml" in line for line in warned("boss"))


def test_what_is_wrong_is_a_sentence_each() -> None:
    found = warnings(False, "x", {"flex": 0.5, "default": 0.0}, {"queue_full": 2, "timeout": 1})
    assert len(found) == 4
    assert "flex 50%." in found[2]
    assert "default" not in found[2]
    assert "3 requests were refused within five minutes: 2 queue_full, 1 timeout." in found[3]
    assert warnings(True, None, {"flex": 0.0}, {}) == []


def test_a_key_learns_what_it_may_use(keyed: tuple[Running, dict[str, str]]) -> None:
    server, keys = keyed

    def key(name: str) -> Any:
        headers = {"Authorization": f"Bearer {keys[name]}"}
        return server.http.get("/v1/qbe/live", headers=headers).json()["key"]

    assert (key("bob")["name"], key("bob")["operator"], list(key("bob")["tiers"])) == ("bob", False, ["flex"])
    assert list(key("boss")["tiers"]) == ["flex", "default", "priority"]
    assert key("boss")["operator"]
    assert key("bob")["tiers"]["flex"] == {
        "bits": [4.0, 4.0], "ceiling": 16.0, "input": 1.0, "cached_input": 0.0, "output": 10.0,
    }  # fmt: skip


def test_each_key_sees_its_own_and_an_operator_all(keyed: tuple[Running, dict[str, str]]) -> None:
    server, keys = keyed
    assert server.http.get("/").status_code == 200
    assert server.http.get("/v1/qbe/live").status_code == 401

    def live(name: str) -> Any:
        return server.http.get("/v1/qbe/live", headers={"Authorization": f"Bearer {keys[name]}"}).json()

    for name in ("alice", "bob"):
        body = {"prompt": name, "service_tier": "flex"}
        assert server.post("completions", body, Authorization=f"Bearer {keys[name]}").status_code == 200
    until(lambda: len(live("boss")["requests"]) == 2, "both have ended")
    assert {r["key"] for r in live("alice")["requests"]} == {"alice"}
    assert live("alice")["last_minute"]["flex"]["requests"] == 1
    assert {r["key"] for r in live("boss")["requests"]} == {"alice", "bob"}
    assert live("boss")["last_minute"]["flex"]["requests"] == 2


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
    page.click("#more summary")
    page.fill("#system", "Be brief.")
    page.click("#go")
    sides = page.locator(".side")
    for number, (tier, bits) in enumerate((("flex", "4.00"), ("priority", "8.00"))):
        facts = sides.nth(number).locator(".facts")
        expect(page, ".facts", f"{tier}: ", number)
        assert f"{bits} bits" in facts.text_content()
        assert "€" in facts.text_content()
        assert "e-" not in facts.text_content()
        assert sides.nth(number).locator(".answer").text_content() != ""
    expect(page, "#verdict", "A million of them: €")
    sides.first.locator(".strip i").nth(2).wait_for()
    page.locator("#requests tbody tr").nth(1).wait_for()
    assert page.locator("#requests tbody tr").first.locator(".strip i").count() == 3
    assert page.locator("#requests th[scope=col]:visible").count() == 9, "all but the key"
    page.locator("#history i").nth(1).wait_for(state="attached")
    assert not page.locator("#login").is_visible()
    assert not page.locator("#leave").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "it does not scroll sideways"
    assert page.locator("main section").first.get_attribute("id") == "playground"
    # Both at one moment: what the page shows of memory and of requests moves them.
    left, right = sides.evaluate_all("all => all.map(side => side.getBoundingClientRect().y)")
    assert (left == right) == (size[0] > 620)
    texts = ("h1", ".numbers .soft", "#tiers td", "#tiers thead th", "#requests .over td", "#go", "#stop", ".facts")
    for selector in (*texts, "#state", "summary", "label", "#verdict"):
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
    assert not page.locator("#inside").is_visible()
    page.fill("#key", keys["alice"])
    page.press("#key", "Enter")
    page.wait_for_selector("#login", state="hidden")
    expect(page, "#who", "alice")
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
           "average_weight_bits": 4, "cost": 0, "currency": evil, "strip": [[4, evil]], "ended": None}  # fmt: skip
    key = real["key"] | {"name": evil, "operator": True}
    said = real | {"model": evil, "currency": evil, "requests": [row], "warnings": [evil], "key": key}
    page.route("**/v1/qbe/live", lambda route: route.fulfill(json=said))
    expect(page, "#model", "onerror")
    assert page.locator("img").count() == 0
    assert page.evaluate("window.hit") is None
    page.close()


def sign_in(page: Any, key: str) -> None:
    page.wait_for_selector("#login:not([hidden])")
    page.fill("#key", key)
    page.press("#key", "Enter")
    page.wait_for_selector("#inside:not([hidden])")


def test_a_key_is_offered_its_tiers_and_leaves(browser: Any, keyed: tuple[Running, dict[str, str]]) -> None:
    server, keys = keyed
    page, _ = open_page(browser, server)
    sign_in(page, keys["bob"])
    assert page.locator(".side .tier").first.locator("option").all_text_contents() == ["flex"]
    assert page.locator(".side .bits").nth(1).input_value() == "16", "its own choice against the most it may read"
    assert page.locator("#tiers tbody th").all_text_contents() == ["flex"]
    assert not page.locator("#requests .key").first.is_visible()
    page.fill("#tokens", "20")
    page.click("#go")
    expect(page, ".facts", "16.00 bits", 1)
    page.click("#leave")
    page.wait_for_selector("#inside", state="hidden")
    assert page.evaluate("sessionStorage.getItem('qbe-key')") is None
    assert page.locator(".answer").first.text_content() == ""
    page.reload()
    page.wait_for_selector("#login:not([hidden])")
    page.close()


def test_an_operator_sees_keys_and_warnings(browser: Any, keyed: tuple[Running, dict[str, str]]) -> None:
    server, keys = keyed
    assert server.post("completions", {"prompt": "x"}, Authorization=f"Bearer {keys['alice']}").status_code == 200
    assert server.post("completions", {"prompt": "x"}, Authorization="Bearer wrong").status_code == 401
    page, wrong = open_page(browser, server)
    sign_in(page, keys["boss"])
    wrong.clear()  # of the first look, without a key
    expect(page, "#warnings", "invalid_api_key")
    page.locator("#requests tbody tr").first.wait_for()
    assert page.locator("#requests thead .key").is_visible()
    assert "alice" in page.locator("#requests tbody tr td:nth-child(2)").all_text_contents()
    assert contrast(page, "#warnings li") >= 4.5
    assert wrong == []
    page.close()


def test_it_can_be_used_without_a_mouse(browser: Any, server: Running) -> None:
    page, _ = open_page(browser, server)
    expect(page, "#state", "ready")
    reached = []
    for _ in range(14):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.className || "
                                     "document.activeElement.tagName"))  # fmt: skip
        if reached[-1] == "BODY":
            break
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or reached[-1] == "skip", reached
    order = ["skip", "prompt", "SUMMARY", "temperature", "tokens", "go", "tier", "bits", "tier", "bits", "wide"]
    assert [one for one in reached if one in order][: len(order)] == order
    page.fill("#tokens", "5")
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    expect(page, ".facts", "5 tokens")
    # Everything that is filled in or pressed has a name.
    unnamed = page.evaluate("""() => [...document.querySelectorAll("input, select, textarea, button")].filter(
        (one) => !(one.labels?.length || one.textContent.trim())).map((one) => one.id)""")
    assert unnamed == []
    page.close()


def test_what_differs_is_marked(browser: Any, server: Running) -> None:
    page, _ = open_page(browser, server)
    found = page.evaluate("""async () => {
        const { compare } = await import("/differences.js");
        const words = (pieces) => pieces.filter(([, same]) => !same).map(([text]) => text);
        const whole = (pieces) => pieces.map(([text]) => text).join("");
        const run = (a, b) => {
          const { left, right, same } = compare(a, b);
          return [words(left), words(right), same, whole(left) === a, whole(right) === b];
        };
        return [run("the sky is blue today", "the sky is deep blue now"), run("", ""), run("a b", "a b"), run("a", "b"),
                run("x ".repeat(3000) + "y", "x ".repeat(2999) + "z")];
    }""")
    assert [one[3:] for one in found] == [[True, True]] * 5, "nothing of a text is lost"
    assert found[0][:3] == [["today"], ["deep", "now"], pytest.approx(8 / 11)]
    assert found[1][:3] == [[], [], 1]
    assert found[2][:3] == [[], [], 1]
    assert found[3][:3] == [["a"], ["b"], 0]
    assert found[4][1] == ["z"]
    page.close()


def test_money_is_what_a_person_reads(browser: Any, server: Running) -> None:
    page, _ = open_page(browser, server)
    found = page.evaluate("""async () => {
        const { money } = await import("/format.js");
        const dollars = [0, 0.000003093133, 0.042, 0.2, 12.3456, 1234.5].map((one) => money(one, "USD"));
        return [...dollars, money(0.5, "credits")];
    }""")
    assert found == ["$0", "$0.0000031", "$0.042", "$0.20", "$12.35", "$1,234.50", "0.50 credits"]
    page.close()
