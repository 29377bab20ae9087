"""Hardware by name, for plans that are made elsewhere. Memory is what drivers report, in whole GiB below it."""

from __future__ import annotations

from qbe.errors import QBEError
from qbe.hardware import HardwareProfile, detect

_GIB = 1 << 30
# name: (vendor's name, GiB, streaming multiprocessors, compute capability)
_GPUS: dict[str, tuple[str, int, int, tuple[int, int]]] = {
    "b200": ("NVIDIA B200", 178, 148, (10, 0)),
    "h200": ("NVIDIA H200", 139, 132, (9, 0)),
    "h100": ("NVIDIA H100 80GB HBM3", 79, 132, (9, 0)),
    "l40s": ("NVIDIA L40S", 44, 142, (8, 9)),
    "l4": ("NVIDIA L4", 22, 58, (8, 9)),
    "rtx4090": ("NVIDIA GeForce RTX 4090", 23, 128, (8, 9)),
    "a100": ("NVIDIA A100-SXM4-80GB", 79, 108, (8, 0)),
    "a10": ("NVIDIA A10", 22, 72, (8, 6)),
    "t4": ("Tesla T4", 14, 40, (7, 5)),
}
HERE = ("cpu", "cuda")
NAMES = (*HERE, *_GPUS)


def target(name: str) -> HardwareProfile:
    """The profile of a device of this machine, or of a GPU that is known by its name.

    Raises:
        QBEError: an unknown name, or no such device here.
    """
    if name in HERE:
        return detect(name)
    if name not in _GPUS:
        raise QBEError(f"--target '{name}' is unknown: choose {', '.join(NAMES)}")
    vendor, memory, processors, capability = _GPUS[name]
    return HardwareProfile("cuda:0", vendor, memory * _GIB, processors, capability)
