"""Compiles the CPU kernel into the wheel. Optional: without a C compiler the package installs all the same, and then
compiles on first use or runs plain PyTorch (`qbe.kernels.cpu.build`). Everything else is in pyproject.toml."""

import runpy
import sys
from pathlib import Path

from setuptools import Extension, setup

FOLDER = "src/qbe/kernels/cpu"
kernel = runpy.run_path(f"{FOLDER}/source.py")


def library_is_there() -> bool:
    """Whether this builds into a tree that has a library of this very source: another environment's, or `make`'s."""
    own = kernel["source_hash"]().encode()
    into_tree = "editable_wheel" in sys.argv or "--inplace" in sys.argv
    return into_tree and any(own in path.read_bytes() for path in Path(FOLDER).glob("_nested*.so"))


setup(
    ext_modules=[]
    if library_is_there()
    else [
        Extension(
            "qbe.kernels.cpu._nested",
            sources=[f"{FOLDER}/nested.c"],
            depends=[str(path) for path in kernel["INCLUDED"]],
            define_macros=[("QBE_SOURCE_HASH", f'"{kernel["source_hash"]()}"')],
            extra_compile_args=[*kernel["FLAGS"], "-g0"],  # Python asks for -g, which triples the library
            extra_link_args=["-pthread", "-lm"],
            optional=True,
        )
    ]
)
