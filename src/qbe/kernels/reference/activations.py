"""Reference of 8-bit activations, and how a row's precision word is read.

A row's precision is one int32: the weight's bits in the lowest byte, the activations' bits in the next one. 0 there
means 16 bits, so that a plain number of bits is a valid one.

Of experts there are thousands, so that each has a byte for a row: the weight's bits, and 128 more where the
activations have 8.
"""

from __future__ import annotations

import torch

from qbe.sites import FULL_BITS

EIGHT = 8  # the one width of activations below 16 bits
EIGHT_IN_BYTE = 128  # what says so in an expert's byte


def precision_word(weight_bits: int, activation_bits: int = FULL_BITS) -> int:
    """What a plan's cell holds for a row that reads these bits."""
    return weight_bits if activation_bits >= FULL_BITS else weight_bits | activation_bits << 8


def precision_byte(weight_bits: int, activation_bits: int = FULL_BITS) -> int:
    """The same for an expert, of which the plan holds a byte."""
    return weight_bits if activation_bits >= FULL_BITS else weight_bits | EIGHT_IN_BYTE


def word_of_byte(precision_bytes: torch.Tensor) -> torch.Tensor:
    """uint8 precision bytes -> int32 precision words."""
    wide = precision_bytes.to(torch.int32)
    return (wide & (EIGHT_IN_BYTE - 1)) | torch.where(wide >= EIGHT_IN_BYTE, EIGHT << 8, 0).to(torch.int32)


def weight_bits(precision_words: torch.Tensor) -> torch.Tensor:
    """int32 precision words -> int32 bits of the weight."""
    return precision_words & 255


def has_eight(precision_words: torch.Tensor) -> torch.Tensor:
    """int32 precision words -> bool: whether the row's activations have 8 bits."""
    return precision_words >> 8 == EIGHT


def eight_bits(x: torch.Tensor, group_size: int) -> torch.Tensor:
    """x as the kernels' 8-bit activations hold it: int8 with a scale for each row and group of inputs.

    Rounded by way of 16-bit fixed point, as the decode kernels do it: q = round(x / s) with s = max|x| / 32512, the
    byte is (q + 128) >> 8, and it stands for 256 * s * byte.

    Args:
        x: float [..., K]; K is padded to whole groups by zeros here.

    Returns:
        float32 [..., K].
    """
    k = x.shape[-1]
    pad = -k % group_size
    groups = torch.nn.functional.pad(x.float(), (0, pad)).unflatten(-1, (-1, group_size))
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-33) / 32512
    q = groups / scale
    q = torch.trunc(q + torch.where(q >= 0, 0.5, -0.5))
    byte = torch.floor((q + 128) / 256)
    return (256 * scale * byte).flatten(-2)[..., :k]
