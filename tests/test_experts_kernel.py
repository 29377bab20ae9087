"""`qbe::nested_experts` against its reference, and the reference against plain matrices."""

from __future__ import annotations

import pytest
import torch

from expert_samples import SLICES, layer, tokens
from qbe.errors import QBEError
from qbe.kernels.ops.nested_experts import ExpertMatrices, nested_experts
from qbe.kernels.reference.nested_experts import nested_experts as reference
from qbe.kernels.reference.nested_linear import dequantise


def _plain(one: ExpertMatrices, inputs: int, bits: int) -> torch.Tensor:
    """Every expert's matrix at these bits, [E, N, K]."""
    if bits == 16:
        assert one.original is not None
        return one.original
    parts = zip(one.packed, one.meta, one.exponents.tolist(), strict=True)
    return torch.stack([dequantise(packed, meta, e, SLICES, inputs, bits) for packed, meta, e in parts])


@pytest.mark.parametrize("bits", [4, 6, 8, 16])
def test_the_reference_is_a_mixture_of_experts(bits: int) -> None:
    """At one precision it is the plain layer of the weights that are read: einsums over all experts."""
    experts, hidden, inner = 5, 96, 72
    given, made = tokens(7, hidden, experts, 3), layer(experts, hidden, inner)
    for one in (made["gate_up"], made["down"]):
        one.precision.fill_(bits)
    gate, up = torch.einsum("th,enh->etn", given["x"], _plain(made["gate_up"], hidden, bits)).chunk(2, -1)
    each = torch.einsum("eti,ehi->eth", torch.nn.functional.silu(gate) * up, _plain(made["down"], inner, bits))
    share = torch.zeros(7, experts).scatter_(1, given["topk_ids"], given["topk_weights"])
    expected = torch.einsum("te,eth->th", share, each)
    torch.testing.assert_close(reference(**given, **made), expected, rtol=1e-4, atol=1e-4)


def test_an_unknown_activation_is_refused() -> None:
    given, made = tokens(2, 64, 4, 2), layer(4, 64, 64)
    with pytest.raises(QBEError, match="no activation 'tanh'"):
        nested_experts(**given, **made, activation="tanh")


def test_the_op_is_the_reference() -> None:
    given, made = tokens(6, 96, 4, 2), layer(4, 96, 72)
    torch.testing.assert_close(nested_experts(**given, **made), reference(**given, **made), rtol=1e-4, atol=1e-4)
