"""From a 16-bit model in memory to one with nested weights, in place: smoothed, then every nestable site nested."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qbe.errors import QBEError
from qbe.format.layout import BLOCK, SliceLayout
from qbe.models.model_errors import one_line
from qbe.progress import bar
from qbe.sites import FULL_BITS, KEEPS_ACTIVATIONS, NESTABLE_ROLES, SiteTable
from qbe.store import known, smoothing
from qbe.store.calibrate import calibrate
from qbe.store.calibration_text import CalibrationText, built_in
from qbe.store.experts import expert_layers
from qbe.store.folding import Fold, apply_exact, edges
from qbe.store.layerwise import Layerwise, NotLayered
from qbe.store.native_formats import is_native, stored_bytes
from qbe.store.nest_experts import expert_sites, nest_layer
from qbe.store.nested_linears import NestedWeightConfig, set_weight
from qbe.store.nested_tensor import NestedTensor
from qbe.store.sensitivity import decoder_layers
from qbe.store.smoothing_layers import smooth_layers
from qbe.tagger import tag


def _nested_on(weight: torch.Tensor, config: NestedWeightConfig, device: torch.device | None) -> NestedTensor:
    """A nested weight that lies where the weight is, made on the device."""
    there = NestedTensor.from_weight(weight.to(device or weight.device), config.slices, config.group_size, False)
    if not config.keep_original and there.device == weight.device:
        return there
    own, bits = weight.device, FULL_BITS if config.keep_original else there.layout.total_bits
    return NestedTensor(
        there.packed.to(own), there.meta.to(own), torch.tensor([bits], dtype=torch.int32, device=own), there.slices,
        there.group_size, there.exponent, there.in_features, weight.dtype,
        weight.detach() if config.keep_original else None,
    )  # fmt: skip


def nestable(table: SiteTable) -> list[str]:
    """Names of the sites that go into the nested store."""
    return [s.name for s in table if s.is_linear and s.role in NESTABLE_ROLES]


def with_store(table: SiteTable, model: nn.Module) -> SiteTable:
    """The table with the gears and bytes of the nested weights found in `model`, and the bytes of native formats.

    Nested experts become a site for each expert's matrix.
    """
    modules = dict(model.named_modules())
    sites = []
    for site in table:
        weight = getattr(modules.get(site.name), "weight", None)
        if isinstance(weight, NestedTensor):
            site = replace(site, gears=weight.gears, bytes_at=weight.bytes_at())
        elif is_native(weight):
            as_tagged, now = weight.numel() * weight.element_size(), site.bytes_at[FULL_BITS]
            if now >= as_tagged:  # not yet counted as it is stored, which is less
                site = replace(site, bytes_at={FULL_BITS: now - as_tagged + stored_bytes(weight)})
        sites.append(site)
    return replace(table, sites=tuple(expert_sites(sites, model)))


def nest_skeleton(model: nn.Module, name: str, config: NestedWeightConfig, sites: Collection[str] | None) -> SiteTable:
    """Puts nested weights without memory into a model on the meta device; returns the table that the model will have.

    Args:
        sites: names of those to nest; None takes all that can be.

    Raises:
        QBEError: there is nothing to nest.
    """
    table = tag(model, name=name)
    names = nestable(table) if sites is None else [n for n in nestable(table) if n in sites]
    if not names:
        raise QBEError(f"{name} has no linear layer that can be nested; QBE cannot change its precision")
    for site in names:
        module = model.get_submodule(site)
        assert isinstance(module, nn.Linear)
        set_weight(module, NestedTensor.empty(module.weight, config))
    return with_store(table, model)


def smooth_model(
    model: nn.Module, tokenizer: Any, config: NestedWeightConfig, *, known_as: str | None = None,
    device: torch.device | None = None, text: CalibrationText | None = None, progress: bool,
) -> list[Fold]:  # fmt: skip
    """`qbe.store.smoothing` of a model that is about to be nested, on a text (None: the built-in one), with a progress
    bar.

    It is done on `device` layer by layer where the model is built that way, else where the model is.

    The model is changed in place and computes what it computed. Nothing is searched for where it is known
    (`qbe.store.known`). Returns the folds that were made.

    Raises:
        QBEError: the model's own code fails.
    """
    table = tag(model)
    wanted = [s.name for s in table if s.is_linear and s.role in NESTABLE_ROLES - KEEPS_ACTIVATIONS]
    names = [n for n in wanted if not is_native(model.get_submodule(n).weight)]
    own = next(model.parameters()).device
    tokens = (text or built_in()).smoothing(tokenizer, model).to(own)
    layout = SliceLayout.of(config.slices)
    layers = decoder_layers(model, table) if known_as is None else []
    with one_line(model):  # it runs for the first time here
        with suppress(NotLayered), bar("smoothing activations", len(layers), progress) as step:
            walk = Layerwise(model, layers, device or own, wide=False)
            return smooth_layers(walk, table, names, tokens, layout, config.group_size, step)
        places = edges(model, table, names, tokens[:1])
        if known_as is not None:  # tried on all of the text where they were found
            return apply_exact(model, known.folds(known_as, places), tokens[:1])
        with bar("smoothing activations", len(places), progress) as step:
            return smoothing.smooth(model, places, tokens, layout, config.group_size, step)


def nest_model(
    model: nn.Module,
    name: str,
    config: NestedWeightConfig,
    *,
    text: torch.Tensor | None = None,
    keep: Path | None = None,
    device: torch.device | None = None,
    progress: bool,
) -> SiteTable:
    """Nests every nestable site of a model in place, except layers in one of torchao's formats; returns the site table.
    Experts are nested, too, every one with its own codes.

    Args:
        text: int64 [windows, tokens] to choose the codes on (`qbe.store.calibrate`); without it weights are rounded.
        keep: where results of a calibration are kept until it is complete.
        device: where weights are rounded, one at a time; None: where they are.

    Raises:
        QBEError: there is nothing to nest.
    """
    table = tag(model, name=name)
    names = [n for n in nestable(table) if not is_native(model.get_submodule(n).weight)]
    experts = expert_layers(model)
    if not names and not experts:
        raise QBEError(
            f"{name} has no linear layer that can be nested (see 'qbe info'); QBE cannot change its precision"
        )
    linears = ((n, model.get_submodule(n)) for n in names if config.group_size > BLOCK)
    wide = [n for n, module in linears if isinstance(module, nn.Linear) and module.in_features < config.group_size]
    if wide:
        warnings.warn(f"{len(wide)} sites have fewer inputs than a group of {config.group_size}, {wide[0]} for "
                      "example: each row takes the bytes of a whole group", stacklevel=2)  # fmt: skip
    if text is not None:
        calibrate(model, names, text, config, keep, progress=progress)
        return with_store(table, model)
    with bar("nesting weights", len(names) + sum(len(e.parameters) for e in experts), progress) as step:
        for site in names:
            module: Any = model.get_submodule(site)
            set_weight(module, _nested_on(module.weight, config, device))
            step()
        for layer in experts:
            nest_layer(layer, config, device, step)
    return with_store(table, model)
