"""Quantization Blueprint Engine: LLM inference that decides precision per request.

    import qbe
    engine = qbe.Engine("smollm2-135m-instruct")
    print(engine.generate("What is the capital of France?").text)

Importing `qbe` is cheap; torch and transformers are imported on first use of what needs them.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.errors import QBEError
from qbe.models import pull
from qbe.pictures import Picture
from qbe.version import __version__

if TYPE_CHECKING:
    from qbe.engine.engine import Engine, Request, Result
    from qbe.engine.sampling.sampling_params import SamplingParams
    from qbe.store.native_formats import native_config
    from qbe.store.nested_linears import NestedWeightConfig, quantize_
    from qbe.store.nested_tensor import NestedTensor

# torchao warns at import about GPU extensions that this machine cannot load, and torch about torchao's enums. Neither
# concerns a user of QBE, and standard error belongs to progress bars and errors.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)

__all__ = [
    "Blueprint",
    "Budget",
    "Engine",
    "NestedTensor",
    "NestedWeightConfig",
    "Picture",
    "QBEError",
    "Request",
    "Result",
    "SamplingParams",
    "__version__",
    "native_config",
    "pull",
    "quantize_",
]

_LAZY = {
    "Engine": "qbe.engine.engine",
    "Request": "qbe.engine.engine",
    "Result": "qbe.engine.engine",
    "SamplingParams": "qbe.engine.sampling.sampling_params",
    "NestedTensor": "qbe.store.nested_tensor",
    "NestedWeightConfig": "qbe.store.nested_linears",
    "native_config": "qbe.store.native_formats",
    "quantize_": "qbe.store.nested_linears",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'qbe' has no attribute {name!r}")
