"""A decode step through torch.compile, called without dynamo's guards.

The step's shapes, its tensors and the model never change, so nothing has to be looked up, unwrapped or checked when it
runs again: what Inductor made is called on the very tensors it was called on first. (Dynamo's and AOTAutograd's own
ways into a graph with some 850 inputs take as long as the weights.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

Step = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def compile_step(run: Step) -> Step:
    """`run` compiled. It must read and write the same tensors on every call, and return two new ones.

    Raises:
        RuntimeError: dynamo or Inductor refuse it, or it became more than one graph.
    """
    from torch._inductor.output_code import CompiledFxGraph

    from qbe.compile.backend import register

    register()
    calls: list[tuple[Callable[..., Any], list[Any]]] = []
    plain = CompiledFxGraph.__call__

    def record(self: CompiledFxGraph, inputs: list[Any]) -> Any:
        assert self.current_callable is not None
        calls.append((self.current_callable, list(inputs)))  # the call empties its list
        return plain(self, inputs)

    # At batch 1 the fused operations are too small to wake a thread for; no sizes are checked, because none can change.
    # Every operation rounds as it does by itself, so that a row is the same, bit for bit, whatever was fused with what:
    # in steps of any number of rows, compiled or not.
    options: dict[str, Any] = {"cpp.threads": 1, "size_asserts": False, "emulate_precision_casts": True}
    compiled = torch.compile(run, backend="qbe", fullgraph=True, dynamic=False, options=options)
    with mock.patch.object(CompiledFxGraph, "__call__", record):
        outputs = compiled()
    if len(calls) != 1:
        raise RuntimeError(f"the decode step became {len(calls)} graphs")
    call, inputs = calls[0]

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        logits, tokens = call(list(inputs))
        return logits, tokens

    found = step()
    if any(f.shape != o.shape or f.dtype is not o.dtype for f, o in zip(found, outputs, strict=True)):
        raise RuntimeError("the decode step's results are not what its graph returns")
    return step
