"""The process that compiles for `qbe.kernels.tuning.compiling`: pickled compilations come in, pickled outcomes go out.

It ends with its parent, whose end closes the pipe.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from importlib import import_module

from qbe.kernels.tuning.compiling import Compilation, CompileResult


def compile_one(compilation: Compilation) -> CompileResult:
    """Compile into Triton's disk cache, or find it there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    began = time.perf_counter()
    try:
        kernel = getattr(import_module(compilation.module), compilation.name)
        kernel.hash = compilation.cache_key  # as the process that asks has it, which will look for that
        source = ASTSource(kernel, compilation.signature, compilation.constants, compilation.attributes)
        triton.compile(source, target=GPUTarget(*compilation.target), options=compilation.options)
    except Exception as error:  # whatever the compiler raises: this candidate is none
        return CompileResult(time.perf_counter() - began, f"{type(error).__name__}: {error}".splitlines()[0])
    return CompileResult(time.perf_counter() - began)


def main() -> None:
    os.nice(int(sys.argv[1]))
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a compiler prints must not end up between the outcomes
    while True:
        try:
            compilation = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(compile_one(compilation), out)
        out.flush()


if __name__ == "__main__":
    main()
