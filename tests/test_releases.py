"""Releases: what may be promoted, one switch for all aliases, and whatever is killed when."""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cli_process import qbe, refused
from covering import FULL
from qbe import QBEError, pull
from qbe.releases import folder as switching
from qbe.releases.alias import Alias
from qbe.releases.folder import MOST_EARLIER, Release, ReleaseFolder, State
from qbe.store.provenance import content_digest
from release_samples import model, verdict

KILLS = 200 if FULL else 20  # at random times; the touches of the file system come on top


def release(path: str, digest: str = "sha256:0") -> Release:
    return Release(path, digest, "0" * 64, "quick", None, "2026-01-01T00:00:00+00:00")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with two models, each with a verdict that passes."""
    for name in ("a", "b"):
        verdict(tmp_path / f"verdict-{name}", model(tmp_path / name, weights=name))
    return tmp_path


def promote(place: Path, name: str, *more: str) -> dict[str, dict[str, str] | None]:
    done = qbe("promote", name, "--verdict", f"verdict-{name}", "--json", *more, cwd=place)
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, dict[str, str] | None] = json.loads(done.stdout)
    return found


def leads(place: Path) -> dict[str, str | None]:
    """Name of the model that each alias leads to."""
    links = {alias: place / "releases" / alias for alias in switching.ALIASES}
    return {alias: link.resolve().name if link.exists() else None for alias, link in links.items()}


def test_promote_switches_and_rollback_goes_back(place: Path) -> None:
    said = promote(place, "a")
    assert said["stable"] is not None
    assert said["stable"]["path"] == str(place / "a")
    assert said["stable"]["digest"] == content_digest(place / "a")
    assert leads(place) == {"stable": "a", "candidate": None, "previous": None}
    assert pull(str(place / "releases/stable")) == place / "releases/stable"

    promote(place, "b", "--alias", "candidate")
    assert leads(place) == {"stable": "a", "candidate": "b", "previous": None}
    promote(place, "b")
    assert leads(place) == {"stable": "b", "candidate": None, "previous": "a"}
    before = os.readlink(place / "releases/.current")
    promote(place, "b")
    assert os.readlink(place / "releases/.current") == before, "what is stable already changes nothing"

    shown = qbe("releases", cwd=place).stdout.decode()
    assert f"stable    {place / 'b'}  sha256:" in shown
    assert "candidate none" in shown
    done = qbe("rollback", cwd=place)
    assert done.returncode == 0
    assert "restart them" in done.stderr.decode()
    assert leads(place) == {"stable": "a", "candidate": None, "previous": None}
    assert "no previous release" in refused("rollback", cwd=place)
    kept = json.loads(next((place / "releases/verdicts").iterdir()).read_text())
    assert kept["verdict"] == "pass"


def test_a_link_to_nothing_is_said(place: Path) -> None:
    promote(place, "a")
    with pytest.raises(QBEError, match="candidate is a link"):
        pull(str(place / "releases/candidate"))


@pytest.mark.parametrize("found", ["fail", "inconclusive", "anomalous"])
def test_what_is_no_pass_is_exit_code_1(place: Path, found: str) -> None:
    verdict(place / "verdict-a", place / "a", found)
    done = qbe("promote", "a", "--verdict", "verdict-a", cwd=place)
    assert done.returncode == 1
    assert done.stderr.decode() == f"qbe: a is not promoted: its verdict is {found} (logic.loss); see its report.html\n"
    assert not (place / "releases").exists()


def test_what_the_verdict_is_not_about_is_refused(place: Path) -> None:
    at = ("promote", "a", "--verdict")
    assert "the verdict is about sha256:" in refused(*at, "verdict-b", cwd=place)
    (place / "a/tokenizer.json").write_text("{}")
    assert "run 'qbe regress' with it" in refused(*at, "verdict-a", cwd=place)
    assert "cannot be read" in refused(*at, "nowhere", cwd=place)
    (place / "verdict-b/items.jsonl").write_text("{}")
    assert "does not belong to the verdict" in refused(*at, "verdict-b", cwd=place)
    assert "no such file" in refused("promote", "nobody", "--verdict", "verdict-a", cwd=place)
    assert "choose stable or candidate" in refused(*at, "verdict-a", "--alias", "previous", cwd=place)
    for text in ("", "[]", '{"format": 1}', '{"format": 2}', json.dumps({"format": 1, "verdict": "good"})):
        (place / "verdict-a/verdict.json").write_text(text)
        said = refused(*at, "verdict-a", cwd=place)
        assert "verdict.json is" in said, said
    assert not (place / "releases").exists()


def test_a_damaged_folder_is_refused(nested: str, tmp_path: Path, home: Path) -> None:
    """One that `qbe quantize` wrote, whose provenance knows each file."""
    folder = Path(shutil.copytree(nested, tmp_path / "a"))
    verdict(tmp_path / "verdict-a", folder)
    before = content_digest(folder)
    (folder / "README.md").write_text("nobody reads this")
    assert content_digest(folder) == before
    promote(tmp_path, "a")
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(1000)
        file.write(b"\xff\x00\xff")
    said = refused("promote", "a", "--verdict", "verdict-a", "--releases", "others", cwd=tmp_path)
    assert "model.safetensors is damaged" in said


def test_rollback_wants_what_was_promoted(place: Path) -> None:
    promote(place, "a")
    promote(place, "b")
    (place / "a/model.safetensors").write_text("other")
    assert "has changed since it was promoted" in refused("rollback", cwd=place)
    shutil.rmtree(place / "a")
    assert "is gone" in refused("rollback", cwd=place)
    assert leads(place)["stable"] == "b"


def test_models_and_releases_move_together(place: Path) -> None:
    (place / "around").mkdir()
    for name in ("a", "b", "verdict-a", "verdict-b"):
        (place / name).rename(place / "around" / name)
    promote(place / "around", "a")
    promote(place / "around", "b")
    (place / "around").rename(place / "moved")
    assert leads(place / "moved") == {"stable": "b", "candidate": None, "previous": "a"}
    assert json.loads(qbe("rollback", "--json", cwd=place / "moved").stdout)["stable"]["path"] == str(place / "moved/a")


def test_a_folder_elsewhere_is_named_in_full(place: Path) -> None:
    promote(place, "a", "--releases", "deep/releases")
    state = ReleaseFolder(place / "deep/releases").state()
    assert state.stable is not None
    assert state.stable.path == str(place / "a")
    assert (place / "deep/releases/stable/config.json").is_file()


def test_only_so_many_are_kept_and_what_is_left_over_goes(tmp_path: Path) -> None:
    folder = ReleaseFolder(tmp_path / "releases")
    for number in range(MOST_EARLIER + 3):
        model(tmp_path / f"m{number}")
        with folder.changing() as state:
            earlier = (*state.earlier, *([state.stable] if state.stable else []))
            folder.switch(State(release(f"m{number}"), None, earlier), {})
        os.symlink("nothing", folder.path / ".current.left")
    assert len(folder.state().earlier) == MOST_EARLIER
    assert len(list((folder.path / switching.GENERATIONS).iterdir())) == 2
    assert len(list(folder.path.glob(".current*"))) == 2, "the last one is not cleared away yet"


def test_a_damaged_list_is_one_line(place: Path) -> None:
    promote(place, "a")
    (place / "releases/.current/releases.json").write_text("{")
    for command in (("releases",), ("rollback",), ("promote", "b", "--verdict", "verdict-b")):
        assert "releases.json is damaged" in refused(*command, cwd=place)
    (place / "releases/.current/releases.json").unlink()
    assert "leads nowhere" in refused("releases", cwd=place)


def test_one_at_a_time(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switching, "LOCK_S", 0.1)
    folder = ReleaseFolder(place / "releases")
    with folder.changing(), pytest.raises(QBEError, match="somebody else"), ReleaseFolder(folder.path).changing():
        pass


class Killed:
    """`release_and_die.py`."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("release_and_die.py"))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def run(self, place: Path, model: str | None, at: int = 0, after_s: float | None = None) -> int:
        """The exit code.

        Args:
            model: to promote; None: roll back. at: killed before this touch. after_s: killed after so many seconds.
        """
        assert self._process.stdin is not None
        ask = {"model": model, "at": at, "cwd": str(place)}
        self._process.stdin.write(json.dumps(ask).encode() + b"\n")
        self._process.stdin.flush()
        child = int(self._line())
        if after_s is not None:
            time.sleep(after_s)
            with suppress(ProcessLookupError):
                os.kill(child, 9)
        return int(self._line())

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], 60)[0], "it ends"
        return self._process.stdout.readline()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


@pytest.fixture(scope="module")
def killed() -> Iterator[Killed]:
    process = Killed()
    yield process
    process.close()


def check_whole(place: Path) -> State:
    """The list and the links say the same, and lead to models."""
    state = ReleaseFolder(place / "releases").state()
    named = {alias: None if r is None else r.path for alias, r in state.aliases().items()}
    assert leads(place) == named
    assert state.stable is not None
    assert (place / "releases/stable/config.json").is_file()
    return state


@pytest.mark.parametrize("command", ["first promote", "promote", "rollback"])
def test_killed_at_every_touch_of_the_folder(place: Path, killed: Killed, command: str) -> None:
    """From the first to the last: the old state, and from one touch on the new one."""
    fresh, model = place / "fresh", None if command == "rollback" else "b"
    if command != "first promote":
        assert killed.run(place, "a") == 0
    if command == "rollback":
        assert killed.run(place, "b") == 0
    old, new = {"first promote": (None, "b"), "promote": ("a", "b"), "rollback": ("b", "a")}[command]
    found: list[str | None] = []
    for at in range(1, 200):
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(place, fresh, symlinks=True, ignore=shutil.ignore_patterns("fresh"))
        code = killed.run(fresh, model, at)
        found.append(leads(fresh)["stable"])
        if found[-1] is not None:
            check_whole(fresh)
        if code == 0:
            break
        assert code == -9
        if (FULL or at % 4 == 0) and (found[-1] == old or model is not None):
            assert killed.run(fresh, model) == 0, "the same command works where it was killed"
            assert check_whole(fresh).stable is not None
            assert leads(fresh)["stable"] == new
    else:
        pytest.fail("it never ended by itself")
    switched = found.index(new)
    assert found == [old] * switched + [new] * (len(found) - switched)
    assert 5 < switched < len(found) - 1
    print(command, len(found) - 1, "kills")


def test_killed_at_any_moment(place: Path, killed: Killed) -> None:
    """The same folder through one death after the other, 200 of them with QBE_TEST_FULL=1."""
    assert killed.run(place, "a") == 0
    began = time.monotonic()
    assert killed.run(place, "b") == 0
    took, dice, outcomes = time.monotonic() - began, random.Random(), Counter[tuple[int, bool]]()
    for _ in range(KILLS):
        before = check_whole(place)
        model = None if before.previous is not None else "b"
        going = "b" if model else "a"
        code = killed.run(place, model, after_s=dice.uniform(0, 1.5 * took))
        after = check_whole(place)
        assert before.stable is not None
        assert after.stable is not None
        assert after.stable.path in (before.stable.path, going)
        assert code in (0, -9)
        outcomes[code, after.stable.path == going] += 1
    print(KILLS, "kills, by exit code and whether it was switched:", dict(outcomes))
    assert outcomes[-9, False] > 0


@pytest.mark.parametrize("args", [["promote", "b", "--verdict", "verdict-b"], ["rollback"], ["releases"]])
def test_no_command_imports_torch(place: Path, killed: Killed, args: list[str]) -> None:
    for name in ("a", "b") if args == ["rollback"] else ("a",):
        assert killed.run(place, name) == 0
    program = "import sys; from qbe.cli.main import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    command = [sys.executable, "-c", program, *args]
    done = subprocess.run(command, cwd=place, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0
    assert done.stdout.split()[-1] == b"False", done.stderr.decode()


def test_a_server_is_told_when_its_alias_moves(place: Path, killed: Killed) -> None:
    assert killed.run(place, "a") == 0
    alias = Alias(str(place / "releases/stable"))
    assert alias.target == str(place / "a")
    assert asyncio.run(alias.look())
    assert killed.run(place, "b") == 0
    with pytest.raises(QBEError, match=r"stable is .*/b now, and this server answers from .*/a: restart it"):
        asyncio.run(alias.look())
    assert killed.run(place, None) == 0
    assert asyncio.run(alias.look()), "it is what it was"


def test_a_name_that_is_no_link_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Alias("org/model").target == "org/model"
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path.resolve())
    assert Alias("m").target == str(tmp_path.resolve() / "m")
    assert Alias("x" * 5000).target == "x" * 5000, "no file can have this name"
