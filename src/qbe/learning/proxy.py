"""Trains the proxy scorer on records: what a policy chose for past requests, by their features."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qbe import policies
from qbe.analysis.profile import QueryProfile
from qbe.budget import Budget
from qbe.errors import QBEError
from qbe.eval.intervals import interval
from qbe.files import reason
from qbe.learning.fitting import network
from qbe.policies import Policy
from qbe.policies.learned import Learned
from qbe.policies.proxy import AGREEMENT, COUNTS, FAR, NAMES, Net
from qbe.records import Record
from qbe.sites import FULL_BITS, SiteTable

HIDDEN = 64
HELD_OUT = 0.25  # the newest requests: what the proxy is judged by
CHECKED = 0.15  # of the others: what says how sure is sure enough
RIGHT = 0.99  # share of the answers that shall agree
FEWEST = 50  # records of an analysis tier, below which the policy stays in charge of it

Widths = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Pair:
    """A past request and what it was given: `gears` is the place of its weights' bits among the distinct ones."""

    profile: QueryProfile
    budget: Budget
    gears: int


def read_records(path: Path) -> list[Record]:
    """Records that `qbe records --export` wrote as JSON lines. Raises QBEError for a file that is none."""
    try:
        return [Record.of(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise QBEError(f"'{path}' cannot be read: {reason(error)}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise QBEError(f"'{path}' has no records ({type(error).__name__}); export some with 'qbe records'") from None


def pairs_of(
    records: Iterable[Record], policy: Policy, table: SiteTable, tick: Callable[[], None] = lambda: None
) -> tuple[list[Pair], list[tuple[int, ...]], dict[str, int]]:
    """What can be learned from, oldest first, the distinct assignments, and how many records were left out and why.

    A record counts where the policy would choose the same for it today: not what an older store or version chose.
    """
    pairs: list[Pair] = []
    places: dict[tuple[int, ...], int] = {}
    left = {"other": 0, "asked_for": 0, "outdated": 0}
    for record in records:
        tick()
        tier, names = record.analysis_tier, NAMES.get(min(record.analysis_tier or 0, 2), ())
        if (
            record.policy != policy.name or record.model != table.model_name or tier is None or record.score is None
            or record.prompt_class is None or not set(names) <= set(record.features)
        ):  # fmt: skip
            left["other"] += 1
            continue
        budget = Budget(record.budget_bits, record.tier, min(record.activation_bits, default=FULL_BITS))
        context = record.prompt_tokens + record.completion_tokens
        profile = QueryProfile(
            record.score, record.prompt_class, tier, dict(record.features), context, cluster=record.cluster
        )
        if record.budget_bits is not None:
            left["asked_for"] += 1
        elif policy.blueprint(profile, budget, table).weight_bits != tuple(record.weight_bits):
            left["outdated"] += 1
        else:
            pairs.append(Pair(profile, budget, places.setdefault(tuple(record.weight_bits), len(places))))
    return pairs, list(places), left


def clusters(distinct: Sequence[tuple[int, ...]], counts: Sequence[int], sizes: Sequence[int]) -> tuple[Widths, Widths]:
    """Assignments that stand for those near them, int64 [medoids] into `distinct`, and whose each is, [distinct].

    Near is a change of `AGREEMENT` bits a weight at most, up or down. The commonest ones come first; each is taken in
    by the nearest medoid before it, or becomes one.
    """
    bits, weight = np.array(distinct), np.array(sizes) / sum(sizes)
    medoids: list[int] = []
    owner = np.zeros(len(distinct), np.int64)
    for at in np.argsort(-np.array(counts), kind="stable"):
        apart = np.abs(bits[medoids] - bits[at]) @ weight if medoids else np.array([np.inf])
        if apart.min() > AGREEMENT:
            medoids.append(int(at))
            owner[at] = len(medoids) - 1
        else:
            owner[at] = int(apart.argmin())
    return np.array(medoids), owner


def train(
    records: Sequence[Record], policy_name: str, table: SiteTable, tick: Callable[[], None] = lambda: None
) -> Learned:
    """Fits a network for each analysis tier that has enough records.

    Raises:
        QBEError: a policy whose blueprints do not follow from profile and budget, or too few records.
    """
    policy = policies.load(policy_name)
    version = getattr(policy, "cache_version", None)
    if version is None:
        raise QBEError(f"the policy '{policy_name}' reads more than a record holds: no proxy can be learned of it")
    pairs, distinct, left = pairs_of(records, policy, table, tick)
    sizes = [s.parameters for s in table.nested]
    counts = np.bincount([p.gears for p in pairs], minlength=len(distinct))
    medoids, owner = clusters(distinct, list(counts), sizes) if pairs else (np.array([], int), np.array([], int))
    averages = np.array(distinct) @ (np.array(sizes) / sum(sizes)) if pairs else np.array([])
    tensors: dict[str, npt.NDArray[Any]] = {}
    tiers: list[dict[str, Any]] = []
    for tier in NAMES:
        of = [p for p in pairs if min(p.profile.tier, 2) == tier]
        if len(of) >= FEWEST:
            found, report = _fit(tier, of, averages, averages[medoids], owner)
            tensors |= {f"{tier}.{k}": v for k, v in found.items()}
            tiers.append({"analysis_tier": tier, **report})
    if not tiers:
        why = ", ".join(f"{n} {k.replace('_', ' ')}" for k, n in left.items())
        raise QBEError(
            f"{len(pairs)} records of '{policy_name}' on {table.model_name} are too few, {FEWEST} are needed ({why}): "
            "serve some requests first, or give --records"
        )
    budgets = sorted({(p.budget.bits_for(0.0), p.budget.bits_for(1.0)) for p in pairs})
    tensors["blueprints"] = np.array([distinct[m] for m in medoids], np.int16)
    tensors["budgets"] = np.array(budgets, np.float64)
    numbers = sum(int(t.size) for k, t in tensors.items() if k.endswith(("w1", "b1", "w2", "b2")))
    held = sum(t["held_out"] for t in tiers)
    about = {
        "policy": policy_name, "policy_version": version, "records": len(pairs), "left_out": left,
        "distinct": len(distinct), "clusters": len(medoids), "parameters": numbers, "tiers": tiers,
        "handled": sum(t["handled"] * t["held_out"] for t in tiers) / held,
        "agreed": sum(t["agreed"] * t["handled"] * t["held_out"] for t in tiers)
        / max(1e-9, sum(t["handled"] * t["held_out"] for t in tiers)),
    }  # fmt: skip
    return Learned(tensors, about)


def _fit(
    tier: int, pairs: Sequence[Pair], averages: Numbers, medoids: Numbers, owner: Widths
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """The tensors of a `Net`, and what it reaches on the newest requests."""
    rows = [[*(p.profile.features[n] for n in NAMES[tier]), p.budget.bits_for(0.0), p.budget.bits_for(1.0)]
            for p in pairs]  # fmt: skip
    x = np.array(rows, np.float64)
    x[:, : COUNTS[tier]] = np.log1p(x[:, : COUNTS[tier]])
    target = averages[[p.gears for p in pairs]]
    y = owner[[p.gears for p in pairs]]
    old = round(len(pairs) * (1 - HELD_OUT))
    check = np.zeros(len(pairs), bool)
    check[np.random.default_rng(0).permutation(old)[: round(old * CHECKED)]] = True
    fitted = ~check & (np.arange(len(pairs)) < old)
    mean, scale = x[fitted].mean(0), np.maximum(x[fitted].std(0), 1e-6)
    z = np.clip((x - mean) / scale, -FAR, FAR).astype(np.float32)
    model = network(z[fitted], y[fitted], HIDDEN, seed=0)
    w1, w2 = (c.astype(np.float32) for c in model.coefs_)
    b1, b2 = (c.astype(np.float32) for c in model.intercepts_)
    if len(model.classes_) == 2:  # scikit-learn has one output then
        w2, b2 = np.concatenate([-w2, w2], 1) / 2, np.concatenate([-b2, b2]) / 2
    whole_w2, whole_b2 = np.zeros((HIDDEN, len(medoids)), np.float32), np.full(len(medoids), -30, np.float32)
    whole_w2[:, model.classes_], whole_b2[model.classes_] = w2, b2
    alike = (np.abs(medoids[:, None] - medoids[None]) <= AGREEMENT).astype(np.float32)
    tensors: dict[str, npt.NDArray[Any]] = {
        "mean": mean.astype(np.float32), "scale": scale.astype(np.float32), "w1": w1, "b1": b1, "w2": whole_w2,
        "b2": whole_b2, "alike": alike, "least": np.float32(0.0),
    }  # fmt: skip
    p = Net(tier, tensors).chances(z)
    at = p.argmax(-1)
    confidence = (p * alike[at]).sum(-1)
    near = np.abs((x - mean) / scale).max(-1) <= FAR
    agreed = np.abs(medoids[at] - target) <= AGREEMENT + 1e-9
    least = enough(confidence[check & near], agreed[check & near])
    tensors["least"] = np.float32(least)
    held = np.arange(len(pairs)) >= old
    handled = held & near & (confidence >= least)
    share = handled[held].astype(np.float64)
    right = agreed[handled].astype(np.float64)
    return tensors, {
        "held_out": int(held.sum()), "handled": float(share.mean()),
        "handled_interval": interval(share, np.ones(len(share))),
        "agreed": float(right.mean()) if len(right) else 0.0, "agreed_interval": interval(right, np.ones(len(right))),
        "largest_change": float(np.abs(medoids[at] - target)[handled].max()) if len(right) else 0.0,
        "least_confidence": least,
    }  # fmt: skip


def enough(confidence: Numbers, agreed: npt.NDArray[np.bool_]) -> float:
    """The lowest confidence from which on the share `RIGHT` of the answers agrees; above 1 if there is none."""
    order = np.argsort(-confidence, kind="stable")
    shares = np.cumsum(agreed[order]) / np.arange(1, len(order) + 1)
    good = np.flatnonzero(shares >= RIGHT)
    return float(confidence[order[good[-1]]]) if len(good) else 2.0
