"""The experts' codes in host memory, page-locked, as far as it goes: where a device fetches slices from, and where its
kernels read the lowest slice of an expert that has none on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch

from qbe.errors import QBEError
from qbe.hardware import free_memory
from qbe.residency.arena import Arena
from qbe.residency.store_files import StoreFiles
from qbe.residency.transfer import Transfer

log = logging.getLogger(__name__)

_LEFT = 8  # one part in so many of the free host memory is left to others


def room_for_experts(free: int) -> int:
    """Bytes that experts may take of so many that are free."""
    return free - free // _LEFT


class HostMemory:
    """Holds whole layers' matrices, the first ones first.

    Args:
        stacks: name of each layer's matrix and the shape of its codes.
        tick: called for each of them.
    """

    def __init__(
        self, stacks: Iterable[tuple[str, Sequence[int]]], files: StoreFiles, transfer: Transfer,
        tick: Callable[[], None],
    ) -> None:  # fmt: skip
        self._transfer = transfer
        self._codes: dict[str, torch.Tensor] = {}
        self._arenas: list[Arena] = []
        free = room_for_experts(free_memory(torch.device("cpu")))
        stored = 0
        for name, shape in stacks:
            size = torch.Size(shape).numel()
            stored += size
            if size <= free and (codes := self._filled(shape, size, *files.place(name), files)) is not None:
                self._codes[name] = codes
                free -= size
            tick()
        self.size = sum(codes.nbytes for codes in self._codes.values())
        if self.size < stored:
            log.warning(
                "host memory has room for %.2f of %.2f GB of experts: the others are fetched from the store's files",
                self.size / 1e9, stored / 1e9,
            )  # fmt: skip

    def of(self, name: str) -> torch.Tensor | None:
        """The codes of a layer's matrix, uint8 as in the file; None where they are not here."""
        return self._codes.get(name)

    def close(self) -> None:
        """Nothing on the device may read it any more."""
        for codes in self._codes.values():
            self._transfer.unlock(codes)
        self._codes.clear()

    def _filled(
        self, shape: Sequence[int], size: int, file: int, start: int, files: StoreFiles
    ) -> torch.Tensor | None:  # fmt: skip
        """A matrix in locked memory; None where the system refuses that."""
        try:
            arena = Arena(shape)
        except QBEError:
            return None
        files.read(file, start, arena.part(0, size))
        if not self._transfer.lock(arena.codes):
            return None
        self._arenas.append(arena)
        return arena.codes
