"""Energy: counters of the kernel and of a driver, joules of answers, budgets that shift the default tier."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qbe.errors import QBEError
from qbe.records.ledger import Ledger
from qbe.server.contract import budget, terms
from qbe.server.energy.governor import Governor, tier_bits
from qbe.server.energy.intensity import Intensity, fetch
from qbe.server.energy.meter import Nvml, Rapl, find
from qbe.server.energy.spending import Spending
from qbe.server.protocol import Contract
from qbe.server.settings import Energy, Settings, Tier
from qbe.server.settings_file import load
from qbe.server.speed import Speed
from server_running import Running, running, tiny_engine, until


def package(folder: Path, number: int, joules: float, name: str = "package-0", limit: int = 2**32) -> Path:
    """A RAPL domain as the kernel shows it."""
    domain = folder / f"intel-rapl:{number}"
    domain.mkdir(parents=True, exist_ok=True)
    for file, text in (("name", name), ("energy_uj", str(int(joules * 1e6))), ("max_energy_range_uj", str(limit))):
        (domain / file).write_text(f"{text}\n")
    return domain


def test_rapl_adds_packages_up_and_counts_on_when_they_begin_anew(tmp_path: Path) -> None:
    one = package(tmp_path, 0, 100.0, limit=10**9)
    two = package(tmp_path, 1, 5.0, "package-1")
    package(tmp_path, 2, 7.0, "dram")
    meter = find(torch.device("cpu"), tmp_path)
    assert isinstance(meter, Rapl)
    first = meter.joules()
    assert first is not None
    (one / "energy_uj").write_text("999000000")
    (two / "energy_uj").write_text("6000000")
    assert meter.joules() == pytest.approx(first + 899 + 1)
    (one / "energy_uj").write_text("2000000")  # its range is 1000 J
    assert meter.joules() == pytest.approx(first + 899 + 1 + 3)
    (one / "energy_uj").unlink()
    assert meter.joules() is None
    assert find(torch.device("cpu"), tmp_path / "nothing") is None


def test_nvml_counts_in_millijoules_and_may_fail() -> None:
    class Failed(Exception):
        pass

    library: Any = SimpleNamespace(NVMLError=Failed, nvmlDeviceGetTotalEnergyConsumption=lambda handle: handle * 1500)
    assert Nvml(library, 2).joules() == 3.0

    def fail(_: Any) -> int:
        raise Failed

    library.nvmlDeviceGetTotalEnergyConsumption = fail
    assert Nvml(library, 2).joules() is None


@pytest.mark.cuda
def test_a_gpu_has_a_counter() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("pynvml")
    meter = find(torch.device("cuda"))
    assert meter is not None
    before = meter.joules()
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def more() -> bool:
        for _ in range(50):
            a @ a
        torch.cuda.synchronize()
        return (meter.joules() or 0.0) > (before or 0.0)

    until(more, "it counts")


class Counter:
    """A machine that draws so many watts."""

    source = "rapl"

    def __init__(self) -> None:
        self.now, self.total, self.watts = 0.0, 50.0, 80.0

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.total += self.watts * seconds

    def joules(self) -> float | None:
        return self.total


def test_power_is_assumed_until_it_is_measured() -> None:
    machine = Counter()
    spending = Spending(machine, lambda: 10.0, machine.clock)
    machine.wait(0.01)
    assert spending.step(0.01, [("a", 1)]) == {"a": pytest.approx(0.1)}
    assert spending.source == "model"
    for _ in range(60):
        machine.wait(0.01)
        spending.step(0.01, [("a", 1)])
    assert spending.source == "rapl"
    assert spending.watts == pytest.approx(80.0)
    machine.watts = 20.0
    machine.wait(100.0)  # idle: nobody's
    machine.watts = 120.0
    before = spending.total
    for _ in range(200):
        machine.wait(0.01)
        spending.step(0.01, [("a", 1)])
    assert spending.watts == pytest.approx(120.0)
    assert 2 * 80 <= spending.total - before <= 2 * 120


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=20), st.floats(0, 10))
def test_rows_share_what_a_step_takes(shares: list[int], seconds: float) -> None:
    spending = Spending(None, lambda: 100.0)
    rows = [(str(i), share) for i, share in enumerate(shares)]
    found = spending.step(seconds, rows)
    assert sum(found.values()) == pytest.approx(100.0 * seconds)
    assert spending.total == pytest.approx(spending.counter())
    for (name, share), (other, more) in pairwise(rows):
        assert found[name] * more == pytest.approx(found[other] * share)


@pytest.fixture
def grid() -> Iterator[tuple[str, dict[str, Any]]]:
    """An HTTP source of carbon intensities."""
    said: dict[str, Any] = {"status": 200, "body": {"data": [{"intensity": {"actual": 123}}]}}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(said["status"])
            self.end_headers()
            self.wfile.write(json.dumps(said["body"]).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/now", said
    server.shutdown()


def test_intensities_come_from_numbers_files_and_urls(tmp_path: Path, grid: tuple[str, dict[str, Any]]) -> None:
    url, said = grid
    assert fetch(50.0) == 50
    file = tmp_path / "now"
    file.write_text(" 77.5\n")
    assert fetch(str(file)) == 77.5
    assert fetch(url, "data.0.intensity.actual") == 123
    for source, field in ((url, "data.1.intensity"), (url, "data"), (url, ""), (str(tmp_path / "none"), "")):
        with pytest.raises(QBEError, match="carbon intensity") as refused:
            fetch(source, field)
        assert "\n" not in str(refused.value)
    file.write_text("-3")
    with pytest.raises(QBEError, match="at least 0"):
        fetch(str(file))
    now = [0.0]
    known = Intensity(lambda: now[0])
    assert known.now is None
    known.renew(url, "data.0.intensity.actual")
    said["status"] = 500
    now[0] = 1800.0
    known.renew(url, "data.0.intensity.actual")
    assert known.now == 123  # the last one counts for an hour
    now[0] = 3700.0
    assert known.now is None


@pytest.mark.parametrize(
    "answer",
    [
        b"nonsense\r\n\r\n",  # http.client.BadStatusLine, which is no OSError
        b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 60000,  # RecursionError
        b"HTTP/1.0 200 OK\r\n\r\n" + b"1" * 5000,  # ValueError of int
        b"HTTP/1.0 200 OK\r\n\r\n" + b"1" * 400,  # OverflowError of float
        b"HTTP/1.0 200 OK\r\n\r\n\xff",
        b"HTTP/1.0 200 OK\r\n\r\ntrue",
        b"HTTP/1.0 200 OK\r\n\r\nNaN",
        b"HTTP/1.0 200 OK\r\n\r\nInfinity",
        b"HTTP/1.0 200 OK\r\n\r\n-1",
        b"HTTP/1.0 302 Found\r\nLocation: http://h:x/\r\n\r\n",
    ],
)
def test_whatever_a_source_says_is_a_number_or_one_line(answer: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with Raw([answer]) as source:
        with pytest.raises(QBEError, match="carbon intensity") as refused:
            fetch(source.url)
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 400
        known = Intensity()
        known.renew(source.url, "")
        known.renew(source.url, "")
    assert known.now is None
    assert caplog.text.count("carbon intensity") == 1


@pytest.mark.parametrize("url", ["http://h/a b", "http://h:x/"])
def test_a_url_that_cannot_be_asked_is_one_line(url: str) -> None:
    with pytest.raises(QBEError, match="carbon intensity"):
        fetch(url)


class Raw:
    """A server that sends the same pieces to everyone, with pauses, until the client leaves.

    Attributes:
        asked: how often a client came.
    """

    def __init__(self, pieces: list[bytes], pause_s: float = 0.0) -> None:
        self._pieces, self._pause_s, self.asked = pieces, pause_s, 0
        self._over, self._listening = threading.Event(), socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}/now"

    def __enter__(self) -> Raw:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                client = self._listening.accept()[0]
            except OSError:
                return
            self.asked += 1
            threading.Thread(target=self._send, args=(client,), daemon=True).start()

    def _send(self, client: socket.socket) -> None:
        with client:
            try:
                client.recv(4096)
                for piece in self._pieces:
                    client.sendall(piece)
                    if self._over.wait(self._pause_s):
                        return
            except OSError:
                return


@pytest.mark.parametrize("head", [b"", b"HTTP/1.0 200 OK\r\n\r\n"])
def test_a_source_that_drips_is_bounded_as_a_whole_and_asked_once(
    head: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("qbe.server.energy.intensity._LIMIT_S", 0.3)
    with Raw([head] + [b"1"] * 400, 0.05) as source:  # 20 seconds, with no pause that is too long
        known, begun = Intensity(), time.monotonic()
        known.renew(source.url, "")
        known.renew(source.url, "")
        assert time.monotonic() - begun < 5
        assert known.now is None
        assert head or source.asked == 1  # the first is still on its way
    assert caplog.text.count("carbon intensity") == 1


def test_an_answer_that_is_late_counts_for_its_own_source_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qbe.server.energy.intensity._LIMIT_S", 0.05)
    go, answers = threading.Event(), {"a": 5.0, "b": 7.0}

    def slow(source: str, field: str) -> float:
        go.wait(10)
        return answers[source]

    monkeypatch.setattr("qbe.server.energy.intensity.fetch", slow)
    known = Intensity()
    known.renew("a", "")
    first = known._asked
    known.renew("b", "")
    assert known.now is None
    go.set()
    until(lambda: first.found, "the first has answered")
    until(lambda: known.now, "the second has answered")
    assert known.now == 7


def test_another_source_has_neither_the_value_nor_the_failure_of_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = tmp_path / "good"
    good.write_text("80")
    known = Intensity()
    known.renew(str(good), "")
    assert known.now == 80
    for name in ("one", "two"):
        for _ in range(2):
            known.renew(str(tmp_path / name), "")
        assert known.now is None
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == 2
    assert str(tmp_path / "one") in lines[0]
    assert str(tmp_path / "two") in lines[1]
    known.renew(60.0, "")
    assert known.now == 60
    known.renew(None, "")
    assert known.now is None


def test_a_new_source_is_asked_at_once(tmp_path: Path) -> None:
    machine, settings = Counter(), {"now": Energy(intensity=100.0)}
    governor = Governor(lambda: settings["now"], machine.clock)
    asyncio.run(governor.look(None))
    assert governor.intensity.now == 100
    file = tmp_path / "now"
    file.write_text("30")
    settings["now"] = Energy(intensity=str(file))
    machine.wait(1.0)
    asyncio.run(governor.look(None))
    assert governor.intensity.now == 30
    settings["now"] = Energy()
    asyncio.run(governor.look(None))
    assert governor.intensity.now is None


def test_power_is_right_though_the_source_was_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 W, of which four seconds in 30 pass while the source is asked."""
    machine = Counter()
    spending = Spending(machine, lambda: 10.0, machine.clock)
    governor = Governor(lambda: Energy(intensity="x", refresh_s=30.0), machine.clock)
    asyncio.run(governor.look(spending))
    machine.wait(30.0)
    monkeypatch.setattr(governor.intensity, "renew", lambda *_: machine.wait(4.0))
    asyncio.run(governor.look(spending))
    assert governor.watts == pytest.approx(80.0)


def govern(settings: Energy, watts: list[float]) -> tuple[Governor, list[float]]:
    """Its shifts when the machine draws these watts, each for a window."""
    machine = Counter()
    spending = Spending(machine, lambda: 10.0, machine.clock)
    governor = Governor(lambda: settings, machine.clock)

    async def run() -> list[float]:
        shifts = []
        await governor.look(spending)
        for power in watts:
            machine.watts = power
            machine.wait(settings.window_s)
            await governor.look(spending)
            shifts.append(governor.shift)
        return shifts

    return governor, asyncio.run(run())


def test_a_budget_shifts_by_quarters_within_its_bounds() -> None:
    by_power = Energy(power_w=100.0)
    assert govern(by_power, [150.0] * 6)[1] == [-0.25, -0.5, -0.75, -1, -1, -1]
    assert govern(by_power, [10.0] * 6)[1] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert govern(by_power, [150.0, 90.0, 90.0, 10.0])[1] == [-0.25, -0.25, -0.25, 0]  # between, it stays
    assert govern(Energy(), [1e6] * 3)[1] == [0, 0, 0]
    clean = Energy(carbon_g_per_h=20.0, intensity=100.0)  # 200 W at most
    assert govern(clean, [190.0, 250.0])[1] == [0, -0.25]
    governor, shifts = govern(Energy(carbon_g_per_h=20.0, intensity="/no/such/file", power_w=100.0), [120.0])
    assert shifts == [-0.25]  # what is known still counts
    assert governor.intensity.now is None


def test_only_the_default_tier_shifts_and_wishes_stay() -> None:
    settings = Settings()

    def within(tier: Any, shift: float, brownout: float = 0.0, **wanted: Any) -> Any:
        given = terms(tier, Contract(**wanted), settings, brownout, shift)
        return budget(given, 1, 1, 1, 4.0, Speed()).within

    assert within("default", -1.0) == (4.3, 4.3)
    assert within("default", 1.0) == (7.0, 7.0)
    assert within("default", 0.5) == (6.0, 7.0)
    assert within("default", 1.0, brownout=1.0) == (4.3, 4.3)  # pressure goes first
    assert within("flex", -1.0) == (4.3, 5.5)
    assert within("priority", 1.0) == (6.5, 8.0)
    assert within("default", -1.0, min_bits=6.5) == (6.5, 6.5)
    assert within("default", 1.0, max_bits=5.5) == (5.5, 5.5)
    assert tier_bits(Tier(bits=(5.0, 7.0)), 1.0, 0.0) == (5.0, 7.0)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("carbon_g_per_h = 5", "needs an intensity"),
        ("power_w = 0", "energy.power_w"),
        ("intensity = -1", "intensity"),
        ('intensity = "http://h/a b"', "energy: .*URL"),
        ('intensity = "http://h:x/"', "energy: .*[Pp]ort"),
        ('intensity = "http://[::1/"', "energy: .*URL"),
        ('intensity = "http:///now"', "energy: .*URL"),
        ('intensity = "http://me@h/now"', "energy: .*URL"),
        ('intensity = "http://h/\\n"', "energy: .*control"),
        ('intensity = ""', "energy: .*text"),
    ],
)
def test_wrong_settings_are_one_line(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(f"[energy]\n{text}\n")
    with pytest.raises(QBEError, match=where) as refused:
        load(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("source", ["HTTPS://[::1]:8080/now?at=1", "http://bücher.example/now", "/a path/now"])
def test_sources_that_can_be_asked_are_taken(source: str) -> None:
    assert Energy(intensity=source).intensity == source


def test_a_server_says_what_answers_took_and_keeps_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a counter in the kernel's form, which another thread moves on at 40 W; the budget is 20."""
    monkeypatch.setattr("qbe.server.service._RELOAD_S", 0.02)
    domain = package(tmp_path / "rapl", 0, 1.0)
    monkeypatch.setattr("qbe.server.observe.observer.find", lambda _: find(torch.device("cpu"), tmp_path / "rapl"))
    over = threading.Event()

    def draw() -> None:
        begun, new = time.monotonic(), domain / "new"
        while not over.wait(0.02):
            new.write_text(str(int((1 + 40 * (time.monotonic() - begun)) * 1e6)))
            new.replace(domain / "energy_uj")

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    config, book = tmp_path / "serve.toml", tmp_path / "ledger.sqlite"
    config.write_text("[energy]\npower_w = 20\nwindow_s = 0.2\nwatts = 7\n[tiers.default]\nbits = [8, 8]\nfloor = 4\n")

    def ask(server: Running, tokens: int = 300) -> Any:
        body = {"prompt": "x", "max_tokens": tokens, "ignore_eos": True}
        return server.post("completions", body).json()["usage"]

    try:
        with running(tiny_engine, config, book) as server:
            first = ask(server, 5)["qbe"]["energy"]
            assert first["source"] == "model"
            assert first["joules"] > 0
            until(lambda: ask(server)["qbe"]["energy"]["source"] == "rapl", "it is measured")
            usage = ask(server)["qbe"]
            assert 0 < usage["energy"]["joules"] < 60 * 40
            assert server.metric('qbe:power_watts{model_name="tiny",source="rapl"}') > 0
            assert server.metric("qbe:joules_total") > 0
            until(lambda: server.metric("qbe:energy_shift") == -1, "it is over its budget")
            sunken = ask(server)["qbe"]
            assert sunken["brownout"] == 1
            assert sunken["average_weight_bits"] == 4
    finally:
        over.set()
        thread.join(10)
    (total,) = Ledger(book).totals()
    assert total.energy in ("model,rapl", "rapl,model")
    assert total.joules == pytest.approx(sum(e.joules or 0.0 for e in Ledger(book).entries()))
    assert total.joules_per_token > 0
