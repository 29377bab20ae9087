"""What was found out about known models comes with the package: `measured/`, a folder for each.

A folder is named by a digest of the model's 16-bit weights and of the layout of its store. It holds the folds that the
model is nested with, and the sensitivities that were measured of that store, checked (`qbe.store.allocation_check`).
All of it would take minutes; and a search for folds ends a little differently on processors that round differently, so
that codes would, too.

To renew a folder, delete it here, quantise the model with `--measure`, and copy its three files from the folder that
this made into one that is named as `digest` says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from qbe.store import kv_table, sensitivity_table
from qbe.store.checkpoint import SMOOTHING
from qbe.store.folding import Edge, Fold
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.provenance import write_beside
from qbe.store.sensitivity import Sensitivity

MEASURED = Path(__file__).with_name("measured")
VERSION = 1  # of the rounding; to be raised, and all folders renewed, when the same weights come to other codes


def find(model: nn.Module, config: NestedWeightConfig) -> str | None:
    """The name of the folder of a model that is about to be nested, with its weights as they were loaded.

    Returns:
        None where nothing is known of it.
    """
    if not any(_fits(file, model) for file in MEASURED.glob(f"*/{SMOOTHING}")):
        return None  # reading all weights would be in vain
    name = digest(model, config)
    return name if (MEASURED / name).is_dir() else None


def _fits(file: Path, model: nn.Module) -> bool:
    """Whether the model has the modules that these folds are of."""
    sizes = {n: t.shape[0] for n, t in model.named_parameters() if t.dim() and not t.is_meta}
    with safe_open(file, framework="pt") as stored:
        return all(sizes.get(f"{name}.weight") == stored.get_slice(name).get_shape()[0] for name in stored.keys())  # noqa: SIM118


def digest(model: nn.Module, config: NestedWeightConfig) -> str:
    """Of all weights, as bfloat16 has them, and of what else codes depend on."""
    found = hashlib.sha256(repr((VERSION, config.slices, config.group_size)).encode())
    for name, tensor in sorted(model.named_parameters()):
        found.update(f"{name} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def folds(name: str, places: Sequence[Edge]) -> list[Fold]:
    """The known folds among these places."""
    with safe_open(MEASURED / name / SMOOTHING, framework="pt") as stored:
        sources = set(stored.keys())
        return [Fold(source, users, stored.get_tensor(source)) for source, users in places if source in sources]


def read(name: str) -> tuple[Sensitivity, tuple[kv_table.KVSite, ...]] | None:
    """What was measured of a known model; None if pages hold other numbers since."""
    weights, kv = sensitivity_table.read(MEASURED / name), kv_table.read(MEASURED / name)
    return (weights, kv) if weights is not None and kv else None


def bring(folder: Path, name: str | None) -> bool:
    """Puts the tables of a known model beside its store in `folder`; whether there were any.

    Raises:
        QBEError: the disk refuses.
    """
    if name is None or Path(name).name != name or read(name) is None:
        return False
    for file in (kv_table.NAME, sensitivity_table.NAME):  # as `measure_into`: where the last one is, both are
        write_beside(folder, file, (MEASURED / name / file).read_text())
    return True
