"""The hardware profile: what a device is and which number formats it runs natively. Pure data; torch only to detect.

A format is native where the device's matrix units (on a CPU: its vector dot products) multiply it as it is, without
converting it to a wider one first. Sources: NVIDIA's PTX ISA (mma, wgmma, tcgen05.mma) and Intel's and AMD's
instruction references.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Collection
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from qbe.errors import QBEError
from qbe.sites import FULL_BITS

if TYPE_CHECKING:
    import torch

ORIGINAL = "original"  # the checkpoint's own 16-bit format, bfloat16 or float16


class Family(StrEnum):
    """Generations of hardware whose native formats differ."""

    BLACKWELL = "blackwell"
    HOPPER = "hopper"
    ADA = "ada"
    AMPERE = "ampere"
    OLDER_CUDA = "older-cuda"
    CPU = "cpu"


class NumberFormat(StrEnum):
    """Number formats that some hardware multiplies natively. MX formats share a power-of-two scale per 32 values,
    NVFP4 an E4M3 scale per 16."""

    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    FP8_E4M3 = "fp8_e4m3"
    MXFP8 = "mxfp8"
    MXFP6 = "mxfp6"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"


# Compute capability from which a family, or a format on its matrix units, is there. A capability above the last one
# is taken for the newest family known here.
_FAMILIES = (
    ((10, 0), Family.BLACKWELL),
    ((9, 0), Family.HOPPER),
    ((8, 9), Family.ADA),
    ((8, 0), Family.AMPERE),
)
_CUDA_FORMATS: dict[NumberFormat, tuple[int, int]] = {
    NumberFormat.BF16: (8, 0),
    NumberFormat.FP16: (7, 0),
    NumberFormat.INT8: (7, 2),
    NumberFormat.FP8_E4M3: (8, 9),
    NumberFormat.MXFP8: (10, 0),
    NumberFormat.MXFP6: (10, 0),
    NumberFormat.MXFP4: (10, 0),
    NumberFormat.NVFP4: (10, 0),
}
# Our name of an x86 extension: the flags of `torch.cpu.get_capabilities` any of which means that it is there.
_EXTENSIONS: dict[str, frozenset[str]] = {
    "avx2": frozenset({"avx2"}),
    "avx512": frozenset({"avx512_bw"}),
    "vnni": frozenset({"avx512_vnni", "avx_vnni"}),
    "bf16": frozenset({"avx512_bf16", "amx_bf16"}),
    "fp16": frozenset({"avx512_fp16", "amx_fp16"}),
    "amx": frozenset({"amx_int8", "amx_bf16"}),
}
# AVX2 alone multiplies bytes with vpmaddubsw; VNNI and AMX add the sum.
_CPU_FORMATS: dict[NumberFormat, frozenset[str]] = {
    NumberFormat.BF16: frozenset({"bf16"}),
    NumberFormat.FP16: frozenset({"fp16"}),
    NumberFormat.INT8: frozenset({"avx2", "vnni", "amx"}),
}


@dataclass(frozen=True)
class HardwareProfile:
    """One device. Built by `detect`, or by hand from any capabilities (a test, or a plan for another machine).

    Attributes:
        device: torch's name of it, e.g. `cuda:0` or `cpu`.
        name: the vendor's name.
        memory_bytes: size of its memory.
        processors: streaming multiprocessors of a GPU, logical cores of a CPU.
        capability: CUDA compute capability; None on a CPU.
        extensions: vector extensions of an x86 CPU, of avx2, avx512, vnni, bf16, fp16 and amx. Other architectures
            are not looked into and have none.
    """

    device: str
    name: str
    memory_bytes: int
    processors: int
    capability: tuple[int, int] | None = None
    extensions: tuple[str, ...] = ()

    @cached_property
    def family(self) -> Family:
        if self.capability is None:
            return Family.CPU
        return next((f for since, f in _FAMILIES if self.capability >= since), Family.OLDER_CUDA)

    @cached_property
    def formats(self) -> tuple[NumberFormat, ...]:
        """Formats it runs natively, in the order of `NumberFormat`."""
        if self.capability is None:
            return tuple(f for f in NumberFormat if _CPU_FORMATS.get(f, frozenset()) & set(self.extensions))
        return tuple(f for f in NumberFormat if self.capability >= _CUDA_FORMATS[f])

    @cached_property
    def activation_formats(self) -> dict[int, str]:
        """Activation gear -> the format activations take there. 16 is always there and means the model's own format.

        8 is there where 8-bit products are native: as E4M3 where tensor cores take it (beside an outlier it keeps
        small values that int8 rounds to zero, at the same rate), else as int8. A GPU may multiply a long prompt that
        has a step to itself in that format (`prompt_format`). Everywhere else, and on devices without one, 8 bits are
        int8 with a scale per group (`qbe.kernels.reference.activations`), and a blueprint that asks for them runs on
        every device.
        """
        for eight in (NumberFormat.FP8_E4M3, NumberFormat.INT8):
            if eight in self.formats:
                return {8: str(eight), FULL_BITS: ORIGINAL}
        return {FULL_BITS: ORIGINAL}

    @cached_property
    def prompt_format(self) -> str | None:
        """What long prompts with 8-bit activations are multiplied in, at the sites that bear it (`SiteTable.native`).

        None on a CPU, whose one kernel multiplies int8 with a scale per group.
        """
        return None if self.capability is None else self.activation_formats.get(8)

    def describe(self) -> dict[str, Any]:
        """The profile as JSON."""
        return {
            **asdict(self),
            "capability": None if self.capability is None else "{}.{}".format(*self.capability),
            "extensions": list(self.extensions),
            "family": str(self.family),
            "formats": [str(f) for f in self.formats],
            "activation_formats": {str(bits): f for bits, f in self.activation_formats.items()},
        }


def extensions_of(flags: Collection[str]) -> tuple[str, ...]:
    """Our names of the vector extensions among a CPU's flags, as `torch.cpu.get_capabilities` spells them."""
    return tuple(name for name, any_of in _EXTENSIONS.items() if any_of & set(flags))


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on a device now: of a GPU those nobody has, of a host those that can be made free."""
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux: what nothing at all is using
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def detect(device: str | torch.device) -> HardwareProfile:
    """The profile of a device of this machine.

    Raises:
        QBEError: not a CPU or CUDA device, or one that is not there.
    """
    import torch

    try:
        where = torch.device(device)
    except RuntimeError:
        raise QBEError(f"unknown device '{device}': choose cpu or cuda") from None
    if where.type == "cpu":
        found = torch.cpu.get_capabilities()
        name = found.get("cpu_name") or platform.processor() or platform.machine()
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        extensions = extensions_of({flag for flag, there in found.items() if there is True})
        return HardwareProfile("cpu", name, memory, os.cpu_count() or 1, extensions=extensions)
    if where.type != "cuda" or (where.index or 0) >= torch.cuda.device_count():
        raise QBEError(
            f"there is no device '{device}' here to profile; torch sees {torch.cuda.device_count()} CUDA devices"
        )
    index = torch.cuda.current_device() if where.index is None else where.index
    gpu = torch.cuda.get_device_properties(index)
    # ROCm's torch calls its GPUs cuda and numbers their capabilities its own way; nothing is known of those here.
    capability = (gpu.major, gpu.minor) if torch.version.hip is None else (0, 0)
    return HardwareProfile(f"cuda:{index}", gpu.name, gpu.total_memory, gpu.multi_processor_count, capability)
