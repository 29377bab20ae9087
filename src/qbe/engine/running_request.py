"""A request between `Engine.submit` and `Engine.take_result`: what the engine keeps of it, its result and record."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from qbe.analysis.profile import QueryProfile
from qbe.engine.adaptive.routing import Read
from qbe.engine.detokenize import Detokenizer
from qbe.engine.result import Request, Result
from qbe.engine.scheduling.sequence import Sequence
from qbe.engine.unsupported_options import bound_was_dropped
from qbe.explain import Explanation
from qbe.records import Record
from qbe.records.record import Times, Work
from qbe.refresh.monitor import Refresh
from qbe.selection.record_builder import (
    build_record,
    choice_part,
    difficulty_part,
    query_part,
    tokens_by_activation_bits,
)


@dataclass
class RunningRequest:
    """A request in the core.

    Attributes:
        chosen: its blueprint, and why.
        running: what the core makes of it.
        pieces: text that nobody has taken yet.
        started, first_token: seconds of `time.perf_counter`.
        result: once it has ended.
        entropies: of `running`, how many have been looked at.
        tokens: of the answer, how many have been.
        kv_raises: how often pages to come got more KV bits.
        profile: what its present blueprint was chosen for.
        refreshes: of its blueprint, in order.
    """

    request: Request
    chosen: Explanation
    running: Sequence
    detokenizer: Detokenizer
    started: float
    pieces: list[str] = field(default_factory=list)
    first_token: float | None = None
    result: Result | None = None
    entropies: int = 0
    tokens: int = 0
    kv_raises: int = 0
    profile: QueryProfile = field(init=False)
    refreshes: list[Refresh] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.profile, chosen = self.chosen.profile, self.chosen
        if chosen.asked is not None:  # a refresh goes on from the bits that its conversation keeps
            self.profile = replace(self.profile, score=chosen.budget.score_for(chosen.average_bits))

    def finish(self, now: float) -> Result:
        """Makes the result. `now` is the time of its last token, as in `started`."""
        self.pieces.append(self.detokenizer.finish())
        running, chosen = self.running, self.chosen
        first = self.first_token or now
        reason = "stop" if self.detokenizer.stopped is not None else running.finish_reason or "cancelled"
        read = None if running.routed is None else Read.of(running.routed, running.blueprint, chosen.table)
        self.result = Result(
            id=running.request_id, text=self.detokenizer.text, token_ids=running.output_ids, finish_reason=reason,
            prompt_tokens=len(running.prompt_ids), profile=chosen.profile, blueprint=chosen.blueprint,
            table=chosen.table, bytes_per_token=read.bytes if read else chosen.bytes_per_token,
            routed=read.weights if read else {}, analysis_ms=chosen.analysis_ms,
            policy_ms=chosen.policy_ms, prefill_ms=(first - self.started) * 1e3, decode_ms=(now - first) * 1e3,
            error=running.error, stop_reason=self.detokenizer.stopped,
            computed_tokens=max(0, running.computed - running.paging.cached),
            cached_tokens=running.paging.cached, high_precision_tokens=running.high_precision_computed,
            average_kv_bits=running.paging.average_kv_bits or chosen.blueprint.average_kv_bits(chosen.table),
            kv_error=running.blueprint.kv_error, pages_read=running.bounded.pages_read,
            pages_raised=running.bounded.pages_raised, host_bytes=running.bounded.host_bytes,
            parts=tuple(running.parts), refreshes=tuple(self.refreshes),
            raised_tokens=sum(m.shift > 0 for m in running.cascade.moves),
            lowered_tokens=sum(m.shift < 0 for m in running.cascade.moves),
            drafted_tokens=running.speculation.drafted if running.speculation else 0,
            accepted_tokens=running.speculation.accepted if running.speculation else 0,
            shared_bits=running.shared_reads.average_bits, missed_bits=running.missed_reads.average_bits,
            misses=running.missed_reads.misses, kv_raises=self.kv_raises,
            cached_parts=tuple(running.blueprint_history.written(running.paging.cached)), asked=chosen.asked,
            ignored=dict(chosen.ignored) | (bound_was_dropped() if running.bounded.dropped else {}),
        )  # fmt: skip
        return self.result

    def record(self, result: Result, model: str) -> Record:
        """The record of its result. `model` is the model's name."""
        budget, difficulty = self.request.budget, self.running.difficulty
        usual = result.computed_tokens - result.high_precision_tokens
        activation_bits = tokens_by_activation_bits([(result.blueprint, usual)], result.table, result.computed_tokens)
        return build_record(
            query_part(result.profile),
            choice_part(
                result.blueprint, tier=budget.tier, budget_bits=budget.bits, kv_error=result.kv_error,
                average_weight_bits=result.average_weight_bits, bytes_per_token=result.bytes_per_token,
                cache=self.chosen.cache, asked_weight_bits=result.asked_weight_bits,
            ),
            Work(
                prompt_tokens=result.prompt_tokens, completion_tokens=len(result.token_ids),
                bytes_moved=self._bytes_moved(result), tokens_by_bits=result.tokens_by_bits,
                tokens_by_activation_bits=activation_bits, pages_read=result.pages_read,
                pages_raised=result.pages_raised, host_bytes=result.host_bytes,
                drafted_tokens=result.drafted_tokens, accepted_tokens=result.accepted_tokens,
                read_weight_bits=result.read_weight_bits, precision_misses=result.misses,
                cached_tokens=result.cached_tokens, cached_weight_bits=result.cached_weight_bits,
            ),
            difficulty_part(difficulty.entropies, difficulty.margins, self.refreshes),
            Times(
                analysis_ms=result.analysis_ms, policy_ms=result.policy_ms, prefill_ms=result.prefill_ms,
                decode_ms=result.decode_ms,
            ),
            id=result.id, model=model, finish_reason=result.finish_reason, error=result.error, arm=self.request.arm,
        )  # fmt: skip

    def _bytes_moved(self, result: Result) -> int:
        """Bytes of weights and scales of all passes at batch 1: the prompt's, then one for each further token that was
        not a draft token, and those of draft steps; at what was read, where steps share that.
        """
        running, tokens, speculation = self.running, len(result.token_ids), self.running.speculation
        first = len(running.prompt_ids) - 1  # whose pass gives the first token
        nbytes = sum(b.bytes_per_token(result.table) * count for b, count in running.spans(first, first + tokens))
        if result.routed:
            nbytes = result.bytes_per_token * tokens
        if speculation is not None:
            passes = tokens - speculation.accepted
            nbytes = round(nbytes * passes / max(1, tokens)) + speculation.draft_bytes
        return max(0, nbytes + running.shared_reads.nbytes - running.missed_reads.nbytes)
