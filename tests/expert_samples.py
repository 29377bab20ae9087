"""Small layers of nested experts, and what to call them with."""

from __future__ import annotations

from typing import Any

import torch

from qbe.format.codes import quantise
from qbe.format.expert_pages import part_pages
from qbe.format.layout import SliceLayout
from qbe.format.packing import pack
from qbe.kernels.ops.experts.nested import ExpertMatrices
from qbe.kernels.reference.activations import precision_byte

SLICES = (4, 2, 2)


def matrices(
    weight: torch.Tensor,
    precision: torch.Tensor,
    slices: tuple[int, ...] = SLICES,
    group_size: int = 64,
    bias: torch.Tensor | None = None,
    keep_original: bool = True,
) -> ExpertMatrices:
    """Experts of weights [E, N, K], as a store nests them."""
    layout = SliceLayout.of(slices)
    packed, meta, exponents = [], [], []
    for one in weight:
        codes, planes, exponent = quantise(one, layout, group_size)
        packed.append(pack(codes, layout))
        meta.append(planes)
        exponents.append(exponent)
    return ExpertMatrices(
        torch.stack(packed), torch.stack(meta), torch.tensor(exponents, dtype=torch.int32), precision,
        weight.contiguous() if keep_original else None, bias,
    )  # fmt: skip


def layer(
    experts: int,
    hidden: int,
    inner: int,
    plan_rows: int = 4,
    dtype: torch.dtype = torch.float32,
    bits: tuple[int, ...] = (4, 6, 8, 16),
    activation_bits: tuple[int, ...] = (16,),
    down_activation_bits: tuple[int, ...] = (16,),
    biased: bool = False,
    slices: tuple[int, ...] = SLICES,
    group_size: int = 64,
    seed: int = 0,
) -> dict[str, Any]:
    """gate_up, down and slices of a random layer; each row of the plan reads each expert at bits of its own.

    What down reads has been rounded on the way, and in 8 bits the last bit of a number may make a step of 1/127 of the
    largest: where results are compared closely, only gate_up has 8-bit activations.
    """
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made).to(dtype)

    def precision(activations: tuple[int, ...]) -> torch.Tensor:
        choices = torch.tensor([precision_byte(b, a) for b in bits for a in activations], dtype=torch.uint8)
        return choices[torch.randint(len(choices), (plan_rows, experts), generator=made)]

    def one(outputs: int, inputs: int, activations: tuple[int, ...]) -> ExpertMatrices:
        weight, bias = normal(experts, outputs, inputs) / inputs**0.5, normal(experts, outputs) if biased else None
        return matrices(weight, precision(activations), slices, group_size, bias, 16 in bits)

    gate_up, down = one(2 * inner, hidden, activation_bits), one(hidden, inner, down_activation_bits)
    return {"gate_up": gate_up, "down": down, "slices": slices}


def lowered(made: dict[str, Any], levels: dict[str, list[int]]) -> dict[str, Any]:
    """The same layer with no row above the first so many slices of each expert."""
    precisions = torch.tensor(SliceLayout.of(made["slices"]).precisions)

    def one(name: str) -> ExpertMatrices:
        matrices, most = made[name], precisions[torch.tensor(levels[name]) - 1]
        return matrices._replace(precision=torch.minimum(matrices.precision, most.to(torch.uint8)), original=None)

    return {**made, "gate_up": one("gate_up"), "down": one("down")}


def in_pages(
    made: dict[str, Any], levels: dict[str, list[int]], page_bytes: int, device: Any = "cpu", pinned: bool = False
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The same layer with the first so many slices of each expert in pages that lie in no order, and these pages."""
    layout, made = SliceLayout.of(made["slices"]), dict(made)
    parts = {n: part_pages(layout, made[n].meta.shape[2], made[n].packed.shape[2], page_bytes) for n in levels}
    most = sum(p.pages for n in levels for p in parts[n]) * len(levels["down"])
    places = iter(torch.randperm(most, generator=torch.Generator().manual_seed(0)).tolist())
    pool = torch.randint(256, (most, page_bytes), dtype=torch.uint8)
    pool = pool.pin_memory() if pinned else pool.to(device)
    for name, of_experts in levels.items():
        matrices = made[name]
        addresses = torch.zeros(len(of_experts), sum(p.pages for p in parts[name]), dtype=torch.int64)
        for e, level in enumerate(of_experts):
            codes = matrices.packed[e].flatten()
            for part in parts[name]:
                for page in range(part.pages if part.slice < level else 0):
                    start, size = part.start + page * part.rows * part.row_bytes, part.rows * part.row_bytes
                    some, place = (
                        codes[start : min(start + size, part.start + matrices.meta.shape[2] * part.row_bytes)],
                        next(places),
                    )
                    pool[place, : len(some)].copy_(some)
                    addresses[e, part.first + page] = pool[place].data_ptr()
        hollow = torch.empty(1, dtype=torch.uint8).expand(matrices.packed.shape)
        made[name] = matrices._replace(packed=hollow, addresses=addresses, original=None)
    return pool, made


def tokens(
    count: int,
    hidden: int,
    experts: int,
    top: int,
    plan_rows: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
) -> dict[str, torch.Tensor]:
    """x, topk_ids, topk_weights and rows of so many tokens, each of which chooses `top` different experts."""
    made = torch.Generator().manual_seed(seed)
    scores = torch.rand(count, experts, generator=made)
    return {
        "x": torch.randn(count, hidden, generator=made).to(dtype),
        "topk_ids": scores.topk(top, dim=-1).indices,
        "topk_weights": torch.rand(count, top, generator=made).to(dtype),
        "rows": torch.randint(plan_rows, (count,), generator=made).to(torch.int32),
    }
