"""Launches that may begin before the kernels ahead of them in the stream have ended.

A kernel launched so waits by itself (`wait_for_kernels` in device.cuh) before it reads what the one ahead wrote: the
time that a launch takes, and whatever it can do without that, goes by meanwhile. It may read what kernels before that
one wrote, if that one waits before it lets others begin. Graphs keep this. torch's own launcher cannot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

Argument = torch.Tensor | int | float | ctypes.Structure | None
EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


def launch(
    kernel: Any,
    blocks: int,
    threads: int,
    arguments: Sequence[Argument],
    shared: int = 0,
    cluster: int = 1,
) -> None:
    """Launch a kernel of `torch.cuda._utils` on the current stream.

    Args:
        arguments: tensors are pointers, None is the null pointer, int is int, float is double, a structure is itself.
        shared: bytes of shared memory.
        cluster: blocks of a cluster.

    Raises:
        RuntimeError: what the driver says.
    """
    from torch.cuda._utils import _check_cuda, _get_gpu_runtime_library

    given: list[Any] = [
        ctypes.c_void_p(None if a is None else a.data_ptr()) if a is None or isinstance(a, torch.Tensor)
        else ctypes.c_double(a) if isinstance(a, float) else a if isinstance(a, ctypes.Structure) else ctypes.c_int(a)
        for a in arguments
    ]  # fmt: skip
    pointers = (ctypes.c_void_p * len(given))(*(ctypes.addressof(g) for g in given))
    attributes = (_Attribute * 2)(
        _Attribute(EARLY, 0, (ctypes.c_int * 16)(1)), _Attribute(CLUSTER, 0, (ctypes.c_int * 16)(cluster, 1, 1))
    )
    config = _Config(
        (blocks, 1, 1),
        (threads, 1, 1),
        shared,
        torch.cuda.current_stream().cuda_stream,
        attributes,
        1 if cluster == 1 else 2,
    )
    _check_cuda(_get_gpu_runtime_library().cuLaunchKernelEx(ctypes.byref(config), kernel.func, pointers, None))
