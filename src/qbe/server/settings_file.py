"""The file that the settings are in, and following it while the server runs."""

from __future__ import annotations

import os
import stat
import tomllib
from pathlib import Path

from pydantic import ValidationError

from qbe.errors import QBEError
from qbe.files import reason
from qbe.server.settings import Settings

_BYTES = 4 << 20


def load(path: Path) -> Settings:
    """The settings in a file.

    Raises:
        QBEError: it cannot be read, is no TOML or holds something that does not fit, in one line with the place.
    """
    return _parsed(path, _read(path))


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
    """The settings in a file as of its last state that was good.

    Args:
        path: the file; None takes the defaults for good.

    Raises:
        QBEError: what `load` raises.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen = self._state()
        self.current = Settings() if path is None else load(path)

    def changed(self) -> Settings | None:
        """The settings of a file that has changed since the last call, else None. They are not `current` yet.

        An empty file is no change: whoever saves it has emptied it and will write it in a moment.

        Raises:
            QBEError: what `load` raises; the next change is looked at again.
        """
        state = self._state()
        if self._path is None or (state is not None and state == self._seen):
            return None
        self._seen = None  # one that cannot be read now is tried again without a change: it may hold a revoked key
        text = _read(self._path)
        if not text.strip():
            return None
        self._seen = state
        return _parsed(self._path, text)

    def _state(self) -> tuple[int, int, int] | None:
        try:
            file = os.stat(self._path) if self._path is not None else None
        except OSError:
            return None
        return None if file is None else (file.st_ino, file.st_size, file.st_mtime_ns)
