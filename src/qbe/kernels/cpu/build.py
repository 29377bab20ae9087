"""Finds, or compiles once, the shared library of `nested.c`, and says which of its paths runs here.

An installed wheel carries the library (`setup.py`). A source tree compiles it with the machine's C compiler into the
user's cache, keyed by source, flags and architecture. Where neither works, plain PyTorch serves: slower, same results.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from qbe.errors import QBEError
from qbe.kernels.cpu.source import FLAGS, FOLDER, SOURCE, source_hash
from qbe.progress import spinner

COMPILE_LIMIT_S = 900  # it takes two to four minutes of one core, and others may use it, too
BACKENDS = ("scalar", "avx2", "avx512", "amx")  # the numbering of nested.c
VARIABLE = "QBE_CPU_KERNEL"

log = logging.getLogger(__name__)


@functools.cache
def backend() -> str:
    """The path that serves QBE's ops on CPU: "amx", "avx512", "avx2", "scalar" or "torch".

    The best one the machine has, unless $QBE_CPU_KERNEL names another. Decided once a process: it is asked on every
    call (a test that changes the variable calls `backend.cache_clear` and `number.cache_clear`).

    Raises:
        QBEError: $QBE_CPU_KERNEL names an unknown path, or one that this machine cannot run.
    """
    forced = os.environ.get(VARIABLE, "")
    if forced and forced not in (*BACKENDS, "torch"):
        names = ", ".join((*BACKENDS, "torch"))
        raise QBEError(f"{VARIABLE}={forced} is not a CPU kernel: unset it or choose one of {names}")
    if forced == "torch":
        return forced
    lib = library()
    if lib is None:
        if forced:
            raise QBEError(f"{VARIABLE}={forced} needs the compiled CPU kernel: install a C compiler or unset it")
        return "torch"
    best = int(lib.qbe_best_backend())
    if forced and BACKENDS.index(forced) > best:
        raise QBEError(f"{VARIABLE}={forced} is beyond this CPU, whose best is {BACKENDS[best]}: unset it")
    return forced or BACKENDS[best]


@functools.cache
def number() -> int:
    """`backend()` as nested.c counts it."""
    return BACKENDS.index(backend())


@functools.cache
def loaded() -> ctypes.CDLL:
    """The library where `backend()` has found one."""
    lib = library()
    assert lib is not None
    return lib


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded kernel with its argument types declared; None where it is neither built nor can be compiled."""
    path = _packaged() or _compiled()
    if path is None:
        return None
    try:
        return _declare(ctypes.CDLL(str(path)))
    except OSError as error:
        log.warning("the CPU kernel %s does not load (%s); plain PyTorch serves instead", path, error)
        return None


def use_openmp(wanted: bool = True) -> bool:
    """Whether kernels run on the threads of torch's OpenMP from now on, and not on their own (pool.c says when to).

    OpenMP is the one that torch's calls reach: of the process, where one was loaded before torch, else torch's. Any
    that exports GNU's entry point will do; without one nothing changes.
    """
    if backend() == "torch":
        return False
    region: Any = None
    for library in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")) if wanted else ():
        with suppress(OSError, AttributeError):
            region = ctypes.cast(ctypes.CDLL(library).GOMP_parallel, ctypes.c_void_p)
            break
    loaded().qbe_use_team(region)
    return region is not None


def _packaged() -> Path | None:
    """The library that the wheel or editable install built, if it belongs to this source."""
    for path in sorted(FOLDER.glob("_nested*.so")):
        try:
            lib = ctypes.CDLL(str(path))
            lib.qbe_source_hash.restype = ctypes.c_char_p
            if lib.qbe_source_hash() == source_hash().encode():
                return path
        except (OSError, AttributeError):
            continue
    return None


def _compiled() -> Path | None:
    """The library in the user's cache, compiled now if it is not there."""
    name = f"nested-{platform.system().lower()}-{platform.machine()}-{source_hash()}.so"
    command = [*FLAGS, "-fPIC", "-shared", f'-DQBE_SOURCE_HASH="{source_hash()}"', str(SOURCE), "-lm"]
    return compiled(name, ("CC", "cc", "gcc", "clang"), command, "plain PyTorch serves instead")


def compiled(name: str, compilers: Sequence[str], arguments: Sequence[str], otherwise: str) -> Path | None:
    """The file of that name in the user's cache, compiled now if it is not there; None (and a warning) if it cannot be.

    Args:
        compilers: the variable that names one, then those to look for.
        arguments: all but the output.
        otherwise: what happens then, for the warning.
    """
    from qbe.files import cache_dir

    folder = cache_dir() / "kernels"
    path = folder / name
    if path.is_file():
        return path
    variable, first, *others = compilers
    installed = (shutil.which(c) for c in (os.environ.get(variable) or first, *others))
    compiler = next((c for c in installed if c is not None), None)
    if compiler is None:
        log.warning("no compiler for the CPU kernels found (%s); %s", ", ".join(compilers[1:]), otherwise)
        return None
    temporary: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(prefix=".kernel-", suffix=".so", dir=folder)
        os.close(handle)
        temporary = Path(draft)
        command = [compiler, *arguments, "-o", draft]
        with spinner("compiling the CPU kernels, once: some minutes", sys.stderr.isatty()):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_LIMIT_S)
        os.replace(temporary, path)
        return path
    except (OSError, subprocess.SubprocessError) as error:
        lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
        detail = next((line for line in lines if "error" in line), lines[0] if lines else "no reason given")
        log.warning("a CPU kernel could not be compiled (%s); %s", detail, otherwise)
        return None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    lib.qbe_multiply.argtypes = [pointer] * 8 + [long] + [integer] * 6
    lib.qbe_multiply.restype = long
    lib.qbe_multiply_many.argtypes = [pointer] * 2 + [long] * 2 + [integer] * 4
    lib.qbe_multiply_many.restype = long
    lib.qbe_experts.argtypes = lib.qbe_sum_experts.argtypes = [pointer] + [integer] * 2
    lib.qbe_experts.restype = lib.qbe_sum_experts.restype = long
    lib.qbe_dequantise.argtypes = [pointer] * 4 + [long] * 2 + [integer] * 4
    lib.qbe_dequantise.restype = long
    lib.qbe_paged_attention.argtypes = [pointer] * 12 + [integer] * 2
    lib.qbe_paged_attention.restype = long
    lib.qbe_bounded_attention.argtypes = [pointer] * 13 + [integer] * 2
    lib.qbe_bounded_attention.restype = long
    if hasattr(lib, "qbe_prompt_attention"):  # x86 alone has it
        lib.qbe_prompt_attention.argtypes = [pointer] * 8 + [integer]
        lib.qbe_prompt_attention.restype = long
    lib.qbe_write_rows.argtypes = [pointer] * 6
    lib.qbe_write_rows.restype = long
    lib.qbe_quantise_pages.argtypes = [pointer] * 4 + [long] * 5 + [integer] * 2
    lib.qbe_quantise_pages.restype = long
    lib.qbe_read_pages.argtypes = [pointer] * 3 + [long] * 4 + [integer] + [pointer] * 2 + [integer]
    lib.qbe_read_pages.restype = long
    lib.qbe_round_rows.argtypes = [pointer] * 3 + [long] + [integer] * 3
    lib.qbe_round_rows.restype = long
    lib.qbe_mamba2_step.argtypes = [pointer] + [integer] * 2
    lib.qbe_mamba2_step.restype = long
    lib.qbe_difficulty.argtypes = [pointer] * 3 + [long] * 3 + [integer]
    lib.qbe_difficulty.restype = None
    lib.qbe_use_team.argtypes = [pointer]
    lib.qbe_use_team.restype = None
    return lib
