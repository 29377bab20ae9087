"""Which device the engine runs on, and what must be minded there."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qbe.errors import QBEError


def pick_device(name: str) -> torch.device:
    """`auto` (CUDA when there is one), `cpu`, `cuda` or `cuda:N`; a CUDA device comes back with its number.

    Raises:
        QBEError: another name, or a device this machine does not have.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError):
        raise QBEError(f"unknown device '{name}': choose auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise QBEError(f"device '{name}' is not supported: choose auto, cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise QBEError(f"device '{name}' is not there: torch sees {torch.cuda.device_count()} CUDA devices; choose cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())  # which another thread could not tell
    return device


def out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed; on the CPU torch has no class of its own for that, nor for sizes beyond 2^63."""
    words = ("allocate memory", "storage size")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(w in str(error).lower() for w in words)


def reserved(device: torch.device) -> int:
    """Bytes that torch holds of a GPU's memory, once it has given back what nothing uses; 0 of a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


@contextmanager
def no_collection() -> Iterator[None]:
    """Nothing is collected inside: while a graph is captured, what a collection destroys (another engine's graphs, its
    pinned memory) could end the capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
