"""linear.cu and dense.cu of `qbe.kernels.cuda`, played on a CPU with a header that has a warp's instructions."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
from functools import cache
from pathlib import Path

import pytest

from qbe.kernels.cpu.build import compiled
from qbe.kernels.cuda import dense, linear

HERE = Path(__file__).parent


@cache
def emulation() -> ctypes.CDLL:
    if not any(shutil.which(name) for name in ("g++", "c++", "clang++")):
        pytest.skip("no C++ compiler")
    files = [HERE / "emulated_gpu.h", HERE / "emulated_linear.cpp"]
    text = linear.source() + dense.source(dense.SOURCES) + "".join(path.read_text() for path in files)
    name = f"emulated-linear-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    flags = ["-O1", "-std=c++17", "-w", "-shared", "-fPIC", str(files[1])]
    path = compiled(name, ("CXX", "g++", "c++", "clang++"), flags, "it is not tested")
    assert path is not None, "the kernel does not compile"
    return ctypes.CDLL(str(path))
