"""Fingerprint of a query: what must be equal for two queries to share a blueprint, and how alike they are otherwise.

Locality-sensitive hashing by random hyperplanes (SimHash; Charikar, 2002): each of 64 bits says on which side of a
plane through the average query its features lie. Two queries whose standardised features are at an angle of a (radians)
differ in 64 a / pi of the bits on average, so that the bits that differ tell how alike they are, in one popcount.
"""

from __future__ import annotations

import hashlib
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np

from qbe.analysis.classifier import Array, default_classifier
from qbe.analysis.features import FEATURES, LOGARITHMIC
from qbe.analysis.profile import QueryProfile
from qbe.analysis.thresholds import MARKS
from qbe.budget import Budget
from qbe.policies.kv import score_step

BITS = 64
Cell = tuple[Any, ...]


class Fingerprint:
    """A query as the cache sees it.

    Attributes:
        cell: what must be equal: the whole budget, the analysis tier, the cluster, the score as finely as policies go
            by it (one of the budget's few averages; thirds for KV bits), and the least bits.
        digest: of the features as they are: equal for equal queries.
        bits: the locality-sensitive hash, an integer below 2^64. It is computed when it is asked for: a query that was
            there before needs none.
    """

    __slots__ = ("_planes", "_values", "cell", "digest")

    def __init__(self, profile: QueryProfile, budget: Budget) -> None:
        """The fingerprint of a query under a budget; the context is no part of it."""
        self._planes = _planes(profile.tier)
        self._values = np.array(self._planes.read(profile.features))
        self.digest = hashlib.blake2b(self._values.tobytes(), digest_size=8).digest()
        score = profile.score
        average = budget.average_for(score, profile.least_bits)
        self.cell: Cell = (budget, profile.tier, profile.cluster, average, score_step(score), profile.least_bits)

    @property
    def bits(self) -> int:
        return self._planes.sides(self._values)


class _Planes:
    """The hyperplanes for the features of one analysis tier."""

    def __init__(self, names: tuple[str, ...], mean: Array, scale: Array, logarithmic: int) -> None:
        """Of the features `names`, the first `logarithmic` count as log(1 + x)."""
        self.read = itemgetter(*names)
        self.logarithmic = logarithmic
        # Planes through the mean of the standardised features, as planes of the features themselves.
        self.normals = np.random.default_rng(0).standard_normal((len(names), BITS)) / scale[:, None]
        self.offsets = mean @ self.normals

    def sides(self, x: Array) -> int:
        """The side of each plane on which features [names] lie, as the bits of an integer."""
        x = x.copy()
        counts = x[: self.logarithmic]
        np.log1p(counts, out=counts)
        return int.from_bytes(np.packbits(x @ self.normals > self.offsets).tobytes(), "big")


@cache
def _planes(tier: int) -> _Planes:
    if tier == 1:  # marks are 0, 1 or between; the length is one of them
        half = np.full(len(MARKS), 0.5)
        return _Planes(MARKS, half, half, 0)
    names = (*LOGARITHMIC, *(f for f in FEATURES if f not in LOGARITHMIC))
    order = [FEATURES.index(n) for n in names]
    c = default_classifier()
    return _Planes(names, c.mean[order], c.scale[order], len(LOGARITHMIC))


def constants() -> bytes:
    """Changes when fingerprints do, be it by other planes or by another classifier."""
    digest = hashlib.blake2b(digest_size=16)
    for tier in (1, 2):
        p = _planes(tier)
        digest.update(p.normals.tobytes() + p.offsets.tobytes())
    return digest.digest()
