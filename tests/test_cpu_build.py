"""The CPU kernel's library: built once into the cache, its best path chosen, alive after a fork."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import choose
from qbe.errors import QBEError
from qbe.kernels.cpu import build, source

COMPILED = build.library() is not None


@pytest.fixture(autouse=True)
def _fresh_choice() -> Iterator[None]:
    yield
    build.backend.cache_clear()
    build.number.cache_clear()


@pytest.mark.skipif(not COMPILED, reason="no C compiler")
def test_best_path_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(build.VARIABLE, raising=False)
    build.backend.cache_clear()
    assert build.backend() == build.BACKENDS[build.library().qbe_best_backend()]  # type: ignore[union-attr]


def test_unknown_path_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    choose("sse9", monkeypatch)
    with pytest.raises(QBEError, match="QBE_CPU_KERNEL=sse9 is not a CPU kernel"):
        build.backend()


def run_python(code: str, tmp_path: Path, **environment: str) -> str:
    """A process of its own, with an empty cache."""
    env = {**os.environ, "QBE_CACHE": str(tmp_path), "PYTHONPATH": str(source.FOLDER.parents[2]), **environment}
    env.pop(build.VARIABLE, None)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# What is tested here is where the library goes, and that it loads. GCC has done its portable path in seconds, where it
# does not optimise.
PORTABLE = """
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#undef __x86_64__
#include "{}"
"""
REPORT = f"""
import tempfile
import qbe.kernels.cpu.build as b
b._packaged, b.FLAGS = (lambda: None), (*b.FLAGS, "-O0")
with tempfile.NamedTemporaryFile("w", suffix=".c") as file:
    file.write({PORTABLE.format(source.SOURCE)!r})
    file.flush()
    b.SOURCE = file.name
    print(b.backend())
"""


def test_without_a_compiler_torch_serves(tmp_path: Path) -> None:
    assert run_python(REPORT, tmp_path, PATH=str(tmp_path), CC="no-such-compiler").splitlines()[-1] == "torch"


def test_with_a_broken_compiler_torch_serves_and_nothing_is_left(tmp_path: Path) -> None:
    assert run_python(REPORT, tmp_path, CC="false").splitlines()[-1] == "torch"
    assert list((tmp_path / "kernels").iterdir()) == []


def test_the_warning_has_the_compilers_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'x.c: In function f:' >&2\necho 'x.c:3: error: unknown type' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("QBE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(compiler))
    assert build.compiled("x.so", ("CC", "cc"), ["x.c"], "torch serves") is None
    assert "x.c:3: error: unknown type); torch serves" in caplog.text


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_compiles_once_into_the_cache(tmp_path: Path) -> None:
    assert run_python(REPORT, tmp_path).splitlines()[-1] in build.BACKENDS
    (built,) = (tmp_path / "kernels").iterdir()
    assert source.source_hash() in built.name
    # The second process finds it, and needs no compiler.
    assert run_python(REPORT, tmp_path, CC="no-such-compiler", PATH=str(tmp_path)).splitlines()[-1] in build.BACKENDS


@pytest.mark.skipif(not (COMPILED and hasattr(os, "fork")), reason="no compiled kernel, or no fork")
def test_forked_child_has_its_own_threads(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from test_cpu_kernel import cpu, problem
a = problem(512, 256, 64, (4, 2, 2), 3, torch.float32, 1, bias=False)
torch.set_num_threads(2)
before = cpu.nested_linear(**a)
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(0 if all(torch.equal(cpu.nested_linear(**a), before) for _ in range(20)) else 1)
print(os.waitpid(child, 0)[1])
"""
    assert run_python(code, tmp_path, QBE_CACHE=os.environ.get("QBE_CACHE", "")) == "0"
