"""What the scheduler keeps of a request with a blueprint: its refreshes while it runs, its record at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from qbe.blueprint import Blueprint, tokens_by_bits
from qbe.records import Record
from qbe.records.record import Times, Work
from qbe.refresh.monitor import Cause, Monitor, Refresh
from qbe.selection.blueprint_history import BlueprintHistory
from qbe.selection.record_builder import (
    build_record,
    choice_part,
    difficulty_part,
    query_part,
    tokens_by_activation_bits,
)
from qbe.selection.selector import BlueprintSelector
from qbe.sites import FULL_BITS, SiteTable
from qbe.store.shared_rows import SharedRow
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
        self.profile = payload.as_profile()
        kept = self.history.first.average_weight_bits(table)
        if payload.asked_weight_bits not in (None, kept):  # a refresh goes on from the bits that its conversation keeps
            self.profile = replace(self.profile, score=payload.as_budget().score_for(kept))
        self.refreshes: list[Refresh] = []
        self.entropies: list[float] = []
        self.margins: list[float] = []
        self._first_token: float | None = None
        self._computed: Counter[Blueprint] = Counter()  # tokens
        self._bytes = 0
        self._shared_bits = 0.0  # that its tokens read beyond their blueprints' averages, summed
        self._bytes_at: dict[str, int] = {}  # of a token by `linear_key`: a step asks for every answer

    def computed(
        self, runs: Sequence[tuple[Blueprint, int]], read: Mapping[str, SharedRow], samples: bool
    ) -> None:  # fmt: skip
        """Count tokens of a step; after a preemption they are counted again.

        Args:
            runs: of the request's history.
            read: what the step's rows read (`SharedRows.of`); empty where each reads its own.
            samples: whether the step gives a token of the answer.
        """
        for blueprint, count in runs:
            self._computed[blueprint] += count
            if blueprint.linear_key in read:
                self._shared_bits += read[blueprint.linear_key].bits * count
        if samples and runs and runs[-1][0].linear_key in read:
            self._bytes += read[runs[-1][0].linear_key].nbytes

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

    def refresh(self, cause: Cause, selector: BlueprintSelector, start: int) -> bool:
        """Choose again for the tokens from position `start` on; whether that gave another blueprint."""
        payload, before = self.payload, self.history.last
        profile, blueprint = selector.select_again(payload.asked_policy, self.profile, payload.as_budget(), cause)
        blueprint = blueprint.with_kv_bits((FULL_BITS,) * self.table.layers)
        if blueprint.linear_key == before.linear_key:
            return False
        self.refreshes.append(Refresh.of(cause, before, blueprint, self.table, profile.score))
        self.profile = profile
        self.history.change(start, blueprint)
        return True

    def record(self, request: Any, model: str) -> Record:
        """The record of its end.

        Args:
            request: vLLM's, finished.
            model: its name.
        """
        now, payload, table, first = time.time(), self.payload, self.table, self.history.first
        began = self._first_token or now
        computed = sum(self._computed.values())
        bits = sum(b.average_weight_bits(table) * tokens for b, tokens in self._computed.items())
        average = (bits / computed if computed else 0.0) or first.average_weight_bits(table)
        by_bits: Counter[int] = Counter()
        for blueprint, tokens in self._computed.items():
            by_bits.update(tokens_by_bits(blueprint, table, tokens))
        reason = REASONS.get(str(request.get_finished_reason()), "error")
        return build_record(
            query_part(payload.as_profile()),
            choice_part(
                first, tier=payload.budget["tier"], budget_bits=payload.budget["bits"], cache=payload.cache,
                average_weight_bits=average,
                bytes_per_token=first.bytes_per_token(table), asked_weight_bits=payload.asked_weight_bits,
            ),
            Work(
                prompt_tokens=request.num_prompt_tokens, completion_tokens=request.num_output_tokens,
                bytes_moved=self._bytes, tokens_by_bits=dict(by_bits),
                tokens_by_activation_bits=tokens_by_activation_bits(self._computed.items(), table, computed),
                read_weight_bits=average + self._shared_bits / max(1, computed),
            ),
            difficulty_part(self.entropies, self.margins, self.refreshes),
            Times(
                analysis_ms=payload.analysis_ms, policy_ms=payload.policy_ms,
                prefill_ms=(began - self.started) * 1e3, decode_ms=(now - began) * 1e3,
            ),
            model=model, finish_reason=reason,
            error=None if reason != "error" else f"vLLM ended it: {request.status.name}",
        )  # fmt: skip
