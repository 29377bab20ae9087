"""Counters of energy that machines have: NVML of NVIDIA GPUs, RAPL of Intel and AMD processors."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch

_RAPL = Path("/sys/class/powercap")


class Meter(Protocol):
    """A counter of joules.

    Attributes:
        source: its name, which stands beside every number that comes of it.
    """

    source: str

    def joules(self) -> float | None:
        """Since some moment; it only rises. None when it cannot be read any more."""
        ...


class Nvml:
    """Energy of one GPU, all of its memory included, whoever uses it.

    Args:
        library: pynvml.
        handle: of the device.
    """

    source = "nvml"

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle

    def joules(self) -> float | None:
        """As `Meter` has it; the driver counts in millijoules and renews the number every some ten milliseconds."""
        try:
            return float(self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3
        except self._library.NVMLError:
            return None


class Rapl:
    """Energy of all processor packages, whoever uses them.

    Args:
        packages: their folders, each with `energy_uj` and `max_energy_range_uj`.
    """

    source = "rapl"

    def __init__(self, packages: list[Path]) -> None:
        self._packages = packages
        self._ranges = [_number(p / "max_energy_range_uj") or 2**32 for p in packages]
        self._last = [_number(p / "energy_uj") for p in packages]
        self._total = 0

    def joules(self) -> float | None:
        """As `Meter` has it. The counters begin anew within minutes to hours; it must be read more often than that."""
        for i, package in enumerate(self._packages):
            before, now = self._last[i], _number(package / "energy_uj")
            if before is None or now is None:
                return None
            self._total += now - before if now >= before else now + self._ranges[i] - before
            self._last[i] = now
        return self._total / 1e6


def find(device: torch.device, rapl: Path = _RAPL) -> Meter | None:
    """The counter of this device's energy; None where there is none that this process may read.

    Args:
        rapl: the kernel's folder of RAPL domains.
    """
    meter = _nvml(device) if device.type == "cuda" else _rapl(rapl)
    return meter if meter is not None and meter.joules() is not None else None


def _nvml(device: torch.device) -> Nvml | None:
    with suppress(Exception):  # no library, no driver, no such device: then there is none
        import pynvml

        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        return Nvml(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    return None


def _rapl(folder: Path) -> Rapl | None:
    packages = []
    for domain in sorted(folder.glob("intel-rapl:*")):
        with suppress(OSError):
            if (domain / "name").read_text().startswith("package"):
                packages.append(domain)
    return Rapl(packages) if packages else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
