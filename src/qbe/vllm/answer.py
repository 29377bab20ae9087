"""What the scheduler keeps of a request with a blueprint: its refreshes while it runs, its record at the end."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

from qbe.analysis import QueryProfile
from qbe.blueprint import Blueprint, tokens_by_bits
from qbe.choosing import BlueprintChooser
from qbe.records import Record
from qbe.records.refresh import Cause, Monitor, Refresh
from qbe.records.thresholds import moved
from qbe.sites import FULL_BITS, SiteTable
from qbe.vllm.ticket import Ticket

# A stop string is found in the front end, which aborts the request: here that is a cancellation, too.
REASONS = {"stop": "stop", "repetition": "stop", "length": "length", "abort": "cancelled"}


class Answer:
    """One request between its arrival and its record.

    Args:
        started: seconds of `time.time`.
        monitor: of its tokens; None where nobody asked for refreshes.
    """

    def __init__(self, ticket: Ticket, table: SiteTable, started: float, monitor: Monitor | None) -> None:
        self.ticket, self.table, self.started, self.monitor = ticket, table, started, monitor
        self.first = self.blueprint = ticket.blueprint(table)
        self.profile = QueryProfile(**ticket.profile, context=ticket.context)
        self.refreshes: list[Refresh] = []
        self.entropies: list[float] = []
        self.margins: list[float] = []
        self._first_token: float | None = None
        self._computed: Counter[Blueprint] = Counter()  # tokens
        self._bytes = 0

    def step(self, tokens: int, new: int, difficulty: tuple[float, float] | None) -> None:
        """Count a step.

        Args:
            tokens: that were computed; new: that were written.
            difficulty: entropy and margin of the new one, where that is watched.
        """
        self._computed[self.blueprint] += tokens
        if not new:
            return
        self._first_token = self._first_token or time.time()
        self._bytes += self.blueprint.bytes_per_token(self.table)
        if difficulty is not None:
            self.entropies.append(difficulty[0])
            self.margins.append(difficulty[1])

    def cause(self) -> Cause | None:
        """Why another blueprint is due, if one is."""
        return None if self.monitor is None else self.monitor.look(self.entropies, self.margins)

    def refresh(self, cause: Cause, chooser: BlueprintChooser) -> bool:
        """Choose again; whether that gave another blueprint."""
        profile = replace(self.profile, score=moved(self.profile.score, cause.kind))
        policy = chooser.policy(self.ticket.asked_policy)
        found, _ = chooser.blueprint(policy, profile, self.ticket.as_budget())
        found = found.with_kv_bits((FULL_BITS,) * self.table.layers)
        if found.linear_key == self.blueprint.linear_key:
            return False
        self.refreshes.append(Refresh.of(cause, self.blueprint, found, self.table, profile.score))
        self.profile, self.blueprint = profile, found
        return True

    def record(self, request: Any, model: str) -> Record:
        """The record of its end.

        Args:
            request: vLLM's, finished.
            model: its name.
        """
        now, ticket, profile, table = time.time(), self.ticket, self.ticket.profile, self.table
        first, parts = self._first_token or now, self._computed
        computed = sum(parts.values())
        average = sum(b.average_weight_bits(table) * n for b, n in parts.items()) / computed if computed else None
        by_bits: Counter[int] = Counter()
        eight = 0
        for blueprint, tokens in parts.items():
            by_bits.update(tokens_by_bits(blueprint, table, tokens))
            low = (s.parameters for s, a in zip(table.nested, blueprint.activation_bits, strict=True) if a < FULL_BITS)
            eight += round(tokens * sum(low) / table.nested_parameters)
        reason = REASONS.get(str(request.get_finished_reason()), "error")
        return Record(
            model=model, policy=ticket.policy, tier=ticket.budget["tier"], budget_bits=ticket.budget["bits"],
            prompt_tokens=request.num_prompt_tokens, completion_tokens=request.num_output_tokens, finish_reason=reason,
            score=profile["score"], prompt_class=profile["prompt_class"], analysis_tier=profile["tier"],
            features=profile["features"], blueprint_key=self.first.key,
            average_weight_bits=average or self.first.average_weight_bits(table), weight_bits=self.first.weight_bits,
            activation_bits=self.first.activation_bits, kv_bits=self.first.kv_bits,
            bytes_per_token=self.first.bytes_per_token(table), bytes_moved=self._bytes, tokens_by_bits=dict(by_bits),
            tokens_by_activation_bits={g: n for g, n in ((8, eight), (FULL_BITS, computed - eight)) if n},
            entropies=tuple(self.entropies) or None, margins=tuple(self.margins) or None,
            refreshes=tuple(r.describe() for r in self.refreshes) or None, analysis_ms=ticket.analysis_ms,
            policy_ms=ticket.policy_ms, prefill_ms=(first - self.started) * 1e3, decode_ms=(now - first) * 1e3,
            error=None if reason != "error" else f"vLLM ended it: {request.status.name}", cluster=profile["cluster"],
            cache=ticket.cache,
        )  # fmt: skip
