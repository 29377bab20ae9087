"""Where residency will put the slices of a store when an engine starts, by the same planner, without an engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from qbe.errors import QBEError
from qbe.hardware import free_memory
from qbe.residency.host_memory import room_for_experts
from qbe.residency.planner import Counts, Numbers, Planner
from qbe.residency.size import at_least
from qbe.sites import FULL_BITS, SiteTable


@dataclass(frozen=True)
class AtStart:
    """Where a store's codes lie.

    Attributes:
        device, host, file: bytes on the device, of the others in locked host memory, and in the store's file alone.
        bits: float64 [nested sites], bits of each that are on the device; 0 where its lowest slice is read from the
            host.
    """

    device: int
    host: int
    file: int
    bits: Numbers

    def describe(self) -> dict[str, int]:
        """As JSON."""
        return {"device_bytes": self.device, "host_bytes": self.host, "file_bytes": self.file}

    def line(self) -> str:
        """In a few words."""
        parts = (("on the device", self.device), ("in host memory", self.host), ("in the store's file", self.file))
        return ", ".join(f"{size / 1e9:.2f} GB {where}" for where, size in parts)


def at_start(table: SiteTable, device: torch.device, bound: int, whole: int) -> AtStart:
    """What is where.

    Args:
        table: of a model whose sites are nested.
        bound: of `device_memory`, bytes.
        whole: that an engine takes with all slices on the device.

    Raises:
        QBEError: a bound that does not hold what always stays there.
    """
    precisions = np.array([g for g in table.gears() if g < FULL_BITS], np.int64)
    widths = np.diff(precisions, prepend=0)
    sizes: Counts = np.array([s.parameters * widths // 8 for s in table.nested], np.int64).reshape(-1, len(widths))
    expert = np.array([s.expert is not None for s in table.nested], bool)
    floors: Counts = np.ones(len(sizes), np.int64)
    if device.type == "cuda":
        floors = np.where(expert, 0, len(widths))
    above = int((sizes * (np.arange(len(widths)) >= floors[:, None])).sum())
    if bound < whole - above:
        raise QBEError(
            f"device_memory is {bound} bytes, but what always stays on the device takes about "
            f"{at_least(whole - above)}; give at least that, or a smaller kv_tokens"
        )
    planner = Planner(sizes, bound - (whole - above), np.array([s.use for s in table.nested], np.float64), floors)
    planner.fill()
    absent = above - planner.held
    host = 0
    if device.type == "cuda":
        host = min(absent, room_for_experts(free_memory(torch.device("cpu"))))
    bits = np.where(planner.levels > 0, precisions[np.maximum(planner.levels, 1) - 1], 0).astype(np.float64)
    return AtStart(int(sizes.sum()) - absent, host, absent - host, bits)
