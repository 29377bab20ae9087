"""The parts of a record (`qbe.records.record`) that both engines fill in alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from qbe.analysis import QueryProfile
from qbe.blueprint import Blueprint
from qbe.records import Record
from qbe.records.record import Choice, Difficulty, Query, Times, Work
from qbe.refresh.monitor import Refresh
from qbe.sites import FULL_BITS, SiteTable


def build_record(
    query: Query, choice: Choice, work: Work, difficulty: Difficulty, times: Times, **identity: Any
) -> Record:
    """The record of these parts.

    Args:
        identity: the fields that `Record` itself adds to theirs.
    """
    parts = (query, choice, work, difficulty, times)
    return Record(**identity, **{name: value for part in parts for name, value in vars(part).items()})


def query_part(profile: QueryProfile) -> Query:
    """What a record says of a query, from its profile before any refresh."""
    return Query(
        score=profile.score, prompt_class=profile.prompt_class, analysis_tier=profile.tier, features=profile.features,
        cluster=profile.cluster,
    )  # fmt: skip


def choice_part(blueprint: Blueprint, **asked: Any) -> Choice:
    """What a record says of the blueprint that a request began with.

    Args:
        asked: the other fields of `Choice`: what was asked for, and what the blueprint's tokens cost.
    """
    return Choice(
        policy=blueprint.policy, blueprint_key=blueprint.key, weight_bits=blueprint.weight_bits,
        activation_bits=blueprint.activation_bits, kv_bits=blueprint.kv_bits, first_kv_bits=blueprint.first_kv_bits,
        state_bits=blueprint.state_bits, **asked,
    )  # fmt: skip


def difficulty_part(entropies: Sequence[float], margins: Sequence[float], refreshes: Iterable[Refresh]) -> Difficulty:
    """What a record says of the answer; entropies and margins as they were measured, possibly none."""
    return Difficulty(
        entropies=tuple(entropies) or None,
        margins=tuple(margins) or None,
        refreshes=tuple(refresh.describe() for refresh in refreshes) or None,
    )


def tokens_by_activation_bits(
    parts: Iterable[tuple[Blueprint, int]], table: SiteTable, computed: int
) -> dict[int, int]:
    """Bits of the activations -> tokens computed at them. Sites of a token differ: it counts by their share of weights.

    Args:
        parts: blueprints and how many tokens each computed at its own activation bits.
        computed: tokens in all; those in no part had 16-bit activations.
    """
    eight = 0
    for blueprint, tokens in parts:
        low = (s.parameters for s, a in zip(table.nested, blueprint.activation_bits, strict=True) if a < FULL_BITS)
        eight += round(tokens * sum(low) / table.nested_parameters)
    return {bits: count for bits, count in ((8, eight), (FULL_BITS, computed - eight)) if count}
