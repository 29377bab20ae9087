"""Estimating the sensitivities of a nested model (`qbe.store.estimate`) on a text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qbe.models import load_model
from qbe.progress import bar
from qbe.sites import KVSite, SiteTable
from qbe.store import checkpoint, expert_use, kv_table, sensitivity, sensitivity_table
from qbe.store.calibration_text import CalibrationText, built_in
from qbe.store.estimate import DRAWS, Estimate
from qbe.store.expert_use import ExpertUse, counting
from qbe.store.experts import nested_experts
from qbe.store.layerwise import Layerwise, NotLayered, page_locked
from qbe.store.measure import measure_into
from qbe.store.nested_experts import NestedExperts
from qbe.store.nested_tensor import NestedTensor
from qbe.store.nesting import with_store
from qbe.store.sensitivity import Sensitivity, decoder_layers
from qbe.tagger import tag

ABOUT = {"dtype": "torch.float32", "estimated": f"{DRAWS} gradients of segments"}


def estimate_model(
    model: nn.Module, tokenizer: Any, table: SiteTable, device: torch.device, use: ExpertUse | None = None,
    text: CalibrationText | None = None, *, progress: bool,
) -> tuple[Sensitivity, tuple[KVSite, ...], ExpertUse]:  # fmt: skip
    """Sensitivities of a nested model that has its 16-bit originals, and how often its experts are used.

    Args:
        use: as it was counted; None counts on what is read here of the text.
        text: None: the built-in one.
        device: where it is computed; the model is moved there a layer at a time.

    Raises:
        NotLayered: it has to be measured.
    """
    layers = decoder_layers(model, table)
    weights: dict[str, NestedTensor] = {}
    for site in table.nested:
        if site.expert is None:
            weights[site.name] = model.get_submodule(site.name).weight  # type: ignore[assignment]
    stacks = dict(nested_experts(model))
    like: NestedTensor | NestedExperts = next(iter(weights.values())) if weights else next(iter(stacks.values()))
    with bar("estimating sensitivity", len(layers) + 1, progress) as step:
        text = text or built_in()
        tokens, kv_tokens = text.sensitivity(tokenizer, model), text.kv(tokenizer, model)
        walk = Layerwise(model, layers, device)
        roles = {s.name: s.role for s in table.nested}
        with counting(model) as counted:
            found = Estimate(walk, roles, tokens, kv_tokens, like.layout.precisions)
        use = counted if use is None or not use.tokens else use
        step()
        found.head(lambda rows: NestedTensor.from_weight(rows, like.slices, like.group_size, keep_original=False))
        for i in reversed(range(len(layers))):
            found.layer(i, weights)
            step()
        logits = walk.run(kv_tokens).logits
    difficulty = None if logits is None else sensitivity.text_difficulty(logits.flatten(0, 1))
    return replace(found.sensitivity(use), text=difficulty), found.kv, use


def count_on_text(model: nn.Module, tokenizer: Any) -> ExpertUse:
    """How often experts are used on the built-in text."""
    return expert_use.count(model, built_in().kv(tokenizer, model))


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
            stored = expert_use.read(folder)
            found, kv, use = estimate_model(loaded.model, loaded.tokenizer, table, device, stored, progress=progress)
    except NotLayered:
        del loaded
        return measure_into(folder, path, name, device, progress=progress)
    known = sensitivity_table.read(folder)
    write_estimated(folder, found if known is None else None, kv, use)
    return known or found


def write_estimated(
    folder: Path, found: Sensitivity | None, kv: tuple[KVSite, ...], use: ExpertUse, text: CalibrationText | None = None
) -> None:
    """Writes what was estimated on a text beside the store; None leaves what is there. Raises QBEError when the disk
    refuses."""
    named = {"text": (text or built_in()).title}
    kv_table.write(folder, kv, named | ABOUT)
    if not (folder / expert_use.NAME).exists():
        expert_use.write(folder, use, named)
    if found is not None:
        sensitivity_table.write(folder, found, named | ABOUT)  # last: where it is, both are
