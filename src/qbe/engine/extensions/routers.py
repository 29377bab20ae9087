"""Requests whose bits routers choose within the forward pass (`qbe.engine.adaptive.routing`)."""

from __future__ import annotations

import torch

from qbe.engine.adaptive.routing import check_columns, is_routed
from qbe.engine.execution.runner import Runner
from qbe.engine.extensions.extension import Extension
from qbe.engine.scheduling.scheduler import ScheduledTokens
from qbe.engine.scheduling.sequence import Sequence
from qbe.errors import QBEError
from qbe.policies.per_token import TokenRouters


class Routers(Extension):
    """Those that this engine knows; one policy's run at a time, as the scheduler sees to.

    Args:
        runner: of the forward pass that they run in.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._by_digest: dict[str, TokenRouters] = {}

    def add(self, routers: TokenRouters) -> None:
        """Take requests whose bits these routers choose. They run from the step on in which the first of them begins.

        Raises:
            QBEError: a model whose tokens cannot have bits of their own.
        """
        check_columns(self._runner.plan)
        self._by_digest[routers.digest] = routers

    def admit(self, sequence: Sequence) -> None:
        if not is_routed(sequence.blueprint):
            return
        dynamic_precision = sequence.blueprint.dynamic_precision
        routers = None if dynamic_precision is None else self._by_digest.get(dynamic_precision.routers)
        if routers is None:
            raise QBEError("this engine has no such routers: start it with the policy that the blueprint is of")
        sequence.routed = torch.zeros(2, len(routers.widths), dtype=torch.int64, device=self._runner.device)

    def extend(self, work: list[ScheduledTokens]) -> list[ScheduledTokens]:
        routed = (w.sequence.blueprint.dynamic_precision for w in work if w.sequence.routed is not None)
        dynamic_precision = next(routed, None)
        if dynamic_precision is not None:
            self._runner.route(self._by_digest[dynamic_precision.routers])
        return work
