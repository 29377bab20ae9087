"""The checkpoint folder that `qbe quantize` writes: an ordinary transformers folder and, beside it, the nested store.

    config.json, tokenizer files, model*.safetensors    the 16-bit model; transformers alone loads the folder as that
    nested-00001-of-0000N.safetensors                   `<site>.packed` and `<site>.meta` of every nested site; those of
                                                        a layer's experts together, `[experts, ...]`
    smoothing.safetensors                               exponents of the folds that the codes were made with
    qbe.json                                            format version, slices, group size, sites, folds, checksums
    expert_use.json                                     how often each expert is used (`qbe.store.expert_use`)
    sensitivity.json                                    measured KL per site and gear (`qbe.store.sensitivity_table`)
    kv_sensitivity.json                                 the same per key head and bits (`qbe.store.kv_table`)
    state_drift.json                                    drift and floors of recurrent states (`qbe.store.drift_table`)
    provenance.json                                     digests of all of these, and of what they were made from
                                                        (`qbe.store.provenance`)

A folder is written under a temporary name beside its target (`qbe.store.draft`). Loading maps the files. The 16-bit
weights are the checkpoint's own; folds (`qbe.store.folding`) are applied when they have been loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from qbe.errors import QBEError
from qbe.format.layout import SliceLayout, check_group_size, padded
from qbe.sites import FULL_BITS
from qbe.store.experts import ExpertLayer, expert_layers, install, nested_experts
from qbe.store.folder import AGAIN, MANIFEST
from qbe.store.folding import Fold, apply, load_folds, save_folds
from qbe.store.nest_experts import originals_of
from qbe.store.nested_experts import NestedExperts
from qbe.store.nested_linears import nested_linears, set_weight
from qbe.store.nested_tensor import NestedTensor

FORMAT = "qbe-nested"
FORMAT_VERSION = 3
READABLE = (1, 2, 3)  # 1 has no folds, 2 no experts; what has none is still written as 2
SMOOTHING = "smoothing.safetensors"
SHARD_BYTES = 2_000_000_000  # one is hashed while the next is written


@dataclass(frozen=True)
class NestedSite:
    """One nested matrix of a checkpoint, as the manifest lists it."""

    file: str
    shape: tuple[int, int]
    exponent: int


@dataclass(frozen=True)
class NestedStack:
    """One nested matrix of all experts of a layer, likewise; shape is [E, N, K]."""

    file: str
    shape: tuple[int, int, int]
    exponents: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """The checked content of `qbe.json`."""

    model_name: str
    group_size: int
    slices: tuple[int, ...]
    sites: dict[str, NestedSite]
    files: dict[str, dict[str, Any]]
    folds: dict[str, tuple[str, ...]]
    known_as: str | None = None
    experts: dict[str, NestedStack] = field(default_factory=dict)


def is_checkpoint(path: Path) -> bool:
    """Whether the folder holds a nested store."""
    return (path / MANIFEST).is_file()


def write_nested(
    folder: Path,
    model: nn.Module,
    model_name: str,
    source: Mapping[str, Any] | None = None,
    folds: Sequence[Fold] = (),
    known_as: str | None = None,
) -> None:
    """Writes the nested tensors of `model` and the manifest into a folder that already holds the 16-bit model.

    Args:
        folds: what the weights were scaled by before they were nested; the folder's own model is not.
        source: of a store in the cache, what it was made from (`qbe.store.superseded`).
        known_as: which of the package's measurements are of this store (`qbe.store.known`).
    """
    nested: dict[str, NestedTensor | NestedExperts] = {name: weight for name, _, weight in nested_linears(model)}
    nested |= dict(nested_experts(model))
    if not nested:
        raise QBEError(f"{model_name} has no linear layer that can be nested; there is nothing to write")
    shards: list[list[str]] = [[]]
    size = 0
    for name, weight in nested.items():
        if size and size + weight.nested_bytes() > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += weight.nested_bytes()

    sites: dict[str, dict[str, Any]] = {}
    experts: dict[str, dict[str, Any]] = {}
    files: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(1) as pool:
        hashes: dict[str, Future[str]] = {}
        for i, names in enumerate(shards, 1):
            file = f"nested-{i:05d}-of-{len(shards):05d}.safetensors"
            tensors: dict[str, torch.Tensor] = {}
            for name in names:
                one = nested[name]
                tensors[f"{name}.meta"] = one.meta.cpu().contiguous()
                if isinstance(one, NestedTensor):
                    tensors[f"{name}.packed"] = one.canonical_packed().cpu().contiguous()
                    sites[name] = {"file": file, "shape": list(one.shape), "exponent": one.exponent}
                else:
                    tensors[f"{name}.packed"] = one.packed.cpu().contiguous()
                    experts[name] = {"file": file, "shape": list(one.shape), "exponents": one.exponents.tolist()}
            save_file(tensors, folder / file, metadata={"format": "pt"})
            hashes[file] = pool.submit(sha256, folder / file)
        for file, found in hashes.items():
            files[file] = {"bytes": (folder / file).stat().st_size, "sha256": found.result()}
    if folds:
        save_folds(folder / SMOOTHING, folds)
        files[SMOOTHING] = {"bytes": (folder / SMOOTHING).stat().st_size, "sha256": sha256(folder / SMOOTHING)}
    first = next(iter(nested.values()))
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION if experts else 2,
        "model": model_name,
        "group_size": first.group_size,
        "slices": list(first.slices),
        **({"source": dict(source)} if source is not None else {}),
        **({"known_as": known_as} if known_as is not None else {}),
        "files": files,
        "sites": sites,
        **({"experts": experts} if experts else {}),
        "folds": {f.source: list(f.consumers) for f in folds},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def identity(manifest: Manifest) -> str:
    """32 hex digits of a store's codes, wherever its folder lies; what is learned of it since does not change them."""
    sums = sorted((name, str(facts.get("sha256"))) for name, facts in manifest.files.items())
    return hashlib.blake2b(repr(sums).encode(), digest_size=16).hexdigest()


def sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks `qbe.json` and the sizes of the files it names.

    Raises:
        QBEError: missing, damaged or of another format version; a nested file missing or of another size.
    """
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise QBEError(f"{path} cannot be read ({error}); {AGAIN}") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise QBEError(f"{path} does not describe a QBE checkpoint; {AGAIN}")
    if raw.get("format_version") not in READABLE:
        raise QBEError(
            f"{folder} was written in format version {raw.get('format_version')}, this QBE reads up to version "
            f"{FORMAT_VERSION}; {AGAIN} or install a matching qbe"
        )
    try:
        sites = {
            name: NestedSite(s["file"], (int(s["shape"][0]), int(s["shape"][1])), int(s["exponent"]))
            for name, s in raw["sites"].items()
        }
        manifest = Manifest(
            str(raw["model"]),
            int(raw["group_size"]),
            tuple(map(int, _list(raw["slices"]))),
            sites,
            dict(raw["files"]),
            {str(source): tuple(map(str, _list(names))) for source, names in raw.get("folds", {}).items()},
            str(raw["known_as"]) if "known_as" in raw else None,
            {str(name): _stack(s) for name, s in raw.get("experts", {}).items()},
        )
        check_group_size(manifest.group_size)
        SliceLayout.of(manifest.slices)
        if not all(0 < s.exponent < 240 and min(s.shape) > 0 for s in sites.values()):
            raise ValueError("a site's exponent or shape is out of range")
        for stack in manifest.experts.values():
            if (
                len(stack.exponents) != stack.shape[0]
                or min(stack.shape) < 1
                or not all(0 < x < 240 for x in stack.exponents)
            ):
                raise ValueError("experts' exponents or shape are out of range")
        for file, facts in manifest.files.items():
            if Path(file).name != file:
                raise ValueError(f"'{file}' is not a plain file name")
            if not (folder / file).is_file():
                raise QBEError(f"{folder / file} is missing; {AGAIN}")
            have = (folder / file).stat().st_size
            if have != facts["bytes"]:
                raise QBEError(f"{folder / file} is damaged: it has {have} bytes instead of {facts['bytes']}; {AGAIN}")
        listed = {s.file for s in sites.values()} | {s.file for s in manifest.experts.values()}
        if not listed <= set(manifest.files):
            raise ValueError("a site lies in a file that is not listed")
        if manifest.folds and SMOOTHING not in manifest.files:
            raise ValueError(f"it has folds, but no {SMOOTHING}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise QBEError(f"{path} is damaged ({error!r}); {AGAIN}") from error
    return manifest


def _stack(raw: Mapping[str, Any]) -> NestedStack:
    experts, outputs, inputs = map(int, _list(raw["shape"]))
    return NestedStack(str(raw["file"]), (experts, outputs, inputs), tuple(map(int, _list(raw["exponents"]))))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is not a list")
    return value


def verify(folder: Path) -> None:
    """Compares the checksums of the nested files. Raises QBEError at the first that differs."""
    for file, facts in read_manifest(folder).files.items():
        if sha256(folder / file) != facts["sha256"]:
            raise QBEError(f"{folder / file} is damaged: its checksum differs; {AGAIN}")


def attach(model: nn.Module, folder: Path, *, keep_original: bool = True) -> Manifest:
    """Replaces the weights of the sites that a checkpoint nests by mapped NestedTensors.

    The model's own weights are scaled in place by the folds of the checkpoint; it still computes the same.

    Args:
        model: the 16-bit model of the same folder.
        keep_original: keep the 16-bit weights as gear 16; else nobody reads those of nested sites.

    Raises:
        QBEError: a damaged file, or one that does not fit the model.
    """
    manifest = read_manifest(folder)
    layout = SliceLayout.of(manifest.slices)
    modules = dict(model.named_modules())
    folds = load_folds(folder / SMOOTHING, manifest.folds, model) if manifest.folds else []
    apply(model, folds, without=() if keep_original else manifest.sites)
    layers = {f"{e.name}.{p}": (e, p) for e in expert_layers(model) for p in e.parameters}
    by_file: dict[str, list[str]] = {}
    files = {n: s.file for n, s in manifest.sites.items()} | {n: s.file for n, s in manifest.experts.items()}
    for name, file in files.items():
        by_file.setdefault(file, []).append(name)
    for file, names in by_file.items():
        try:
            with safe_open(folder / file, framework="pt") as stored:
                for name in names:
                    if name in manifest.experts:
                        _attach_experts(layers.get(name), name, manifest, stored, folder / file, keep_original)
                        continue
                    site, module = manifest.sites[name], modules.get(name)
                    if not isinstance(module, nn.Linear) or tuple(module.weight.shape) != site.shape:
                        raise QBEError(f"{folder / file} does not fit the model: {name} is not a {site.shape} linear")
                    packed, meta = _tensors(stored, name, site.shape, manifest, folder / file)
                    weight = module.weight.detach()
                    bits = torch.tensor([FULL_BITS if keep_original else layout.total_bits], dtype=torch.int32)
                    nested = NestedTensor(
                        packed, meta, bits, list(layout.slices), manifest.group_size, site.exponent, site.shape[1],
                        weight.dtype, weight if keep_original else None,
                    )  # fmt: skip
                    set_weight(module, nested)
        except (SafetensorError, OSError) as error:
            raise QBEError(f"{folder / file} is damaged ({error}); {AGAIN}") from error
    return manifest


def _tensors(
    stored: Any, name: str, shape: tuple[int, ...], manifest: Manifest, file: Path
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a matrix [N, K], or of several [E, N, K]. Raises QBEError where they have another shape."""
    layout, (*experts, n, k) = SliceLayout.of(manifest.slices), shape
    kp = padded(k, manifest.group_size)
    packed, meta = stored.get_tensor(f"{name}.packed"), stored.get_tensor(f"{name}.meta")
    wanted = (
        (*experts, layout.total_bits, n * kp // 8),
        (*experts, 2 * len(layout.precisions), n, kp // manifest.group_size),
    )
    if (tuple(packed.shape), tuple(meta.shape)) != wanted or {packed.dtype, meta.dtype} != {torch.uint8}:
        raise QBEError(f"{file} is damaged: {name} has the wrong shape; {AGAIN}")
    return packed, meta


def _attach_experts(
    found: tuple[ExpertLayer, str] | None, name: str, manifest: Manifest, stored: Any, file: Path, keep_original: bool
) -> None:
    stack = manifest.experts[name]
    experts, n, k = stack.shape
    if found is None or (found[0].count, *found[0].weight(found[1], 0).shape) != stack.shape:
        raise QBEError(f"{file} does not fit the model: {name} is no matrix of {experts} experts, {n} by {k}")
    layer, parameter = found
    packed, meta = _tensors(stored, name, stack.shape, manifest, file)
    dtype = layer.weight(parameter, 0).dtype
    exponents = torch.tensor(stack.exponents, dtype=torch.int32)
    original = originals_of(layer, parameter) if keep_original else None
    nested = NestedExperts(packed, meta, exponents, manifest.slices, manifest.group_size, k, dtype, original)
    install(layer, parameter, nested)
