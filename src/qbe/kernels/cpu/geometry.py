"""The shape of one nested weight, checked once and laid out for C; every later call finds it by its shapes."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch

from qbe.format.layout import BLOCK, SliceLayout

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # the numbering of store.c
ROW_DTYPES = {**DTYPES, torch.float16: 2}  # of x and y of nested weights


class _ShapeStruct(ctypes.Structure):
    """`Shape` of store.c, its layout in front."""

    _fields_ = (
        ("total_bits", ctypes.c_int32),
        ("precisions", ctypes.c_int32),
        ("parts", ctypes.c_int32),
        ("precision", ctypes.c_int32 * 8),
        ("first", ctypes.c_int32 * 8),
        ("width", ctypes.c_int32 * 8),
        ("exponent", ctypes.c_int32),
        ("k", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("kp", ctypes.c_int64),
        ("groups", ctypes.c_int64),
    )


class Geometry(NamedTuple):
    k: int
    n: int
    slices: tuple[int, ...]
    exponent: int
    group: int  # inputs that share a scale
    layout: SliceLayout
    address: int  # of `table`
    table: _ShapeStruct


@functools.lru_cache(maxsize=4096)
def geometry(
    packed: tuple[int, ...], meta: tuple[int, ...], k: int, slices: tuple[int, ...], exponent: int
) -> Geometry:
    """The geometry of a weight with packed and meta of these shapes, for k inputs.

    Raises:
        RuntimeError: they do not belong together.
    """
    layout = SliceLayout.of(slices)
    fits = len(packed) == 2 and len(meta) == 3
    n, groups = meta[1:] if fits else (0, 0)
    kp = packed[1] * 8 // n if n else 0
    if (
        not fits
        or packed[0] != layout.total_bits
        or meta[0] != 2 * len(layout.precisions)
        or kp * n != packed[1] * 8
        or (n and (groups < 1 or kp % (groups * BLOCK)))
        or not 0 < exponent < 255
    ):
        raise RuntimeError(
            f"packed {list(packed)}, meta {list(meta)} and exponent {exponent} are not a nested weight with slices "
            f"{slices}"
        )
    if n and not kp - kp // groups < k <= kp:
        raise RuntimeError(f"x has {k} inputs a row, but its nested weight takes {kp - kp // groups + 1} to {kp}")
    table = _ShapeStruct(layout.total_bits, len(layout.precisions), len(layout.parts), exponent=exponent)
    table.precision[: len(layout.precisions)] = layout.precisions
    table.first[: len(layout.parts)] = [p.first for p in layout.parts]
    table.width[: len(layout.parts)] = [p.width for p in layout.parts]
    table.k, table.n, table.kp, table.groups = k, n, kp, groups
    return Geometry(k, n, slices, exponent, kp // max(groups, 1), layout, ctypes.addressof(table), table)
