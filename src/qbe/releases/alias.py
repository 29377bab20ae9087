"""A server whose model was named by a link, such as `releases/stable`: where it led, and whether it still does."""

from __future__ import annotations

import os
from pathlib import Path

from qbe.errors import QBEError


class Alias:
    """A model's name, followed once: a switch while files are read must not mix two releases.

    Args:
        model: as `qbe.pull` takes it.

    Attributes:
        target: what to load: where links lead, or the name itself.
    """

    def __init__(self, model: str) -> None:
        self._path = Path(model).expanduser()
        try:
            there = self._path.exists()
        except (OSError, ValueError):  # a name that no file can have
            there = False
        self.target = os.path.realpath(self._path) if there else model
        self._led = there and self.target != os.path.abspath(self._path)

    async def look(self) -> bool:
        """Raises QBEError where the link leads elsewhere now."""
        if self._led and (now := os.path.realpath(self._path)) != self.target:
            raise QBEError(f"{self._path} is {now} now, and this server answers from {self.target}: restart it")
        return True
