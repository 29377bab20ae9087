"""The files that the settings are in, and following them while the server runs."""

from __future__ import annotations

import logging
import os
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from qbe.errors import QBEError
from qbe.files import reason
from qbe.server.settings import Settings

log = logging.getLogger(__name__)

_BYTES = 4 << 20
_State = tuple[int, int, int]  # of a file: inode, size, time of change


def load(path: Path | None, keys: Path | None = None) -> Settings:
    """The settings in a file, or in two.

    Args:
        path: the file; None takes the defaults.
        keys: a file of more keys and nothing else, so that the other one may be read by everyone.

    Raises:
        QBEError: one cannot be read, is no TOML or holds something that does not fit, in one line with the place.
    """
    given = {file: _read(file) for file in (path, keys) if file is not None}
    return _joined(path, keys, given)


def _joined(path: Path | None, keys: Path | None, given: dict[Path, bytes]) -> Settings:
    settings = Settings() if path is None else _parsed(path, given[path])
    if keys is None:
        return settings
    apart = _parsed(keys, given[keys])
    if other := sorted(apart.model_fields_set - {"keys"}):
        raise QBEError(f"{keys}: {other[0]}: a file of keys holds no other settings")
    if twice := sorted(apart.keys.keys() & settings.keys.keys()):
        raise QBEError(f"{keys}: keys.{twice[0]}: {path} has a key of this name, too")
    try:
        return Settings.model_validate(vars(settings) | {"keys": settings.keys | apart.keys})
    except ValidationError as error:
        raise QBEError(f"{keys}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def _read(path: Path) -> bytes:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe that nobody writes to, too
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise QBEError(f"{path} cannot be read: it is no regular file")
            content = file.read(_BYTES + 1)
    except OSError as error:
        raise QBEError(f"{path} cannot be read: {reason(error)}") from None
    if len(content) > _BYTES:
        raise QBEError(f"{path} cannot be read: a settings file has no more than {_BYTES} bytes")
    return content


def _parsed(path: Path, text: bytes) -> Settings:
    try:
        return Settings.model_validate(tomllib.loads(text.decode()))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        parts = [str(part) if str(part).isprintable() else repr(part) for part in first["loc"]]
        where = ".".join(parts) or "the file"
        said = "there is no such setting" if first["type"] == "extra_forbidden" else first["msg"]
        raise QBEError(f"{path}: {where}: {said.removeprefix('Value error, ')}") from None
    except RecursionError:
        raise QBEError(f"{path} cannot be read: its tables or arrays are nested too deeply") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise QBEError(f"{path} is not TOML: {error}") from None
    except ValueError:  # of `int`: tomllib lets it through
        raise QBEError(f"{path} cannot be read: a number in it has thousands of digits") from None


class Watched:
    """The settings in a file, or in two, as of their last state that was good.

    Args:
        path: the file; None takes the defaults for good.
        keys: a file of more keys, or None.

    Raises:
        QBEError: what `load` raises.
    """

    def __init__(self, path: Path | None, keys: Path | None = None) -> None:
        self._path, self._keys = path, keys
        self._seen, self._unread = self._states(), False
        self.current = load(path, keys)

    def changed(self) -> Settings | None:
        """The settings of files that have changed since the last call, else None. They are not `current` yet.

        A file that has become empty is no change: whoever saves it has emptied it and will write it in a moment.

        Raises:
            QBEError: what `load` raises; the next change is looked at again.
        """
        states = self._states()
        if not self._unread and None not in states.values() and states == self._seen:
            return None
        self._unread = True  # one that cannot be read now is tried again without a change: it may hold a revoked key
        given = {file: _read(file) for file in self._seen}
        if any(not text.strip() and states[file] != self._seen[file] for file, text in given.items()):
            return None
        self._unread, self._seen = False, states
        return _joined(self._path, self._keys, given)

    def _states(self) -> dict[Path, _State | None]:
        return {file: _state(file) for file in (self._path, self._keys) if file is not None}


def _state(file: Path) -> _State | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


class Reloading:
    """Takes over a changed file; keeps what there is while it is wrong.

    Args:
        watched: the file.
        public: whether others than this machine can connect, so that keys must not vanish.
        check: raises QBEError for settings that the model cannot be served with.
        told: why those of the last change are not in use; None: they are.
    """

    def __init__(
        self, watched: Watched, public: bool, check: Callable[[Settings], None], told: Callable[[str | None], None]
    ) -> None:  # fmt: skip
        self._watched, self._public, self._check, self._told = watched, public, check, told

    async def look(self) -> bool:
        """Raises QBEError for a changed file that is not taken."""
        changed = self._watched.changed()
        if changed is not None:
            if not changed.keys and (self._public or self._watched.current.keys):
                raise QBEError("the settings have no keys any more: restart the server to serve without")
            self._check(changed)
            self._watched.current = changed
            self._told(None)
            log.warning("the settings were reloaded")
        return True

    def failed(self, why: str) -> None:
        """A look raised an error."""
        self._told(why)
        log.warning("the settings stay as they were: %s", why)
