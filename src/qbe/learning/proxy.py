"""Trains the proxy scorer on records: what a policy chose for past requests, by their features, and what the scores of
their answers say of it (`qbe.learning.scored`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qbe import policies
from qbe.analysis.profile import QueryProfile
from qbe.budget import Budget
from qbe.datasets.intervals import interval
from qbe.errors import QBEError
from qbe.files import reason
from qbe.learning import scored
from qbe.learning.fitting import network
from qbe.policies import Policy
from qbe.policies.learned import Learned
from qbe.policies.proxy import AGREEMENT, COUNTS, FAR, NAMES, Net, nearest
from qbe.records import Record
from qbe.sites import FULL_BITS, SiteTable

HIDDEN, NETWORKS = 32, 4
HELD_OUT = 0.25  # the newest requests: what the proxy is judged by
CHECKED = 0.15  # of the others: what says how far the networks may be apart
RIGHT = 0.99  # share of the answers that shall agree
SAME = 0.01  # bits of the average: the solver may find another of several assignments that are as good
SCORES = 8  # steps from 0 to 1, at which a policy is asked what else it has for a budget
FEWEST = 50  # records of an analysis tier, below which the policy stays in charge of it

Widths = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Pair:
    """A past request and what it was given: `gears` is the place of its weights' bits among the distinct ones,
    `kl` the divergence of its answer, NaN where that was not scored."""

    profile: QueryProfile
    budget: Budget
    gears: int
    kl: float = float("nan")


def read_records(path: Path) -> list[Record]:
    """Records that `qbe records --export` wrote as JSON lines. Raises QBEError for a line that is none."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise QBEError(f"'{path}' cannot be read: {reason(error)}") from None
    except ValueError:
        raise QBEError(f"'{path}' is not valid UTF-8; convert it first") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                records.append(Record.of(json.loads(line)))
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise QBEError(
                f"'{path}', line {number}: this is no record; export some with 'qbe records --export'"
            ) from None
    return records


def pairs_of(
    records: Iterable[Record], policy: Policy, table: SiteTable, tick: Callable[[], None] = lambda: None
) -> tuple[list[Pair], list[tuple[int, ...]], dict[str, int]]:
    """What can be learned from, oldest first, the distinct assignments, and how many records were left out and why.

    A record counts where the policy would choose the same for it today: not what an older store or version chose.
    """
    pairs: list[Pair] = []
    places: dict[tuple[int, ...], int] = {}
    left = {"other": 0, "asked_for": 0, "outdated": 0}
    average = table.reads.average_bits
    for record in records:
        tick()
        tier, names = record.analysis_tier, NAMES.get(min(record.analysis_tier or 0, 2), ())
        if (
            record.policy != policy.name or record.model != table.model_name or tier is None or record.score is None
            or record.prompt_class is None or not set(names) <= set(record.features)
            or len(record.weight_bits) != len(table.nested)
        ):  # fmt: skip
            left["other"] += 1
            continue
        budget = Budget(record.budget_bits, record.tier, min(record.activation_bits, default=FULL_BITS))
        context = record.prompt_tokens + record.completion_tokens
        profile = QueryProfile(
            record.score, record.prompt_class, tier, dict(record.features), context, cluster=record.cluster
        )
        if record.budget_bits is not None or profile.least_bits:  # of the latter no proxy is asked
            left["asked_for"] += 1
        elif abs(average(record.weight_bits) - average(_bits(policy, profile, budget, table))) > SAME:
            left["outdated"] += 1
        else:
            kl = float("nan") if record.refreshes else scored.divergence(record.quality, record.id)
            place = places.setdefault(tuple(record.weight_bits), len(places))
            pairs.append(Pair(profile, budget, place, kl))
    return pairs, list(places), left


def clusters(averages: Numbers, counts: Widths) -> Widths:
    """The assignments, by their place, that stand for those near them, in ascending order of their average bits.

    Near is half of `AGREEMENT`. The commonest ones come first; each has one before it near enough, or becomes a centre.
    """
    centres: list[int] = []
    for candidate in np.argsort(-counts, kind="stable"):
        if not centres or np.abs(averages[centres] - averages[candidate]).min() > AGREEMENT / 2:
            centres.append(int(candidate))
    return np.array(sorted(centres, key=lambda i: averages[i]), np.int64)


def train(
    records: Sequence[Record], policy_name: str, table: SiteTable, tick: Callable[[], None] = lambda: None
) -> Learned:
    """Fits a network for each analysis tier that has enough records.

    Raises:
        QBEError: a policy whose blueprints do not follow from profile and budget, or too few records.
    """
    policy = policies.load(policy_name)
    version = policy.cache_version
    if version is None:
        raise QBEError(f"the policy '{policy_name}' reads more than a record holds: no proxy can be learned of it")
    pairs, distinct, left = pairs_of(records, policy, table, tick)
    if any(p.kl == p.kl for p in pairs):  # some were scored: what the policy has for their budgets is to choose from
        distinct = list(dict.fromkeys([*distinct, *_choices(policy, pairs, table)]))
    averages = np.array([table.reads.average_bits(bits) for bits in distinct])
    damage = scored.damages(distinct, table)
    centres = clusters(averages, np.bincount([p.gears for p in pairs], minlength=len(distinct)))
    tensors: dict[str, npt.NDArray[Any]] = {}
    tiers: list[dict[str, Any]] = []
    for tier in NAMES:
        of = [p for p in pairs if min(p.profile.tier, 2) == tier]
        if len(of) >= FEWEST:
            tensors_of_tier, report = _fit(tier, of, averages, averages[centres], damage)
            tensors |= {f"{tier}.{k}": v for k, v in tensors_of_tier.items()}
            tiers.append({"analysis_tier": tier, **report})
    if not tiers:
        why = ", ".join(f"{n} {k.replace('_', ' ')}" for k, n in left.items())
        raise QBEError(
            f"{len(pairs)} records of '{policy_name}' on {table.model_name} are too few, {FEWEST} are needed ({why}): "
            "serve some requests first, or give --records"
        )
    budgets = sorted({(p.budget.bits_for(0.0), p.budget.bits_for(1.0)) for p in pairs})
    tensors["blueprints"] = np.array([distinct[c] for c in centres], np.int16)
    tensors["averages"] = averages[centres]
    tensors["budgets"] = np.array(budgets, np.float64)
    numbers = sum(int(t.size) for k, t in tensors.items() if k.endswith(("w1", "b1", "w2", "b2")))
    held = sum(t["held_out"] for t in tiers)
    about = {
        "policy": policy_name, "policy_version": version, "records": len(pairs), "left_out": left,
        "distinct": len(distinct), "clusters": len(centres), "parameters": numbers, "tiers": tiers,
        "handled": sum(t["handled"] * t["held_out"] for t in tiers) / held,
        "agreed": sum(t["agreed"] * t["handled"] * t["held_out"] for t in tiers)
        / max(1e-9, sum(t["handled"] * t["held_out"] for t in tiers)),
    }  # fmt: skip
    return Learned(tensors, about)


def _choices(policy: Policy, pairs: Sequence[Pair], table: SiteTable) -> list[tuple[int, ...]]:
    """What a policy gives requests of these budgets, whatever their score."""
    profile = pairs[0].profile
    scores = [i / SCORES for i in range(SCORES + 1)]
    budgets = {p.budget.range: p.budget for p in pairs}.values()
    return [_bits(policy, replace(profile, score=score), budget, table) for budget in budgets for score in scores]


def _bits(policy: Policy, profile: QueryProfile, budget: Budget, table: SiteTable) -> tuple[int, ...]:
    return policy.blueprint(profile, budget, table).weight_bits


def _fit(
    tier: int, pairs: Sequence[Pair], averages: Numbers, centres: Numbers, damage: Numbers
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """The tensors of a `Net`, and what it reaches on the newest requests.

    Args:
        averages: of the distinct assignments. centres: of those that stand for others, ascending.
        damage: summed sensitivities of the distinct assignments.
    """
    rows = [[*(p.profile.features[n] for n in NAMES[tier]), p.budget.bits_for(0.0), p.budget.bits_for(1.0)]
            for p in pairs]  # fmt: skip
    x = np.array(rows, np.float64)
    x[:, : COUNTS[tier]] = np.log1p(x[:, : COUNTS[tier]])
    places = np.array([p.gears for p in pairs], np.int64)
    target = averages[places]
    old = round(len(pairs) * (1 - HELD_OUT))
    check = np.zeros(len(pairs), bool)
    check[np.random.default_rng(0).permutation(old)[: round(old * CHECKED)]] = True
    fitted = ~check & (np.arange(len(pairs)) < old)
    mean, scale = x[fitted].mean(0), np.maximum(x[fitted].std(0), 1e-6)
    z = (x - mean) / scale
    near = np.abs(z).max(-1) <= FAR
    z = np.clip(z, -FAR, FAR).astype(np.float32)
    held = np.arange(len(pairs)) >= old
    kl = np.array([p.kl for p in pairs])
    target, quality = scored.corrected(z.astype(np.float64), kl, x[:, -2:], places, (averages, damage), held)
    middle, width = target[fitted].mean(), max(float(target[fitted].std()), 1e-6)
    models = [network(z[fitted], (target[fitted] - middle) / width, HIDDEN, seed) for seed in range(NETWORKS)]
    w2 = np.zeros((HIDDEN * NETWORKS, NETWORKS))
    for i, model in enumerate(models):
        w2[i * HIDDEN : (i + 1) * HIDDEN, i] = model.coefs_[1][:, 0] * width
    tensors: dict[str, npt.NDArray[Any]] = {
        "mean": mean, "scale": scale, "w1": np.concatenate([m.coefs_[0] for m in models], 1), "w2": w2,
        "b1": np.concatenate([m.intercepts_[0] for m in models]),
        "b2": np.array([m.intercepts_[1][0] * width + middle for m in models]), "most": np.zeros(1),
    }  # fmt: skip
    tensors = {k: v.astype(np.float32) for k, v in tensors.items()}
    said = Net(tier, tensors).averages(z)
    spread = np.ptp(said, -1)
    answers = centres[[nearest(centres.tolist(), m) for m in said.mean(-1).tolist()]]
    agreed = np.abs(answers - target) <= (_gaps(centres, target) if quality["used"] else AGREEMENT) + 1e-9
    most = harmless(spread[check & near], agreed[check & near])
    tensors["most"] = np.array([most], np.float32)
    handled = held & near & (spread <= most)
    share, right = handled[held].astype(np.float64), agreed[handled].astype(np.float64)
    return tensors, {
        "held_out": int(held.sum()), "handled": float(share.mean()),
        "handled_interval": interval(share, np.ones(len(share))),
        "agreed": float(right.mean()) if len(right) else 0.0, "agreed_interval": interval(right, np.ones(len(right))),
        "largest_change": float(np.abs(answers - target)[handled].max()) if len(right) else 0.0, "largest_spread": most,
        "quality": quality,
    }  # fmt: skip


def _gaps(centres: Numbers, target: Numbers) -> Numbers:
    """How far the averages are apart that a target lies between: either is as good as the other."""
    above = np.clip(np.searchsorted(centres, target), 1, max(1, len(centres) - 1))
    return np.maximum(np.append(centres, np.inf)[above] - centres[above - 1], AGREEMENT)


def harmless(spread: Numbers, agreed: npt.NDArray[np.bool_]) -> float:
    """The largest spread up to which the share `RIGHT` of the answers agrees; -1, which no spread is, without one."""
    order = np.argsort(spread, kind="stable")
    shares = np.cumsum(agreed[order]) / np.arange(1, len(order) + 1)
    good = np.flatnonzero(shares >= RIGHT)
    return float(spread[order[good[-1]]]) if len(good) else -1.0
