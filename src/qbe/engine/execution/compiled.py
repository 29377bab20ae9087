"""Steps through torch.compile, called without dynamo's guards.

Shapes, tensors and the model never change, but for the inputs of a step with prompts, so that nothing has to be looked
up, unwrapped or checked when it runs again: what Inductor made is called on the very tensors it was called on first.
(Dynamo's and AOTAutograd's own ways into a graph with some 850 inputs take as long as the weights.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Step = Callable[[], tuple[torch.Tensor, torch.Tensor]]
Prompts = Callable[..., torch.Tensor]


def has_compiler() -> bool:
    """Whether Inductor finds a C++ compiler, without which nothing compiles on a CPU: it would find out after work."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except (RuntimeError, OSError):
        return False
    return True


def compile_step(run: Step) -> Step:
    """`run`, a decode step, compiled. It must read and write the same tensors on every call, and return two new ones.

    Raises:
        RuntimeError: dynamo or Inductor refuse it, or it became more than one graph.
    """
    # At batch 1 the fused operations are too small to wake a thread for.
    call, inputs, outputs = _record(run, (), {"cpp.threads": 1})

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        logits, tokens = call(list(inputs))
        return logits, tokens

    results = step()
    if any(f.shape != o.shape or f.dtype is not o.dtype for f, o in zip(results, outputs, strict=True)):
        raise RuntimeError("the decode step's results are not what its graph returns")
    return step


def compile_prompts(run: Prompts, arguments: Sequence[torch.Tensor]) -> Prompts:
    """`run`, a step with prompts, compiled for any number of tokens and of rows whose logits are kept.

    Args:
        run: takes tokens and positions int64 `[T]` and rows int64 `[n]`, and returns a new tensor.
        arguments: such tensors for a first run, of sizes 2 and more, T unlike n and unlike any size of the model.

    Raises:
        RuntimeError: dynamo or Inductor refuse it, or it became more than one graph.
    """
    tokens, kept = len(arguments[0]), len(arguments[2])
    for argument in arguments:
        torch._dynamo.mark_dynamic(argument, 0)
    call, inputs, (expected,) = _record(lambda *given: (run(*given),), arguments, {})
    index_of = {argument.data_ptr(): i for i, argument in enumerate(arguments)}
    tensors = [
        (i, index_of[x.data_ptr()])
        for i, x in enumerate(inputs)
        if isinstance(x, torch.Tensor) and x.data_ptr() in index_of
    ]
    sizes = [(i, x == kept) for i, x in enumerate(inputs) if isinstance(x, int)]
    unknown = {x for x in inputs if isinstance(x, int)} - {tokens, kept}
    if unknown or sorted(which for _, which in tensors) != [0, 1, 2]:
        raise RuntimeError("the step's inputs are not those of its graph")

    def step(*given: torch.Tensor) -> torch.Tensor:
        now = list(inputs)
        for i, which in tensors:
            now[i] = given[which]
        for i, which in sizes:
            now[i] = len(given[2 * which])
        (logits,) = call(now)
        return logits

    result = step(*arguments)
    if result.shape != expected.shape or result.dtype is not expected.dtype:
        raise RuntimeError("the step's result is not what its graph returns")
    return step


def _record(
    run: Callable[..., Any], arguments: Sequence[torch.Tensor], options: dict[str, Any]
) -> tuple[Callable[..., Any], list[Any], Any]:
    """What Inductor made of `run(*arguments)`, the inputs it was called on, and what came of it.

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

    # No sizes are checked, because the graph is called on what it was made for. Every operation rounds as it does by
    # itself, so that a row is the same, bit for bit, whatever was fused with what: in steps of any number of rows,
    # compiled or not.
    options = {"size_asserts": False, "emulate_precision_casts": True, **options}
    # Only what is marked is a symbol: by itself Dynamo would take for one what was another for an engine before.
    compiled = torch.compile(run, backend="qbe", fullgraph=True, dynamic=False, options=options)
    # Dynamo counts what engines that are gone have compiled as recompilations of one function, and raises at the ninth.
    unlimited = torch._dynamo.config.patch(recompile_limit=1 << 30, accumulated_recompile_limit=1 << 30)
    with unlimited, _calling(CompiledFxGraph, record):
        outputs = compiled(*arguments)
    if len(calls) != 1:
        raise RuntimeError(f"the step became {len(calls)} graphs")
    return (*calls[0], outputs)


@contextmanager
def _calling(kind: type, call: Callable[..., Any]) -> Iterator[None]:
    """Inside the block instances of `kind` are called by `call`: Inductor offers no hook that sees a graph's inputs."""
    before = kind.__call__
    kind.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__call__ = before  # type: ignore[method-assign]
