"""A server of `releases/stable`: it says when the alias moves, and a rolling restart under load loses no request."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import httpx2

from cli_process import qbe
from qbe.releases.folder import ReleaseFolder
from qbe.releases.promote import promote
from qbe.releases.verdict import read
from release_samples import verdict
from server_process import save_tiny, serving
from server_running import LIMIT_S, until

TOKENS = 24


class Load:
    """Clients that ask one after the other, of whatever server a balancer would send them to."""

    def __init__(self, url: str, clients: int = 3) -> None:
        self.url, self.answered, self.failures = url, 0, list[str]()
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        body = {"model": "stable", "prompt": "hello", "max_tokens": TOKENS, "ignore_eos": True}
        while not self._ends.is_set():
            url = self.url
            try:
                found = httpx2.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S, verify=False)
                assert found.json()["usage"]["completion_tokens"] == TOKENS, found.text
                self.answered += 1
            except httpx2.ConnectError as error:
                if url == self.url:  # else the server it was about to ask had been replaced: nothing was lost
                    self.failures.append(repr(error))
            except Exception as error:
                self.failures.append(repr(error))

    def stop(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(LIMIT_S)


def served(url: str) -> list[str]:
    return [m["id"] for m in httpx2.get(f"{url}/v1/models", timeout=LIMIT_S).json()["data"]]


def test_a_rollback_under_load_loses_no_request(tmp_path: Path) -> None:
    folder = ReleaseFolder(tmp_path / "releases")
    for name in ("a", "b"):
        save_tiny(tmp_path / name)
        promote(tmp_path / name, read(verdict(tmp_path / f"verdict-{name}", tmp_path / name)), folder)
    options = ("--model", str(folder.path / "stable"), "--policy", "uniform")
    with (tmp_path / "log").open("w") as log, serving(*options, home=tmp_path, log=log) as (old, url):
        assert served(url) == ["stable", str(tmp_path / "b")]
        load = Load(url)
        until(lambda: load.answered > 3, "it answers")
        assert qbe("rollback", cwd=tmp_path).returncode == 0
        line = f"stable is {tmp_path / 'a'} now, and this server answers from {tmp_path / 'b'}: restart it"
        until(lambda: line in (tmp_path / "log").read_text(), "it says that the release is another one")
        assert (tmp_path / "log").read_text().count("restart it") == 1, "once"
        with serving(*options, home=tmp_path, log=log) as (_, after):
            load.url = after
            old.send_signal(signal.SIGTERM)
            assert old.wait(LIMIT_S) == 0, "what it had begun is answered"
            before = load.answered
            until(lambda: load.answered > before + 3, "the new one answers")
            assert served(after) == ["stable", str(tmp_path / "a")]
            load.stop()
    assert load.failures == []
