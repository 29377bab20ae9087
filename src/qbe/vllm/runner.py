"""vLLM's model runner, writing the rows' words into the plan before each forward."""

from __future__ import annotations

from typing import Any

import numpy as np

from qbe.blueprint import Blueprint
from qbe.sites import FULL_BITS
from qbe.vllm.config import QBEConfig
from qbe.vllm.ticket import Ticket, blueprint_of


class PlannedRunner:
    """To be mixed into a platform's V1 model runner, before it in the order of bases.

    vLLM tells a worker of a request once, with its sampling parameters; a refreshed blueprint comes with the scheduler's
    output (`qbe.vllm.scheduler`). Preempted requests keep theirs.
    """

    blueprints: dict[str, Blueprint]

    def start_plan(self, config: QBEConfig) -> None:
        """Called once, when the model is loaded."""
        assert config.plan is not None
        self.plan, self.blueprints = config.plan, {}
        table = config.served.table
        widest = tuple(s.gears[-1] for s in table.nested)
        self._widest = Blueprint.of("widest", table, widest)  # for requests that came without a ticket

    def _update_states(self, scheduler_output: Any) -> Any:
        for request in scheduler_output.finished_req_ids:
            self.blueprints.pop(request, None)
        return super()._update_states(scheduler_output)  # type: ignore[misc]

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        found = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        for request, (policy, weights, activations) in getattr(scheduler_output, "qbe_refreshed", {}).items():
            self.blueprints[request] = blueprint_of(policy, weights, activations, self.plan.table)
        batch = self.input_batch  # type: ignore[attr-defined]
        each = [self._blueprint(request) for request in batch.req_ids[: batch.num_reqs]]
        self.plan.write(list(zip(each, num_scheduled_tokens.tolist(), strict=True)), each)
        return found

    def _get_prompt_logprobs_dict(self, hidden_states: Any, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        """The head then sees tokens of one prompt, not the last token of each: its row of the plan is set for that."""
        found: dict[str, Any] = {}
        for request in list(self.num_prompt_logprobs):  # type: ignore[attr-defined]
            if request in num_scheduled_tokens:
                tokens = num_scheduled_tokens[request]
                blueprint = self._blueprint(request)
                self.plan.write([(blueprint, tokens)], [blueprint] * tokens)
                found |= super()._get_prompt_logprobs_dict(hidden_states, {request: tokens})  # type: ignore[misc]
        return found

    def _blueprint(self, request: str) -> Blueprint:
        if request not in self.blueprints:
            ticket = Ticket.find(self.requests[request].sampling_params)  # type: ignore[attr-defined]
            self.blueprints[request] = self._widest if ticket is None else ticket.blueprint(self.plan.table)
        return self.blueprints[request]
