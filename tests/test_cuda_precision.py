"""What the bytes of decode attention's products are relative to: no token or channel may cost the others their bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kv_samples import Memory
from qbe.format.kv_blocks import PAGE_SIZE
from qbe.kernels.reference.paged_attention import paged_attention as reference
from test_cuda_attention import Cut, check, kernel, kernel_of
from test_paged_attention import case, copied, on_cpu, on_gpu_order
from test_triton_kernel import CUDA, DEVICE

DIM = 128
NEAR = {torch.bfloat16: 0.01, torch.float16: 0.002}  # of the norm of a head's output


def one_page(dtype: torch.dtype, bits: int, sink: float, first: float, loud: float = 1.0) -> dict[str, Any]:
    """A page, and the new token. The page's first token has a score `sink` nats above all others' and a value `first`
    times as large as theirs; another token's is `loud` times as large and its score `sink` nats below.
    """
    g = torch.Generator().manual_seed(0)
    query = torch.randn(1, 1, DIM, generator=g).to(dtype)
    keys, values = torch.zeros(PAGE_SIZE, 1, DIM), torch.randn(PAGE_SIZE, 1, DIM, generator=g) + 1
    along = query[0].float() / query.float().square().sum() * DIM**0.5
    keys[0], values[0] = sink * along, first * values[0]
    if loud != 1:
        keys[5], values[5] = -sink * along, loud * values[5]
    memory = Memory([(16,), (bits,)], (1, DIM, DIM), dtype, 4)
    quantised, last = memory.filled(1, keys, values), memory.page()
    new = torch.zeros(1, 1, DIM).to(dtype)
    return {
        "query": query.to(DEVICE), "key": new.to(DEVICE), "value": (new + 1).to(DEVICE),
        "memory": memory.data.to(DEVICE), "head_offsets": memory.head_offsets.to(DEVICE),
        "slots": torch.tensor([last], device=DEVICE),
        "block_tables": torch.tensor([[quantised, last]], device=DEVICE), "entropy": torch.zeros(1, 1, device=DEVICE),
        "lengths": torch.tensor([PAGE_SIZE + 1], device=DEVICE), "scaling": DIM**-0.5, "window": 0, "softcap": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize("bits", [8, 4, 2, 68])
@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize(
    ("sink", "first", "loud"), [(8, 0.01, 1), (10, 0.01, 1), (8, 1, 1), (4, 1, 100), (6, 0, 1), (90, 0, 1)]
)
def test_no_token_costs_the_others_their_bits(
    sink: float, first: float, loud: float, dtype: torch.dtype, bits: int
) -> None:
    """An attention sink, usually a token whose value is small; a token whose value is large and that is hardly seen."""
    arguments = one_page(dtype, bits, sink, first, loud)
    expected = reference(**on_cpu(copied(arguments))).float()
    found_in = copied(arguments)
    found_in["memory"] = on_gpu_order(found_in)
    found = (kernel() if CUDA else kernel_of(Cut(), False))(**(found_in if CUDA else on_cpu(found_in))).float().cpu()
    assert float((found - expected).norm()) <= NEAR[dtype] * float(expected.norm())  # never so if it is not a number


@pytest.mark.parametrize("ahead", [False, True])
def test_so_many_key_heads_that_their_costs_reach_far_into_shared_memory(ahead: bool) -> None:
    """3 712 of them: what blocks find out lies where their copies come later."""
    check(case("many key heads", [1] * 57 + [70], torch.float16, [16, 4]), torch.float16, Cut(3, ahead=ahead))
