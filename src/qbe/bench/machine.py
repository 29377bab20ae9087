"""The machine a benchmark ran on: device, versions, cores, load, and how fast it copies and multiplies."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "torchao", "triton", "transformers", "llama-cpp-python")
_REPEATS = 20


@dataclass(frozen=True)
class Roofline:
    """What the machine's physics allow.

    Attributes:
        bandwidth: of a copy, bytes read and written per second.
        flops: of a large bfloat16 matrix product, per second.
    """

    bandwidth: float
    flops: float

    def seconds(self, moved: float, operations: float = 0.0) -> float:
        """The least time for work that must move so many bytes and multiply so often."""
        return max(moved / self.bandwidth, operations / self.flops)


def measure_limits(device: torch.device, copy_bytes: int | None = None, matmul_size: int | None = None) -> Roofline:
    """Measures both; the best of twenty, since this is a limit.

    Args:
        copy_bytes: size of the copied buffer: beyond any cache. By default 1 GiB on a GPU, 256 MiB on a CPU.
        matmul_size: M = N = K of the product; by default 8192 on a GPU, 2048 on a CPU.
    """
    gpu = device.type == "cuda"
    copy_bytes = copy_bytes or (1 << 30 if gpu else 1 << 28)
    matmul_size = matmul_size or (8192 if gpu else 2048)
    return Roofline(
        2 * copy_bytes / _copy_seconds(copy_bytes, device), 2 * matmul_size**3 / _matmul_seconds(matmul_size, device)
    )


def _copy_seconds(size: int, device: torch.device) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _best_seconds(lambda: target.copy_(source), device)


def _matmul_seconds(size: int, device: torch.device) -> float:
    a = torch.randn(size, size, device=device).bfloat16()
    return _best_seconds(lambda: a @ a, device)


def _best_seconds(run: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(_REPEATS):
        best = min(best, seconds(run, device))
    return best


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """What one run takes: device time between two events on a GPU, wall time on a CPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def free_bytes(device: torch.device) -> int:
    """Memory that is free on the device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        match = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        match = None
    return int(match[1]) << 10 if match else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def hardware(device: torch.device, limits: Roofline) -> dict[str, Any]:
    """The machine as JSON; what is not there is None."""
    gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else _cpu_name(),
        "kind": device.type,
        "driver": _driver() if gpu else None,
        "cuda": torch.version.cuda if gpu else None,
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "load_average": list(os.getloadavg()),
        "copy_bandwidth_bytes_per_s": limits.bandwidth,
        "matmul_flops_per_s": limits.flops,
        "versions": {
            "qbe": _qbe(),
            "python": platform.python_version(),
            **{p: version(p) for p in PACKAGES},
            "torch": torch.__version__,
        },
    }


def version(package: str) -> str | None:
    """The installed version of a package, None when it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _qbe() -> str:
    from qbe.version import __version__

    return __version__


def _cpu_name() -> str:
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()


def _driver() -> str | None:
    try:
        match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return match[1] if match else None
