"""vLLM's scheduler, watching over answers: it refreshes their blueprints and writes their records.

Workers leave with a step's output how hard each watched answer's token was to predict; a blueprint that takes another
one's place goes to all workers with the next step. Both are attributes of vLLM's own messages.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from qbe.analysis import Analyzer
from qbe.blueprint import Blueprint
from qbe.records import RecordStore, RecordWriter
from qbe.refresh import thresholds
from qbe.refresh.monitor import Monitor
from qbe.store.shared_rows import SharedRows
from qbe.vllm import transfer
from qbe.vllm.blueprint_payload import KEY, BlueprintPayload
from qbe.vllm.cache_salt import resalt_blocks
from qbe.vllm.request_state import RequestState


class PlannedScheduler(Scheduler):
    """vLLM's scheduler, and that."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._model = self.vllm_config.quant_config.served
        self._answers: dict[str, RequestState] = {}
        self._refreshed: dict[str, tuple[int, str, bytes, bytes]] = {}  # not yet sent to the workers
        self._records = RecordWriter(RecordStore())
        table = self._model.table
        self._shared = SharedRows(table) if self.vllm_config.quant_config.shared_rows else None
        self._widest = Blueprint.of("widest", table, tuple(s.gears[-1] for s in table.nested))  # of who has no answer
        self._selector: Any = None

    def add_request(self, request: Any) -> None:
        if request.abort_immediately and not transfer.can_be_rejected(request.kv_transfer_params or {}):
            request.kv_transfer_params = None
        super().add_request(request)
        payload = BlueprintPayload.find(request.sampling_params)
        if payload is not None and request.request_id not in self._answers:
            monitor = Monitor(self._thresholds()) if payload.budget["refresh"] else None
            self._answers[request.request_id] = RequestState(payload, self._model.table, request.arrival_time, monitor)

    def _thresholds(self) -> thresholds.Thresholds | None:
        """As `BlueprintSelector.thresholds`, which the front end has asked."""
        return thresholds.load(self._model.name) or thresholds.of_text(self._model.table.text)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        self._count(output.num_scheduled_tokens)
        output.qbe_refreshed = {
            request: self._refreshed.pop(request)
            for request in list(self._refreshed)
            if request in output.num_scheduled_tokens
        }
        return output

    def _count(self, scheduled: dict[str, int]) -> None:
        """What the requests of a step compute and read."""
        runs = {}
        for request, tokens in scheduled.items():
            answer, start = self._answers.get(request), self.requests[request].num_computed_tokens - tokens
            runs[request] = [(self._widest, tokens)] if answer is None else answer.history.runs(start, tokens)
        read = self._shared.of(b for of_it in runs.values() for b, _ in of_it) if self._shared is not None else {}
        for request, of_it in runs.items():
            if (answer := self._answers.get(request)) is not None:
                seen = self.requests[request]
                answer.computed(of_it, read, seen.num_computed_tokens >= seen.num_tokens)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        sampled, where = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        difficulties = getattr(model_runner_output, "qbe_difficulties", {})
        for request in scheduler_output.num_scheduled_tokens:
            answer = self._answers.get(request)
            if answer is not None and sampled and request in where and sampled[where[request]]:
                answer.wrote(difficulties.get(request))
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request in difficulties:
            self._refresh(request)
        return outputs

    def _refresh(self, request_id: str) -> None:
        answer, request = self._answers.get(request_id), self.requests.get(request_id)
        if answer is None or request is None or (cause := answer.cause()) is None:
            return
        if self._selector is None:
            from qbe.vllm.frontend import make_selector

            self._selector = make_selector(self._model, Analyzer(), None)
        # From the token on that was just written, or from the first that is not on its way; none is after a preemption.
        start = max(request.num_tokens - 1, request.num_computed_tokens)
        if answer.refresh(cause, self._selector, start):
            blueprint = answer.history.last
            bits = bytes(blueprint.weight_bits), bytes(blueprint.activation_bits)
            self._refreshed[request_id] = start, blueprint.policy, *bits
            resalt_blocks(request, start, blueprint.computed_key, self.hash_block_size)

    def _connector_finished(self, request: Any) -> Any:
        delay, params = super()._connector_finished(request)
        answer = self._answers.get(request.request_id)
        # Another server fetches the prompt; or a whole turn, of which a refreshed answer may be a part.
        if params is not None and answer is not None and (params.get("do_remote_prefill") or not answer.refreshes):
            params = {**params, KEY: transfer.told(answer.payload)}
        return delay, params

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        freed = super()._free_request(request, *args, **kwargs)
        self._refreshed.pop(request.request_id, None)
        answer = self._answers.pop(request.request_id, None)
        if answer is not None:
            self._records.try_append(answer.record(request, self._model.name))
        return freed

    def shutdown(self) -> None:
        super().shutdown()
        self._records.close()


class PlannedAsyncScheduler(PlannedScheduler, AsyncScheduler):
    """The same for steps that are scheduled before the last one's output is there; a refresh comes a step later."""
