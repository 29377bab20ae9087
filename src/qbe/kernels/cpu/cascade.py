"""`qbe::cascade` on the CPU: the compiled kernel where there is one, else the reference."""

from __future__ import annotations

import ctypes
import functools

import torch

from qbe.kernels.cascade_ops import WHO
from qbe.kernels.cpu import build
from qbe.kernels.reference.cascade import cascade as reference


class _Shape(ctypes.Structure):
    """`CascadeShape` of cascade.c."""

    _fields_ = tuple((name, ctypes.c_int64) for name in (
        "heads", "entropy_row", "sites", "words_row", "point", "layer", "sign", "window", "most", "who",
    ))  # fmt: skip


def cascade(
    attended: torch.Tensor,
    entropy: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor | None,
    words: torch.Tensor,
    steering: torch.Tensor,
    moves: torch.Tensor,
    thresholds: torch.Tensor,
    steps: torch.Tensor,
    layers: torch.Tensor,
    point: int,
    layer: int,
    sign: int,
    window: int,
    most: int,
) -> torch.Tensor:
    """Arguments as those of `qbe.kernels.cascade_ops.cascade`.

    Raises:
        RuntimeError: a tensor whose numbers do not lie side by side.
    """
    if build.backend() == "torch":
        return reference(
            attended, entropy, lengths, rows, words, steering, moves, thresholds, steps, layers, point, layer, sign,
            window, most,
        )  # fmt: skip
    n, heads = entropy.shape
    if any(t.stride(-1) != 1 < t.shape[-1] for t in (entropy, lengths, words, steering, moves)):
        raise RuntimeError("entropy, lengths, words, steering and moves must have their numbers side by side")
    shape = _shape(heads, entropy.stride(0), len(words), words.stride(0), point, layer, sign, window, most)
    build.loaded().qbe_cascade(
        entropy.data_ptr(), lengths.data_ptr(), None if rows is None else rows.data_ptr(), n, words.data_ptr(),
        steering.data_ptr(), moves.data_ptr(), thresholds.data_ptr(), steps.data_ptr(), layers.data_ptr(), shape,
    )  # fmt: skip
    return attended.clone()


@functools.lru_cache(maxsize=1024)
def _shape(*numbers: int) -> object:
    return ctypes.byref(_Shape(*numbers, WHO))
