"""Measuring what lower precision costs a model with a nested store, for policies to choose by: weights, activations
(`qbe.store.sensitivity`) and KV cache (`qbe.store.kv_sensitivity`), on a text."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qbe.errors import QBEError
from qbe.hardware import free_memory
from qbe.models import load_model
from qbe.models.gguf_split import part_files
from qbe.progress import bar
from qbe.sites import KVSite, SiteTable, TextDifficulty
from qbe.store import checkpoint, expert_use, kv_sensitivity, kv_table, sensitivity, sensitivity_table
from qbe.store.allocation_check import checked
from qbe.store.calibration_text import CalibrationText, built_in
from qbe.store.expert_use import with_use
from qbe.store.native_products import measure_native
from qbe.store.nesting import with_store
from qbe.store.placement import place
from qbe.store.sensitivity import Sensitivity
from qbe.tagger import tag

# Of the segments that estimates read: a pass for each site and gear takes long enough with these. One of each kind of
# the built-in text.
SEGMENTS = 8


def measure_into(
    folder: Path, path: Path, name: str, device: torch.device, text: CalibrationText | None = None,
    check: bool = False, *, progress: bool,
) -> Sensitivity:  # fmt: skip
    """Measures the sensitivities of the model at `path` with the store in `folder`, and writes them there.

    Those of weights stay as they are where they were measured before: then it is the KV cache's that are outdated.
    In float32 when that fits into memory: the rounding of a bfloat16 pass is larger than what 8 bits do to one site.

    Args:
        check: check what is measured, and correct it (`qbe.store.allocation_check`).
    """
    loaded = load_model(path, dtype="float32" if _fits_in_float32(path, device) else "auto", progress=progress)
    table = tag(loaded.model, name=name)
    checkpoint.attach(loaded.model, folder)
    table = with_store(table, loaded.model)
    place(loaded.model, device, "device")
    about = {"text": (text or built_in()).title, "dtype": str(loaded.dtype)}
    kv = measure_kv(loaded.model, loaded.tokenizer, table, text, progress=progress)
    kv_table.write(folder, kv, about)
    measured = sensitivity_table.read(folder)
    if measured is None:
        measured = measure_model(loaded.model, loaded.tokenizer, table, text, progress=progress)
        if check:
            table = with_use(table, expert_use.read(folder))
            measured = checked(loaded.model, loaded.tokenizer, table, measured, device, text, progress=progress)
        sensitivity_table.write(folder, measured, about)  # last: where it is, both are
    return measured


def measure_model(
    model: nn.Module, tokenizer: Any, table: SiteTable, text: CalibrationText | None = None, *, progress: bool
) -> Sensitivity:
    """What `qbe.store.sensitivity` measures, on a text (None: the built-in one), with a progress bar."""
    tokens = (text or built_in()).sensitivity(tokenizer, model)[:SEGMENTS]
    eight = [s for s in table.nested if len(s.activation_gears) > 1]
    passes = len(table.nested) + len(eight) + sum(s.expert is None for s in eight)
    with bar("measuring sensitivity", passes, progress) as step:
        return Sensitivity(
            sensitivity.measure(model, table, tokens, lambda _: step()),
            sensitivity.measure_activations(model, table, tokens, lambda _: step()),
            sensitivity.difficult_entropy(model, table, tokens),
            measure_native(model, table, tokens, lambda _: step()),
            measure_text(model, tokenizer, table, text),
        )


def with_stored(table: SiteTable, measured: Sensitivity, folder: Path) -> SiteTable:
    """The table with what was measured of the store in a folder.

    Raises:
        QBEError: it is of another store, or damaged.
    """
    for site in table.nested:
        if not set(site.gears) <= set(measured.weights.get(site.name, {})):
            raise QBEError(f"the sensitivities in {folder} lack {site.name}; delete {sensitivity_table.NAME} there")
    return with_measured(table, measured)


def with_measured(table: SiteTable, measured: Sensitivity) -> SiteTable:
    """The table with what was measured."""
    table = table.with_sensitivity(measured.weights, measured.activations, measured.native)
    return replace(table, difficult_entropy=measured.difficult_entropy, text=measured.text)


def measure_kv(
    model: nn.Module, tokenizer: Any, table: SiteTable, text: CalibrationText | None = None, *, progress: bool
) -> tuple[KVSite, ...]:
    """`qbe.store.kv_sensitivity.measure` on a text (None: the built-in one), with a progress bar."""
    tokens = (text or built_in()).kv(tokenizer, model)
    with bar("measuring KV sensitivity", table.layers, progress) as step:
        return kv_sensitivity.measure(model, table, tokens, step)


@torch.inference_mode()
def measure_text(
    model: nn.Module, tokenizer: Any, table: SiteTable | None = None, text: CalibrationText | None = None
) -> TextDifficulty | None:
    """How hard a text (None: the built-in one) is to predict, from one forward pass, for the refreshes of answers
    (`qbe.refresh`).

    Args:
        table: of nested sites that are read at 16 bits meanwhile; None: at what they are set to.
    """
    tokens = (text or built_in()).kv(tokenizer, model)
    with nullcontext() if table is None else sensitivity.full_bits(model, table):
        logits = sensitivity.logits_of(model, tokens.to(next(model.parameters()).device))
    return sensitivity.text_difficulty(logits)


def _fits_in_float32(path: Path, device: torch.device) -> bool:
    files = path.iterdir() if path.is_dir() else part_files(path)
    stored = sum(f.stat().st_size for f in files if f.suffix in (".safetensors", ".gguf"))
    needed = stored * (8 if path.suffix == ".gguf" else 2.5)  # a 4-bit file grows eightfold, a 16-bit one doubles
    return needed < free_memory(device) * 0.8
