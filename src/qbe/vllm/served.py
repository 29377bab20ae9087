"""What QBE knows of a model that vLLM serves, read from its folder: its sites and, where there is one, its store."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

from qbe.errors import QBEError
from qbe.models.folder_weights import lazy_state_dict
from qbe.models.load import load_skeleton
from qbe.sites import SiteTable
from qbe.store import checkpoint, provenance, sensitivity_table
from qbe.store.checkpoint import Manifest
from qbe.store.measure import with_stored
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.nesting import nest_skeleton

TRUST = "QBE_TRUST"  # a variable: vLLM reads the folder before its own options are there

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """A model that vLLM serves with QBE. It travels to every worker.

    Attributes:
        name: what the caller called it.
        folder: where its files are.
        table: its sites; the order of the nested ones is that of the plan's rows.
        nesting: layout of the store.
        manifest: of the store that `qbe quantize` wrote; None for a checkpoint that is nested while it is loaded.
    """

    name: str
    folder: Path
    table: SiteTable
    nesting: NestedWeightConfig
    manifest: Manifest | None


def describe(name: str, revision: str | None = None) -> ServedModel:
    """Reads what there is to know of a model before its weights are.

    Args:
        name: a folder, or a hub id (which is downloaded, as vLLM would).

    Raises:
        QBEError: a folder without config, one with a changed file, or a model with nothing to nest.
    """
    folder = Path(name) if Path(name).is_dir() else _download(name, revision)
    trusted = os.environ.get(TRUST) == "1"
    try:
        made = None if trusted else provenance.check(folder)
    except QBEError as error:
        raise QBEError(re.sub("--trust of [^;]* takes", f"{TRUST}=1 takes", str(error))) from error
    manifest = checkpoint.read_manifest(folder) if checkpoint.is_checkpoint(folder) else None
    if manifest is None and (left := next(iter(sorted(folder.glob("nested-*.safetensors"))), None)):
        raise QBEError(f"{folder} is damaged: it has {left.name}, but no {checkpoint.MANIFEST}; {checkpoint.AGAIN}")
    if manifest is not None:
        lazy_state_dict(folder)  # vLLM counts the nested files as weights, and would start with these alone
    nesting = NestedWeightConfig()
    if manifest is not None:
        nesting = NestedWeightConfig(manifest.group_size, manifest.slices)
    sites = None if manifest is None else manifest.sites.keys()
    table = nest_skeleton(load_skeleton(folder), name, nesting, sites)
    if manifest is not None:
        if made is None and not trusted:  # a folder of an older QBE
            checkpoint.verify(folder)
        measured = sensitivity_table.read(folder)
        if measured is not None:
            table = with_stored(table, measured, folder)
        else:
            log.warning(
                "%s has no %s, so that requests are served at the same bits in every layer (policy 'uniform'): "
                "'qbe quantize' writes a folder with one", folder, sensitivity_table.NAME,
            )  # fmt: skip
    return ServedModel(name, folder, table, nesting, manifest)


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            name, revision=revision, allow_patterns=["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"]
        )
    )
