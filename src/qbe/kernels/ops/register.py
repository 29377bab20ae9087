"""One call makes a function an op of torch: its schema, who serves which device, and its result's shape for tracing.

Defined through `torch.library.Library` rather than `custom_op`: its per-call checks cost more than the kernel at
batch 1, and a decode step makes some two hundred calls.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

Implementation = Callable[..., Any]
OPS: dict[str, Op] = {}  # by name; torch forgets an implementation whose library nobody holds
_library = torch.library.Library("qbe", "FRAGMENT")


class Op:
    """What `register` has made known to torch as `torch.ops.qbe.<name>`.

    Attributes:
        name: without the namespace.
        arguments: of the schema, what stands between its parentheses.
        cpu, cuda, fake: the functions that torch calls; None where there is none.
    """

    def __init__(
        self, schema: str, cpu: Implementation | None, cuda: Implementation | None, fake: Implementation | None
    ) -> None:
        self.name, _, rest = schema.partition("(")
        self.arguments = rest.rpartition(") -> ")[0]
        self.cpu, self.cuda, self.fake = cpu, cuda, fake
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        if fake is not None:
            torch.library.register_fake(f"qbe::{self.name}", fake, lib=_library)
        if cuda is not None:
            _library.impl(self.name, cuda, "CUDA")
        if cpu is not None:
            self.restore_cpu()

    def withdraw_cpu(self) -> None:
        """From now on nothing serves CPU tensors, until somebody else does: torch warns where one replaces another."""
        self._on_cpu._destroy()

    def restore_cpu(self) -> None:
        """`cpu` serves CPU tensors, at first and after `withdraw_cpu`."""
        assert self.cpu is not None
        self._on_cpu = torch.library.Library("qbe", "IMPL")  # of this op alone: a library is withdrawn as a whole
        self._on_cpu.impl(self.name, self.cpu, "CPU")


def register(
    schema: str,
    *,
    cpu: Implementation | str | None = None,
    cuda: Implementation | str | None = None,
    fake: Implementation | None = None,
) -> Op:
    """Make an op of the namespace `qbe` known to torch.

    Args:
        schema: torch's, without the namespace: "name(Tensor x, int n) -> Tensor"; says what is written to.
        cpu, cuda: for tensors there: a function of the schema's arguments, or where it is, "module:function", which is
            imported when it is first called. So an op is imported without what its implementations need.
        fake: the same without computing: shape, strides and dtype of the result, for torch.compile.

    Raises:
        ValueError: an implementation is named otherwise.
        RuntimeError: torch does not understand the schema, or knows an op of that name.
    """
    op = Op(schema, _implementation(cpu), _implementation(cuda), fake)
    OPS[op.name] = op
    return op


def _implementation(given: Implementation | str | None) -> Implementation | None:
    if not isinstance(given, str):
        return given
    module_name, colon, name = given.partition(":")
    if not (module_name and colon and name.isidentifier()):
        raise ValueError(f"{given!r} is no implementation: give a function, or where one is as 'module:function'")
    module: ModuleType | None = None

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal module
        if module is None:
            module = import_module(module_name)
        return getattr(module, name)(*arguments, **named)

    call.__qualname__ = given
    return call
