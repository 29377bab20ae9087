"""Triton's interpreter, refusing what compute-sanitizer's memcheck would find on a GPU: an access outside of a tensor.

By itself the interpreter reads and writes wherever a pointer points, as a GPU does while the memory beside a tensor
happens to be mapped. Here every access of a program must lie in the storage of a tensor that its launch was given.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

_BYTES = {1: 1, 8: 1, 16: 2, 32: 4, 64: 8}  # of an element, by its bits
_storages: list[tuple[int, int]] = []  # of the launch that runs: the first byte, and the first behind the last
_beside: list[weakref.ref[torch.Tensor]] = []


class OutOfBounds(Exception):
    """An access outside of every tensor of a launch."""


def reached(memory: torch.Tensor) -> None:
    """Launches may access this, too, as long as it lives: they are given addresses that count from another tensor."""
    _beside.append(weakref.ref(memory))


def check_bounds() -> None:
    """From now on, kernels that the interpreter runs in this process raise for such an access."""
    builder: Any = InterpreterBuilder
    builder.create_masked_load = _checked(builder.create_masked_load, 0, 1)
    builder.create_masked_store = _checked(builder.create_masked_store, 0, 2)
    builder.create_atomic_cas = _checked(builder.create_atomic_cas, 0, None)
    builder.create_atomic_rmw = _checked(builder.create_atomic_rmw, 1, 3)
    launch = GridExecutor._init_args_hst

    def note(self: Any, args: Any, kwargs: Any) -> Any:
        found = launch(self, args, kwargs)
        _beside[:] = [ref for ref in _beside if ref() is not None]
        given = (*found[0], *found[1].values(), *(ref() for ref in _beside))
        storages = [t.untyped_storage() for t in given if isinstance(t, torch.Tensor)]
        _storages[:] = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages})
        return found

    GridExecutor._init_args_hst = note


def _checked(access: Callable[..., Any], pointers: int, mask: int | None) -> Callable[..., Any]:
    """The access, after a look at its pointers where its mask is true; both are arguments of it, by number."""

    def run(self: Any, *arguments: Any) -> Any:
        handle = arguments[pointers]
        at, size = np.atleast_1d(handle.data), _BYTES[handle.get_element_ty().primitive_bitwidth]
        if mask is not None:
            at = at[np.broadcast_to(np.atleast_1d(arguments[mask].data).astype(bool), at.shape)]
        outside = np.ones(at.shape, bool)
        for begin, end in _storages:
            outside &= (at < begin) | (at + size > end)
        if outside.any():
            raise OutOfBounds(_told(int(at[outside].ravel()[0]), size, int(outside.sum())))
        return access(self, *arguments)

    return run


def _told(pointer: int, size: int, count: int) -> str:
    begin, end = min(_storages, key=lambda s: min(abs(pointer - s[0]), abs(pointer - s[1])))
    where = f"{begin - pointer} bytes before" if pointer < begin else f"{pointer - end} bytes behind the end of"
    return f"{count} accesses of {size} bytes outside of every tensor, the first {where} one of {end - begin} bytes"
