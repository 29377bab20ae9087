"""From a model's name to a model with a nested store: from a checkpoint folder, from the cache, or made now.

A model that is not a QBE checkpoint is nested once; codes and sensitivities go to the user's cache, the 16-bit
weights keep being read from where they are.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from qbe.errors import QBEError
from qbe.files import cache_dir
from qbe.models import LoadedModel, load_model, pull
from qbe.models.config_check import check_limits
from qbe.models.gguf_split import READER, part_files
from qbe.sites import SiteTable
from qbe.store import (
    checkpoint,
    drift_table,
    expert_use,
    known,
    kv_table,
    provenance,
    sensitivity_table,
    superseded,
)
from qbe.store.draft import writing
from qbe.store.estimating import count_on_text, estimate_into, estimate_model, write_estimated
from qbe.store.expert_use import ExpertUse, scaled, with_use
from qbe.store.layerwise import NotLayered, page_locked
from qbe.store.measure import measure_kv, measure_model, measure_text, with_measured, with_stored
from qbe.store.nested_linears import NestedWeightConfig, nested_linears
from qbe.store.nesting import nest_model, nestable, smooth_model, with_store
from qbe.store.placement import place, place_of
from qbe.store.sensitivity import Sensitivity
from qbe.tagger import tag
from qbe.version import __version__

CPU = torch.device("cpu")


@dataclass
class PreparedModel:
    """A model ready to be run at any blueprint.

    Attributes:
        model: transformers causal LM whose nestable linears hold NestedTensors.
        tokenizer: its tokenizer.
        table: sites with gears, bytes and, when they were measured, sensitivities.
        name: what the caller called it.
        folder: of its nested store; None where that was made in memory.
        store: digest of its store (`qbe.store.checkpoint.identity`); None where that lies in no folder.
    """

    model: Any
    tokenizer: Any
    table: SiteTable
    name: str
    folder: Path | None = None
    store: str | None = None


def prepare(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: torch.device,
    originals: str | None = None,
    most_bits: int | None = None,
    need_sensitivity: bool = True,
    trust: bool = False,
    paged: bool = False,
    progress: bool = True,
) -> PreparedModel:
    """Loads a model and its nested store; makes (and caches) what is missing.

    Args:
        name: anything `qbe.pull` takes, or a folder that `qbe quantize` wrote.
        device: where the model will run; weights are smoothed, nested and looked at there, too, a layer at a time.
        originals: where the 16-bit weights of nested sites live (`qbe.store.placement.place_of`). Those that live
            nowhere are not even read.
        most_bits: the widest precision of the store that is loaded; None: all of it.
        need_sensitivity: estimate the sensitivities if they are not stored yet and did not come with the package.
        paged: leave the codes of experts out of a GPU's memory, as `qbe.store.placement.place`.
        trust: take the files of a QBE folder as they are, whatever its `provenance.json` says of them.

    Raises:
        QBEError: whatever is wrong with the model or its files.
    """
    path, originals = pull(str(name), progress=progress), place_of(originals, device)
    if trust:
        provenance.check_trusted(path)
    else:
        provenance.check(path, progress=progress)
    for _ in range(3):
        folder = store_folder(str(name), device=device, sensitivity=need_sensitivity, progress=progress)
        with superseded.in_use(folder) as there:
            if not there:
                continue
            try:
                return _from_store(
                    path, folder, str(name), dtype, device, originals, most_bits, need_sensitivity, paged, progress
                )
            except QBEError as error:
                if folder == path:
                    raise
                remedy = f"delete {folder}, and it is made anew"  # nobody ran 'qbe quantize' for what is in the cache
                raise QBEError(str(error).replace(checkpoint.AGAIN, remedy)) from error
    raise QBEError(f"{folder} vanishes whenever it is made; is another program cleaning that folder?")


def _from_store(
    path: Path, folder: Path, name: str, dtype: str | torch.dtype, device: torch.device, originals: str,
    most_bits: int | None, need_sensitivity: bool, paged: bool, progress: bool,
) -> PreparedModel:  # fmt: skip
    """The model at `path` with the store in `folder`."""
    keep = originals != "none"
    unread = () if keep else checkpoint.read_manifest(folder).sites
    loaded = load_model(path, dtype=dtype, without=unread, progress=progress)
    table = tag(loaded.model, name=name)
    manifest = checkpoint.attach(loaded.model, folder, keep_original=keep)
    if missing := set(nestable(table)) - set(manifest.sites):
        raise QBEError(f"{folder} is damaged: it lacks {min(missing)}; {checkpoint.AGAIN}")
    measured = sensitivity_table.read(folder)
    # Known tables cost nothing, but a folder that nobody may write to has to do without.
    missing_all = measured is None or kv_table.outdated(folder)
    lacks = missing_all or (measured is not None and not measured.native)
    if lacks and (need_sensitivity or os.access(folder, os.W_OK)):
        if known.bring(folder, manifest.known_as):
            measured = sensitivity_table.read(folder)
        elif missing_all and need_sensitivity:
            measured = estimate_into(folder, path, name, device, progress=progress)
    place(loaded.model, device, originals, most_bits, paged)
    counted, served = expert_use.read(folder), expert_use.read_served(folder)
    table = with_use(with_store(table, loaded.model), counted + served if counted and served else counted)
    table = drift_table.with_floors(table, drift_table.read(folder))
    if measured is not None:
        if measured.text is None and not (
            paged and device.type == "cuda"
        ):  # a store of an older version, or one that is known
            measured = _with_text(measured, loaded, None if folder == path else folder)
        if counted and served:
            measured = scaled(measured, counted, counted + served)
        table = with_stored(table, measured, folder).with_kv(kv_table.read(folder))
    return PreparedModel(loaded.model, loaded.tokenizer, table, name, folder, checkpoint.identity(manifest))


def _with_text(measured: Sensitivity, loaded: LoadedModel, folder: Path | None) -> Sensitivity:
    """With how hard the built-in text is to predict, from a forward pass of the model as it is loaded; it is kept in
    the folder of a store in the cache. A folder that somebody made is left as it is."""
    text = measure_text(loaded.model, loaded.tokenizer)
    if text is not None and folder is not None and os.access(folder, os.W_OK):
        sensitivity_table.add_text(folder, text)
    return replace(measured, text=text)


def prepare_in_memory(
    model: nn.Module,
    tokenizer: Any,
    *,
    device: torch.device,
    originals: str | None = None,
    most_bits: int | None = None,
    need_sensitivity: bool = True,
    progress: bool = True,
) -> PreparedModel:
    """Nests a transformers causal LM that is in memory already, in place, and estimates its sensitivities if needed.

    Raises:
        QBEError: no tokenizer, or nothing to nest.
    """
    if tokenizer is None:
        raise QBEError("a model given in memory needs its tokenizer: Engine(model, tokenizer=...)")
    name = str(getattr(model, "name_or_path", "") or type(model).__name__)
    if nested_linears(model):
        raise QBEError(f"{name} is nested already; one model serves one engine, load it again for another")
    if isinstance(config := getattr(model, "config", None), PreTrainedConfig):
        check_limits(config, name)
    nesting = NestedWeightConfig()
    known_as = known.find(model.eval().requires_grad_(False), nesting)
    smooth_model(model, tokenizer, nesting, known_as=known_as, device=device, progress=progress)
    table = nest_model(model, name, nesting, device=device, progress=progress)
    originals = place_of(originals, device)
    measured: Sensitivity | None = None
    use: ExpertUse | None = None
    if need_sensitivity:
        found = known.read(known_as) if known_as is not None else None
        try:
            measured, kv, use = (
                (*found, None) if found else estimate_model(model, tokenizer, table, device, progress=progress)
            )
        except NotLayered:
            place(model, device, "device")  # the measurement reads all of them again and again
            measured = measure_model(model, tokenizer, table, progress=progress)
            use = count_on_text(model, tokenizer)
            kv = measure_kv(model, tokenizer, table, progress=progress)
        if measured.text is None:
            measured = replace(measured, text=measure_text(model, tokenizer))
    place(model, device, originals, most_bits)
    table = with_use(with_store(table, model), use)
    if measured is not None:
        table = with_measured(table, measured).with_kv(kv)
    return PreparedModel(model, tokenizer, table, name)


def store_folder(name: str, *, device: torch.device = CPU, sensitivity: bool = False, progress: bool) -> Path:
    """Where the nested store of a model lies: its own folder, or one in the cache (made on first use)."""
    path = pull(name, progress=progress)
    if checkpoint.is_checkpoint(path):
        return path
    return cached_store(path, name, device=device, sensitivity=sensitivity, progress=progress)


def cached_store(path: Path, name: str, *, device: torch.device, sensitivity: bool, progress: bool) -> Path:
    """The nested store of a model that is no QBE checkpoint, made on first use.

    Args:
        device: where it is made, a layer at a time.
        sensitivity: estimate sensitivities, too, while the 16-bit model is there.
    """
    config = NestedWeightConfig()
    folder = cache_dir() / "nested" / fingerprint(path, config)
    if not checkpoint.is_checkpoint(folder):
        loaded = load_model(path, progress=progress)
        model, tokenizer = loaded.model, loaded.tokenizer
        known_as = known.find(model, config)
        found = None
        with page_locked(model, device):
            folds = smooth_model(model, tokenizer, config, known_as=known_as, device=device, progress=progress)
            table = nest_model(model, name, config, device=device, progress=progress)
            if sensitivity and known_as is None:
                with suppress(NotLayered):
                    found = estimate_model(model, tokenizer, table, device, progress=progress)
        try:
            with writing(folder) as partial:
                checkpoint.write_nested(partial, model, name, superseded.source_of(path), folds, known_as)
                if found is not None:
                    write_estimated(partial, *found)
        except QBEError:
            if not checkpoint.is_checkpoint(folder):  # else another process finished the same store first
                raise
        superseded.prune(folder)
    return folder


def fingerprint(path: Path, config: NestedWeightConfig) -> str:
    """Changes with the model's files (path, size, time), the layout, the rounding, the format and QBE's version."""
    kinds = (".safetensors", ".gguf", ".json")
    files = sorted(p for p in path.iterdir() if p.suffix in kinds) if path.is_dir() else part_files(path)
    facts = [str(path.resolve()), config.slices, config.group_size]
    if not path.is_dir():
        facts.append(READER)
    facts += [known.VERSION, checkpoint.FORMAT_VERSION, __version__]
    facts += [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return f"{path.name}-{hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()}"
