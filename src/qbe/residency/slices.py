"""The slices of a store: where each lies in its file, and in the memory that kernels read."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

from qbe.errors import QBEError
from qbe.format.layout import SliceLayout
from qbe.progress import bar
from qbe.residency.arena import Arena
from qbe.residency.planner import Counts, Slice
from qbe.sites import SiteTable
from qbe.store.checkpoint import read_manifest
from qbe.store.experts import nested_experts
from qbe.store.folding import AGAIN
from qbe.store.nested_experts import NestedExperts
from qbe.store.nested_linears import nested_linears, set_weight
from qbe.store.nested_tensor import NestedTensor


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
    """Takes over the codes of a model: from mapped files into arenas, where only the lowest slices are filled.

    Files stay open, so that one that is deleted meanwhile can still be read; they are read, not mapped, so that one
    that is cut short is an error of that read.

    Args:
        model: as `qbe.store.checkpoint.attach` made it from `folder`, without 16-bit originals, on the CPU.
        table: its sites.

    Attributes:
        precisions: int64 [slices], bits of the first so many slices.
        sizes: int64 [nested sites, slices], bytes.

    Raises:
        QBEError: a file that is damaged or cannot be read, or no room in the address space.
    """

    def __init__(self, model: nn.Module, folder: Path, table: SiteTable, progress: bool) -> None:
        manifest = read_manifest(folder)
        layout = SliceLayout.of(manifest.slices)
        self.precisions: Counts = np.array(layout.precisions, np.int64)
        self._widths, self._firsts = layout.slices, (0, *layout.precisions[:-1])
        self._bits = layout.total_bits
        self._paths = [folder / name for name in manifest.files if name.startswith("nested-")]
        numbers = {path.name: i for i, path in enumerate(self._paths)}
        self._open: list[int] = []
        try:
            self._open.extend(os.open(path, os.O_RDONLY) for path in self._paths)
            starts: dict[str, int] = {}
            for number in range(len(self._paths)):
                starts |= self._starts(number)
            linears = {name: (module, weight) for name, module, weight in nested_linears(model)}
            stacks = dict(nested_experts(model))
            self._matrices: dict[str, _Matrix] = {}
            self._of: list[tuple[_Matrix, int]] = []
            for site in table.nested:
                name = site.name if site.expert is None else site.name.rpartition(".")[0]
                if name not in self._matrices:
                    listed = manifest.sites.get(name) or manifest.experts[name]
                    at = numbers[listed.file], starts[f"{name}.packed"]
                    self._matrices[name] = _moved(*linears[name], *at) if name in linears else _moved_stack(
                        stacks[name], *at
                    )  # fmt: skip
                self._of.append((self._matrices[name], site.expert or 0))
            self.sizes: Counts = np.array([[m.plane * w for w in self._widths] for m, _ in self._of], np.int64)
            with bar("reading the lowest slices", len(self._of), progress) as step:
                for number in range(len(self._of)):
                    self.load(Slice(number, 0))
                    step()
        except (OSError, KeyError, ValueError) as error:
            self.close()
            raise QBEError(f"the nested store in {folder} cannot be read ({error}); {AGAIN}") from error
        except BaseException:
            self.close()
            raise

    def load(self, one: Slice) -> None:
        """Fills a slice's memory from its file. Raises OSError where that cannot be read, or has become too short."""
        matrix, start, size = self._place(one)
        part, done = matrix.arena.part(start, size), 0
        while done < size:
            count = os.preadv(self._open[matrix.file], [part[done:]], matrix.start + start + done)
            if count == 0:
                raise OSError(f"{self._paths[matrix.file]} ends too early")
            done += count

    def drop(self, one: Slice) -> None:
        """Gives a slice's memory back."""
        matrix, start, size = self._place(one)
        matrix.arena.drop(start, size)

    def close(self) -> None:
        """Closes the files. No other thread may be loading."""
        while self._open:
            os.close(self._open.pop())

    def _place(self, one: Slice) -> tuple[_Matrix, int, int]:
        """The slice's matrix, and where it begins in its codes and how long it is, in bytes."""
        matrix, expert = self._of[one.site]
        start = (expert * self._bits + self._firsts[one.number]) * matrix.plane
        return matrix, start, self._widths[one.number] * matrix.plane

    def _starts(self, number: int) -> dict[str, int]:
        """Name of each tensor of a safetensors file -> its first byte. The header is JSON behind its length."""
        length = int.from_bytes(os.pread(self._open[number], 8, 0), "little")
        header = json.loads(os.pread(self._open[number], length, 8))
        return {n: 8 + length + entry["data_offsets"][0] for n, entry in header.items() if n != "__metadata__"}


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
