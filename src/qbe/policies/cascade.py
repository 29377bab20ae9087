"""The cascade's routers: what the attention of some layers says of a token gives it the bits of the layers after them.

Behind a few layers, the points, the entropies of the attention of all heads there and at the points before are read by
a network like those of `qbe.policies.routers`: for each site of the layers up to the next point it scores what each
further slice is worth to the token, and slices above a threshold are read. So every site is decided once in a pass, by
the point before it, and a token's bits change at most as often as there are points. Pure data, no torch.
"""

from __future__ import annotations

from functools import lru_cache

from qbe.blueprint import DynamicPrecision
from qbe.errors import QBEError
from qbe.policies import learned
from qbe.policies.per_token import LEVELS, TokenRouters
from qbe.policies.routers import RoutedBlock, bits_left, gear_bits, networks
from qbe.sites import ATTENTION_ROLES, SiteTable

NAME = "cascade"  # of the learned file, and in `DynamicPrecision.by`
POINTS = 10  # at most: each costs a launch, and the network that it reads


@lru_cache(maxsize=8)
def points_of(table: SiteTable) -> tuple[int, ...]:
    """The layers whose attention is looked at, evenly spaced from the first one on; behind each, layers are nested."""
    last = max((s.layer for s in table.nested if s.layer is not None), default=-1)
    layers = sorted({s.layer for s in table if s.role in ATTENTION_ROLES and s.layer is not None and s.layer < last})
    return tuple(layers[:: -(-len(layers) // POINTS)]) if layers else ()


@lru_cache(maxsize=8)
def blocks_of(table: SiteTable) -> tuple[RoutedBlock, ...]:
    """For each point the sites of the layers behind it, up to the layer of the next one; its name is of their first
    module. Those of layers up to the first point, and the output head, are in none.
    """
    points, blocks = points_of(table), []
    for point, end in zip(points, (*points[1:], table.layers), strict=False):
        sites = tuple(i for i, s in enumerate(table.nested) if s.layer is not None and point < s.layer <= end)
        blocks.append(RoutedBlock(table.nested[sites[0]].name.rpartition(".")[0], sites))
    return tuple(blocks)


def check(table: SiteTable, packs: bool) -> None:
    """Raises QBEError for a model that has no cascade.

    Args:
        packs: whether tokens of different sequences share a forward of it and nothing but attention mixes them.
    """
    name = table.model_name or "this model"
    if not packs:
        raise QBEError(
            f"{name} can have no cascade (its layers keep a state, or sequences share no forward): leave it out"
        )
    if not points_of(table):
        raise QBEError(f"{name} can have no cascade (it has no attention with nested layers behind it): leave it out")


def load(table: SiteTable, packs: bool = True) -> TokenRouters:
    """What `qbe train cascade` found.

    Raises:
        QBEError: what `check` raises; it has not run for this model, or its file does not serve.
    """
    check(table, packs)
    if not learned.path_of(NAME, table).is_file():
        raise QBEError(
            f"the cascade has not been trained for {table.model_name}: run 'qbe train cascade --model "
            f"{table.model_name}', or leave it out"
        )
    fitted, blocks = learned.read(NAME, table), blocks_of(table)
    return TokenRouters(
        blocks, networks(fitted.tensors, len(blocks)), tuple(map(int, fitted.tensors["widths"])),
        fitted.tensors["thresholds"], fitted.checksum,
    )  # fmt: skip


def level_of(routers: TokenRouters, table: SiteTable, weight_bits: tuple[int, ...], bits: float) -> float:
    """The level, 0 to LEVELS - 1 and beyond, at which tokens like training's have this average over all nested sites
    if the sites without a router have these bits.
    """
    low, high = gear_bits(table)[0], gear_bits(table)[-1]
    return (bits_left(table, routers.blocks, weight_bits, bits) - low) / (high - low) * (LEVELS - 1)


def dynamic_precision(
    routers: TokenRouters, table: SiteTable, weight_bits: tuple[int, ...], excess: float = 0.0, tokens: int = 1
) -> DynamicPrecision | None:
    """Of a token whose blueprint has these bits; None where its average is beyond what the routers can give.

    Args:
        excess: bits of the average that the tokens so far had more than their blueprints say, summed.
        tokens: in which that shall be made up for.
    """
    average = table.reads.average_bits(weight_bits)
    if not routers.blocks or not 0 < level_of(routers, table, weight_bits, average) < LEVELS - 1:
        return None
    level = level_of(routers, table, weight_bits, average - excess / tokens)
    return DynamicPrecision(NAME, round(min(LEVELS - 1.0, max(0.0, level))), routers.digest)
