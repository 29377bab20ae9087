"""The linear layers of one token, with random weights: dense and nested, every layer with memory of its own.

Weights are random because only shapes and bits matter for time; they are copies of one matrix per shape, because a
copy lies in memory of its own and that is all a cache can see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.functional import linear

from qbe.store.nested_linears import NestedWeightConfig, set_weight
from qbe.store.nested_tensor import NestedTensor
from qbe.store.placement import place


@dataclass(frozen=True)
class LinearGroup:
    """Linear layers of one shape in one decoder layer.

    Attributes:
        name: what they do.
        n, k: outputs and inputs.
        per_layer: how many of them a decoder layer has.
    """

    name: str
    n: int
    k: int
    per_layer: int = 1


@dataclass(frozen=True)
class Token:
    """The linear layers that one token passes.

    Attributes:
        model: whose shapes these are.
        layers: decoder layers.
        parts: of one decoder layer, in order.
        head: the output head, if it is counted.
    """

    model: str
    layers: int
    parts: tuple[LinearGroup, ...]
    head: LinearGroup | None = None

    @property
    def all_parts(self) -> tuple[LinearGroup, ...]:
        return (*self.parts, self.head) if self.head else self.parts

    def copies(self, part: LinearGroup) -> int:
        return 1 if part is self.head else self.layers * part.per_layer

    def order(self) -> list[tuple[LinearGroup, int]]:
        """Every linear layer as (part, number of its copy), in the order in which a token passes them."""
        body = [(p, i * p.per_layer + j) for i in range(self.layers) for p in self.parts for j in range(p.per_layer)]
        return [*body, (self.head, 0)] if self.head else body


LLAMA_8B = Token(
    "Llama-3.1-8B",
    32,
    (
        LinearGroup("qkv", 6144, 4096),
        LinearGroup("o", 4096, 4096),
        LinearGroup("gate+up", 28672, 4096),
        LinearGroup("down", 4096, 14336),
    ),
)
SMOLLM2 = Token(
    "SmolLM2-135M",
    30,
    (
        LinearGroup("q, o", 576, 576, 2),
        LinearGroup("k, v", 192, 576, 2),
        LinearGroup("gate, up", 1536, 576, 2),
        LinearGroup("down", 576, 1536),
    ),
    LinearGroup("head", 49152, 576),
)


def token_for(device: torch.device) -> Token:
    return LLAMA_8B if device.type == "cuda" else SMOLLM2


@dataclass
class Weights:
    """All weights of a token.

    Attributes:
        dense: part name -> bfloat16 [n, k] for every copy.
        nested: group size -> part name -> the same weights in the nested store, as a model has them on this device;
            their `original` is the dense weight.
    """

    token: Token
    device: torch.device
    dense: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    nested: dict[int, dict[str, list[NestedTensor]]] = field(default_factory=dict)

    def bytes_read(self, part: LinearGroup, widths: Iterable[int], group: int, rows: int) -> float:
        """Bytes that one linear layer must move for `rows` rows at these precisions: weight, scales, input, output.

        The widest precision needs its own scales only, each lower one adds some of its own.
        """
        weight, wanted = self.nested[group][part.name][0], sorted(set(widths))
        bytes_at = weight.bytes_at()
        codes = {b: part.n * part.k * b / 8 for b in wanted}
        top = wanted[-1]
        scales = {b: bytes_at[b] - codes[b] for b in wanted if b < 16}
        widest = bytes_at[weight.layout.total_bits] - part.n * part.k * weight.layout.total_bits / 8
        shared = widest if len(scales) > 1 else 0.0  # what every precision's scales refer to is read once
        total = codes[top] + sum(scales.values()) - shared * max(0, len(scales) - 1)
        return total + 2 * rows * (part.n + part.k)


def random_weights(
    token: Token, device: torch.device, groups: Iterable[int], on_part: Callable[[], None] = lambda: None
) -> Weights:
    """Random weights for a token on its device; `on_part` is called once for each part."""
    torch.manual_seed(0)
    out = Weights(token, device, nested={g: {} for g in groups})
    for part in token.all_parts:
        first = (torch.randn(part.n, part.k, device=device) * 0.02).bfloat16()
        dense = [first, *(first.clone() for _ in range(token.copies(part) - 1))]
        out.dense[part.name] = dense
        for group, nested in out.nested.items():
            nested[part.name] = _nested(dense, group, device)
        on_part()
    return out


def _nested(dense: list[torch.Tensor], group: int, device: torch.device) -> list[NestedTensor]:
    """The dense weights as an engine would hold them: nested and placed on the device."""
    holder = nn.Sequential(nn.Linear(1, 1, bias=False))
    config = NestedWeightConfig(group_size=group)
    set_weight(holder[0], NestedTensor.from_weight(dense[0], config.slices, config.group_size))  # type: ignore[arg-type]
    place(holder, device, "device")
    first = holder[0].weight
    assert isinstance(first, NestedTensor)
    first.original = None  # so that it is not cloned with the rest
    out = []
    for original in dense:
        copy = first.clone()
        assert isinstance(copy, NestedTensor)
        copy.original = original
        out.append(copy)
    return out


def call(x: torch.Tensor, weight: NestedTensor, bits: torch.Tensor) -> torch.Tensor:
    """x [M, K] times a nested weight, row r at bits[r] (int32 [M]), the way a model calls it."""
    weight.bits = bits
    return linear(x, weight)
