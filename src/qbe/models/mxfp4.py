"""Weights that a checkpoint has as MXFP4, such as gpt-oss's experts, back in 16 bits, where all of them are exact.

A block is 32 numbers of an input dimension: 4 bits each (sign, two bits of exponent, one of mantissa), two to a byte,
the first one in the low bits, and one power of two in a byte (OCP Microscaling Formats, version 1.0). A checkpoint has
`X_blocks`, uint8 [experts, outputs, blocks, 16], and `X_scales`, uint8 [experts, outputs, blocks], in the place of X,
which the model has as [experts, inputs, outputs].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from qbe.errors import QBEError
from qbe.models.folder_weights import LazySafetensor

METHOD = "mxfp4"  # as configurations call it
_BYTES = 16  # of a block's numbers
_BIAS, _NO_NUMBER = 127, 255  # of the scales' exponents
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))


def dequantise(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of some blocks.

    Args:
        blocks: uint8 [..., blocks, 16].
        scales: uint8 [..., blocks].

    Returns:
        [..., 32 * blocks] in `dtype`.

    Raises:
        ValueError: a scale that is no number.
    """
    if (scales == _NO_NUMBER).any():
        raise ValueError("a scale of its MXFP4 blocks is no number")
    pairs = torch.tensor([(_VALUES[byte & 15], _VALUES[byte >> 4]) for byte in range(256)], device=blocks.device)
    numbers = pairs[blocks.int()].flatten(-2)
    return torch.ldexp(numbers, scales.int()[..., None] - _BIAS).flatten(-2).to(dtype)


@dataclass(frozen=True)
class LazyMXFP4:
    """A matrix of every expert of a layer, read and dequantised when transformers asks for it, as `LazySafetensor`.

    Attributes:
        shape: [experts, inputs, outputs].
    """

    blocks: LazySafetensor
    scales: LazySafetensor
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    def __getitem__(self, _: Any) -> LazyMXFP4:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weights on `device` in `dtype`, one expert at a time."""
        out = torch.empty(self.shape, dtype=dtype or self.dtype, device=device or "cpu")
        blocks, scales = self.blocks.to(device), self.scales.to(device)
        try:
            for expert, codes, exponents in zip(out, blocks, scales, strict=True):
                expert.copy_(dequantise(codes, exponents, out.dtype).T)
        except ValueError as error:
            raise QBEError(f"{self.blocks.file}: {self.blocks.name}: {error}; download the model again") from None
        return out


def dequantised(weights: Mapping[str, LazySafetensor]) -> dict[str, LazySafetensor | LazyMXFP4]:
    """A checkpoint's tensors, with those that are MXFP4 under the names that the model has for them.

    Raises:
        QBEError: blocks without scales, or whose shapes do not belong together.
    """
    found: dict[str, LazySafetensor | LazyMXFP4] = dict(weights)
    for name, blocks in weights.items():
        own = name.removesuffix("_blocks")
        if own == name or blocks.dtype is not torch.uint8:
            continue
        scales = weights.get(f"{own}_scales")
        fits = scales is not None and scales.dtype is torch.uint8 and len(blocks.shape) == 4
        if scales is None or not fits or (*scales.shape, _BYTES) != blocks.shape:
            have = "missing" if scales is None else f"{scales.dtype} {list(scales.shape)}"
            raise QBEError(
                f"{blocks.file}: {name} {list(blocks.shape)} is not a matrix of MXFP4 blocks by expert (scales: "
                f"{have}); download the model again"
            )
        experts, outputs, count, _ = blocks.shape
        del found[name], found[f"{own}_scales"]
        found[own] = LazyMXFP4(blocks, scales, (experts, count * 2 * _BYTES, outputs))
    return found
