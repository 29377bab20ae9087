"""An engine's requests, step by step: submitted, moved on by `step` until finished, their results taken, recorded."""

from __future__ import annotations

import functools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from qbe.compatibility import Situation
from qbe.engine import prompt_pictures
from qbe.engine.adaptive.activation_statistics import ActivationStats
from qbe.engine.core import Core
from qbe.engine.detokenize import Detokenizer
from qbe.engine.request_selector import Choice, RequestSelector
from qbe.engine.result import PromptInput, Request, Result
from qbe.engine.running_request import RunningRequest
from qbe.engine.sampling.logprobs import prompt_scoring
from qbe.engine.scheduling.sequence import Sequence
from qbe.engine.stop_tokens import special_tokens
from qbe.engine.unsupported_options import without_unsupported
from qbe.engine.use_records import UseRecords
from qbe.errors import QBEError, about
from qbe.policies import kv
from qbe.records import RecordStore, RecordWriter
from qbe.records.record import Quality
from qbe.refresh.monitor import Monitor, Refresh
from qbe.selection.state_floors import below_floors
from qbe.sites import FULL_BITS, SiteTable
from qbe.store.expert_use import ExpertUse

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="Requests")

log = logging.getLogger(__name__)


def locked(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """One thread at a time: the steps of an engine are shared by all of its requests, whichever thread asked."""

    @functools.wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            return method(self, *args, **kwargs)

    return call


class Requests:
    """What an engine does with requests once its model is loaded. Threads may share it.

    Args:
        tokenizer: of the model.
        name: of the model, for records.
        records: where they go; None keeps none.
        store: digest of the model's store, for what is counted of its experts (`qbe.engine.use_records`).
    """

    def __init__(
        self, core: Core, selector: RequestSelector, tokenizer: Any, name: str,
        records: RecordStore | RecordWriter | None, store: str | None,
    ) -> None:  # fmt: skip
        self.core, self.tokenizer, self.name = core, tokenizer, name
        self._selector, self._records, self._table = selector, records, core.table
        self._use = UseRecords(core.plan.use, store, records)
        self._closed = False
        self._lock = threading.RLock()
        self._live: dict[str, RunningRequest] = {}
        self._special = special_tokens(tokenizer)

    @property
    def table(self) -> SiteTable:
        """The model's sites."""
        return self._table

    @property
    def expert_use(self) -> ExpertUse | None:
        """How often experts were used since the start, as of a second ago; None where none are nested, or none was."""
        return self._use.counted

    def choose(self, request: Request, fits: bool = False) -> Choice:
        """Token ids of the prompt and the blueprint for it. Another thread may ask while steps run.

        Args:
            fits: whether a prompt that is longer than the context is refused, before anything that takes long.

        Raises:
            QBEError: what `submit` raises, but for a length that does not fit where nobody asked.
        """
        if isinstance(request.prompt, list):
            self.core.check_tokens("prompt", [t for t in request.prompt if isinstance(t, int)])
        with about("policy"):
            situation = self._situation(request)
        budget, ignored = without_unsupported(request, situation)
        ids, chosen = self._selector.choose(replace(request, budget=budget), fits)
        return ids, replace(chosen, ignored=ignored)

    def _situation(self, request: Request) -> Situation:
        """What its options meet. Raises QBEError for an unknown policy."""
        budget, table, no_cascade = request.budget, self._table, self._selector.cascade
        return replace(
            self.core.situation,
            originals_full=False,  # whether that matters depends on the blueprint (`BoundedKV.admit`)
            measured=table.difficult_entropy is not None,
            scored=self._selector.policy(request.policy).reads_score,
            thresholds=budget.refresh and self._selector.thresholds(budget) is not None,
            no_cascade=str(no_cascade).replace(": ", "; ", 1) if isinstance(no_cascade, QBEError) else "",
            below_floors="" if budget.state_bits is None else below_floors(table, budget.state_bits),
            bounded=budget.kv_error is not None,
            high_precision=budget.high_precision_tokens,
        )

    def read_pictures(self, prompt: PromptInput) -> PromptInput:
        """`prompt_pictures.read` with this engine's tower. Threads may ask."""
        return prompt_pictures.read(prompt, self._selector.tower)

    def count_tokens(self, request: Request) -> int:
        """Tokens of the prompt. Raises QBEError for one that cannot be run, or is longer than the context."""
        return len(self._selector.encode(request, fits=True)[2])

    @locked
    def make_ready(self, policy: str | None) -> None:
        """Take blueprints of this policy, whose routers may choose bits within the forward pass; `submit` does so, too.

        Raises:
            QBEError: an unknown policy, or one that cannot serve this model.
        """
        with about("policy"):
            routers = self._selector.routers(policy)
            if routers is not None:
                self.core.add_routers(routers)

    @locked
    def submit(self, request: Request, fork_parent: str | None = None, choice: Choice | None = None) -> str:
        """Queues a request; `step` moves it on until `finished`, then `take_result` has its answer. Returns its id.

        Args:
            fork_parent: id of a request of the same prompt that has `started`, to begin on its pages.
            choice: what `choose` said of this request, where it was asked before.
        """
        if self._closed:
            raise QBEError("this engine is closed; make a new one")
        self.make_ready(request.policy)
        ids, chosen = self.choose(request) if choice is None else choice
        key = uuid.uuid4().hex
        running = Sequence(key, ids, request.params, chosen.blueprint)
        running.sampling.constraint = request.constraint
        running.priority = request.priority
        prompt_pictures.place_in(running, request.prompt, self._selector.tower)
        running.paging.cache_salt = request.cache_salt
        # Who fixes bits gets exactly these; others get pages with more where there are some.
        running.paging.more, running.paging.more_kv = request.budget.bits is None, request.budget.kv_bits is None
        running.paging.fork_parent = None if fork_parent is None else self._live[fork_parent].running
        if request.params.prompt_logprobs is not None:
            running.sampling.scoring, running.paging.fork_parent = prompt_scoring(running), None
        # An average that was asked for is kept; one that was chosen may turn out too low for what comes.
        quantised = chosen.blueprint.average_kv_bits(self._table) < FULL_BITS
        budget = chosen.budget
        running.attention.watched = budget.kv_bits is None and quantised
        running.bounded.best_effort = budget.best_effort
        if budget.high_precision_tokens:
            running.difficulty.threshold = self._table.difficult_entropy
        if self._selector.reads_prompt(request):
            running.activation_stats, running.paging.fork_parent = ActivationStats.of(self._table), None
        if budget.refresh:
            running.difficulty.monitor = Monitor(self._selector.thresholds(budget), chosen.pace)
        self.core.add(running)
        self._selector.began(chosen.blueprint, request.budget, chosen.context, ids, request.cache_salt)
        chosen = replace(chosen, blueprint=running.blueprint)  # the cache may not hold what was chosen
        is_chat = isinstance(request.prompt, list) and isinstance(request.prompt[0], dict)
        text = Detokenizer(
            self.tokenizer, request.params.stop, self.core.eos_ids, () if is_chat else ids, self._special
        )  # fmt: skip
        self._live[key] = RunningRequest(request, chosen, running, text, time.perf_counter())
        return key

    @locked
    def step(self) -> None:
        """Runs one step of every request that can run."""
        try:
            outputs = self.core.step()
        except BaseException:
            for live in list(self._live.values()):
                if live.running.finish_reason is not None and live.result is None:
                    self._finish(live)
            raise
        now = time.perf_counter()
        for output in outputs:
            live = self._live[output.sequence.request_id]
            if live.result is not None:
                continue  # a stop string ended it at an earlier token of this step
            try:
                self._raise_kv(live)
                self._choose_again(live)
                self._refresh(live)
            except Exception as error:  # of a policy; the others in the step have nothing to do with it
                log.exception("the policy of a request failed while it was answered")
                live.running.error = f"its policy failed while it was answered ({type(error).__name__})"
                if self.core.cancel(output.sequence.request_id, "error") is None:
                    live.running.finish_reason = "error"  # it was its last token
                self._finish(live, now)
                continue
            if output.new_token is not None:
                live.first_token = live.first_token or now
                live.tokens += 1
                live.pieces.append(live.detokenizer.push(output.new_token))
            if output.finished:
                self._finish(live, now)
            elif live.detokenizer.stopped is not None:
                self.core.cancel(output.sequence.request_id, "stop")
                live.running.rewind(live.tokens)
                self._finish(live, now)

    @locked
    def cancel(self, request_id: str) -> None:
        """Ends a request now; its pages are free at once and its result holds what was written so far."""
        live = self._live.get(request_id)
        if live is not None and live.result is None:
            self.core.cancel(request_id)
            self._finish(live)

    @locked
    def take_pieces(self, request_id: str) -> list[str]:
        """The text that came since the last call."""
        live = self._live[request_id]
        pieces, live.pieces = [p for p in live.pieces if p], []
        return pieces

    @locked
    def shown(self, request_id: str) -> int:
        """How many of a request's tokens have given their text to its pieces."""
        return self._live[request_id].detokenizer.shown

    @locked
    def sequence(self, request_id: str) -> Sequence:
        """The sequence of a request whose result was not taken yet, to be read between steps."""
        return self._live[request_id].running

    @locked
    def refreshes(self, request_id: str) -> tuple[Refresh, ...]:
        """The refreshes so far of a request whose result was not taken yet."""
        return tuple(self._live[request_id].refreshes)

    @locked
    def started(self, request_id: str) -> bool:
        """Whether the request has its first token, or its result."""
        live = self._live[request_id]
        return live.first_token is not None or live.result is not None

    @locked
    def finished(self, request_id: str) -> bool:
        """Whether the request has its result."""
        return self._live[request_id].result is not None

    @locked
    def take_result(self, request_id: str) -> Result:
        """The result of a finished request, which the engine forgets then. Raises KeyError for any other."""
        live = self._live[request_id]
        if live.result is None:
            raise KeyError(request_id)
        del self._live[request_id]
        return live.result

    @locked
    def run_idle(self, work: Callable[[Core], T]) -> T:
        """What `work` returns, which may step the core: between two steps of the requests, and while there is none."""
        return work(self.core)

    def record_quality(self, request_id: str, quality: Mapping[str, Any]) -> None:
        """Keep in the record of a finished request how it was scored (`qbe.engine.sampling.answer_scoring`)."""
        if self._records is not None:
            self._records.try_set_quality(Quality(request_id, quality))

    @locked
    def close(self) -> None:
        """Cancels what still runs and closes the record store and the blueprint cache."""
        for key in list(self._live):
            self.cancel(key)
        self._closed = True
        self._use.look(closing=True)
        if self._records is not None:
            self._records.close()
        if self._selector.cache is not None:
            self._selector.cache.close()

    def _raise_kv(self, live: RunningRequest) -> None:
        """More KV bits for pages to come, where a request's attention has turned out unlike calibration's."""
        running = live.running
        if len(running.attention.entropies) == live.entropies or running.finish_reason is not None:
            return
        live.entropies = len(running.attention.entropies)
        now = running.blueprint.kv_bits
        bits = kv.raised(live.chosen.blueprint.kv_bits, now, self._table, running.attention.entropies)
        if bits != now:
            self.core.raise_kv(running, bits)
            live.kv_raises += running.blueprint.kv_bits != now

    def _choose_again(self, live: RunningRequest) -> None:
        """Another blueprint for the answer, where the policy reads the prompt and that has run."""
        running = live.running
        if running.activation_stats is None or running.remaining > 1 or running.finish_reason == "error":
            return
        activation_stats, running.activation_stats = running.activation_stats, None
        if self.core.refresh(running, self._selector.again(live.request, live.chosen, activation_stats.signals())):
            bytes_per_token = running.blueprint.bytes_per_token(self._table)
            live.chosen = replace(live.chosen, blueprint=running.blueprint, bytes_per_token=bytes_per_token)

    def _refresh(self, live: RunningRequest) -> None:
        """Another blueprint, where the answer has become hard or easy to predict and stays so."""
        running = live.running
        if running.difficulty.monitor is None or running.finish_reason is not None:
            return
        cause = running.difficulty.monitor.look(running.difficulty.entropies, running.difficulty.margins)
        if cause is None:
            return
        before, request = running.blueprint, live.request
        profile, blueprint = self._selector.select_again(request.policy, live.profile, request.budget, cause)
        if self.core.refresh(running, blueprint):
            live.profile = profile
            live.refreshes.append(Refresh.of(cause, before, running.blueprint, self._table, profile.score))

    def _finish(self, live: RunningRequest, now: float | None = None) -> None:
        """Makes the result and its record."""
        result = live.finish(time.perf_counter() if now is None else now)
        if self._records is not None:
            self._records.try_append(live.record(result, self.name))
        self._use.look()
