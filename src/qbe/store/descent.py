"""Coordinate descent over codes and scales (`qbe.kernels.reference.descent`), in C where there is a compiler.

The C file is compiled on first use, in a second, into the user's cache. Without a compiler the reference serves: the
same results, in hours where C takes minutes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from qbe.kernels.cpu import build
from qbe.kernels.reference import descent as reference
from qbe.store import scales
from qbe.store.layout import SliceLayout

SOURCE = Path(__file__).parent / "descent.c"
# Sums may be taken in any order: nothing that is computed here has to be the same on every machine.
FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math",
         "-ffp-contract=fast")  # fmt: skip
ROWS = 32  # that a thread takes at a time
SWEEPS = 6  # more take less than 1 % off the errors
# Errors are counted in steps of their own precision. 6 bits pay most for what the first bits gain, so they weigh more;
# what 7 and 8 bits cost can hardly be seen in a model's answers, and all others gain by the freedom.
IMPORTANCE = {6: 1.5, 7: 0.1, 8: 0.02}
SETTINGS = repr((SWEEPS, IMPORTANCE))  # results that are kept belong to them


def importance(layout: SliceLayout) -> tuple[float, ...]:
    """What each precision's error weighs."""
    return tuple(IMPORTANCE.get(b, 1.0) for b in layout.precisions)


def descend(
    weight: torch.Tensor, hessian: torch.Tensor, codes: torch.Tensor, meta: torch.Tensor, exponent: int,
    layout: SliceLayout, sweeps: int = SWEEPS,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Better codes and meta of a weight; arguments, all on the CPU, and results as the reference's.

    Raises:
        MemoryError: no room for a few rows' working buffers.
    """
    lib = library()
    if lib is None:
        return reference.descend(weight, hessian, codes, meta, exponent, layout, importance(layout), sweeps)
    weight, hessian = weight.float().contiguous(), hessian.float().contiguous()
    codes, meta = codes.clone(memory_format=torch.contiguous_format), meta.clone(memory_format=torch.contiguous_format)
    scale = scales.decode_scale(meta[0], exponent).contiguous()
    (n, k), groups = weight.shape, meta.shape[2]
    slices = torch.tensor(layout.slices, dtype=torch.int32)
    weighed = [v * 4.0 ** (b - layout.total_bits) for v, b in zip(importance(layout), layout.precisions, strict=True)]
    weights = torch.tensor(weighed, dtype=torch.float32)

    def some(first: int) -> int:
        return lib.qbe_descend(
            weight[first:].data_ptr(), hessian.data_ptr(), codes[first:].data_ptr(), scale[first:].data_ptr(),
            meta[:, first:].data_ptr(), slices.data_ptr(), weights.data_ptr(), len(slices), min(ROWS, n - first), k,
            codes.shape[1] // groups, n * groups, sweeps,
        )  # fmt: skip

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        if any(threads.map(some, range(0, n, ROWS))):
            raise MemoryError("no memory for the working buffers of the calibration")
    return codes, meta


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled C; None where there is no compiler."""
    text = SOURCE.read_bytes() + " ".join(FLAGS).encode()
    name = f"descent-{platform.system().lower()}-{platform.machine()}-{hashlib.sha256(text).hexdigest()[:16]}.so"
    otherwise = "calibration takes hours instead of minutes"
    path = build.compiled(name, ("CC", "cc", "gcc", "clang"), [*FLAGS, str(SOURCE)], otherwise)
    if path is None:
        return None
    lib = ctypes.CDLL(str(path))
    pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    lib.qbe_descend.argtypes = [pointer] * 7 + [integer] + [long] * 4 + [integer]
    lib.qbe_descend.restype = long
    return lib
