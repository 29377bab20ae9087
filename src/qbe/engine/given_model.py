"""The model that an engine was given: a name, a path, or a model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from qbe.engine.execution.runner import can_cascade
from qbe.errors import QBEError
from qbe.kvcache.cache import decoder_config
from qbe.policies.cascade import load as load_cascade
from qbe.policies.per_token import TokenRouters
from qbe.store.prepare import PreparedModel, prepare, prepare_in_memory


def prepare_model(
    model: str | Path | nn.Module, tokenizer: Any, processor: Any, dtype: str, trust: bool, paged: bool, **rest: Any
) -> PreparedModel:
    """The model, nested, on the device. Raises QBEError for what does not go with where it comes from."""
    if not isinstance(model, nn.Module):
        given = "tokenizer" if tokenizer is not None else "processor" if processor is not None else None
        if given is not None:
            raise QBEError(f"{given} is for a model given in memory; a folder or a file brings its own: leave it out")
        return prepare(model, dtype=dtype, trust=trust, paged=paged, **rest)
    if trust:
        raise QBEError("trust is for a folder of 'qbe quantize'; a model given in memory has no files")
    if dtype != "auto":
        raise QBEError(f"a model given in memory keeps its dtype; convert it first, not with dtype='{dtype}'")
    return prepare_in_memory(model, tokenizer, **rest)


def cascade_of(prepared: PreparedModel) -> TokenRouters | QBEError:
    """What was learned, or why there is none: who asks for a cascade is told, and others can do without."""
    try:
        return load_cascade(prepared.table, can_cascade(decoder_config(prepared.model)))
    except QBEError as error:
        return error
