"""Tensor maps: how the copy engine of Hopper finds a tile of a matrix. The driver makes them."""

from __future__ import annotations

import ctypes

import torch

_TYPES = {torch.int8: 0, torch.uint8: 0, torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
_SWIZZLE_128, _PROMOTION_256 = 3, 3


class TensorMap(ctypes.Structure):
    """CUtensorMap, which the driver wants at a multiple of 64."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)
    _align_ = 64


def tensor_map(x: torch.Tensor, columns: int, rows: int) -> TensorMap:
    """Boxes of rows of 128 swizzled bytes; what lies outside the matrix is zero.

    Args:
        x: [M, K], contiguous; a row has a multiple of 16 bytes.
        columns, rows: of a box.

    Raises:
        RuntimeError: what the driver says.
    """
    from torch.cuda._utils import _check_cuda, _get_gpu_runtime_library

    room = (ctypes.c_uint8 * 192)()
    address = -(-ctypes.addressof(room) // 64) * 64
    made = TensorMap.from_address(address)
    made.room = room
    _check_cuda(
        _get_gpu_runtime_library().cuTensorMapEncodeTiled(
            ctypes.c_void_p(address),
            _TYPES[x.dtype],
            2,
            ctypes.c_void_p(x.data_ptr()),
            (ctypes.c_uint64 * 2)(x.shape[1], x.shape[0]),
            (ctypes.c_uint64 * 1)(x.shape[1] * x.element_size()),
            (ctypes.c_uint32 * 2)(columns, rows),
            (ctypes.c_uint32 * 2)(1, 1),
            0,
            _SWIZZLE_128,
            _PROMOTION_256,
            0,
        )
    )
    return made
