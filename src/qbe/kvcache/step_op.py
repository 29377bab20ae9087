"""`qbe::step_attention`: attention of whatever tokens a step has, as one op: so a step with prompts can be compiled.

Whose tokens they are and which pages they see differs from step to step in number and kind, so that it is no argument:
the op finds it in the layout of the step that runs on its thread (`qbe.kvcache.attention.step`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from qbe.kernels.ops.register import register

if TYPE_CHECKING:
    from qbe.kvcache.attention import StepLayout

_running = threading.local()


def step_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scaling: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes the step's keys and values to their pages and lets every token attend to its sequence's.

    Args:
        query: `[1, heads, T, key_dim]`. key, value: `[1, kv_heads, T, dim]`.
        window: a query sees that many last tokens; 0 means all.
        softcap: scores s become softcap * tanh(s / softcap); 0 means they stay.
        sinks: float32 `[heads]` or None (`qbe.kernels.ops.paged_attention.paged_attention`).

    Returns:
        `[1, T, heads, value_dim]`.
    """
    return torch.ops.qbe.step_attention.default(query, key, value, layer, scaling, window, softcap, sinks)


@contextmanager
def running(layout: StepLayout) -> Iterator[None]:
    """Inside the block this thread's steps have this layout."""
    _running.layout = layout
    try:
        yield
    finally:
        _running.layout = None


def _fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, *rest: object) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scaling: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    from qbe.kvcache.attention import attend_step

    layout: StepLayout = _running.layout
    source = layout.cache.sources.get(layer, layer)
    if source == layer:
        layout.cache.write(layout, layer, key, value)
    return attend_step(
        layout, source, query, key, value, scaling, window or None, softcap or None, sinks, source == layer
    ).contiguous()


register(
    "step_attention(Tensor query, Tensor key, Tensor value, int layer, float scaling, int window, float softcap, "
    "Tensor? sinks=None) -> Tensor",
    cpu=_attend,
    fake=_fake,
)
