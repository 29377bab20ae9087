"""Coordinate descent over codes and scales (`qbe.kernels.reference.descent`), in C where there is a compiler.

The C file is compiled on first use, in a second, into the user's cache. Without a compiler the reference serves: the
same results, in hours where C takes minutes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from qbe.format import scales
from qbe.format.layout import SliceLayout
from qbe.kernels.cpu import build
from qbe.kernels.reference import descent as reference

SOURCE = Path(__file__).parent / "descent.c"
# Sums may be taken in any order: nothing that is computed here has to be the same on every machine.
FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math",
         "-ffp-contract=fast")  # fmt: skip
ROWS = 32  # that a thread takes at a time
# Sweeps of each round. The second begins with scales that fit better, which takes 2 % off the error at 6 bits; more
# sweeps take less than 1 % off.
ROUNDS = (1, 6)
# Errors are counted in steps of their own precision. 6 bits pay most for what the first bits gain, so they weigh more,
# and tuned scales (`qbe.store.tuning`) give 3 bits most; what 7 and 8 bits cost can hardly be seen in a model's
# answers, and all others gain by the freedom.
IMPORTANCE = {3: 0.95, 4: 1.1, 6: 1.5, 7: 0.1, 8: 0.02}
SETTINGS = repr((ROUNDS, IMPORTANCE))  # results that are kept belong to them


def importance(layout: SliceLayout) -> tuple[float, ...]:
    """What each precision's error weighs."""
    return tuple(IMPORTANCE.get(b, 1.0) for b in layout.precisions)


def descend(
    weight: torch.Tensor, hessian: torch.Tensor, codes: torch.Tensor, meta: torch.Tensor, exponent: int,
    layout: SliceLayout, rounds: Sequence[int] = ROUNDS,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Better codes and meta of a weight; arguments, all on the CPU, and results as the reference's.

    Raises:
        MemoryError: no room for a few rows' working buffers.
    """
    lib = library()
    if lib is None:
        return reference.descend(weight, hessian, codes, meta, exponent, layout, importance(layout), rounds)
    weight, hessian = weight.float().contiguous(), hessian.float().contiguous()
    codes, meta = codes.clone(memory_format=torch.contiguous_format), meta.clone(memory_format=torch.contiguous_format)
    scale = scales.decode_scale(meta[0], exponent).contiguous()
    (n, k), groups = weight.shape, meta.shape[2]
    slices = torch.tensor(layout.slices, dtype=torch.int32)
    succession = reference.succession(hessian)
    order, factor = (succession[0].int(), succession[1].float()) if succession else (None, None)
    weighed = [v * 4.0 ** (b - layout.total_bits) for v, b in zip(importance(layout), layout.precisions, strict=True)]
    weights = torch.tensor(weighed, dtype=torch.float32)

    def some(row: int) -> bool:
        """Whether these rows found no memory."""
        arguments = (
            weight[row:].data_ptr(), hessian.data_ptr(), _pointer(factor), _pointer(order), codes[row:].data_ptr(),
            scale[row:].data_ptr(), meta[:, row:].data_ptr(), slices.data_ptr(), weights.data_ptr(), len(slices),
            min(ROWS, n - row), k, codes.shape[1] // groups, n * groups,
        )  # fmt: skip
        return any(lib.qbe_descend(*arguments, sweeps) for sweeps in rounds)

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        if any(threads.map(some, range(0, n, ROWS))):
            raise MemoryError("no memory for the working buffers of the calibration")
    return codes, meta


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


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
    lib.qbe_descend.argtypes = [pointer] * 9 + [integer] + [long] * 4 + [integer]
    lib.qbe_descend.restype = long
    return lib
