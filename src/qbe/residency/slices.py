"""What residency asks of the memory that kernels read, and that memory on a CPU: an arena for each matrix."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import nn

from qbe.errors import QBEError
from qbe.progress import bar
from qbe.residency.arena import Arena
from qbe.residency.planner import Counts, Slice
from qbe.residency.store_files import StoreFiles
from qbe.sites import SiteTable
from qbe.store.experts import nested_experts
from qbe.store.folding import AGAIN
from qbe.store.nested_experts import NestedExperts
from qbe.store.nested_linears import nested_linears, set_weight
from qbe.store.nested_tensor import NestedTensor
from qbe.store.plan import Plan
from qbe.store.read_limits import ReadLimits


class Slices(Protocol):
    """The codes of a model, of which kernels read what is there.

    Attributes:
        precisions: int64 [slices], bits of the first so many slices.
        sizes: int64 [nested sites, slices], bytes on the device.
        floors: int64 [nested sites], how many slices of each never leave the device.
    """

    precisions: Counts
    sizes: Counts
    floors: Counts

    def start(self, plan: Plan, budget: int) -> None:
        """Take so many bytes for slices above the floors; requests come next."""

    def load(self, one: Slice) -> None:
        """Bring a slice; any thread. Raises OSError or MemoryError where that cannot be done."""

    def publish(self, levels: Counts) -> None:
        """From the next launch on kernels read so many slices of each site, int64 [nested sites]."""

    def drop(self, one: Slice) -> None:
        """Give the memory of a slice back that is no longer published."""

    def close(self) -> None:
        """No other thread may be loading."""


@dataclass(frozen=True)
class _Matrix:
    """A nested matrix, or that of every expert of a layer.

    Attributes:
        file: number of its file.
        start: of its codes in the file, bytes.
        plane: bytes of one bit of every code, of one expert.
    """

    file: int
    start: int
    plane: int
    arena: Arena


class StoredSlices:
    """Takes over the codes of a model on a CPU: from mapped files into arenas, where only the lowest slices are filled.

    The plan lowers rows to what is published (`qbe.store.read_limits`), except where they wait for what they want.

    Args:
        model: as `qbe.store.checkpoint.attach` made it from `folder`, without 16-bit originals, on the CPU.
        table: its sites.

    Raises:
        QBEError: a file that is damaged or cannot be read, or no room in the address space.
    """

    def __init__(self, model: nn.Module, folder: Path, table: SiteTable, waits: bool, progress: bool) -> None:
        try:
            self._files = StoreFiles(folder)
        except (OSError, KeyError, ValueError) as error:
            raise QBEError(f"the nested store in {folder} cannot be read ({error}); {AGAIN}") from error
        layout = self._files.layout
        self.precisions: Counts = np.array(layout.precisions, np.int64)
        self._widths, self._firsts = layout.slices, (0, *layout.precisions[:-1])
        self._bits, self._waits = layout.total_bits, waits
        try:
            linears = {name: (module, weight) for name, module, weight in nested_linears(model)}
            stacks = dict(nested_experts(model))
            matrices: dict[str, _Matrix] = {}
            self._of: list[tuple[_Matrix, int]] = []
            for site in table.nested:
                name = site.name if site.expert is None else site.name.rpartition(".")[0]
                if name not in matrices:
                    at = self._files.place(name)
                    matrices[name] = _moved(*linears[name], *at) if name in linears else _moved_stack(
                        stacks[name], *at
                    )  # fmt: skip
                self._of.append((matrices[name], site.expert or 0))
            self.sizes: Counts = np.array([[m.plane * w for w in self._widths] for m, _ in self._of], np.int64)
            self.floors: Counts = np.ones(len(self._of), np.int64)
            self._limits = ReadLimits(np.full(len(self._of), self.precisions[-1]))
            with bar("reading the lowest slices", len(self._of), progress) as step:
                for number in range(len(self._of)):
                    self.load(Slice(number, 0))
                    step()
        except (OSError, KeyError) as error:
            self.close()
            raise QBEError(f"the nested store in {folder} cannot be read ({error}); {AGAIN}") from error
        except BaseException:
            self.close()
            raise

    def start(self, plan: Plan, budget: int) -> None:
        plan.limits = self._limits

    def load(self, one: Slice) -> None:
        matrix, start, size = self._place(one)
        self._files.read(matrix.file, matrix.start + start, matrix.arena.part(start, size))

    def publish(self, levels: Counts) -> None:
        if not self._waits:
            self._limits.set(self.precisions[levels - 1])

    def drop(self, one: Slice) -> None:
        matrix, start, size = self._place(one)
        matrix.arena.drop(start, size)

    def close(self) -> None:
        self._files.close()

    def _place(self, one: Slice) -> tuple[_Matrix, int, int]:
        """The slice's matrix, and where it begins in its codes and how long it is, in bytes."""
        matrix, expert = self._of[one.site]
        start = (expert * self._bits + self._firsts[one.number]) * matrix.plane
        return matrix, start, self._widths[one.number] * matrix.plane


def _moved(module: nn.Linear, weight: NestedTensor, file: int, start: int) -> _Matrix:
    """Gives a layer's weight an arena."""
    arena = Arena(weight.packed.shape)
    moved = NestedTensor(
        arena.codes, weight.meta.clone(), weight.bits, weight.slices, weight.group_size, weight.exponent,
        weight.in_features, weight.logical_dtype,
    )  # fmt: skip
    set_weight(module, moved)
    return _Matrix(file, start, weight.packed.shape[-1], arena)


def _moved_stack(stack: NestedExperts, file: int, start: int) -> _Matrix:
    """Gives a layer's experts one."""
    arena = Arena(stack.packed.shape)
    stack.packed, stack.meta = arena.codes, stack.meta.clone()
    return _Matrix(file, start, stack.packed.shape[-1], arena)
