"""What the scheduler keeps of a request with a blueprint: its refreshes while it runs, its record at the end."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

from qbe.analysis import QueryProfile
from qbe.blueprint import Blueprint, tokens_by_bits
from qbe.records import Record
from qbe.refresh.monitor import Cause, Monitor, Refresh
from qbe.refresh.thresholds import moved
from qbe.selection.selector import BlueprintChooser
from qbe.sites import FULL_BITS, SiteTable
from qbe.vllm.blueprint_history import BlueprintHistory
from qbe.vllm.blueprint_payload import BlueprintPayload

# A stop string is found in the front end, which aborts the request: here that is a cancellation, too.
REASONS = {"stop": "stop", "repetition": "stop", "length": "length", "abort": "cancelled"}


class RequestState:
    """One request between its arrival and its record.

    Args:
        started: seconds of `time.time`.
        monitor: of its tokens; None where nobody asked for refreshes.
    """

    def __init__(self, payload: BlueprintPayload, table: SiteTable, started: float, monitor: Monitor | None) -> None:
        self.payload, self.table, self.started, self.monitor = payload, table, started, monitor
        self.history = BlueprintHistory(payload.blueprint(table))
        self.profile = QueryProfile(**payload.profile, context=payload.context)
        self.refreshes: list[Refresh] = []
        self.entropies: list[float] = []
        self.margins: list[float] = []
        self._first_token: float | None = None
        self._computed: Counter[Blueprint] = Counter()  # tokens
        self._bytes = 0
        self._bytes_at: dict[str, int] = {}  # of a token by `linear_key`: a step asks for every answer

    def computed(self, start: int, tokens: int) -> None:
        """Count tokens of a step, from position `start` on; after a preemption they are counted again."""
        for blueprint, count in self.history.runs(start, tokens):
            self._computed[blueprint] += count

    def wrote(self, difficulty: tuple[float, float] | None) -> None:
        """Count a token of the answer.

        Args:
            difficulty: its entropy and margin, where they are watched.
        """
        self._first_token = self._first_token or time.time()
        key = self.history.last.linear_key
        if key not in self._bytes_at:
            self._bytes_at[key] = self.history.last.bytes_per_token(self.table)
        self._bytes += self._bytes_at[key]
        if difficulty is not None:
            self.entropies.append(difficulty[0])
            self.margins.append(difficulty[1])

    def cause(self) -> Cause | None:
        """Why another blueprint is due, if one is."""
        return None if self.monitor is None else self.monitor.look(self.entropies, self.margins)

    def refresh(self, cause: Cause, chooser: BlueprintChooser, start: int) -> bool:
        """Choose again for the tokens from position `start` on; whether that gave another blueprint."""
        profile = replace(self.profile, score=moved(self.profile.score, cause.kind))
        policy = chooser.policy(self.payload.asked_policy)
        found, _ = chooser.blueprint(policy, profile, self.payload.as_budget())
        found = found.with_kv_bits((FULL_BITS,) * self.table.layers)
        if found.linear_key == self.history.last.linear_key:
            return False
        self.refreshes.append(Refresh.of(cause, self.history.last, found, self.table, profile.score))
        self.profile = profile
        self.history.change(start, found)
        return True

    def record(self, request: Any, model: str) -> Record:
        """The record of its end.

        Args:
            request: vLLM's, finished.
            model: its name.
        """
        now, payload, profile, table = time.time(), self.payload, self.payload.profile, self.table
        began, first, parts = self._first_token or now, self.history.first, self._computed
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
            model=model, policy=payload.policy, tier=payload.budget["tier"], budget_bits=payload.budget["bits"],
            prompt_tokens=request.num_prompt_tokens, completion_tokens=request.num_output_tokens, finish_reason=reason,
            score=profile["score"], prompt_class=profile["prompt_class"], analysis_tier=profile["tier"],
            features=profile["features"], blueprint_key=first.key,
            average_weight_bits=average or first.average_weight_bits(table), weight_bits=first.weight_bits,
            activation_bits=first.activation_bits, kv_bits=first.kv_bits,
            bytes_per_token=first.bytes_per_token(table), bytes_moved=self._bytes, tokens_by_bits=dict(by_bits),
            tokens_by_activation_bits={g: n for g, n in ((8, eight), (FULL_BITS, computed - eight)) if n},
            entropies=tuple(self.entropies) or None, margins=tuple(self.margins) or None,
            refreshes=tuple(r.describe() for r in self.refreshes) or None, analysis_ms=payload.analysis_ms,
            policy_ms=payload.policy_ms, prefill_ms=(began - self.started) * 1e3, decode_ms=(now - began) * 1e3,
            error=None if reason != "error" else f"vLLM ended it: {request.status.name}", cluster=profile["cluster"],
            cache=payload.cache,
        )  # fmt: skip
