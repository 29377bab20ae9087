"""Formats that the hardware multiplies itself, through torchao: FP8, MXFP8, MXFP4 and NVFP4 in place of the store.

    from qbe.hardware import detect
    qbe.quantize_(model, qbe.native_config("nvfp4", detect("cuda")), filter_fn=...)
    engine = qbe.Engine(model, tokenizer=tokenizer)

A layer in such a format has one precision: the engine runs it as it is and nests the others. Weights must be bfloat16.

What torchao 0.18 offers, from its source and from trying it: FP6 as a conversion only (a byte a weight), whose products
are emulated (both sides are dequantised first); int8 products that are native on a GPU above 16 rows, else emulated in
32 bits; NVFP4, MXFP8 and MXFP4 from compute capability 10 on. The tests multiply in FP8 where a GPU has it. They make
the configs of the Blackwell formats and have never multiplied in them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TypeGuard

import torch
import torchao
from torchao.core.config import AOBaseConfig
from torchao.utils import TorchAOBaseTensor

from qbe.errors import QBEError
from qbe.hardware import HardwareProfile, NumberFormat
from qbe.store.nested_tensor import NestedTensor


def native_config(format: str, profile: HardwareProfile) -> AOBaseConfig:
    """torchao's config for weights and activations in `format`, for `quantize_`.

    Raises:
        QBEError: an unknown format, one that the device does not run natively, or one that torchao does not have.
    """
    if format not in (*_OFFERED, *_NOT_OFFERED):
        raise QBEError(f"unknown format '{format}': choose one of {', '.join(_OFFERED)}, or the nested store")
    wanted = NumberFormat(format)
    if wanted in _NOT_OFFERED:
        raise QBEError(f"{wanted} cannot run on {profile.name}: {_NOT_OFFERED[wanted]}")
    if wanted not in profile.formats:
        others = [f for f in _OFFERED if f in profile.formats]
        instead = f"the nested store at {_BITS[wanted]} bits" + "".join(f" or {f}" for f in others)
        raise QBEError(
            f"{wanted} cannot run on {profile.name} ({profile.family}), which has no units for it: use {instead}"
        )
    try:
        return _OFFERED[wanted]()
    except ImportError as error:
        version = torchao.__version__
        raise QBEError(
            f"{wanted} is not in torchao {version} ({error}): install torchao 0.18, or use the nested store"
        ) from None


def availability(profile: HardwareProfile) -> dict[str, str | None]:
    """For each native format: None where `native_config` gives a config on this device, else why it refuses."""
    found: dict[str, str | None] = {}
    for name in (*_OFFERED, NumberFormat.MXFP6):
        try:
            native_config(name, profile)
            found[str(name)] = None
        except QBEError as error:
            found[str(name)] = str(error)
    return found


def is_native(weight: object) -> TypeGuard[TorchAOBaseTensor]:
    """Whether a weight is in one of torchao's formats; the nested store, a tensor of QBE's, is none."""
    return isinstance(weight, TorchAOBaseTensor) and not isinstance(weight, NestedTensor)


def stored_bytes(weight: TorchAOBaseTensor) -> int:
    """Bytes of a native weight's data and scales."""
    names, _ = weight.__tensor_flatten__()
    return sum(t.numel() * t.element_size() for t in (getattr(weight, name) for name in names))


def _fp8() -> AOBaseConfig:
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow

    return Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())


def _nvfp4() -> AOBaseConfig:
    from torchao.prototype.mx_formats import NVFP4DynamicActivationNVFP4WeightConfig

    # Its Triton kernel for activations comes from another package and is the default there even without it.
    return NVFP4DynamicActivationNVFP4WeightConfig(use_triton_kernel=importlib.util.find_spec("mslk") is not None)


def _mx(element: str) -> AOBaseConfig:
    from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig

    dtype = getattr(torch, element)
    return MXDynamicActivationMXWeightConfig(activation_dtype=dtype, weight_dtype=dtype)


_OFFERED: dict[NumberFormat, Callable[[], AOBaseConfig]] = {
    NumberFormat.FP8_E4M3: _fp8,
    NumberFormat.MXFP8: lambda: _mx("float8_e4m3fn"),
    NumberFormat.MXFP4: lambda: _mx("float4_e2m1fn_x2"),
    NumberFormat.NVFP4: _nvfp4,
}
_BITS = {NumberFormat.FP8_E4M3: 8, NumberFormat.MXFP8: 8, NumberFormat.MXFP4: 4, NumberFormat.NVFP4: 4}
_NOT_OFFERED: dict[NumberFormat, str] = {
    NumberFormat.MXFP6: "torchao 0.18 has no FP6 product, it only emulates one; use the nested store at 6 bits",
    NumberFormat.INT8: "torchao 0.18 multiplies int8 natively above 16 rows on a GPU only; use nested 8 bits",
    NumberFormat.BF16: "it is a 16-bit format, to which nothing is quantised; leave the layer as it is",
    NumberFormat.FP16: "it is a 16-bit format, to which nothing is quantised; leave the layer as it is",
}
