"""The folder of releases, and its one switch.

    releases/
      stable, candidate, previous    links to model folders, through `.current`; any program can be given one
      .current                       link to the newest generation: replacing it is the switch
      .generations/7/                links `stable`, `candidate`, `previous`, and releases.json, which says all of it
      verdicts/SHA256.json           the verdicts that releases stand on

All three aliases change together, because one rename makes a whole generation the current one. What ends a process
before it leaves the old generation, after it the new one.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qbe.errors import QBEError
from qbe.files import reason, write_bytes, write_text

ALIASES = ("stable", "candidate", "previous")
CURRENT, GENERATIONS, NAME = ".current", ".generations", "releases.json"
FORMAT = 1
MOST_EARLIER = 10  # releases that `qbe rollback` can go back to, one after the other
LOCK_S = 10.0


@dataclass(frozen=True)
class Release:
    """A model folder that may be served.

    Attributes:
        path: of the folder or file; absolute, or from the folder that holds the releases.
        digest: of its content (`qbe.store.provenance.content_digest`) when it was promoted.
        verdict: digest of the verdict that it was promoted on.
        suite: of that verdict. settings: digest of the settings that the verdict is about.
        promoted: UTC, ISO 8601.
    """

    path: str
    digest: str
    verdict: str
    suite: str
    settings: str | None
    promoted: str


@dataclass(frozen=True)
class State:
    """Which releases there are.

    Attributes:
        earlier: those that were stable before and were not rolled back, the latest last.
    """

    stable: Release | None = None
    candidate: Release | None = None
    earlier: tuple[Release, ...] = ()

    @property
    def previous(self) -> Release | None:
        """What `qbe rollback` goes back to."""
        return self.earlier[-1] if self.earlier else None

    def aliases(self) -> dict[str, Release | None]:
        """By the names of `ALIASES`."""
        return {"stable": self.stable, "candidate": self.candidate, "previous": self.previous}


class ReleaseFolder:
    """Reads and switches.

    Args:
        path: of the folder; made by the first switch.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path.expanduser()))

    def state(self) -> State:
        """What the current generation says; no release where there is no folder yet.

        Raises:
            QBEError: it cannot be read.
        """
        for _ in range(3):
            try:
                generation = self.path / os.readlink(self.path / CURRENT)
                return _parsed(generation / NAME)
            except FileNotFoundError:  # there is none yet, or it was switched meanwhile, and cleared away
                if not os.path.lexists(self.path / CURRENT):
                    return State()
            except OSError as error:
                raise QBEError(f"the releases in '{self.path}' cannot be read: {reason(error)}") from None
        raise QBEError(f"'{self.path / CURRENT}' leads nowhere: remove the folder '{self.path}' and promote again")

    def target(self, release: Release) -> Path:
        """Where its model is."""
        return self.path.parent / release.path

    def named(self, model: Path) -> str:
        """The path of a model as a release keeps it: from the folder around `releases` where the model is within that,
        so that both can be mounted elsewhere together; else absolute."""
        around = self.path.parent
        return str(model.relative_to(around)) if model.is_relative_to(around) else str(model)

    @contextmanager
    def changing(self) -> Iterator[State]:
        """The state, while nobody else may switch.

        Raises:
            QBEError: somebody else does for longer than `LOCK_S`, or the folder cannot be written.
        """
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path, os.O_RDONLY)
        try:
            self._wait_for(lock)
            yield self.state()
        finally:
            os.close(lock)

    def switch(self, state: State, verdicts: Mapping[str, bytes]) -> None:
        """Makes this the current state, at once. Only within `changing`.

        Args:
            verdicts: digest -> content, of verdicts to keep.

        Raises:
            QBEError: the folder cannot be written; then nothing has changed.
        """
        with self._writing():
            for digest, content in verdicts.items():
                (self.path / "verdicts").mkdir(exist_ok=True)
                write_bytes(self.path / "verdicts" / f"{digest}.json", content)
            generations = self.path / GENERATIONS
            generations.mkdir(exist_ok=True)
            numbers = [int(p.name) for p in generations.iterdir() if p.name.isdecimal()]
            mine = generations / str(max(numbers, default=0) + 1)
            self._write_generation(mine, state)
            _sync(generations)
            for alias in ALIASES:
                with suppress(FileExistsError):
                    os.symlink(f"{CURRENT}/{alias}", self.path / alias)
            beside = self.path / f"{CURRENT}.{uuid.uuid4().hex[:8]}"
            os.symlink(f"{GENERATIONS}/{mine.name}", beside)
            before = self._number()
            os.replace(beside, self.path / CURRENT)
            _sync(self.path)
        self._clear(keep={mine.name, before})

    def _write_generation(self, folder: Path, state: State) -> None:
        folder.mkdir()
        for alias, release in state.aliases().items():
            if release is not None:
                target = self.target(release)
                # Links count from where they lie.
                away = target if os.path.isabs(release.path) else os.path.relpath(target, folder)
                os.symlink(away, folder / alias)
        described = {"stable": _described(state.stable), "candidate": _described(state.candidate)}
        earlier = [asdict(release) for release in state.earlier[-MOST_EARLIER:]]
        write_text(folder / NAME, json.dumps({"format": FORMAT, **described, "earlier": earlier}, indent=1) + "\n")
        _sync(folder)

    def _number(self) -> str:
        """The name of the current generation; "" where there is none."""
        try:
            return Path(os.readlink(self.path / CURRENT)).name
        except FileNotFoundError:
            return ""

    def _clear(self, keep: set[str]) -> None:
        """Away with what nobody reads any more, or a process that was killed has left. It costs space only."""
        for generation in (self.path / GENERATIONS).iterdir():
            if generation.name not in keep:
                shutil.rmtree(generation, ignore_errors=True)
        for left in (*self.path.glob(f"{CURRENT}.*"), *self.path.glob("verdicts/.*.partial")):
            with suppress(OSError):
                left.unlink()

    def _wait_for(self, lock: int) -> None:
        ends = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > ends:
                    raise QBEError(f"somebody else is changing the releases in '{self.path}': try again") from None
                time.sleep(0.05)
            except OSError:  # a file system without locks
                return

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise QBEError(f"the releases in '{self.path}' cannot be written: {reason(error)}") from None


def _described(release: Release | None) -> dict[str, Any] | None:
    return None if release is None else asdict(release)


def _parsed(path: Path) -> State:
    try:
        found = json.loads(path.read_bytes())
        if found["format"] != FORMAT:
            raise ValueError(f"it is of format {found['format']}")
        stable, candidate = (None if found[k] is None else Release(**found[k]) for k in ("stable", "candidate"))
        return State(stable, candidate, tuple(Release(**one) for one in found["earlier"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        around = path.parents[2]
        raise QBEError(f"{path} is damaged ({error!r}): remove the folder '{around}' and promote again") from None


def _sync(folder: Path) -> None:
    """What was made in a folder outlives a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
