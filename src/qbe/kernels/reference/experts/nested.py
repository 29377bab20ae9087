"""Reference of `qbe::nested_experts`: token by token, expert by expert."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch.nn.functional import gelu, silu

from qbe.format.expert_pages import part_pages
from qbe.format.layout import SliceLayout
from qbe.kernels.ops.experts.nested import GELU, GELU_TANH, SILU, ExpertMatrices
from qbe.kernels.reference.activations import weight_bits, word_of_byte
from qbe.kernels.reference.nested_linear import nested_linear


def nested_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    rows: torch.Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    slices: Sequence[int],
    activation: str = SILU,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float = 0.0,
    page_bytes: int = 0,
) -> torch.Tensor:
    """Arguments and result as those of `qbe.kernels.ops.experts.nested.nested_experts`.

    Raises:
        RuntimeError: a row at 16 bits without an original.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    experts = gate_up.packed.shape[0]
    for t in range(x.shape[0]):
        row = int(rows[t])
        for expert, weight in zip(topk_ids[t].tolist(), topk_weights[t].float(), strict=True):
            if 0 <= expert < experts:
                both = _linear(x[t : t + 1], gate_up, expert, row, slices, page_bytes)
                hidden = gated(both, activation, interleaved, alpha, limit).to(x.dtype)
                out[t] += weight * _linear(hidden, down, expert, row, slices, page_bytes)[0]
    return out.to(x.dtype)


def gated(both: torch.Tensor, activation: str, interleaved: bool, alpha: float, limit: float) -> torch.Tensor:
    """float32 [..., 2 I] of gate and up -> float32 [..., I]."""
    gate, up = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, dim=-1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == SILU:
        return silu(gate) * up
    if activation in (GELU, GELU_TANH):
        return gelu(gate, approximate="tanh" if activation == GELU_TANH else "none") * up
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def gathered(matrices: ExpertMatrices, expert: int, slices: Sequence[int], page_bytes: int) -> tuple[torch.Tensor, int]:
    """The codes of one expert [total_bits, N*Kp/8] out of pages in main memory, and the bits of them that are there;
    the others are zeros."""
    assert matrices.addresses is not None
    layout, (outputs, plane) = SliceLayout.of(slices), (matrices.meta.shape[2], matrices.packed.shape[2])
    codes, addresses = torch.zeros(layout.total_bits * plane, dtype=torch.uint8), matrices.addresses[expert].tolist()
    missing = len(slices)
    for part in part_pages(layout, outputs, plane, page_bytes):
        end = part.start + outputs * part.row_bytes
        for page in range(part.pages):
            if (address := addresses[part.first + page]) == 0:
                missing = min(missing, part.slice)
                break
            start = part.start + page * part.rows * part.row_bytes
            size = min(part.rows * part.row_bytes, end - start)
            found = (ctypes.c_uint8 * size).from_address(address)
            codes[start : start + size] = torch.frombuffer(found, dtype=torch.uint8)
    return codes.view(layout.total_bits, plane), layout.precisions[missing - 1]


def _linear(
    x: torch.Tensor, matrices: ExpertMatrices, expert: int, row: int, slices: Sequence[int], page_bytes: int
) -> torch.Tensor:
    """x [1, K] times one expert's matrix at the precision of one row of the plan, float32 [1, N]."""
    word = word_of_byte(matrices.precision[row, expert]).view(1)
    packed = matrices.packed[expert]
    if matrices.addresses is not None:
        packed, there = gathered(matrices, expert, slices, page_bytes)
        word = word - (weight_bits(word) - there).clamp_min(0)
    original = None if matrices.original is None else matrices.original[expert]
    bias = None if matrices.bias is None else matrices.bias[expert]
    return nested_linear(
        x.float(), packed, matrices.meta[expert], word, original, bias, slices,
        int(matrices.exponents[expert]),
    )  # fmt: skip
