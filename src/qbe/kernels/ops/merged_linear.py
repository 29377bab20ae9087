"""The custom op of several linear layers that read the same input: queries, keys and values; gate and up.

A decode step then makes one call where it made three, and the threads are woken once. Each weight keeps its own bits.
`qbe.compile` puts the op into compiled graphs; nobody need call it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qbe.kernels.ops.gradients import without_gradient

_library = torch.library.Library("qbe", "FRAGMENT")
_library.define(
    "nested_linears(Tensor x, Tensor[] packed, Tensor[] meta, Tensor[] bits, Tensor[] originals, Tensor[] biases, "
    "int[] slices, int[] exponents) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def nested_linears(
    x: torch.Tensor,
    packed: Sequence[torch.Tensor],
    meta: Sequence[torch.Tensor],
    bits: Sequence[torch.Tensor],
    originals: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    slices: Sequence[int],
    exponents: Sequence[int],
) -> torch.Tensor:
    """`qbe.kernels.ops.nested_linear` for each weight of a list, with one x.

    Args:
        x: float16, bfloat16 or float32 [..., K].
        packed, meta, bits, exponents: one for every weight.
        originals: one for every weight, or none.
        biases: one for every weight, or none.
        slices: widths of the slices of all of them.

    Returns:
        [..., N1 + N2 + ...] in x's dtype, the results side by side.
    """
    y = torch.ops.qbe.nested_linears.default(x, packed, meta, bits, originals, biases, slices, exponents)
    return without_gradient(y, x, *biases)


@torch.library.register_fake("qbe::nested_linears", lib=_library)
def _fake(
    x: torch.Tensor,
    packed: Sequence[torch.Tensor],
    meta: Sequence[torch.Tensor],
    bits: Sequence[torch.Tensor],
    originals: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    slices: Sequence[int],
    exponents: Sequence[int],
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], sum(m.shape[1] for m in meta))


def _cpu(
    x: torch.Tensor,
    packed: Sequence[torch.Tensor],
    meta: Sequence[torch.Tensor],
    bits: Sequence[torch.Tensor],
    originals: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    slices: Sequence[int],
    exponents: Sequence[int],
) -> torch.Tensor:
    from qbe.kernels.cpu.nested_linears import nested_linears as kernel

    return kernel(x, packed, meta, bits, originals, biases, slices, exponents)


def _cuda(
    x: torch.Tensor,
    packed: Sequence[torch.Tensor],
    meta: Sequence[torch.Tensor],
    bits: Sequence[torch.Tensor],
    originals: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    slices: Sequence[int],
    exponents: Sequence[int],
) -> torch.Tensor:
    from qbe.kernels.triton.nested_linears import nested_linears as kernel

    return kernel(x, packed, meta, bits, originals, biases, slices, exponents)


on_cpu = torch.library.Library("qbe", "IMPL")  # `qbe.kernels.cpu.native` may take its place
on_cpu.impl("nested_linears", _cpu, "CPU")
_library.impl("nested_linears", _cuda, "CUDA")
