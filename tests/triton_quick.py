"""Triton's interpreter, without doing again what it has done, or what nobody looks at: most of its time.

A call of one jitted function by another puts interpreted functions in the place of the language's, though they are
there since the launch began; every operation makes anew the table of NumPy's dtypes, and every value the shape of its
type; and every sum of integers is computed again in 64 bits for an assertion that is dropped outside of Triton's debug
mode.
"""

from __future__ import annotations

import dataclasses
import functools
from types import FunctionType
from typing import Any

import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_patched: set[str] = set()  # modules, in the launch that runs


@functools.cache
def _modules(fn: FunctionType) -> frozenset[str]:
    """Those of the language that a function sees."""
    return frozenset(m.__name__ for m in (tl, tl.core) if any(v is m for v in fn.__globals__.values()))


def be_quick() -> None:
    """From now on, in this process."""
    module: Any = interpreter
    patch, launch = module._patch_lang, module.GridExecutor.__call__
    plain = module._get_np_dtype
    of_numbers = functools.cache(plain)

    def patch_once(fn: FunctionType) -> Any:
        if _modules(fn) and _modules(fn) <= _patched:
            return module._LangPatchScope()
        _patched.update(_modules(fn))
        return patch(fn)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        _patched.clear()  # the launch before has put the language's own functions back
        return launch(self, *args, **kwargs)

    def dtype_of(kind: Any) -> Any:
        return plain(kind) if kind.scalar.is_ptr() else of_numbers(kind.scalar)  # types of blocks have no hash

    module._patch_lang = patch_once
    module.GridExecutor.__call__ = launch_anew
    module._get_np_dtype = dtype_of
    builder = module.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _share_shapes()


@functools.cache
def _described(shape: tuple[int, ...]) -> tuple[Any, int, Any, Any]:
    """Shape and size as a block's type has them, then as its values do. Raises what the type would."""
    if not shape:
        raise TypeError("0d block_type is forbidden")
    size = validate_block_shape(shape)
    return tl.tuple(shape), size, tl.tuple([tl.constexpr(s) for s in shape]), tl.constexpr(size)


def _share_shapes() -> None:
    """All blocks of one shape have the same objects for it."""
    no_shape, one = tl.tuple(()), tl.constexpr(1)
    broadcast = TritonSemantic.broadcast_impl_value

    def describe(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.described = _described(tuple(s.value if isinstance(s, tl.constexpr) else s for s in shape))
        self.shape, self.numel, *_ = self.described

    def hold(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        *_, self.shape, self.numel = type.described if type.is_block() else (no_shape, one)

    def unless_equal(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    block: Any = tl.block_type
    block.__init__ = describe
    block.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")  # asked for in messages alone
    tl.tensor.__init__ = hold  # type: ignore[method-assign]
    TritonSemantic.broadcast_impl_value = unless_equal  # type: ignore[method-assign]
