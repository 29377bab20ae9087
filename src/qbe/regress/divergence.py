"""How far two models' next-token distributions are apart on the same text, by what servers say of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qbe.datasets.intervals import Numbers
from qbe.regress.client import ScoredText

_LEAST = 1e-9  # of what the likeliest tokens leave


@dataclass(frozen=True)
class Divergence:
    """Of one text.

    Attributes:
        nats: float64 [tokens - 1], lower bounds of the KL divergence from the baseline before each token.
        agreed: of them, how many have the same likeliest token.
    """

    nats: Numbers
    agreed: int


def compare(before: ScoredText, now: ScoredText) -> Divergence | None:
    """None where the two cut the text into different tokens."""
    if before.tokens != now.tokens:
        return None
    pairs = list(zip(before.likeliest, now.likeliest, strict=True))
    nats = np.asarray([bound(p, q) for p, q in pairs], np.float64)
    agreed = sum(bool(p) and bool(q) and _first(p) == _first(q) for p, q in pairs)
    return Divergence(nats, agreed)


def bound(before: Mapping[str, float], now: Mapping[str, float]) -> float:
    """KL divergence over a partition of the vocabulary, nats: the tokens that both list, one by one, and the rest as
    one. It is never more than that over all tokens, and 0 only where these agree.
    """
    common = before.keys() & now.keys()
    found = sum(math.exp(before[t]) * (before[t] - now[t]) for t in common)
    rest, rest_now = (max(_LEAST, 1.0 - sum(math.exp(of[t]) for t in common)) for of in (before, now))
    return max(0.0, found + rest * math.log(rest / rest_now))


def _first(of: Mapping[str, float]) -> str:
    return max(of, key=lambda token: (of[token], token))


def per_text(found: Sequence[Divergence]) -> tuple[Numbers, Numbers]:
    """Sums of nats and numbers of tokens, float64 [texts], of which the bootstrap draws."""
    return np.asarray([d.nats.sum() for d in found]), np.asarray([float(len(d.nats)) for d in found])
