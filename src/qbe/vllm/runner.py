"""vLLM's model runner, writing the rows' precision words into the plan before each forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from qbe.analysis.difficulty import difficulty
from qbe.blueprint import Blueprint
from qbe.selection.blueprint_history import BlueprintHistory
from qbe.vllm.blueprint_payload import BlueprintPayload, blueprint_of
from qbe.vllm.config import QBEConfig
from qbe.vllm.full_rows import Runs
from qbe.vllm.measured import measured


class PlannedRunner(GPUModelRunner):
    """vLLM's first model runner, which those of all platforms are made from.

    vLLM tells a worker of a request once, with its sampling parameters; a refreshed blueprint comes with the
    scheduler's output (`qbe.vllm.scheduler`). Preempted requests keep theirs, and those that they had before.
    """

    histories: dict[str, BlueprintHistory]

    def start_plan(self, config: QBEConfig) -> None:
        """Called once, when the model is loaded."""
        assert config.plan is not None
        layers = self.vllm_config.model_config.get_layers_start_end_indices(self.vllm_config.parallel_config)
        config.check_found(range(*layers), get_pp_group().is_last_rank)
        self.plan, self._full_rows, self.histories = config.plan, config.full_rows, {}
        self.watched: set[str] = set()
        table = config.served.table
        # For requests that came without a payload, and for steps without requests.
        self._widest = Blueprint.of("widest", table, tuple(s.gears[-1] for s in table.nested))
        self._lowest = Blueprint.of("lowest", table, tuple(s.gears[0] for s in table.nested))

    def _update_states(self, scheduler_output: Any) -> Any:
        for request in scheduler_output.finished_req_ids:
            self.histories.pop(request, None)
            self.watched.discard(request)
        return super()._update_states(scheduler_output)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        inputs = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        for request, (start, policy, weights, activations) in getattr(scheduler_output, "qbe_refreshed", {}).items():
            self._history(request).change(start, blueprint_of(policy, weights, activations, self.plan.table))
        starts, counts = self.input_batch.num_computed_tokens_cpu.tolist(), num_scheduled_tokens.tolist()
        each = [self._history(request).runs(starts[i], counts[i]) for i, request in self._batch()]
        self._write([run for runs in each for run in runs], [(runs[-1][0], 1) for runs in each])
        return inputs

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        if hasattr(self, "plan"):  # of any number of rows, between steps of requests
            rows = [(self._lowest, self.plan.max_rows)]
            self._write(rows, rows)
        return super()._dummy_run(*args, **kwargs)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Leaves with its output how hard the tokens of watched answers were to predict."""
        state = self.execute_model_state
        logits: Any = None if state is None else state.logits
        watched = [] if logits is None else [(i, r) for i, r in self._batch() if r in self.watched]
        hard = None
        if watched:  # before sampling, which may change the logits
            rows = logits[[i for i, _ in watched]].float()
            hard = difficulty(rows, rows.argmax(-1))[1:]
        output = super().sample_tokens(grammar_output)
        return output if hard is None else measured(output, [r for _, r in watched], hard)

    def _batch(self) -> Iterator[tuple[int, str]]:
        batch = self.input_batch
        return enumerate(batch.req_ids[: batch.num_reqs])

    def _get_prompt_logprobs_dict(self, hidden_states: Any, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        """The head then sees tokens of one prompt, not the last token of each: its row of the plan is set for that."""
        logprobs: dict[str, Any] = {}
        for request in list(self.num_prompt_logprobs):
            if request in num_scheduled_tokens:
                tokens = num_scheduled_tokens[request]
                blueprint = self._history(request).first
                self._write([(blueprint, tokens)], [(blueprint, tokens)])
                logprobs |= super()._get_prompt_logprobs_dict(hidden_states, {request: tokens})
        return logprobs

    def _write(self, tokens: Runs, kept: Runs) -> None:
        """Set the rows of all layers, and those of the output head, to what they read."""
        read = iter(self.plan.read([b for b, _ in (*tokens, *kept)]))
        tokens, kept = ([(next(read), n) for _, n in runs] for runs in (tokens, kept))
        self.plan.write(tokens, [b for b, n in kept for _ in range(n)])
        for full_rows, runs in zip(self._full_rows, (tokens, kept), strict=True):
            full_rows.note(runs)

    def _history(self, request: str) -> BlueprintHistory:
        if request not in self.histories:
            payload = BlueprintPayload.find(self.requests[request].sampling_params)
            self.histories[request] = BlueprintHistory(
                self._widest if payload is None else payload.blueprint(self.plan.table)
            )
            if payload is not None and payload.budget["refresh"]:
                self.watched.add(request)
        return self.histories[request]
