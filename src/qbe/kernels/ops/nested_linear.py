"""The custom op of a linear layer whose weight is read at each row's own precision.

Bits are an int32 tensor on x's device, one value per row. A kernel reads them while it runs, so a new blueprint is a
write to that tensor: nothing is relaunched, recompiled or repacked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qbe.kernels.ops.gradients import without_gradient
from qbe.kernels.ops.register import register


def nested_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    meta: torch.Tensor,
    bits: torch.Tensor,
    original: torch.Tensor | None,
    bias: torch.Tensor | None,
    slices: Sequence[int],
    exponent: int,
    float32_output: bool = False,
    batch_invariant: bool = True,
) -> torch.Tensor:
    """A linear layer whose weight is read at each row's own precision. For inference: a gradient through
    it raises QBEError (`qbe.kernels.ops.gradients`).

    Args:
        x: float16, bfloat16 or float32 [..., K]; R rows.
        packed: uint8 [total_bits, N*Kp/8], the slices, most significant first (`qbe.format.layout`).
        meta: uint8 [2P, N, G], scales and offsets of every precision (`qbe.format.scales`).
        bits: int32 [R], a precision word for each row: the weight's bits in the lowest byte, 16 (and what is above)
            reads `original`; a width the store lacks is served by the highest precision below it, or by the lowest.
            Kernels read it while they run, so nothing is refused. The activations' bits in the next byte, 8 or (as 0)
            16 (`qbe.kernels.reference.activations`).
        original: [N, K] in the model's dtype, on x's device or in pinned host memory; None if it was dropped.
        bias: [N] or None.
        slices: widths of the slices, most significant first.
        exponent: scale exponent of the matrix.
        float32_output: give the sums as they are, in float32 and not rounded to x's dtype: for logits, which are far
            from zero and near each other (in bfloat16 those from 16 to 32 are told apart by eighths only).
        batch_invariant: a row of few comes out the same, bit for bit, whatever rows are beside it. A GPU and a CPU with
            AMX have faster kernels for those that may not.

    Returns:
        [..., N] in x's dtype, or float32; sums are taken in float32.
    """
    y = torch.ops.qbe.nested_linear.default(
        x, packed, meta, bits, original, bias, slices, exponent, float32_output, batch_invariant
    )
    return without_gradient(y, x, bias)


def _fake(
    x: torch.Tensor,
    packed: torch.Tensor,
    meta: torch.Tensor,
    bits: torch.Tensor,
    original: torch.Tensor | None,
    bias: torch.Tensor | None,
    slices: Sequence[int],
    exponent: int,
    float32_output: bool = False,
    batch_invariant: bool = True,
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], meta.shape[1], dtype=torch.float32 if float32_output else None)


OP = register(
    "nested_linear(Tensor x, Tensor packed, Tensor meta, Tensor bits, Tensor? original, Tensor? bias, "
    "int[] slices, int exponent, bool float32_output=False, bool batch_invariant=True) -> Tensor",
    cpu="qbe.kernels.cpu.linear.nested:nested_linear",
    cuda="qbe.kernels.triton.linear.nested:nested_linear",
    fake=_fake,
)
