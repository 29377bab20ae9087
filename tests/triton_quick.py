"""Triton's interpreter, without doing again what it has done: more than a quarter of its time.

A call of one jitted function by another puts interpreted functions in the place of the language's, though they are
there since the launch began; and every operation makes anew the table of NumPy's dtypes.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any

import triton.language as tl
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
