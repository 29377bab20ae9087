"""New keys and values into their pages, ahead of attention.

`qbe.kernels.triton.attention.paged` writes each row's own where no other row of its launch reads. A sequence with
several rows in a step, each of which sees the ones before it, needs them written by a launch of their own.
"""

# mypy: disable-error-code="no-untyped-def, assignment, operator, arg-type"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qbe.kernels.triton.kv_cache.blocks import PAGE


def write_rows(
    key: torch.Tensor, value: torch.Tensor, memory: torch.Tensor, head_offsets: torch.Tensor, slots: torch.Tensor
) -> None:
    """Arguments as those of `qbe.kernels.ops.paged_attention.paged_attention`."""
    rows, kv_heads, key_dim = key.shape
    value_dim = value.shape[2]
    write_rows_kernel[(rows, kv_heads)](
        key, value, memory.view(key.dtype), head_offsets, slots, key.stride(0), key.stride(1), key.stride(2),
        value.stride(0), value.stride(1), value.stride(2), KEY_DIM=key_dim, VALUE_DIM=value_dim,
        ITEM=key.element_size(), BK=triton.next_power_of_2(key_dim), BV=triton.next_power_of_2(value_dim), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["slots_ptr"])
def write_rows_kernel(
    k_ptr, v_ptr, numbers_ptr, head_offsets_ptr, slots_ptr, k_row, k_head, k_one, v_row, v_head, v_one,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ITEM: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """numbers: the pages' memory as the model's dtype. A program serves one key head of one row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dk = tl.arange(0, BK)
    dv = tl.arange(0, BV)
    key = tl.load(k_ptr + row * k_row + head * k_head + dk * k_one, mask=dk < KEY_DIM, other=0.0)
    key += key * 0  # infinity becomes NaN, so that it cannot hide behind a score that is low
    value = tl.load(v_ptr + row * v_row + head * v_head + dv * v_one, mask=dv < VALUE_DIM, other=0.0)
    slot = tl.load(slots_ptr + row)
    head_offset = tl.load(head_offsets_ptr + head)  # of format 0
    to = (slot - slot % 256 + head_offset - head_offset % 256) // ITEM
    tl.store(numbers_ptr + to + slot % 256 * KEY_DIM + dk, key, mask=dk < KEY_DIM)
    tl.store(numbers_ptr + to + PAGE * KEY_DIM + slot % 256 * VALUE_DIM + dv, value, mask=dv < VALUE_DIM)
