"""The file with the measured key heads of a model (`qbe.store.kv_sensitivity`), beside its nested store."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qbe.errors import QBEError
from qbe.sites import KV_BITS, KVSite
from qbe.store.provenance import write_beside

NAME = "kv_sensitivity.json"
VERSION = 3  # of what is measured; to be raised when pages of the same bits come to hold other numbers


def write(folder: Path, sites: Sequence[KVSite], about: Mapping[str, Any]) -> None:
    """Writes what was measured beside the store, atomically. Raises QBEError when the disk refuses."""
    heads = [
        {
            "layer": s.layer, "head": s.head, "query_heads": s.query_heads, "numbers": s.numbers,
            "kl": {str(b): float(f"{kl:.6g}") for b, kl in s.sensitivity.items()},
            "entropy": None if s.entropy is None else [round(x, 6) for x in s.entropy],
        }
        for s in sites
    ]  # fmt: skip
    described = {"version": VERSION, "about": dict(about), "heads": heads}
    write_beside(folder, NAME, json.dumps(described, indent=1) + "\n")


def outdated(folder: Path) -> bool:
    """Whether a checkpoint's key heads were measured in another version, and may be measured again in its folder."""
    try:
        version = json.loads((folder / NAME).read_text())["version"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False  # there is none, or `read` will say what is wrong with it
    return bool(version != VERSION) and os.access(folder, os.W_OK)


def read(folder: Path) -> tuple[KVSite, ...]:
    """The key heads of a checkpoint; none where they were not measured, or in another version.

    Raises:
        QBEError: the file is damaged.
    """
    path = folder / NAME
    if not path.is_file():
        return ()
    try:
        raw = json.loads(path.read_text())
        if raw["version"] != VERSION:
            return ()
        sites = tuple(
            KVSite(
                int(h["layer"]), int(h["head"]), int(h["query_heads"]), int(h["numbers"]),
                {int(b): float(kl) for b, kl in h["kl"].items()},
                None if h["entropy"] is None else (float(h["entropy"][0]), float(h["entropy"][1])),
            )
            for h in raw["heads"]
        )  # fmt: skip
        for s in sites:
            if set(s.sensitivity) != set(KV_BITS) or not all(map(math.isfinite, s.sensitivity.values())):
                raise ValueError(f"layer {s.layer}, head {s.head} lacks a finite number for each of {KV_BITS} bits")
        return sites
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise QBEError(f"{path} is damaged ({error!r}); delete it, and KV bits follow plain rules") from error
