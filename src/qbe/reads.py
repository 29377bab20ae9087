"""What a token reads of a model's weights: averages in bits and bytes are over these. Pure data, no torch.

A matrix counts by the share of the tokens that read it, so a mixture of experts by what a token uses of it, and not by
all that is stored. What is not nested counts at 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]


class Site(Protocol):
    """What is asked of a `qbe.sites.Site`."""

    @property
    def nested(self) -> bool: ...
    @property
    def gears(self) -> tuple[int, ...]: ...
    @property
    def bytes_at(self) -> Mapping[int, int]: ...
    @property
    def parameters(self) -> int: ...
    @property
    def read_weights(self) -> float: ...
    @property
    def use(self) -> float: ...
    @property
    def expert(self) -> int | None: ...


@dataclass(frozen=True, eq=False)
class TokenReads:
    """Expected reads of one token.

    Attributes:
        sizes: float64 [nested sites], weights that the token is multiplied by at each (`Site.read_weights`).
        fixed: the same of all that is not nested, which runs at `full_bits`.
        bytes_at: float64 [nested sites, full_bits + 1], bytes that the token reads of each at each number of bits.
        fixed_bytes: float64 [other sites].
        use, fixed_use: float64, share of the tokens that read each nested and each other site.
        lowest: the fewest bits of each nested site.
    """

    sizes: Numbers
    fixed: float
    bytes_at: Numbers
    fixed_bytes: Numbers
    use: Numbers
    fixed_use: Numbers
    lowest: Numbers
    full_bits: int

    @classmethod
    def of(cls, sites: Sequence[Site], full_bits: int) -> TokenReads:
        nested, others = [s for s in sites if s.nested], [s for s in sites if not s.nested]

        def size(site: Site, bits: int) -> float:
            known = site.bytes_at.get(bits)
            if known is None:
                return site.parameters * site.use * bits / 8
            return known if site.expert is None else known * site.use

        rows = [[size(s, bits) for bits in range(full_bits + 1)] for s in nested]
        return cls(
            np.array([s.read_weights for s in nested], np.float64),
            sum(s.read_weights for s in others),
            np.array(rows, np.float64).reshape(len(nested), full_bits + 1),
            np.array([size(s, full_bits) for s in others], np.float64),
            np.array([s.use for s in nested], np.float64),
            np.array([s.use for s in others], np.float64),
            np.array([s.gears[0] for s in nested], np.float64),
            full_bits,
        )

    @cached_property
    def weights(self) -> float:
        """That a token is multiplied by, in all."""
        return float(self.sizes.sum()) + self.fixed

    @property
    def partial(self) -> bool:
        """Whether tokens differ in what they read."""
        return bool((self.use < 1).any() or (self.fixed_use < 1).any())

    @cached_property
    def lowest_average(self) -> float:
        """The fewest bits that all weights can have on average."""
        return self.average_bits(self.lowest)

    def average_bits(self, weight_bits: Sequence[int] | Numbers) -> float:
        """Mean bits over all weights, where the nested sites have these."""
        total = float(self.sizes @ np.asarray(weight_bits, np.float64)) + self.full_bits * self.fixed
        return total / self.weights if self.weights else float(self.full_bits)

    def of_nested(self, average_bits: float) -> float:
        """The average over nested sites alone that gives all weights `average_bits`."""
        nested = float(self.sizes.sum())
        return (average_bits * self.weights - self.full_bits * self.fixed) / nested if nested else 0.0

    def nbytes(self, weight_bits: Sequence[int], tokens: int = 1) -> int:
        """Bytes of weights and scales that a step of so many tokens reads, each matrix once; the KV cache not counted.

        Experts count by the chance that one of the tokens uses them.
        """
        nested = self.bytes_at[np.arange(len(self.sizes)), np.asarray(weight_bits, np.int64)]
        return int(nested @ _times(self.use, tokens) + self.fixed_bytes @ _times(self.fixed_use, tokens))


def _times(use: Numbers, tokens: int) -> Numbers:
    """What so many tokens read of a site over what one does, if each uses it with this probability."""
    used = np.where(use > 0, use, 1.0)
    return (1 - (1 - np.minimum(used, 1.0)) ** tokens) / used
