"""The custom op of several linear layers that read the same input: queries, keys and values; gate and up.

A decode step then makes one call where it made three, and the threads are woken once. Each weight keeps its own bits.
`qbe.compile` puts the op into compiled graphs; nobody need call it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qbe.kernels.ops.gradients import without_gradient
from qbe.kernels.ops.register import register


def nested_linears(
    x: torch.Tensor,
    packed: Sequence[torch.Tensor],
    meta: Sequence[torch.Tensor],
    bits: Sequence[torch.Tensor],
    originals: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    slices: Sequence[int],
    exponents: Sequence[int],
    batch_invariant: bool = True,
) -> torch.Tensor:
    """`qbe.kernels.ops.nested_linear` for each weight of a list, with one x.

    Args:
        x: float16, bfloat16 or float32 [..., K].
        packed, meta, bits, exponents: one for every weight.
        originals: one for every weight, or none.
        biases: one for every weight, or none.
        slices: widths of the slices of all of them.
        batch_invariant: as there.

    Returns:
        [..., N1 + N2 + ...] in x's dtype, the results side by side.
    """
    y = torch.ops.qbe.nested_linears.default(
        x, packed, meta, bits, originals, biases, slices, exponents, batch_invariant
    )
    return without_gradient(y, x, *biases)


def fake(
    x: torch.Tensor,
    packed: Sequence[torch.Tensor],
    meta: Sequence[torch.Tensor],
    bits: Sequence[torch.Tensor],
    originals: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    slices: Sequence[int],
    exponents: Sequence[int],
    batch_invariant: bool = True,
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], sum(m.shape[1] for m in meta))


OP = register(
    "nested_linears(Tensor x, Tensor[] packed, Tensor[] meta, Tensor[] bits, Tensor[] originals, Tensor[] biases, "
    "int[] slices, int[] exponents, bool batch_invariant=True) -> Tensor",
    cpu="qbe.kernels.cpu.linear.merged:nested_linears",
    cuda="qbe.kernels.triton.linear.merged:nested_linears",
    fake=fake,
)
