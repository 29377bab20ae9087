"""What scored answers say of queries: bits that even out their divergence, for `qbe train proxy`.

A server scores some of its answers against the widest gear (`Record.quality`). How far an answer diverges beyond what
the store's sensitivities say of its bits is the query's difficulty, which ridge regression learns from its features.
Fewer bits multiply the divergence by about the same number whatever the query, so that at an average of bits the summed
divergence is least where all queries are expected to diverge alike: harder ones get more bits, easier ones fewer, of
the averages that the policy has for their budget's range, and at the same mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qbe.datasets.intervals import interval
from qbe.errors import QBEError
from qbe.sites import SiteTable

FEWEST = 50  # scored answers to learn from
FEWEST_HELD = 12  # newer ones, to judge it by
NO_KL = 1e-7  # nats a token, below which rounding is all that is seen
HALVINGS = 50  # of the interval in which the common divergence is looked for
SLACK = 0.05  # bits by which an assignment may miss its average
PENALTIES = (1.0, 10.0, 100.0, 1000.0)

Numbers = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def divergence(quality: Any, record: str) -> float:
    """What `Record.quality` says of an answer's divergence, nats a token; NaN where it was not scored.

    Raises:
        QBEError: it is no such column.
    """
    if quality is None:
        return float("nan")
    kl = quality.get("kl") if isinstance(quality, Mapping) else None
    if not isinstance(kl, int | float) or not np.isfinite(kl):
        raise QBEError(
            f"record {record}: quality is {quality!r}, but must be a score with a finite kl; export it again"
        )
    return float(kl)


def damages(distinct: Sequence[Sequence[int]], table: SiteTable) -> Numbers:
    """float64 [assignments]: the summed sensitivities of each, nats a token."""
    return np.array(
        [sum(s.sensitivity.get(g, 0.0) for s, g in zip(table.nested, bits, strict=True)) for bits in distinct]
    )


def corrected(
    z: Numbers, kl: Numbers, ranges: Numbers, places: Places, choices: tuple[Numbers, Numbers], held: Flags
) -> tuple[Numbers, dict[str, Any]]:
    """Average bits that queries should have, by what was scored; as they were where that is not shown to be better.

    Args:
        z: standardised features [queries, inputs].
        kl: divergence of each answer, nats a token; NaN where it was not scored.
        ranges: lowest and highest average of each query's budget [queries, 2].
        places: of what each query was given among the choices.
        choices: the averages of the policy's assignments, and their `damages`.
        held: the newest queries. Whether it is better is judged by their scored answers, whose divergence at other bits
            is taken to change as the sensitivities do.

    Returns:
        averages within the query's range, between two choices where the report says `used`, and the report.
    """
    bits, damage = choices[0][places], choices[1][places]
    usable = (np.nan_to_num(kl) > NO_KL) & (damage > 0)
    old, new = usable & ~held, usable & held
    report: dict[str, Any] = {"scored": int(usable.sum()), "used": False}
    if old.sum() < FEWEST or new.sum() < FEWEST_HELD:
        return bits, report
    from sklearn.linear_model import RidgeCV  # here: it is a second of importing

    excess = np.log(kl[usable]) - np.log(damage[usable])
    fitted = RidgeCV(PENALTIES).fit(z[old], excess[old[usable]])
    harder = np.asarray(fitted.predict(z), np.float64)
    curve = _curve(*choices)
    judged = _evened(harder[new], ranges[new], bits[new], curve)[1]  # at the mean bits of just these
    after = kl[new] * np.exp(np.interp(judged, *curve) - np.interp(bits[new], *curve))
    bounds = interval(after, kl[new])
    report |= {"ratio": float(after.sum() / kl[new].sum()), "ratio_interval": bounds}
    if bounds is None or bounds[1] >= 1:
        return bits, report
    wanted, chosen = _evened(harder, ranges, bits, curve)
    return wanted, report | {"used": True, "moved": float(np.mean(np.abs(chosen - bits)))}


def _curve(bits: Numbers, damage: Numbers) -> tuple[Numbers, Numbers]:
    """Averages, ascending, and the logarithm of what each does, never more at more bits."""
    at = np.unique(bits[damage > 0])
    least = [np.log(damage[(bits == average) & (damage > 0)].min()) for average in at]
    return at, np.minimum.accumulate(np.array(least))


def _evened(
    harder: Numbers, ranges: Numbers, bits: Numbers, curve: tuple[Numbers, Numbers]
) -> tuple[Numbers, Numbers]:  # fmt: skip
    """Averages at which queries of a budget are expected to diverge alike, and the choices nearest to them, at no more
    than the mean that they have."""
    wanted, chosen = bits.copy(), bits.copy()
    for low_bits, high_bits in np.unique(ranges, axis=0):
        some = (ranges == (low_bits, high_bits)).all(1)
        there = (curve[0] >= low_bits - SLACK) & (curve[0] <= high_bits + SLACK)
        if not there.any():
            continue
        given, does, hard = curve[0][there], curve[1][there], harder[some]
        low, high = float(does.min() + hard.min()), float(does.max() + hard.max())
        for _ in range(HALVINGS):  # the mean falls as the level rises
            level = (low + high) / 2
            mean = _nearest(given, does, level - hard).mean()
            low, high = (level, high) if mean > bits[some].mean() else (low, level)
        wanted[some] = np.interp(high - hard, does[::-1], given[::-1])
        chosen[some] = _nearest(given, does, high - hard)
    return wanted, chosen


def _nearest(given: Numbers, does: Numbers, wanted: Numbers) -> Numbers:
    """Of the averages `given`, whose damage is `does`, the one whose damage is nearest to each that is wanted."""
    return given[np.abs(does[None, :] - wanted[:, None]).argmin(1)]
