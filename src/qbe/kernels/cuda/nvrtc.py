"""NVRTC, NVIDIA's compiler at run time, which comes with PyTorch: a kernel's source becomes machine code.

Not `torch.cuda._compile_kernel`, which wants CUDA's headers on the machine; our kernels include none.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import tempfile
from contextlib import suppress
from functools import cache
from typing import Any

import torch

log = logging.getLogger(__name__)

OPTIONS = ("-std=c++17",)


def compile_kernel(source: str, name: str, arch: str) -> tuple[bytes, str]:
    """Machine code, and the symbol in it of the kernel of that name, `f<1, true>` for one of a template's.

    It takes seconds, in which other Python threads run.

    Args:
        arch: compute capability, `90`.

    Raises:
        RuntimeError: what NVRTC says of the source; or there is no NVRTC.
    """
    from torch.cuda._utils import _get_gpu_rtc_library

    try:
        lib = _get_gpu_rtc_library()
    except OSError as error:
        raise RuntimeError(f"no NVRTC ({error})") from error
    program = ctypes.c_void_p()

    def call(function: str, *arguments: object) -> None:
        status = getattr(lib, function)(program, *arguments)
        if status:
            raise RuntimeError(f"{function} gives {status}\n{_text(lib, program)}")

    options = (f"--gpu-architecture=sm_{arch}", *OPTIONS)
    given = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    status = lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    if status:
        raise RuntimeError(f"nvrtcCreateProgram gives {status}")
    try:
        call("nvrtcAddNameExpression", name.encode())
        call("nvrtcCompileProgram", len(options), given)
        size = ctypes.c_size_t()
        call("nvrtcGetCUBINSize", ctypes.byref(size))
        binary = ctypes.create_string_buffer(size.value)
        call("nvrtcGetCUBIN", binary)
        symbol = ctypes.c_char_p()
        call("nvrtcGetLoweredName", name.encode(), ctypes.byref(symbol))
        return binary.raw, (symbol.value or b"").decode()
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _text(lib: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    """What the compiler said last."""
    size = ctypes.c_size_t()
    if lib.nvrtcGetProgramLogSize(program, ctypes.byref(size)):
        return ""
    text = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, text)
    return text.value.decode(errors="replace")


def compiled_kernel(source: str, name: str, arch: str) -> tuple[bytes, str]:
    """`compile_kernel`, once: what it gave is in the user's cache, keyed by all that it depends on.

    A file that is damaged, or that may not be read, is made anew.
    """
    from qbe.files import cache_dir

    key = hashlib.sha256("\n".join((source, name, arch, str(torch.version.cuda), *OPTIONS)).encode()).hexdigest()[:24]
    try:
        path = cache_dir() / "kernels" / f"cuda-sm{arch}-{key}.cubin"
        digest, symbol, binary = path.read_bytes().split(b"\n", 2)
        if digest.decode() == _digest(symbol, binary):
            return binary, symbol.decode()
    except (OSError, ValueError, RuntimeError):  # not there, damaged, or no home
        pass
    made, called = compile_kernel(source, name, arch)
    draft = None
    try:
        path = cache_dir() / "kernels" / f"cuda-sm{arch}-{key}.cubin"
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(prefix=".kernel-", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(b"\n".join((_digest(called.encode(), made).encode(), called.encode(), made)))
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except (OSError, RuntimeError) as error:
        log.warning("the kernel %s is compiled at every start: it cannot be kept (%s)", name, error)
        if draft is not None:
            with suppress(OSError):
                os.unlink(draft)
    return made, called


def _digest(symbol: bytes, binary: bytes) -> str:
    return hashlib.sha256(symbol + b"\n" + binary).hexdigest()


@cache
def loaded_kernel(device: torch.device, source: str, name: str, shared: int) -> Any:
    """A kernel on a device, for `launch`; None, with a warning, where it cannot be had.

    Args:
        shared: the most bytes of shared memory that it is launched with; 0 is what every kernel may have.
    """
    try:
        from torch.cuda._utils import _cuda_load_module

        arch = "".join(map(str, torch.cuda.get_device_capability(device)))
        with torch.cuda.device(device):
            binary, symbol = compiled_kernel(source, name, arch)
            kernel = _cuda_load_module(binary, [symbol])[symbol]  # type: ignore[index]
            if shared:
                kernel.set_shared_memory_config(shared)
        return kernel
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, OSError) as error:
        line = next((x for x in str(error).splitlines() if "error" in x), str(error).strip())
        log.warning("decoding is slower than it could be: no kernel %s (%s)", name, line[:200])
        return None
