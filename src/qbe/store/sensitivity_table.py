"""The file with the measured sites of a model (`qbe.store.sensitivity`), beside its nested store."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qbe.errors import QBEError
from qbe.sites import TextDifficulty
from qbe.store.checked import AllocationCheck
from qbe.store.provenance import write_beside
from qbe.store.sensitivity import Sensitivity

NAME = "sensitivity.json"


def write(folder: Path, measured: Sensitivity, about: Mapping[str, Any]) -> None:
    """Writes what was measured beside the store, atomically. Raises QBEError when the disk refuses."""
    tables = {
        "about": dict(about),
        "kl": _rounded(measured.weights),
        "activations": _rounded(measured.activations),
        "difficult_entropy": measured.difficult_entropy,
        "native": _rounded(measured.native),
    }
    if measured.text is not None:
        tables["text"] = asdict(measured.text)
    if measured.check is not None:
        tables["check"] = measured.check.describe()
    write_beside(folder, NAME, json.dumps(tables, indent=1) + "\n")


def add_text(folder: Path, text: TextDifficulty) -> None:
    """Adds how hard the built-in text is to a table without it. Raises QBEError when the disk refuses."""
    tables = json.loads((folder / NAME).read_text())
    write_beside(folder, NAME, json.dumps({**tables, "text": asdict(text)}, indent=1) + "\n")


def add_check(folder: Path, checked: Sensitivity) -> None:
    """Replaces the sensitivities of weights by corrected ones, and adds the check. Raises QBEError when the disk
    refuses."""
    assert checked.check is not None
    tables = json.loads((folder / NAME).read_text())
    new = {"kl": _rounded(checked.weights), "check": checked.check.describe()}
    write_beside(folder, NAME, json.dumps({**tables, **new}, indent=1) + "\n")


def estimated(folder: Path) -> bool:
    """Whether what is beside the store was estimated from gradients rather than measured."""
    try:
        return "estimated" in json.loads((folder / NAME).read_text())["about"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _rounded(measured: Mapping[str, Mapping[Any, float]]) -> dict[str, dict[str, float]]:
    return {name: {str(g): float(f"{kl:.6g}") for g, kl in gears.items()} for name, gears in measured.items()}


def read(folder: Path) -> Sensitivity | None:
    """What was measured of a checkpoint; None when nothing was. Older folders lack the check, the text's difficulty,
    native products, or all but weights.

    Raises:
        QBEError: the file is damaged.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text())
        weights, activations = (
            {str(n): {int(g): float(kl) for g, kl in gears.items()} for n, gears in table.items()}
            for table in (raw["kl"], raw.get("activations", {}))
        )
        native = {str(n): {str(f): float(kl) for f, kl in of.items()} for n, of in raw.get("native", {}).items()}
        entropy = raw.get("difficult_entropy")
        entropy = None if entropy is None else float(entropy)
        text = None
        if raw.get("text") is not None:
            text = TextDifficulty(*(tuple(map(float, raw["text"][name])) for name in ("entropies", "margins")))
        numbers = [kl for table in (weights, activations, native) for of in table.values() for kl in of.values()]
        told = () if text is None else (*text.entropies, *text.margins)
        if not all(map(math.isfinite, [*numbers, entropy or 0.0, *told])):
            raise ValueError("a value is not a finite number")
        if text is not None and len(text.entropies) != len(text.margins):
            raise ValueError("the text has fewer margins than entropies, or more")
        check = None if raw.get("check") is None else AllocationCheck.read(raw["check"])
        return Sensitivity(weights, activations, entropy, native, text, check)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise QBEError(f"{path} is damaged ({error!r}); delete it, and it is measured again") from error
