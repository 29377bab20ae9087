"""The record of a request, as both engines write it (`qbe.records.record.Record`)."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from qbe.analysis import QueryProfile
from qbe.blueprint import Blueprint
from qbe.records import Record
from qbe.refresh.monitor import Refresh
from qbe.sites import FULL_BITS, SiteTable


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a request, as far as an engine measures it; fields as in `Record`.

    Attributes:
        refreshes: of its blueprint, in order.
        bounded: pages_read, pages_raised and host_bytes; None where attention has no bounded mode.
        speculation: drafted_tokens and accepted_tokens; None where nothing speculates.
    """

    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    error: str | None
    average_weight_bits: float
    bytes_per_token: int
    bytes_moved: int
    tokens_by_bits: Mapping[int, int]
    tokens_by_activation_bits: Mapping[int, int]
    entropies: Sequence[float]
    margins: Sequence[float]
    refreshes: Sequence[Refresh]
    prefill_ms: float
    decode_ms: float
    kv_error: float | None = None
    bounded: tuple[int, int, int] | None = None
    speculation: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class RecordBuilder:
    """What is known of a request when its blueprint has been chosen.

    Attributes:
        model: its name.
        tier, budget_bits: of the budget.
        profile: of the query, before any refresh.
        blueprint: that it begins with.
        cache: what the blueprint cache did.
        analysis_ms, policy_ms: milliseconds.
        id: of the record.
    """

    model: str
    table: SiteTable
    tier: str
    budget_bits: float | None
    profile: QueryProfile
    blueprint: Blueprint
    cache: str | None
    analysis_ms: float
    policy_ms: float
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def build(self, outcome: Outcome) -> Record:
        """Its record, now that it has ended."""
        profile, blueprint = self.profile, self.blueprint
        pages_read, pages_raised, host_bytes = outcome.bounded or (None, None, None)
        drafted, accepted = outcome.speculation or (None, None)
        return Record(
            id=self.id, model=self.model, policy=blueprint.policy, tier=self.tier, budget_bits=self.budget_bits,
            prompt_tokens=outcome.prompt_tokens, completion_tokens=outcome.completion_tokens,
            finish_reason=outcome.finish_reason, error=outcome.error,
            score=profile.score, prompt_class=profile.prompt_class, analysis_tier=profile.tier,
            features=profile.features, cluster=profile.cluster,
            blueprint_key=blueprint.key, weight_bits=blueprint.weight_bits,
            activation_bits=blueprint.activation_bits, kv_bits=blueprint.kv_bits,
            first_kv_bits=blueprint.first_kv_bits, kv_error=outcome.kv_error, cache=self.cache,
            average_weight_bits=outcome.average_weight_bits, bytes_per_token=outcome.bytes_per_token,
            bytes_moved=outcome.bytes_moved, tokens_by_bits=outcome.tokens_by_bits,
            tokens_by_activation_bits=outcome.tokens_by_activation_bits,
            pages_read=pages_read, pages_raised=pages_raised, host_bytes=host_bytes,
            drafted_tokens=drafted, accepted_tokens=accepted,
            entropies=tuple(outcome.entropies) or None, margins=tuple(outcome.margins) or None,
            refreshes=tuple(refresh.describe() for refresh in outcome.refreshes) or None,
            analysis_ms=self.analysis_ms, policy_ms=self.policy_ms,
            prefill_ms=outcome.prefill_ms, decode_ms=outcome.decode_ms,
        )  # fmt: skip


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
