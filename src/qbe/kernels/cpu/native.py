"""Lets torch call the CPU ops without Python in between (torch_ops.cpp), where a C++ compiler is found.

A Python implementation costs 5 to 20 us a call and a decode step makes 150 calls. The file is compiled once (two
seconds) into the user's cache, for the torch that runs; without a compiler the Python implementations stay.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import platform
from pathlib import Path

import torch

from qbe.kernels.cpu import build, dispatch
from qbe.kernels.cpu.geometry import ROW_DTYPES
from qbe.kernels.ops import cascade as cascade_ops
from qbe.kernels.ops import merged_linear as merged_ops
from qbe.kernels.ops import nested_linear as ops
from qbe.kernels.ops import numbered_linear as numbered_ops
from qbe.kernels.ops import paged_attention as attention_ops
from qbe.kernels.ops import rms_norm as norm_ops
from qbe.kernels.ops import rotary as rotary_ops
from qbe.kernels.ops import routing as routing_ops

SOURCE = Path(__file__).parent / "torch_ops.cpp"
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared")
_OPS = (
    ops.OP, merged_ops.OP, attention_ops.PAGED, routing_ops.OP, cascade_ops.OP, numbered_ops.OP, norm_ops.OP,
    rotary_ops.OP,
)  # fmt: skip

log = logging.getLogger(__name__)
_library = torch.library.Library("qbe", "FRAGMENT")
for _op in _OPS:
    # What torch_ops.cpp does not serve it hands to these.
    _library.define(f"{_op.name}_python({_op.arguments}) -> Tensor")
    _library.impl(f"{_op.name}_python", _op.cpu, "CPU")


@functools.cache
def load() -> bool:
    """Put the compiled ops in place of the Python ones, once a process; whether they are. Idempotent."""
    if build.backend() == "torch":
        return False
    path = _compiled()
    if path is None:
        return False
    for op in _OPS:
        op.withdraw_cpu()
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        for op in _OPS:
            op.restore_cpu()
        log.warning("the compiled CPU ops %s do not load (%s); those in Python serve instead", path, error)
        return False
    kernels = build.loaded()
    around = [getattr(kernels, name, None) for name in ("qbe_square", "qbe_norm", "qbe_rotate")]  # x86 alone has them
    lib.qbe_bind(
        ctypes.cast(kernels.qbe_multiply_many, ctypes.c_void_p),
        ctypes.cast(kernels.qbe_paged_attention, ctypes.c_void_p),
        (ctypes.c_void_p * 3)(*(None if f is None else ctypes.cast(f, ctypes.c_void_p) for f in around)),
        ctypes.c_int32(build.number()),
        (ctypes.c_int64 * 3)(*(dispatch.many_rows(dtype) for dtype in ROW_DTYPES)),
        (ctypes.c_int64 * 3)(*(dispatch.many_full(dtype) for dtype in ROW_DTYPES)),
    )
    return True


def _compiled() -> Path | None:
    major, minor = (int(v) for v in torch.__version__.split(".")[:2])
    root = Path(torch.__file__).parent
    arguments = [
        *FLAGS, f"-DTORCH_TARGET_VERSION=0x{major:02x}{minor:02x}000000000000", f"-I{root / 'include'}", str(SOURCE),
        f"-L{root / 'lib'}", "-ltorch_cpu",
    ]  # fmt: skip
    text = SOURCE.read_bytes() + " ".join((*FLAGS, torch.__version__)).encode()
    key = f"{platform.system().lower()}-{platform.machine()}-{hashlib.sha256(text).hexdigest()[:16]}"
    return build.compiled(
        f"torch-ops-{key}.so", ("CXX", "c++", "g++", "clang++"), arguments, "ops in Python serve instead"
    )
