"""QAQ (Li et al.): a router for each block gives every query bits of its own, block by block."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.policies import learned
from qbe.policies.base import Policy
from qbe.policies.kv import allocate_kv
from qbe.policies.routers import Numbers, RoutedBlock, bits_left, blocks_of, gear_bits, networks, static_gears
from qbe.sites import FULL_BITS, Role, SiteTable

_ENTRIES = frozenset({
    Role.ATTENTION_Q, Role.ATTENTION_K, Role.ATTENTION_V, Role.ATTENTION_QKV, Role.FFN_GATE, Role.FFN_UP,
    Role.FFN_GATE_UP, Role.SSM_IN,
})  # fmt: skip


class QAQPolicy(Policy):
    """The prompt runs at the best static assignment. What each attention and feed-forward block then has read, its
    inputs' mean over the prompt, goes through the block's router (`qbe train qaq`), a small network whose scores say
    how likely each of the store's widths is; the answer runs with every block at its likeliest one. Decode steps see
    the prompt's decision and make none: it holds for the whole answer.

    An average holds for the traffic, not for a query: widths are made cheaper or dearer by one price per bit, at which
    training's queries had that average. It is the budget's, else the middle of its tier. The KV cache has the budget's
    bits, else 16.
    """

    name = "qaq"
    reads_score = False
    needs_sensitivity = True
    reads_prompt = True

    def prepare(self, table: SiteTable) -> None:
        """Raises QBEError where no router was trained for this model."""
        _router(table)

    def blueprint(self, profile: QueryProfile, budget: Budget, table: SiteTable) -> Blueprint:
        """Raises QBEError without a trained router, or for a budget below the store's lowest average."""
        router, bits = _router(table), budget.bits_for(0.5, profile.least_bits)
        gears = static_gears(table, bits)
        if profile.signals is not None:
            means = [profile.signals.means[entry] for entry in router.entries]
            gears = router.gears([m for m in means if m is not None], gears, bits)
        kv_bits = FULL_BITS if budget.kv_bits is None else float(budget.kv_bits)
        return Blueprint.of(
            self.name, table, gears, table.activations(budget.activation_bits), allocate_kv(table, kv_bits)
        )


class Router:
    """Of one model. See `qbe.learning.qaq`.

    Attributes:
        entries: for each block the place of a nested site that reads its input.
        sample: scores of training's queries, float64 [queries, blocks, widths].
    """

    def __init__(self, table: SiteTable, tensors: dict[str, learned.Array]) -> None:
        self.table, self.blocks, self.widths = table, blocks_of(table), gear_bits(table)
        self.entries = tuple(entry(table, block) for block in self.blocks)
        self.sample: Numbers = tensors["sample"].astype(np.float64)
        self._networks = networks(tensors, len(self.blocks))
        self._centres = [tensors[f"{i}.centre"] for i in range(len(self.blocks))]
        self._scales = [tensors[f"{i}.scale"] for i in range(len(self.blocks))]
        self._prices = lru_cache(maxsize=256)(self._price)

    def gears(self, means: list[learned.Array], base: tuple[int, ...], bits: float) -> tuple[int, ...]:
        """For each site a gear.

        Args:
            means: of each block's inputs over the prompt, float32 [inputs].
            base: what sites without a router have.
            bits: the average over traffic.
        """
        parts = zip(self._networks, means, self._centres, self._scales, strict=True)
        scores = np.stack([n.scores((m - centre) / scale) for n, m, centre, scale in parts])
        price = self._prices(bits_left(self.table, self.blocks, base, bits))
        chosen = self._chosen(scores, price)
        gears = list(base)
        for block, choice in zip(self.blocks, chosen, strict=True):
            for site in block.sites:
                gears[site] = self.widths[choice]
        return tuple(gears)

    def _chosen(self, scores: Numbers, price: float) -> Numbers:
        return np.asarray((scores - price * np.array(self.widths)).argmax(-1))

    def _price(self, bits: float) -> float:
        """The price of a bit at which the sample's widths are `bits` on average at most."""
        sizes = np.array([sum(self.table.nested[s].parameters for s in b.sites) for b in self.blocks], np.float64)
        low, high = -1e3, 1e3
        for _ in range(60):
            middle = (low + high) / 2
            average = (np.array(self.widths)[self._chosen(self.sample, middle)] @ sizes).mean() / sizes.sum()
            low, high = (middle, high) if average > bits + 1e-9 else (low, middle)
        return high


def entry(table: SiteTable, block: RoutedBlock) -> int:
    """A site of the block that reads its input."""
    return next((s for s in block.sites if table.nested[s].role in _ENTRIES), block.sites[0])


@lru_cache(maxsize=8)
def _router(table: SiteTable) -> Router:
    return Router(table, dict(learned.read("qaq", table).tensors))
