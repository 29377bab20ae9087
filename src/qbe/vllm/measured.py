"""A step's output with the difficulty of its tokens, for the scheduler (`qbe.vllm.scheduler`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput


def measured(output: Any, requests: Sequence[str], hard: torch.Tensor) -> Any:
    """The output that carries it, as attribute `qbe_difficulties`: request -> (entropy in nats, margin).

    Args:
        hard: float [2, requests] on the device (`qbe.analysis.difficulty`).
    """
    if isinstance(output, AsyncModelRunnerOutput):
        return MeasuredLater(output, requests, hard)
    if output is not None:
        entropies, margins = hard.tolist()
        pairs = zip(requests, zip(entropies, margins, strict=True), strict=True)
        output.qbe_difficulties = dict(pairs)
    return output


class MeasuredLater(AsyncModelRunnerOutput):
    """An output that is fetched from the device while the next step runs."""

    def __init__(self, inner: AsyncModelRunnerOutput, requests: Sequence[str], hard: torch.Tensor) -> None:
        self._inner, self._requests, self._hard = inner, requests, hard

    def get_output(self) -> Any:
        return measured(self._inner.get_output(), self._requests, self._hard)

    def get_kv_connector_output(self) -> Any:
        """What vLLM 0.33 saves of a step whose output cannot be fetched."""
        return self._inner.get_kv_connector_output()
