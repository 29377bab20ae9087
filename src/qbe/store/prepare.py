"""From a model's name to a model with a nested store: from a checkpoint folder, from the cache, or made now.

A model that is not a QBE checkpoint is nested once; codes and sensitivities go to the user's cache, the 16-bit
weights keep being read from where they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from transformers import PreTrainedConfig

import qbe
from qbe.errors import QBEError
from qbe.hardware import free_memory
from qbe.models import cache_dir, load_model, pull
from qbe.models.config_check import check_limits
from qbe.models.load import quiet
from qbe.sites import FULL_BITS, KEEPS_ACTIVATIONS, NESTABLE_ROLES, KVSite, SiteTable
from qbe.store import checkpoint, kv_sensitivity, kv_table, sensitivity, smoothing, superseded
from qbe.store.folding import Fold, edges
from qbe.store.layout import SliceLayout
from qbe.store.native_formats import is_native, stored_bytes
from qbe.store.nested_tensor import NestedTensor, NestedWeightConfig, nest, nested_linears
from qbe.store.placement import place
from qbe.store.sensitivity import Sensitivity
from qbe.tagger import tag


@dataclass
class PreparedModel:
    """A model ready to be run at any blueprint.

    Attributes:
        model: transformers causal LM whose nestable linears hold NestedTensors.
        tokenizer: its tokenizer.
        table: sites with gears, bytes and, when they were measured, sensitivities.
        name: what the caller called it.
    """

    model: Any
    tokenizer: Any
    table: SiteTable
    name: str


def nestable(table: SiteTable) -> list[str]:
    """Names of the sites that go into the nested store."""
    return [s.name for s in table if s.is_linear and s.role in NESTABLE_ROLES]


def with_store(table: SiteTable, model: nn.Module) -> SiteTable:
    """The table with the gears and bytes of the nested weights found in `model`, and the bytes of native formats."""
    modules = dict(model.named_modules())
    sites = []
    for site in table:
        weight = getattr(modules.get(site.name), "weight", None)
        if isinstance(weight, NestedTensor):
            site = replace(site, gears=weight.gears, bytes_at=weight.bytes_at())
        elif is_native(weight):
            as_tagged = weight.numel() * weight.element_size()
            site = replace(site, bytes_at={FULL_BITS: site.bytes_at[FULL_BITS] - as_tagged + stored_bytes(weight)})
        sites.append(site)
    return replace(table, sites=tuple(sites))


def prepare(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: torch.device,
    originals: str = "device",
    need_sensitivity: bool = True,
    progress: bool = True,
) -> PreparedModel:
    """Loads a model and its nested store; makes (and caches) what is missing.

    Args:
        name: anything `qbe.pull` takes, or a folder that `qbe quantize` wrote.
        originals: where the 16-bit weights of nested sites live: `device`, or `host` (pinned memory).
        need_sensitivity: measure the sensitivities if they are not stored yet (minutes, once per model).

    Raises:
        QBEError: whatever is wrong with the model or its files.
    """
    path = pull(str(name), progress=progress)
    for _ in range(3):
        folder = store_folder(str(name), progress=progress)
        with superseded.in_use(folder) as there:
            if not there:
                continue
            try:
                return _from_store(path, folder, str(name), dtype, device, originals, need_sensitivity, progress)
            except QBEError as error:
                if folder == path:
                    raise
                remedy = f"delete {folder}, and it is made anew"  # nobody ran 'qbe quantize' for what is in the cache
                raise QBEError(str(error).replace(checkpoint.AGAIN, remedy)) from error
    raise QBEError(f"{folder} vanishes whenever it is made; is another program cleaning that folder?")


def _from_store(
    path: Path, folder: Path, name: str, dtype: str | torch.dtype, device: torch.device, originals: str,
    need_sensitivity: bool, progress: bool,
) -> PreparedModel:  # fmt: skip
    """The model at `path` with the store in `folder`."""
    loaded = load_model(path, dtype=dtype, progress=progress)
    table = tag(loaded.model, name=name)
    manifest = checkpoint.attach(loaded.model, folder)
    if missing := set(nestable(table)) - set(manifest.sites):
        raise QBEError(f"{folder} is damaged: it lacks {min(missing)}; {checkpoint.AGAIN}")
    table = with_store(table, loaded.model)
    measured = checkpoint.read_sensitivity(folder)
    if measured is None and need_sensitivity:
        measured = measure_into(folder, path, name, device, progress=progress)
    if measured is not None:
        for site in table.nested:
            if not set(site.gears) <= set(measured.weights.get(site.name, {})):
                raise QBEError(f"the sensitivities in {folder} lack {site.name}; delete sensitivity.json there")
        table = with_measured(table, measured).with_kv(kv_table.read(folder))
    place(loaded.model, device, originals)
    return PreparedModel(loaded.model, loaded.tokenizer, table, name)


def prepare_in_memory(
    model: nn.Module,
    tokenizer: Any,
    *,
    device: torch.device,
    originals: str = "device",
    need_sensitivity: bool = True,
    progress: bool = True,
) -> PreparedModel:
    """Nests a transformers causal LM that is in memory already, in place, and measures its sensitivities if needed.

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
    smooth_model(model.eval().requires_grad_(False), tokenizer, nesting, progress=progress)
    table = nest_model(model, name, nesting, progress=progress)
    place(model, device, "device")
    if need_sensitivity:  # before originals leave the device: the measurement reads all of them again and again
        measured = measure_model(model, tokenizer, table, progress=progress)
        table = with_measured(table, measured).with_kv(measure_kv(model, tokenizer, table, progress=progress))
    if originals != "device":
        place(model, device, originals)
    return PreparedModel(model, tokenizer, table, name)


def store_folder(name: str, *, progress: bool) -> Path:
    """Where the nested store of a model lies: its own folder, or one in the cache (made on first use)."""
    path = pull(name, progress=progress)
    return path if checkpoint.is_checkpoint(path) else cached_store(path, name, progress=progress)


def cached_store(path: Path, name: str, *, progress: bool) -> Path:
    """The nested store of a model that is no QBE checkpoint, made on first use."""
    config = NestedWeightConfig()
    folder = cache_dir() / "nested" / fingerprint(path, config)
    if not checkpoint.is_checkpoint(folder):
        loaded = load_model(path, progress=progress)
        folds = smooth_model(loaded.model, loaded.tokenizer, config, progress=progress)
        nest_model(loaded.model, name, config, progress=progress)
        try:
            with checkpoint.writing(folder) as partial:
                checkpoint.write_nested(partial, loaded.model, name, superseded.source_of(path), folds)
        except QBEError:
            if not checkpoint.is_checkpoint(folder):  # else another process finished the same store first
                raise
        superseded.prune(folder)
    return folder


def fingerprint(path: Path, config: NestedWeightConfig) -> str:
    """Changes with the model's files (path, size, time), the layout, the format and the version of QBE."""
    kinds = (".safetensors", ".gguf", ".json")
    files = sorted(p for p in path.iterdir() if p.suffix in kinds) if path.is_dir() else [path]
    facts = [str(path.resolve()), config.slices, config.group_size, checkpoint.FORMAT_VERSION, qbe.__version__]
    facts += [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return f"{path.name}-{hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()}"


def smooth_model(model: nn.Module, tokenizer: Any, config: NestedWeightConfig, *, progress: bool) -> list[Fold]:
    """`qbe.store.smoothing.smooth` of a model that is about to be nested, on the built-in text, with a progress bar.

    The model is changed in place and computes what it computed. Returns the folds that were made.
    """
    table = tag(model)
    wanted = [s.name for s in table if s.is_linear and s.role in NESTABLE_ROLES - KEEPS_ACTIVATIONS]
    names = [n for n in wanted if not is_native(model.get_submodule(n).weight)]
    tokens = sensitivity.calibration_tokens(tokenizer, smoothing.SEGMENT_TOKENS).to(next(model.parameters()).device)
    places = edges(model, table, names, tokens)
    with bar("smoothing activations", len(places), progress) as step:
        return smoothing.smooth(model, places, tokens, SliceLayout.of(config.slices), config.group_size, step)


def nest_model(model: nn.Module, name: str, config: NestedWeightConfig, *, progress: bool) -> SiteTable:
    """Nests every nestable site of a model in place, except layers in one of torchao's formats; returns the site table.

    Raises:
        QBEError: there is nothing to nest.
    """
    table = tag(model, name=name)
    names = [n for n in nestable(table) if not is_native(model.get_submodule(n).weight)]
    if not names:
        raise QBEError(
            f"{name} has no linear layer that can be nested (see 'qbe info'); QBE cannot change its precision"
        )
    with bar("nesting weights", len(names), progress) as step:
        nest(model, names, config, on_site=lambda _: step())
    return with_store(table, model)


def measure_into(folder: Path, path: Path, name: str, device: torch.device, *, progress: bool) -> Sensitivity:
    """Measures the sensitivities of the model at `path` with the store in `folder`, and writes them there.

    In float32 when that fits into memory: the rounding of a bfloat16 pass is larger than what 8 bits do to one site.
    """
    loaded = load_model(path, dtype="float32" if _fits_in_float32(path, device) else "auto", progress=progress)
    table = tag(loaded.model, name=name)
    checkpoint.attach(loaded.model, folder)
    table = with_store(table, loaded.model)
    place(loaded.model, device, "device")
    about = {"text": "built-in calibration text", "dtype": str(loaded.dtype)}
    kv = measure_kv(loaded.model, loaded.tokenizer, table, progress=progress)
    kv_table.write(folder, kv, about)
    measured = measure_model(loaded.model, loaded.tokenizer, table, progress=progress)
    checkpoint.write_sensitivity(folder, measured, about)  # last: where it is, both are
    return measured


def measure_model(model: nn.Module, tokenizer: Any, table: SiteTable, *, progress: bool) -> Sensitivity:
    """What `qbe.store.sensitivity` measures, on the built-in text, with a progress bar."""
    tokens = sensitivity.calibration_tokens(tokenizer)
    passes = len(table.nested) + sum(len(s.activation_gears) > 1 for s in table.nested)
    with bar("measuring sensitivity", passes, progress) as step:
        return Sensitivity(
            sensitivity.measure(model, table, tokens, lambda _: step()),
            sensitivity.measure_activations(model, table, tokens, lambda _: step()),
            sensitivity.difficult_entropy(model, table, tokens),
        )


def with_measured(table: SiteTable, measured: Sensitivity) -> SiteTable:
    """The table with what was measured."""
    table = table.with_sensitivity(measured.weights, measured.activations)
    return replace(table, difficult_entropy=measured.difficult_entropy)


def measure_kv(model: nn.Module, tokenizer: Any, table: SiteTable, *, progress: bool) -> tuple[KVSite, ...]:
    """`qbe.store.kv_sensitivity.measure` on the built-in text, with a progress bar."""
    tokens = sensitivity.calibration_tokens(tokenizer, kv_sensitivity.TOKENS, whole=True)
    with bar("measuring KV sensitivity", table.layers, progress) as step:
        return kv_sensitivity.measure(model, table, tokens, step)


def _fits_in_float32(path: Path, device: torch.device) -> bool:
    files = path.iterdir() if path.is_dir() else [path]
    stored = sum(f.stat().st_size for f in files if f.suffix in (".safetensors", ".gguf"))
    needed = stored * (8 if path.suffix == ".gguf" else 2.5)  # a 4-bit file grows eightfold, a 16-bit one doubles
    return needed < free_memory(device) * 0.8


def quantise_to(
    name: str,
    out: Path,
    config: NestedWeightConfig,
    device: torch.device,
    *,
    measure: bool = True,
    progress: bool = True,
) -> Path:
    """`qbe quantize`: writes the checkpoint folder of a model, sensitivities included.

    Raises:
        QBEError: bad input, a target that exists, or a disk that refuses; nothing is left behind then.
    """
    path = pull(name, progress=progress)
    if checkpoint.is_checkpoint(path):
        raise QBEError(f"{path} is already a QBE checkpoint; give the 16-bit model it was made from")
    with checkpoint.writing(out) as partial:
        loaded = load_model(path, progress=progress)
        with quiet():
            loaded.model.save_pretrained(partial)
            loaded.tokenizer.save_pretrained(partial)
        folds = smooth_model(loaded.model, loaded.tokenizer, config, progress=progress)
        nest_model(loaded.model, name, config, progress=progress)
        checkpoint.write_nested(partial, loaded.model, name, folds=folds)
        del loaded
        if measure:
            measure_into(partial, path, name, device, progress=progress)
    return out


@contextmanager
def bar(what: str, total: int, show: bool) -> Iterator[Callable[[], None]]:
    """A progress bar on standard error; yields the function that advances it by one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
