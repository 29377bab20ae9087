"""The codes of experts on a device whose memory does not hold all of them: in pages that a table finds.

A device's memory is given out in pages that are larger than a slice of most experts, so that no address space can be
left half empty, as on a CPU. Instead one tensor is cut into pages (`qbe.format.expert_pages`), any of which takes any
piece of any slice, and kernels find them by a table on the device, which they read while they run: what comes or goes
changes the table, between two steps, and captured steps stay. Rows read the nearest precision that the table has.

The lowest slice of an expert that host memory holds may leave the device, too: its table then has the host's addresses,
and kernels read it from there. Dense layers, and experts that no kernel multiplies as they are, stay whole.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from qbe.errors import QBEError
from qbe.format.expert_pages import PartPages, page_bytes_of, part_pages
from qbe.progress import bar
from qbe.residency.host_memory import HostMemory
from qbe.residency.planner import Counts, Slice
from qbe.residency.store_files import StoreFiles
from qbe.residency.transfer import Transfer
from qbe.sites import SiteTable
from qbe.store.experts import paged_experts
from qbe.store.folding import AGAIN
from qbe.store.nested_experts import NestedExperts, hollow
from qbe.store.plan import Plan


@dataclass(frozen=True)
class _Stack:
    """The same matrix of all experts of a layer.

    Attributes:
        outputs, plane: rows of one expert's matrix, and bytes of one bit of all of its codes.
        table: int64 [experts, pages], what the device's table is to hold; a view.
        host: uint8 [experts, bytes of a matrix] in locked host memory, or None.
    """

    name: str
    outputs: int
    plane: int
    parts: tuple[PartPages, ...]
    table: Counts
    host: torch.Tensor | None


class DeviceSlices:
    """Takes over the codes of a model's experts; see `qbe.residency.slices.Slices`.

    Args:
        model: on the device, but for the codes of its experts, which may be anywhere (`paged` of
            `qbe.store.placement.place`).
        table: its sites.
        transfer: to its device.

    Raises:
        QBEError: a file that is damaged or cannot be read.
    """

    def __init__(self, model: nn.Module, folder: Path, table: SiteTable, transfer: Transfer, progress: bool) -> None:
        self._transfer, self._folder = transfer, folder
        self._files: StoreFiles | None = None
        self._host: HostMemory | None = None
        self._levels: Counts = np.full(len(table.nested), -1, np.int64)  # as they are published
        self._free: deque[torch.Tensor] = deque()
        self._pages: dict[Slice, list[torch.Tensor]] = {}
        self._reading = threading.Lock()
        self._staging: torch.Tensor | None = None
        experts = dict(paged_experts(model))
        try:
            self._files = StoreFiles(folder)
            shapes = {name: tuple(one.packed.shape) for name, one in experts.items()}
            with bar("reading experts into host memory", len(shapes), progress) as step:
                self._host = HostMemory(shapes.items(), self._files, transfer, step)
            stacks = self._take_over(experts)
            self._of = [None if s.expert is None else stacks.get(s.name.rpartition(".")[0]) for s in table.nested]
            self._experts = [s.expert or 0 for s in table.nested]
            self._layout = self._files.layout
            self.precisions: Counts = np.array(self._layout.precisions, np.int64)
            sizes = [self._sizes(stack, s.parameters) for stack, s in zip(self._of, table.nested, strict=True)]
            self.sizes: Counts = np.array(sizes, np.int64).reshape(-1, len(self.precisions))
            every = len(self.precisions)
            self.floors: Counts = np.array([every if s is None else int(s.host is None) for s in self._of], np.int64)
            self._bring_floors()
        except (OSError, KeyError, ValueError) as error:
            self.close()
            raise QBEError(f"the nested store in {folder} cannot be read ({error}); {AGAIN}") from error
        except BaseException:
            self.close()
            raise

    def start(self, plan: Plan, budget: int) -> None:
        above = self.sizes * (np.arange(self.sizes.shape[1]) >= self.floors[:, None])
        self._free.extend(self._room(min(budget, int(above.sum())) // self.page_bytes))

    def load(self, one: Slice) -> None:
        stack = self._of[one.site]
        assert stack is not None
        pages = [self._free.popleft() for _ in range(_count(stack, one.number))]
        try:
            self._fill(stack, one, pages)
        except BaseException:
            self._free.extend(pages)
            raise
        self._pages[one] = pages

    def publish(self, levels: Counts) -> None:
        changed = np.flatnonzero(levels != self._levels)
        for site in changed.tolist():
            stack = self._of[site]
            if stack is not None:
                self._point(stack, site, int(levels[site]))
        if len(changed):
            self._levels = levels.copy()
            self._transfer.write(self._on_device, torch.from_numpy(self._addresses))

    def drop(self, one: Slice) -> None:
        self._transfer.given_up()
        self._free.extend(self._pages.pop(one))

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
        if self._files is not None:
            self._files.close()

    def _take_over(self, experts: dict[str, NestedExperts]) -> dict[str, _Stack]:
        """Gives every matrix of the experts its part of the table; name -> what is known of it."""
        assert self._files is not None
        assert self._host is not None
        layout, outputs = self._files.layout, {name: one.meta.shape[2] for name, one in experts.items()}
        planes = {name: one.packed.shape[2] for name, one in experts.items()}
        self.page_bytes = page_bytes_of(layout, [(outputs[n], planes[n]) for n in experts]) if experts else 1
        parts = {n: part_pages(layout, outputs[n], planes[n], self.page_bytes) for n in experts}
        counts = {n: len(one) * sum(p.pages for p in parts[n]) for n, one in experts.items()}
        self._addresses: Counts = np.zeros(sum(counts.values()), np.int64)  # of all of them, one after the other
        self._on_device = torch.zeros(len(self._addresses), dtype=torch.int64, device=self._transfer.device)
        found, at = dict[str, _Stack](), 0
        for name, one in experts.items():
            here, at = slice(at, at + counts[name]), at + counts[name]
            table, host = self._addresses[here].reshape(len(one), -1), self._host.of(name)
            codes = None if host is None else host.view(len(one), -1)
            found[name] = _Stack(name, outputs[name], planes[name], parts[name], table, codes)
            one.packed = hollow(one.packed.shape, self._transfer.device)
            one.addresses, one.page_bytes = self._on_device[here].view(len(one), -1), self.page_bytes
        return found

    def _sizes(self, stack: _Stack | None, parameters: int) -> list[int]:
        """Bytes of each slice of a site."""
        if stack is None:
            return [parameters * width // 8 for width in self._layout.slices]
        return [self.page_bytes * _count(stack, number) for number in range(len(self._layout.slices))]

    def _room(self, pages: int) -> torch.Tensor:
        """Memory on the device, uint8 [pages, bytes of one]."""
        return torch.empty(pages, self.page_bytes, dtype=torch.uint8, device=self._transfer.device)

    def _bring_floors(self) -> None:
        """Brings the lowest slices that host memory does not hold, in pages of their own, for good."""
        ones = [(s, Slice(i, 0)) for i, s in enumerate(self._of) if s is not None and s.host is None]
        self._free.extend(self._room(sum(_count(stack, 0) for stack, _ in ones)))
        for _, one in ones:
            self.load(one)
        self.publish(self.floors)

    def _fill(self, stack: _Stack, one: Slice, pages: list[torch.Tensor]) -> None:
        """Copies a slice into its pages, from host memory or from its file."""
        parts, expert = [part for part in stack.parts if part.slice == one.number], self._experts[one.site]
        start, size = parts[0].start, stack.outputs * sum(part.row_bytes for part in parts)
        if stack.host is not None:
            self._transfer.copy(_pieces(stack, parts, stack.host[expert, start : start + size], pages))
            return
        with self._reading:  # one buffer serves all
            if self._staging is None or len(self._staging) < size:
                self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=self._transfer.device.type == "cuda")
            assert self._files is not None
            file, begin = self._files.place(stack.name)
            begin += expert * stack.plane * self._layout.total_bits + start
            staged: npt.NDArray[np.uint8] = self._staging[:size].numpy()
            self._files.read(file, begin, staged.data)
            self._transfer.copy(_pieces(stack, parts, self._staging[:size], pages))

    def _point(self, stack: _Stack, site: int, level: int) -> None:
        """Writes into a site's row of the table where its pages are."""
        row = stack.table[self._experts[site]]
        for number in range(len(self.precisions)):
            pages = iter(self._pages[Slice(site, number)] if number < level else ())
            for part in stack.parts:
                if part.slice != number:
                    continue
                here = slice(part.first, part.first + part.pages)
                if number < level:
                    row[here] = [next(pages).data_ptr() for _ in range(part.pages)]
                elif number == 0 and stack.host is not None:
                    first = stack.host[self._experts[site]].data_ptr() + part.start
                    row[here] = first + np.arange(part.pages) * (part.rows * part.row_bytes)
                else:
                    row[here] = 0


def _count(stack: _Stack, number: int) -> int:
    """Pages of a slice."""
    return sum(part.pages for part in stack.parts if part.slice == number)


def _pieces(
    stack: _Stack, parts: list[PartPages], codes: torch.Tensor, pages: list[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each of a slice's pages, and what of its codes belongs there."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for part in parts:
        first, end = part.start - parts[0].start, part.start - parts[0].start + stack.outputs * part.row_bytes
        for page in range(part.pages):
            begin = first + page * part.rows * part.row_bytes
            some = codes[begin : min(end, begin + part.rows * part.row_bytes)]
            found.append((pages[len(found)][: len(some)], some))
    return found
