"""Routers of blocks, which `qaq`, `mobi`, `tokenwise` and the cascade have in common: a small network for each block.

A block's sites are those of one module of a decoder layer, attention or feed-forward; `tokenwise` takes the output head
for a block, too. The network reads that module's input: one hidden layer of rectified units. Sites without a router
keep the best static assignment's bits, and the routers share what that leaves of an average.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from qbe.errors import QBEError
from qbe.policies.allocate import allocate
from qbe.policies.learned import Array
from qbe.sites import FULL_BITS, Role, SiteTable

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RoutedBlock:
    """name: of its module, such as `model.layers.3.mlp`. sites: their places among the nested ones, which follow each
    other. head: whether it is the output head, which sees only the rows whose logits are wanted.
    """

    name: str
    sites: tuple[int, ...]
    head: bool = False


@dataclass(frozen=True)
class Network:
    """inner float32 [inputs, hidden], inner_bias [hidden], outer [hidden, scores], outer_bias [scores]."""

    inner: Array
    inner_bias: Array
    outer: Array
    outer_bias: Array

    def scores(self, x: Array) -> Numbers:
        """float64 [..., scores] of inputs [..., inputs]."""
        hidden = np.maximum(x.astype(np.float64) @ self.inner + self.inner_bias, 0.0)
        return np.asarray(hidden @ self.outer + self.outer_bias, np.float64)


@lru_cache(maxsize=8)
def blocks_of(table: SiteTable, head: bool = False) -> tuple[RoutedBlock, ...]:
    """The blocks of a model in the order of its layers, and with `head` its output head, if that is nested.

    Raises:
        QBEError: a model that has none.
    """
    if any(s.expert is not None for s in table.nested):
        raise QBEError(
            f"{table.model_name or 'this model'} has nested experts, for which there are no routers yet; choose "
            "another policy, and leave the cascade out"
        )
    blocks: list[tuple[str, list[int]]] = []
    for index, site in enumerate(table.nested):
        name = site.name.rpartition(".")[0]
        if site.layer is None:
            continue
        if not blocks or blocks[-1][0] != name:
            blocks.append((name, []))
        blocks[-1][1].append(index)
    if not blocks:
        raise QBEError(f"{table.model_name or 'this model'} has no nested layers that a router could choose bits for")
    heads = [(s.name, index) for index, s in enumerate(table.nested) if head and s.role is Role.OUTPUT_HEAD]
    return (
        *(RoutedBlock(name, tuple(sites)) for name, sites in blocks),
        *(RoutedBlock(name, (index,), head=True) for name, index in heads),
    )


def gear_bits(table: SiteTable) -> tuple[int, ...]:
    """What routers choose among: the store's precisions below 16 bits, ascending."""
    return tuple(g for g in table.gears() if g < FULL_BITS)


@lru_cache(maxsize=256)
def static_gears(table: SiteTable, bits: float) -> tuple[int, ...]:
    """The best static assignment. Raises QBEError for a budget below the store's lowest average."""
    return allocate(table, bits, {})


def bits_left(table: SiteTable, blocks: Sequence[RoutedBlock], gears: Sequence[int], bits: float) -> float:
    """The average over the sites of these blocks that gives all sites `bits`, where the others have these gears."""
    routed = {s for block in blocks for s in block.sites}
    sizes = table.reads.sizes
    taken = FULL_BITS * table.reads.fixed + sum(sizes[i] * g for i, g in enumerate(gears) if i not in routed)
    return float((bits * table.reads.weights - taken) / sum(sizes[i] for i in routed))


def networks(tensors: Mapping[str, Array], count: int) -> tuple[Network, ...]:
    """Of a file's tensors those of so many blocks."""
    names = ("inner", "inner_bias", "outer", "outer_bias")
    return tuple(Network(*(tensors[f"{i}.{name}"] for name in names)) for i in range(count))


def named(networks: Sequence[Network]) -> dict[str, Array]:
    """The tensors of a file that `networks` reads."""
    return {f"{i}.{name}": value for i, n in enumerate(networks) for name, value in vars(n).items()}
