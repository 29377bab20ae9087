"""Which passages of a log are taken, so that few of them look like all: quotas over four labels.

Each value of each label (a language, say) wants its share of the passages, and the rare ones `FEWEST` of them. Passages
are taken one after the other, of the combination of labels whose values lack most of what they want; so any beginning
of the set looks like the whole, and who reads less of it reads the same mixture.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST = 2  # passages of every value that the log has
LABELS = ("class", "language", "structure", "length")

Values = tuple[str, ...]  # one for each label


@dataclass(frozen=True)
class Quota:
    """Of one value: its share of the log, passages that it wants, and those that were taken."""

    share: float
    wanted: float
    taken: int


def wants(logged: Counter[Values], count: int) -> list[dict[str, float]]:
    """For each label value -> passages that it wants of `count`.

    Args:
        logged: how many exchanges of the log have each combination of values.
    """
    total, found = logged.total(), list[dict[str, float]]()
    for label in range(len(LABELS)):
        counts = Counter[str]()
        for values, n in logged.items():
            counts[values[label]] += n
        found.append({value: max(count * n / total, min(FEWEST, n)) for value, n in counts.items()})
    return found


def choose(candidates: Sequence[tuple[Values, str]], logged: Counter[Values], count: int) -> list[int]:
    """Places of the candidates that are taken, in the order in which they are.

    Args:
        candidates: values and text of each.
        logged: as for `wants`: of all, those included that are no candidates.
        count: to take, or all that there are.
    """
    wanted = wants(logged, count)
    left: dict[Values, list[int]] = {}
    # Within a combination by digest: not by the hour that the log was written in, and the same whenever it is done.
    order = sorted(range(len(candidates)), key=lambda i: hashlib.sha256(_bytes(candidates[i][1])).digest())
    for i in reversed(order):
        left.setdefault(candidates[i][0], []).append(i)
    taken: list[Counter[str]] = [Counter() for _ in LABELS]
    chosen: list[int] = []

    def lack(values: Values) -> float:
        return sum(
            (want[value] - have[value]) / want[value] for want, have, value in zip(wanted, taken, values, strict=True)
        )

    while left and len(chosen) < count:
        values = max(sorted(left), key=lack)
        chosen.append(left[values].pop())
        if not left[values]:
            del left[values]
        for have, value in zip(taken, values, strict=True):
            have[value] += 1
    return chosen


def met(logged: Counter[Values], taken: Sequence[Values], count: int) -> dict[str, dict[str, Quota]]:
    """Label -> value -> what became of its quota; the commonest first."""
    total, found = logged.total(), dict[str, dict[str, Quota]]()
    for label, (name, wanted) in enumerate(zip(LABELS, wants(logged, count), strict=True)):
        have = Counter(values[label] for values in taken)
        shares = Counter[str]()
        for values, n in logged.items():
            shares[values[label]] += n
        found[name] = {v: Quota(n / total, wanted[v], have[v]) for v, n in shares.most_common()}
    return found


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
