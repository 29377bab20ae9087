"""Bits of the KV cache: context length, tier and score give an average, what was measured the bits of every key head.

The average is met by the same exact allocation as that of the weights. What a width costs a head is its measured
sensitivity, which has the rest in it: how fragile its layer is, how many query heads read it and how diffuse they are.
That diffuse heads need more bits, as is often said, is not so: where a head looks at many tokens their errors cancel.
In SmolLM2 the rank correlation of entropy and sensitivity is -0.59 at 4 bits, -0.49 at 2 (`docs/quality.md`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby

from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint, shortest
from qbe.budget import Budget
from qbe.errors import QBEError
from qbe.policies.allocate import TOLERANCE, solve
from qbe.sites import FULL_BITS, KV_BITS, KVBits, KVSite, SiteTable

# What the cache may cost in a long context, nats per token by the sum of the measured sensitivities: at a score of 0,
# and at 1. The default tier is where SmolLM2's cache is more than three times smaller at 4096 tokens: 4.2 to 4.4 bits
# (`docs/quality.md`).
TIER_DAMAGE: dict[str, tuple[float, float]] = {
    "flex": (8e-3, 3e-3),
    "default": (2.5e-3, 2e-3),
    "priority": (1e-3, 2e-4),
}
FEWEST, MOST = 4.0, 8.0  # below 4 bits damages no longer add up; 8 bits are all but exact

# A text's first page has so many bits at least, and 16 where the others are nearly exact: at 8 bits on average that
# halves SmolLM2's divergence, at 6.2 it takes 7 %, at 4.4 nothing (`docs/quality.md`).
FIRST_PAGE_BITS = 8
NEARLY_EXACT = 6.0
STEP = 0.2  # of the averages in between: requests share pages at equal bits only
SCORE_STEPS = 3  # as many as the default tier's averages of the weights, so that its blueprints stay few
UNMEASURED_BITS = 8.0  # for every tier, where nothing says which heads bear fewer

# A context whose cache at 16 bits is a small part of what a token reads gains nothing from fewer bits. Small is a 16th
# of the weights' bytes: 6 % of one request's traffic; in a batch of 16, the engine's default, which reads the weights
# once, half of it. SmolLM2 at 5.5 bits reads 98 MB a token and keeps 23 kB for each of the context: 266 tokens; an 8B
# Llama 5.7 GB and 131 kB: 2 700. From there on 8 bits, until the cache at 8 bits would cost as much again.
SMALL_SHARE = 1 / 16

# Towards the end of its context a model finds by itself what it is asked for less surely: at 16 bits SmolLM2 finds all
# of 100 needles up to 5 120 tokens, 16 or 15 of 20 at 8 192, one of them by 0.13 nats in float32, of which bfloat16
# takes half and more. There the cache may do a 32nd of the damage. It then moves what decides a needle by 0.019 nats,
# where an eighth of the damage moves it by 0.085, which is as much as bfloat16's own roundings do (`docs/quality.md`).
NEAR_THE_END = 7 / 8  # of the model's context
LESS_THERE = 1 / 32

# Where nothing was measured: damage grows with the step of the codes squared and with the query heads that read it, and
# the first layer is by far the most fragile (SGLang's first 4-bit cache: GPQA .623 -> .473, with that layer at 16 bits
# .601, PR #15285).
FIRST_LAYER = 16.0

# Attention whose entropy is this many deviations from what was measured is not what the sensitivities tell of.
FAR = 3.0
LEAST_DEVIATION = 0.02


def average_bits(profile: QueryProfile, budget: Budget, table: SiteTable, weight_bytes: int) -> float:
    """The average that a request's KV cache shall have.

    Args:
        weight_bytes: that its blueprint reads for a token.
    """
    if budget.kv_bits is not None:
        return float(budget.kv_bits)
    small, twice, near_the_end = _bounds(table, weight_bytes)
    if profile.context <= small:
        return float(FULL_BITS)
    if not table.kv_measured:
        return UNMEASURED_BITS
    at_0, at_1 = TIER_DAMAGE[budget.plain_tier]
    damage = at_0 * (at_1 / at_0) ** ((score_step(profile.score) + 0.5) / SCORE_STEPS)
    bits = fewest_bits(table, damage * LESS_THERE if profile.context > near_the_end else damage)
    return max(bits, MOST) if profile.context <= twice else bits


def with_cache(blueprint: Blueprint, budget: Budget, table: SiteTable, average: float) -> Blueprint:
    """The blueprint with a KV cache of that average.

    A text's first page has 8 bits at least, 16 where the average is high, unless the budget says what pages have. Its
    tokens are looked at from everywhere (Xiao et al., "Efficient Streaming Language Models with Attention Sinks",
    2023): at 4.4 bits on average, one page of 64 did more than half of what the whole cache did to SmolLM2.
    """
    first = None if budget.kv_bits is not None else FIRST_PAGE_BITS if average < NEARLY_EXACT else FULL_BITS
    return replace(blueprint, kv_bits=allocate_kv(table, average), first_kv_bits=first)


def score_step(score: float) -> int:
    """The third of its range that a score is in, which is as finely as the average goes by it: 0, 1 or 2."""
    return min(SCORE_STEPS - 1, int(SCORE_STEPS * max(0.0, score)))


def same_contexts(context: int, budget: Budget, table: SiteTable, weight_bytes: int) -> tuple[int, int]:
    """The shortest and the longest context that `average_bits` does not tell from this one."""
    edges = () if budget.kv_bits is not None else _bounds(table, weight_bytes)
    first = max((e + 1 for e in edges if e < context), default=0)
    return first, min((e for e in edges if e >= context), default=sys.maxsize)


def _bounds(table: SiteTable, weight_bytes: int) -> tuple[int, int, int]:
    """The longest contexts, in tokens, whose cache at 16 bits is a small part of what a token reads, and twice that,
    and the longest that is not near the end of the model's own.
    """
    if not table.kv_numbers:
        return sys.maxsize, sys.maxsize, sys.maxsize
    bytes_a_token = table.kv_numbers * FULL_BITS // 8
    small = weight_bytes * SMALL_SHARE
    near_the_end = sys.maxsize if table.context is None else int(table.context * NEAR_THE_END)
    return int(small // bytes_a_token), int(2 * small // bytes_a_token), near_the_end


@lru_cache(maxsize=256)
def fewest_bits(table: SiteTable, damage: float) -> float:
    """An average from 4 to 8 bits, in steps, whose allocation does no more damage than that; 16 if none does.

    Heads are raised from the fewest bits, always where a bit saves most, until the sum is small enough. The exact
    allocation at the average that this takes is no worse.
    """
    costs = [_costs(s, table) for s in table.kv]
    bits = [KV_BITS[0]] * len(costs)
    while sum(cost[b] for cost, b in zip(costs, bits, strict=True)) > damage:
        steps = (
            ((cost[b] - cost[more]) / (more - b) / site.numbers, i, more)
            for i, (site, cost, b) in enumerate(zip(table.kv, costs, bits, strict=True))
            for more in KV_BITS
            if more > b
        )
        _, i, more = max(steps)
        bits[i] = more
    average = sum(s.numbers * b for s, b in zip(table.kv, bits, strict=True)) / table.kv_numbers
    average = max(FEWEST, math.ceil(round(average / STEP, 6)) * STEP)
    return round(average, 2) if average <= MOST + 1e-9 else float(FULL_BITS)


@lru_cache(maxsize=256)
def allocate_kv(table: SiteTable, average: float) -> tuple[KVBits, ...]:
    """For every layer the bits of its key heads, with the least total damage at an average of at most `average`.

    Raises:
        QBEError: the solver found nothing in its time.
    """
    if not table.kv or average >= FULL_BITS:
        return (FULL_BITS,) * table.layers
    costs, sizes = [_costs(s, table) for s in table.kv], [s.numbers for s in table.kv]
    # A model of few heads may have no assignment that close.
    head_bits = solve(costs, sizes, average, average - TOLERANCE) or solve(costs, sizes, average)
    if head_bits is None:
        raise QBEError(f"no KV bits were found for an average of {average:g}; try a higher one", field="kv_bits")
    bits: list[KVBits] = [FULL_BITS] * table.layers
    for layer, heads in groupby(zip(table.kv, head_bits, strict=True), key=lambda pair: pair[0].layer):
        bits[layer] = shortest(tuple(b for _, b in heads))
    return tuple(bits)


def _costs(site: KVSite, table: SiteTable) -> dict[int, float]:
    """Bits -> damage, measured or by rule; never more at more bits."""
    if table.kv_measured:
        costs, worst = {}, 0.0
        for bits in sorted(KV_BITS, reverse=True):
            costs[bits] = worst = max(worst, site.sensitivity[bits])
        return costs
    first = FIRST_LAYER if site.layer == table.kv[0].layer else 1.0
    return {b: 0.0 if b == FULL_BITS else site.query_heads * first / (2**b - 1) ** 2 for b in KV_BITS}


def raised(
    chosen: Sequence[KVBits], now: Sequence[KVBits], table: SiteTable, entropies: Sequence[Sequence[float]]
) -> tuple[KVBits, ...]:
    """The bits of pages to come, after what a request's attention has been like.

    A head that is far more diffuse or far more focused than in calibration, on average over the tokens seen, gets the
    next width above the one that the blueprint chose, and keeps it.

    Args:
        chosen: at first. now: as raised before.
        entropies: per token one for each key head (`qbe.sites.KVSite.entropy`).
    """
    means = [sum(e) / len(e) for e in zip(*entropies, strict=True)]
    bits: list[KVBits] = list(now)
    for layer, heads in groupby(zip(table.kv, means, strict=True), key=lambda pair: pair[0].layer):
        bits[layer] = shortest(
            tuple(
                max(_of(now, site), _next(_of(chosen, site))) if _is_far(site, mean) else _of(now, site)
                for site, mean in heads
            )
        )
    return tuple(bits)


def _is_far(site: KVSite, mean: float) -> bool:
    if site.entropy is None:
        return False
    usual, deviation = site.entropy
    return math.isfinite(mean) and abs(mean - usual) > FAR * max(deviation, LEAST_DEVIATION)


def _of(bits: Sequence[KVBits], site: KVSite) -> int:
    of_layer = bits[site.layer]
    return of_layer if isinstance(of_layer, int) else of_layer[site.head]


def _next(bits: int) -> int:
    return min(b for b in KV_BITS if b > bits or b == FULL_BITS)
