"""Recurrent states below 32 bits: what the kernels are held against (`qbe.format.state_rows` has the layout)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from qbe.format.state_rows import LANES, feedback_bits, feedback_bytes, padded_size

_WORD = 0xFFFFFFFF
_TINY = 1e-30  # a row whose numbers are all smaller is zero: the inverse of its scale would be infinite


def quantise_state(state: torch.Tensor, bits: int, position: int) -> torch.Tensor:
    """uint8 [bytes] of `state` [..., size] at 16, 10 or 8 bits; a row with a number that is not finite becomes NaN.

    Args:
        position: of the token after which it is so: below 16 bits rounding is stochastic, and differs by it.
    """
    codes, scales = _codes(state, bits, position)
    more = feedback_bits(bits)
    parts = [(codes >> more).to(torch.int16 if bits == 16 else torch.int8)]
    if more:
        parts.append(_feedback(codes & (1 << more) - 1, more, feedback_bytes(state.shape[-1], bits)))
    return torch.cat([part.contiguous().view(torch.uint8).flatten() for part in (*parts, scales)])


def round_state(state: torch.Tensor, bits: int, position: int) -> torch.Tensor:
    """float32 [..., size]: what `dequantise_state` makes of `quantise_state`, without the bytes in between."""
    codes, scales = _codes(state, bits, position)
    return (codes.float() * scales.float()[:, None])[:, : state.shape[-1]].reshape(state.shape)


def _codes(state: torch.Tensor, bits: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [rows, padded size], and bfloat16 [rows]: their scales."""
    size, levels = state.shape[-1], 2 ** (bits - 1) - 1
    rows = F.pad(state.reshape(-1, size).float(), (0, padded_size(size) - size))
    most = rows.abs().amax(1)
    scale = ((most / levels).contiguous().view(torch.int32) + 0xFFF0 & -0x10000).view(torch.float32)
    scale = torch.where(most < _TINY, 0.0, scale)
    broken = ~rows.isfinite().all(1)
    inverse = torch.where((scale == 0) | broken, 0.0, 1 / scale)
    rows = rows.masked_fill(broken[:, None], 0.0)
    codes = rows * inverse[:, None]
    if bits < 16:
        codes += _dither(rows, position)
    codes = codes.round().clamp(-levels, levels).to(torch.int32)
    return codes, scale.masked_fill(broken, math.nan).to(torch.bfloat16)


def dequantise_state(stored: torch.Tensor, shape: tuple[int, ...], bits: int) -> torch.Tensor:
    """float32 `shape`: what `quantise_state` has made of such a state."""
    rows, size = math.prod(shape[:-1]), shape[-1]
    padded, dtype, more = padded_size(size), torch.int16 if bits == 16 else torch.int8, feedback_bits(bits)
    sizes = [rows * padded * dtype.itemsize, rows * feedback_bytes(size, bits), rows * 2]
    codes, feedback, scales = (part.contiguous() for part in stored.split(sizes))
    numbers = codes.view(dtype).view(rows, padded).int()
    if more:
        runs = feedback.view(rows, -1, 1, LANES).int() >> torch.arange(0, 8, more, device=stored.device).view(-1, 1)
        low = (runs & (1 << more) - 1).reshape(rows, -1)
        numbers = (numbers << more) | low[:, :padded]
    return (numbers.float() * scales.view(torch.bfloat16).float()[:, None])[:, :size].reshape(shape)


def _dither(rows: torch.Tensor, position: int) -> torch.Tensor:
    """In [-1/2, 1/2), as if drawn: a hash of each place and the position. What differs a little is rounded alike."""
    places = torch.arange(rows.numel(), dtype=torch.int32, device=rows.device).view(rows.shape)
    h = places * _signed(0x85EBCA77) + _signed(position * 0xC2B2AE3D)  # modulo 2^32, as int32 wraps around
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> shift & (1 << 32 - shift) - 1) * _signed(factor)
    return (h >> 8 & 0xFFFFFF).float() * 2**-24 - 0.5


def _signed(word: int) -> int:
    """The int32 with the lowest 32 bits of a number."""
    return (word + 0x80000000 & _WORD) - 0x80000000


def _feedback(low: torch.Tensor, more: int, row_bytes: int) -> torch.Tensor:
    """uint8 [rows, row_bytes] of bits [rows, padded size]."""
    runs = 8 // more  # of LANES numbers that share LANES bytes
    low = F.pad(low, (0, row_bytes * runs - low.shape[1])).view(len(low), -1, runs, LANES)
    return (low << torch.arange(0, 8, more, device=low.device).view(-1, 1)).sum(2).to(torch.uint8)
