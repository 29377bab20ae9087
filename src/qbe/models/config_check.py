"""What a checkpoint's config may ask for, checked before a model is built from it.

transformers checks types, not sizes: a config that asks for a hundred thousand layers keeps it busy for minutes before
anyone looks at the weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from qbe.errors import QBEError
from qbe.models.folder_weights import LazySafetensor
from qbe.models.mxfp4 import LazyMXFP4

# Fields that say how often something with weights of its own is repeated, in the configs of transformers.
_REPEATED = {
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers", "decoder_layers",
    "num_experts", "num_local_experts", "n_routed_experts",
}  # fmt: skip
_ALWAYS_BUILT = 512  # parts that are nothing to build: defaults for parts that a checkpoint lacks stay below it


def check_counts(folder: Path, tensors: Mapping[str, LazySafetensor | LazyMXFP4]) -> None:
    """Refuses a `config.json` that repeats a part more often than the weights can fill.

    Every layer has a tensor; every expert has one, or an index in the first dimension of one.

    Raises:
        QBEError: such a count, or a file that is no JSON.
    """
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise QBEError(f"{file} is no JSON ({' '.join(str(e).split())[:100]}); download the model again") from e
    dims = [t.shape[0] for t in tensors.values() if t.shape]
    for key, value in _numbers(raw):
        limit = max(_ALWAYS_BUILT, len(tensors), *(dims if "expert" in key else ()))
        if key in _REPEATED and value > limit:
            raise QBEError(
                f"{file} asks for {key} {value}, but the weights beside it have {len(tensors)} tensors in all; "
                "the weights and the config belong to different models"
            )


def _numbers(value: Any, depth: int = 0) -> Iterator[tuple[str, int | float]]:
    """Keys with a number, also those of configs within the config."""
    if isinstance(value, dict) and depth < 4:
        for key, inner in value.items():
            if isinstance(inner, int | float):
                yield key, inner
            else:
                yield from _numbers(inner, depth + 1)


def check_size(folder: Path, model: nn.Module, tensors: Mapping[str, LazySafetensor | LazyMXFP4]) -> None:
    """Refuses a model on the meta device that needs far more weights than the files hold, before memory is taken.

    Raises:
        QBEError: more than twice as many. (Fewer missing ones are named one by one when the model is loaded.)
    """
    needed = sum(p.numel() for p in model.parameters())
    stored = sum(math.prod(t.shape) for t in tensors.values())
    if needed > 2 * stored:
        raise QBEError(
            f"{folder / 'config.json'} asks for {needed / 1e6:.4g} M weights, but the files beside it hold "
            f"{stored / 1e6:.4g} M; the weights and the config belong to different models"
        )


def check_limits(config: PreTrainedConfig, where: str | Path) -> None:
    """Refuses a model without a layer or without room for a token.

    Raises:
        QBEError: `num_hidden_layers` or `max_position_embeddings` (which some models lack) below 1 or no whole number.
    """
    decoder = config.get_text_config(decoder=True)
    for key in ("num_hidden_layers", "max_position_embeddings"):
        value = getattr(decoder, key, None)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise QBEError(f"{where}: {key} is {value!r}, but must be a whole number, 1 or more")
