"""`torch.compile(model, backend="qbe")`: Inductor for everything around nested linears, which stay calls of their op.

Precision is not in the graph: bits are a tensor that the kernels read, so a change of precision recompiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule


def qbe(graph: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """The backend. `options` are Inductor's and come on top of QBE's own."""
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(graph, inputs, config_patches={**settings(), **(kwargs.get("options") or {})})
    return compiled


def settings() -> dict[str, Any]:
    """QBE's settings of Inductor."""
    from qbe.compile.fuse import FuseRows

    return {"post_grad_custom_pre_pass": FuseRows()}


def register() -> None:
    """Let torch.compile find the backend by its name."""
    if "qbe" not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(qbe, name="qbe")
