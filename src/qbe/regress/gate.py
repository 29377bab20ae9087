"""What one gate saw, and the three forms that gates have: a loss of pairs, a rate, a measured ratio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from qbe.regress.statistics import Pairs, items_needed, rate_bounds, rate_items_needed

Bounds = Callable[[float], tuple[float, float] | None]
Status = Literal["pass", "fail", "inconclusive", "anomalous", "not run"]


@dataclass(frozen=True)
class Gate:
    """One of them.

    Attributes:
        name: `domain.what`.
        status: `not run` where it does not apply, which `saw` explains.
        saw: in words, with the numbers.
        limit: what was asked for.
        items: those that it names.
        n: items that it stands on; needed: as many as would have decided it.
    """

    name: str
    status: Status
    saw: str
    limit: str = ""
    items: tuple[str, ...] = ()
    n: int | None = None
    needed: int | None = None

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "items": list(self.items)}


@dataclass(frozen=True)
class Flips:
    """Names of the items of a comparison: all, those lost, those gained."""

    names: Sequence[str]
    lost: tuple[str, ...]
    gained: tuple[str, ...]

    @classmethod
    def of(cls, before: dict[str, bool], now: dict[str, bool]) -> Flips:
        """Of items that both sides have."""
        names = [name for name in before if name in now]
        return cls(
            names,
            tuple(n for n in names if before[n] and not now[n]),
            tuple(n for n in names if now[n] and not before[n]),
        )

    @property
    def pairs(self) -> Pairs:
        return Pairs(len(self.names), len(self.lost), len(self.gained))


@dataclass(frozen=True)
class Judge:
    """Decides at an error rate.

    Attributes:
        alpha: of bounds.
        comparisons: among which a loss by chance must be as unlikely (Bonferroni).
    """

    alpha: float
    comparisons: int = 1

    @property
    def significance(self) -> float:
        """Below which it is no chance that the candidate is worse."""
        return self.alpha / self.comparisons

    def loss(self, name: str, flips: Flips, margin: float, what: str) -> Gate:
        """Non-inferiority: passes if the upper bound of the loss is within the margin; fails if more than the margin
        is lost and that is no chance.
        """
        pairs = flips.pairs
        if not pairs.n:
            return Gate(name, "not run", "no item could be asked of both")
        most, chance, significance = pairs.most_loss(self.alpha), pairs.loss_is_chance(), self.significance
        status: Status = "inconclusive"
        if most <= margin:
            status = "pass"
        elif pairs.loss > margin and chance <= significance:
            status = "fail"
        saw = f"{pairs.lost} of {pairs.n} {what} lost, {pairs.gained} gained"
        saw += f": a loss of {pairs.loss:+.1%}, at most {most:.1%}"
        saw += f" (chance of such losses {chance:.2g})" if pairs.lost else ""
        needed = items_needed(pairs, margin, self.alpha, significance)
        return Gate(name, status, saw, f"a loss of at most {margin:.1%}", flips.lost, pairs.n, needed)

    def rate(self, name: str, found: Sequence[str], n: int, limit: float, what: str) -> Gate:
        """Of items that should be rare."""
        if not n:
            return Gate(name, "not run", "no item could be asked of both")
        low, high = rate_bounds(len(found), n, self.significance)[0], rate_bounds(len(found), n, self.alpha)[1]
        status: Status = "pass" if high <= limit else "fail" if low > limit else "inconclusive"
        saw = f"{len(found)} of {n} {what}: {len(found) / n:.1%}, at most {high:.1%}"
        needed = rate_items_needed(len(found) / n, limit, self.alpha)
        return Gate(name, status, saw, f"at most {limit:.1%}", tuple(found), n, needed)

    def ratio(self, name: str, bounds: Bounds, value: float, limit: float, what: str, n: int) -> Gate:
        """Of something measured that should be small.

        Args:
            bounds: error rate -> one-sided bounds; None where too little was measured.
        """
        strict, loose = bounds(self.significance), bounds(self.alpha)
        if strict is None or loose is None:
            return Gate(name, "not run", f"too little was measured of {what}")
        low, high = strict[0], loose[1]
        status: Status = "pass" if high <= limit else "fail" if low > limit else "inconclusive"
        return Gate(name, status, f"{what}: {value:.4g}, {low:.4g} to {high:.4g}", f"at most {limit:g}", (), n)
