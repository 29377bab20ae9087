"""The files of a nested store, and where each matrix's codes lie in them.

Files stay open, so that one that is deleted meanwhile can still be read; they are read, not mapped, so that one that is
cut short is an error of that read.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from qbe.format.layout import SliceLayout
from qbe.store.checkpoint import read_manifest


class StoreFiles:
    """Reads codes from the store in a folder.

    Attributes:
        layout: of its slices.

    Raises:
        QBEError: no store, or a damaged one.
        OSError, ValueError, KeyError: a file that cannot be read, or has no header.
    """

    def __init__(self, folder: Path) -> None:
        manifest = read_manifest(folder)
        self.layout = SliceLayout.of(manifest.slices)
        self._paths = [folder / name for name in manifest.files if name.startswith("nested-")]
        numbers = {path.name: i for i, path in enumerate(self._paths)}
        self._listed = {n: numbers[s.file] for n, s in manifest.sites.items()}
        self._listed |= {n: numbers[s.file] for n, s in manifest.experts.items()}
        self.open: list[int] = []
        self._starts: dict[str, int] = {}
        try:
            for path in self._paths:
                self.open.append(os.open(path, os.O_RDONLY))
                self._starts |= self._header(self.open[-1])
        except BaseException:
            self.close()
            raise

    def place(self, name: str) -> tuple[int, int]:
        """The file of a matrix, or of that of all experts of a layer, by number, and where its codes begin there."""
        return self._listed[name], self._starts[f"{name}.packed"]

    def read(self, file: int, start: int, into: memoryview) -> None:
        """Fills memory from a file. Raises OSError where that cannot be read, or has become too short."""
        done = 0
        while done < len(into):
            count = os.preadv(self.open[file], [into[done:]], start + done)
            if count == 0:
                raise OSError(f"{self._paths[file]} ends too early")
            done += count

    def close(self) -> None:
        """Nobody may be reading."""
        while self.open:
            os.close(self.open.pop())

    def _header(self, file: int) -> dict[str, int]:
        """Name of each tensor of a safetensors file -> its first byte. The header is JSON behind its length."""
        length = int.from_bytes(os.pread(file, 8, 0), "little")
        header = json.loads(os.pread(file, length, 8))
        return {n: 8 + length + entry["data_offsets"][0] for n, entry in header.items() if n != "__metadata__"}
