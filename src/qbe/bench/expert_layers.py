"""Layers of experts with random weights, nested and in bfloat16, and ways to run them.

Experts are copies of one matrix: each lies in memory of its own, and that is all a cache can see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import grouped_mm, linear, silu

from qbe.format.codes import quantise
from qbe.format.layout import SliceLayout
from qbe.format.packing import pack
from qbe.kernels.ops.experts.nested import ExpertMatrices, nested_experts
from qbe.kernels.reference.activations import precision_byte, weight_bits, word_of_byte
from qbe.sites import FULL_BITS
from qbe.store.nested_linears import NestedWeightConfig


@dataclass(frozen=True)
class ExpertShape:
    """The routed experts of one layer.

    Attributes:
        model: whose they are, or like whose.
        experts, top: how many, and how many of them a token chooses.
        hidden, inner: numbers of a token, and between the matrices of an expert.
        copies: layers of that shape, so that no cache holds what a step reads.
    """

    model: str
    experts: int
    top: int
    hidden: int
    inner: int
    copies: int = 1


QWEN3_30B = ExpertShape("Qwen3-30B-A3B", 128, 8, 2048, 768)
# The feed-forward network of SmolLM2-135M (576, 1536) as what a token reads of 32 experts.
SMOLLM2_EXPERTS = ExpertShape("SmolLM2-like", 32, 4, 576, 384, copies=6)


@dataclass(frozen=True)
class Layers:
    """All copies of a layer.

    Attributes:
        gate_up, down: nested, of each copy, with their originals; `precision` is what a call gives.
    """

    shape: ExpertShape
    device: torch.device
    layout: SliceLayout
    gate_up: list[ExpertMatrices]
    down: list[ExpertMatrices]

    def precision(self, tokens: int, bits: Callable[[int, int], int], activation_bits: int) -> torch.Tensor:
        """uint8 [tokens, E]: the precision bytes where row r reads expert e at bits(r, e)."""

        def byte(row: int, expert: int) -> int:
            read = bits(row, expert)
            return precision_byte(read, FULL_BITS if read >= FULL_BITS else activation_bits)

        every = range(self.shape.experts)
        plan = [[byte(r, e) for e in every] for r in range(tokens)]
        return torch.tensor(plan, dtype=torch.uint8, device=self.device)

    def nested(self, given: dict[str, torch.Tensor], layer: int, precision: torch.Tensor) -> torch.Tensor:
        """Ours, [tokens, hidden]."""
        gate_up, down = (m[layer]._replace(precision=precision) for m in (self.gate_up, self.down))
        ids, slices = given["ids"][layer], self.layout.slices
        return nested_experts(given["x"], ids, given["weights"], given["rows"], gate_up, down, slices)

    def _dense(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        gate_up, down = self.gate_up[layer].original, self.down[layer].original
        assert gate_up is not None
        assert down is not None
        return gate_up, down

    def loop(self, given: dict[str, torch.Tensor], layer: int) -> torch.Tensor:
        """Expert by expert in bfloat16, as transformers' models do by themselves."""
        (gate_up, down), ids, x = self._dense(layer), given["ids"][layer], given["x"]
        out = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            token, slot = torch.where(ids == expert)
            gate, up = linear(x[token], gate_up[expert]).chunk(2, dim=-1)
            y = linear(silu(gate) * up, down[expert]) * given["weights"][token, slot, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out

    def grouped(self, given: dict[str, torch.Tensor], layer: int) -> torch.Tensor:
        """By torch's grouped product in bfloat16, as transformers' "grouped_mm" does."""
        (gate_up, down), ids = self._dense(layer), given["ids"][layer]
        chosen, order = ids.flatten().sort(stable=True)
        ends = torch.zeros(self.shape.experts, dtype=torch.int32, device=self.device)
        ends.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32))
        ends = ends.cumsum(0, dtype=torch.int32)
        gate, up = grouped_mm(given["x"][order // ids.shape[1]], gate_up.mT, offs=ends).chunk(2, dim=-1)
        y = grouped_mm(silu(gate) * up, down.mT, offs=ends) * given["weights"].flatten()[order, None]
        each = torch.empty_like(y)
        each[order] = y
        return each.view(*ids.shape, -1).sum(1)

    def bytes_read(self, given: dict[str, torch.Tensor], precision: torch.Tensor) -> float:
        """Bytes that one layer moves at least: of every expert what the highest of its rows reads, and its scales."""
        used = torch.zeros(self.shape.experts, 9, dtype=torch.bool)  # [expert, gear]; the original's is 0
        bits = weight_bits(word_of_byte(precision)).cpu()
        ids, rows = given["ids"][0].cpu(), given["rows"].cpu().long()
        for slot in ids.T:
            read = bits[rows, slot]
            used[slot, torch.where(read >= FULL_BITS, 0, read).long()] = True
        weights = 3 * self.shape.hidden * self.shape.inner
        planes = weights / NestedWeightConfig().group_size
        total = 2.0 * weights * int(used[:, 0].sum())
        for gears in used[:, 1:]:
            read_bits = [i + 1 for i, wanted in enumerate(gears.tolist()) if wanted]
            if read_bits:
                lower = sum(b < self.layout.total_bits for b in read_bits)
                total += weights * max(read_bits) / 8 + planes * (2 + 2 * lower)
        return total + 2.0 * given["x"].numel() * 2

    def products(self, given: dict[str, torch.Tensor]) -> int:
        return int(given["ids"][0].numel()) * 3 * self.shape.hidden * self.shape.inner


def random_layers(shape: ExpertShape, device: torch.device) -> Layers:
    made = torch.Generator().manual_seed(0)
    config = NestedWeightConfig()
    layout = SliceLayout.of(config.slices)

    def matrices(outputs: int, inputs: int) -> ExpertMatrices:
        weight = (torch.randn(outputs, inputs, generator=made) / inputs**0.5).to(device).bfloat16()
        codes, meta, exponent = quantise(weight, layout, config.group_size)
        packed, experts = pack(codes, layout), shape.experts

        def copied(one: torch.Tensor) -> torch.Tensor:
            return one.expand(experts, *one.shape).contiguous()

        exponents = torch.full((experts,), exponent, dtype=torch.int32, device=device)
        nothing = torch.zeros(0, experts, dtype=torch.uint8, device=device)
        return ExpertMatrices(copied(packed), copied(meta), exponents, nothing, copied(weight))

    gate_up = [matrices(2 * shape.inner, shape.hidden) for _ in range(shape.copies)]
    return Layers(shape, device, layout, gate_up, [matrices(shape.hidden, shape.inner) for _ in range(shape.copies)])


def rows_of(layers: Layers, tokens: int) -> dict[str, torch.Tensor]:
    """Random x, weights, rows of the plan, and for each layer the experts that they choose, all equally likely."""
    shape, made = layers.shape, torch.Generator().manual_seed(tokens)
    scores = torch.rand(shape.copies, tokens, shape.experts, generator=made)
    given = {
        "x": torch.randn(tokens, shape.hidden, generator=made).bfloat16(),
        "ids": scores.topk(shape.top, dim=-1).indices,
        "weights": torch.softmax(torch.randn(tokens, shape.top, generator=made), -1).bfloat16(),
        "rows": torch.arange(tokens, dtype=torch.int32),
    }
    return {name: tensor.to(layers.device) for name, tensor in given.items()}
