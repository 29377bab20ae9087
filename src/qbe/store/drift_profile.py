"""`qbe quantize`: profiles the drift of a model's recurrent states and keeps it, and the floors, with the store."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from qbe.progress import bar
from qbe.store.calibration_text import built_in
from qbe.store.drift_curve import Profile
from qbe.store.layerwise import NotLayered, page_locked
from qbe.store.state_drift import measure
from qbe.tagger import tag

TOKENS = 1024  # of a window of a given text
WINDOWS = 2
BUILT_IN = (1, 448)  # windows of the built-in text, and tokens of each: seconds where a given one takes minutes
UNLIMITED = 32_768  # tokens that floors are for where a model names no context


def profile(
    model: nn.Module, tokenizer: Any, name: str, device: torch.device, text: torch.Tensor | None = None, *,
    progress: bool,
) -> Profile | None:  # fmt: skip
    """The drift of every recurrent state of a model, and the floors that follow; None where it has no such states.

    A model that cannot be profiled has no floors, which is said in a warning.

    Args:
        model: a transformers causal LM whose weights are plain.
        device: where it is computed; the model is moved there a layer at a time.
        text: int64 [windows, tokens], of which the first are read; None: the built-in one.
    """
    table = tag(model, name=name)
    if not table.states:
        return None
    tokens = text_of(model, tokenizer, text)
    config = model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
    context = int(getattr(config, "max_position_embeddings", None) or UNLIMITED)
    try:
        with (
            page_locked(model, device),
            bar("profiling state drift", len(table.states) * tokens.shape[1], progress) as step,
        ):
            drifts = measure(model, table, tokens, device, step)
    except NotLayered:
        warnings.warn(f"{name} is built so that the drift of its states cannot be profiled: they have no floors, and "
                      "state_bits may have any number there is", stacklevel=2)  # fmt: skip
        return None
    return Profile.of(table, drifts, context)


def text_of(model: nn.Module, tokenizer: Any, text: torch.Tensor | None) -> torch.Tensor:
    """int64 [windows, tokens] that are profiled on."""
    if text is not None:
        return text[:WINDOWS, :TOKENS]
    return built_in().segments(tokenizer, BUILT_IN, model)
