"""Estimating the sensitivities of a nested model (`qbe.store.estimate`) on the built-in text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qbe.models import load_model
from qbe.progress import bar
from qbe.sites import KVSite, SiteTable
from qbe.store import checkpoint, kv_sensitivity, kv_table, sensitivity, sensitivity_table
from qbe.store.estimate import DRAWS, Estimate
from qbe.store.layerwise import Layerwise, NotLayered, page_locked
from qbe.store.measure import measure_into
from qbe.store.nested_tensor import NestedTensor
from qbe.store.nesting import with_store
from qbe.store.sensitivity import Sensitivity, decoder_layers
from qbe.tagger import tag

ABOUT = {"text": "built-in calibration text", "dtype": "torch.float32", "estimated": f"{DRAWS} backward passes"}


def texts_of(model: nn.Module, tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The built-in text twice: int64 [segments, tokens] for weights and activations, [1, tokens] for the KV cache."""
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)  # type: ignore[union-attr, operator]
    whole = sensitivity.calibration_tokens(tokenizer, kv_sensitivity.TOKENS, whole=True)[:, :context]
    return sensitivity.calibration_tokens(tokenizer), whole


def estimate_model(
    model: nn.Module, tokenizer: Any, table: SiteTable, device: torch.device, *, progress: bool
) -> tuple[Sensitivity, tuple[KVSite, ...]]:
    """Sensitivities of a nested model that has its 16-bit originals.

    Args:
        device: where it is computed; the model is moved there a layer at a time.

    Raises:
        NotLayered: it has to be measured.
    """
    layers = decoder_layers(model, table)
    weights: dict[str, NestedTensor] = {s.name: model.get_submodule(s.name).weight for s in table.nested}  # type: ignore[misc]
    with bar("estimating sensitivity", len(layers) + 1, progress) as step:
        tokens, kv_tokens = texts_of(model, tokenizer)
        walk = Layerwise(model, layers, device)
        roles = {s.name: s.role for s in table.nested}
        precisions = next(iter(weights.values())).layout.precisions
        found = Estimate(walk, roles, tokens, kv_tokens, precisions)
        step()
        found.head(lambda rows: NestedTensor.from_weight(rows, *_like(weights), keep_original=False))
        for i in reversed(range(len(layers))):
            found.layer(i, weights)
            step()
        logits = walk.run(kv_tokens).logits
    text = None if logits is None else sensitivity.text_difficulty(logits.flatten(0, 1))
    return replace(found.sensitivity(), text=text), found.kv


def estimate_into(folder: Path, path: Path, name: str, device: torch.device, *, progress: bool) -> Sensitivity:
    """Estimates the sensitivities of the model at `path` with the store in `folder`, and writes them there.

    They are measured where the model is built otherwise, and those of weights stay where they were known before: then
    it is the KV cache's that are outdated.
    """
    loaded = load_model(path, progress=progress)
    table = tag(loaded.model, name=name)
    checkpoint.attach(loaded.model, folder)
    table = with_store(table, loaded.model)
    try:
        with page_locked(loaded.model, device):
            found, kv = estimate_model(loaded.model, loaded.tokenizer, table, device, progress=progress)
    except NotLayered:
        del loaded
        return measure_into(folder, path, name, device, progress=progress)
    known = sensitivity_table.read(folder)
    write_estimated(folder, found if known is None else None, kv)
    return known or found


def write_estimated(folder: Path, found: Sensitivity | None, kv: tuple[KVSite, ...]) -> None:
    """Writes what was estimated beside the store; None leaves what is there. Raises QBEError when the disk refuses."""
    kv_table.write(folder, kv, ABOUT)
    if found is not None:
        sensitivity_table.write(folder, found, ABOUT)  # last: where it is, both are


def _like(weights: dict[str, NestedTensor]) -> tuple[list[int], int]:
    one = next(iter(weights.values()))
    return one.slices, one.group_size
