"""Each token runs with as many slices of every weight as its hidden states ask for: MoBiQuant, and QBE's own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint, DynamicPrecision
from qbe.budget import Budget
from qbe.errors import QBEError
from qbe.policies import learned
from qbe.policies.base import Policy
from qbe.policies.kv import allocate_kv
from qbe.policies.routers import Network, RoutedBlock, bits_left, blocks_of, gear_bits, networks, static_gears
from qbe.sites import FULL_BITS, SiteTable

LEVELS = 256  # thresholds: of averages that rise evenly from the lowest width to the highest


@dataclass(frozen=True)
class TokenRouters:
    """What an engine needs to route tokens (`qbe.engine.adaptive.routing`).

    Attributes:
        blocks, networks: for each block the network whose scores, for each of its sites and each slice after the first,
            are [sites * slices]: the first one of a site is what its second slice is worth to the token, each further
            one by how much less the next slice is, through a softplus.
        widths: bits with one slice, with two, and so on.
        thresholds: float32 [LEVELS], falling: what a slice must be worth more than.
        digest: changes with any of it.
    """

    blocks: tuple[RoutedBlock, ...]
    networks: tuple[Network, ...]
    widths: tuple[int, ...]
    thresholds: learned.Array
    digest: str


class PerTokenPolicy(Policy):
    """Every token of prompt and answer chooses the bits of each block when it gets there, within the forward pass: a
    router (`qbe train`) scores what each further slice of each site is worth to it, and slices above a threshold
    are read. One threshold serves all blocks; it follows from the budget by what training's tokens chose, so the
    average is met over traffic and not by every answer. It is the budget's, else the middle of its tier; above the
    store's widest slice, that. The KV cache has the budget's bits, else 16.

    A blueprint says the best static assignment at that average: what the request is expected to cost, and what sites
    without a router have. What was read in fact is in its result.
    """

    name: str
    head = False  # whether the output head has a router, too
    needs_sensitivity = True
    has_routers = True
    reads_score = False

    def prepare(self, table: SiteTable) -> None:
        """Raises QBEError where no routers were trained for this model."""
        self.routers(table)

    def blueprint(self, profile: QueryProfile, budget: Budget, table: SiteTable) -> Blueprint:
        """Raises QBEError without trained routers, or for a budget below the store's lowest average."""
        routers = self.routers(table)
        bits, widths = budget.bits_for(0.5, profile.least_bits), gear_bits(table)
        gears = static_gears(table, bits)
        share = (bits_left(table, routers.blocks, gears, bits) - widths[0]) / (widths[-1] - widths[0])
        if budget.bits is not None and share > 1.01:
            raise QBEError(
                f"'{self.name}' moves bits between {widths[0]} and {widths[-1]}: {budget.bits:g} on average is more "
                "than that allows; ask for fewer, or for another policy"
            )
        level = round(min(1.0, max(0.0, share)) * (LEVELS - 1))
        kv_bits = FULL_BITS if budget.kv_bits is None else float(budget.kv_bits)
        blueprint = Blueprint.of(
            self.name, table, gears, table.activations(budget.activation_bits), allocate_kv(table, kv_bits)
        )
        return replace(blueprint, dynamic_precision=DynamicPrecision("routers", level, routers.digest))

    def routers(self, table: SiteTable) -> TokenRouters:
        """What the engine runs. Raises QBEError where none were trained for this model."""
        return _routers(self.name, table, self.head)


class MobiPolicy(PerTokenPolicy):
    """MoBiQuant: routers distilled from the 16-bit model (`qbe train mobi`)."""

    name = "mobi"


class TokenwisePolicy(PerTokenPolicy):
    """QBE's own: routers that learned first what fewer bits of each site alone would do to the answer, then what all
    together do; the output head has one, too (`qbe train tokenwise`).
    """

    name, head = "tokenwise", True


@lru_cache(maxsize=8)
def _routers(name: str, table: SiteTable, head: bool) -> TokenRouters:
    fitted, blocks = learned.read(name, table), blocks_of(table, head)
    return TokenRouters(
        blocks, networks(fitted.tensors, len(blocks)), tuple(map(int, fitted.tensors["widths"])),
        fitted.tensors["thresholds"], fitted.checksum,
    )  # fmt: skip
