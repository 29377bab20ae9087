"""Four precision tiers (ultra-low, low, medium, high) as what each asks for on a device. Pure data.

Usually such tiers are served by a format each of Blackwell, Hopper and Ampere (`USUAL_FORMATS`). This mapping keeps the
tiers and departs from the formats where QBE's store or the hardware says so:

- INT4 of tinygemm and of CUTLASS become the nested store at 4 and at 6 bits. As formats of the weights the two are the
  same 4 bits, which would make two tiers one, and a 4-bit copy beside the others is what the nested store avoids.
  Hopper's wgmma takes no 4-bit integers at all.
- FP6 becomes the store's 6 bits: they move the same bytes, Blackwell's tensor cores run FP6 at the rate of FP8, so
  that E4M3 activations lose nothing, and torchao has no FP6 product to call (`qbe.store.native_formats`).
- FP8 E4M3 of the medium tier is that of the activations. Weights come from the store's 8 bits, on a grid of 256 levels
  a group where E4M3 has 3 bits of mantissa.
- FP16 becomes the checkpoint's own tensor, bit for bit: most checkpoints are bfloat16, whose range FP16 does not have.
- NVFP4 stays, with a limit: torchao keeps it as a copy of its own, so a layer in it has
  left the choice per query. On layers that keep the choice the tier is the nested store at 4 bits.
- Ada, older GPUs and CPUs follow the same rule: the store's bits, and 8-bit activations where
  8-bit products are native.

The activations here are what the device runs natively (`HardwareProfile.activation_formats`); a blueprint carries 16
unless its budget asks for 8 (`Budget.activation_bits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from qbe.hardware import ORIGINAL, Family, HardwareProfile, NumberFormat
from qbe.sites import FULL_BITS

NESTED = "nested"


class PrecisionTier(StrEnum):
    """Not a budget's tier (flex, default, priority): one gear, for every site alike."""

    ULTRA_LOW = "ultra-low"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


USUAL_FORMATS: dict[PrecisionTier, dict[Family, str]] = {
    PrecisionTier.ULTRA_LOW: {
        Family.BLACKWELL: "NVFP4", Family.HOPPER: "INT4 (tinygemm)", Family.AMPERE: "INT4 (tinygemm)",
    },
    PrecisionTier.LOW: {
        Family.BLACKWELL: "FP6", Family.HOPPER: "INT4 (CUTLASS)", Family.AMPERE: "INT4 (CUTLASS)",
    },
    PrecisionTier.MEDIUM: {Family.BLACKWELL: "FP8 E4M3", Family.HOPPER: "FP8 E4M3", Family.AMPERE: "INT8"},
    PrecisionTier.HIGH: {Family.BLACKWELL: "FP16", Family.HOPPER: "FP16", Family.AMPERE: "FP16"},
}  # fmt: skip

_BITS = {PrecisionTier.ULTRA_LOW: 4, PrecisionTier.LOW: 6, PrecisionTier.MEDIUM: 8, PrecisionTier.HIGH: FULL_BITS}
_WEIGHTS = {
    PrecisionTier.ULTRA_LOW: "fewest bytes a token",
    PrecisionTier.LOW: "between 4 and 8, from the same store",
    PrecisionTier.MEDIUM: "all bits of the codes",
    PrecisionTier.HIGH: "the checkpoint's own weights, exact",
}
_ACTIVATIONS = {
    str(NumberFormat.FP8_E4M3): "E4M3 at twice the rate of 16 bits",
    str(NumberFormat.INT8): "8-bit integers are native",
    ORIGINAL: "no native 8-bit products",
}


@dataclass(frozen=True)
class TierFormat:
    """What a tier asks for on one device.

    Attributes:
        weight_format: `nested` (the store), `original` (the 16-bit weight) or a native format through torchao.
        weight_bits: the gear, or the bits of an element in a native format.
        activation_format: `original` (the model's 16 bits) or a native format.
        activation_bits: the activation gear.
        why: one line.
        specification: the tier's usual format (`USUAL_FORMATS`); None where there is none for the family.
    """

    weight_format: str
    weight_bits: int
    activation_format: str
    activation_bits: int
    why: str
    specification: str | None = None

    def describe(self) -> dict[str, Any]:
        """The mapping as JSON."""
        return asdict(self)


def tier_formats(profile: HardwareProfile, gears: Sequence[int] = (4, 6, 8, 16)) -> dict[PrecisionTier, TierFormat]:
    """The tiers on a device, lowest first.

    Args:
        gears: precisions of the store, ascending. A tier's width that is not among them is served as the kernels serve
            it: by the highest gear below it, else by the lowest.
    """
    return {tier: _format(tier, profile, gears) for tier in PrecisionTier}


def _format(tier: PrecisionTier, profile: HardwareProfile, gears: Sequence[int]) -> TierFormat:
    said = USUAL_FORMATS[tier].get(profile.family)
    if tier is PrecisionTier.ULTRA_LOW and NumberFormat.NVFP4 in profile.formats:
        why = "fastest on the tensor cores; a copy of its own, which leaves the choice per query"
        return TierFormat(str(NumberFormat.NVFP4), 4, str(NumberFormat.NVFP4), 4, why, said)
    bits = max((g for g in gears if g <= _BITS[tier]), default=min(gears))
    why = _WEIGHTS[tier] if bits == _BITS[tier] else f"the store has no {_BITS[tier]} bits, {bits} are the nearest"
    if tier is PrecisionTier.HIGH:
        return TierFormat(ORIGINAL if bits == FULL_BITS else NESTED, bits, ORIGINAL, FULL_BITS, why, said)
    narrow = min(profile.activation_formats)
    form = profile.activation_formats[narrow]
    return TierFormat(NESTED, bits, form, narrow, f"{why}; {_ACTIVATIONS[form]}", said)
