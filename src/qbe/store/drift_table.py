"""The file with the profiled drift of recurrent states (`qbe.store.state_drift`), beside the nested store."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qbe.errors import QBEError
from qbe.sites import STATE_BITS, STATE_FULL_BITS, SiteTable
from qbe.store.drift_curve import Profile, StateProfile, Stretches
from qbe.store.provenance import write_beside

NAME = "state_drift.json"
VERSION = 1  # of what is measured, and of how floors follow from it


def write(folder: Path, profile: Profile | None, about: Mapping[str, Any]) -> None:
    """Writes a profile beside the store, atomically; nothing without one. Raises QBEError when the disk refuses."""
    if profile is not None:
        described = {"version": VERSION, "about": dict(about), **describe(profile)}
        write_beside(folder, NAME, json.dumps(described, indent=1) + "\n")


def describe(profile: Profile) -> dict[str, Any]:
    """The profile as JSON."""
    return {
        "context": profile.context,
        "windows": profile.windows,
        "ends": list(profile.ends),
        "bound": profile.bound,
        "states": [
            {
                "name": s.name, "layer": s.layer, "floor": s.floor,
                "gears": {
                    str(gear): {
                        "kl": _rounded(of.kl), "error": _rounded(of.error), "predicted": _six(s.predicted[gear])
                    }
                    for gear, of in s.gears.items()
                },
            }
            for s in profile.states
        ],
    }  # fmt: skip


def _six(x: float) -> float:
    return float(f"{x:.6g}")


def _rounded(values: Sequence[float]) -> list[float]:
    return list(map(_six, values))


def read(folder: Path) -> Profile | None:
    """The profile of a checkpoint; None where there is none, or one of another version.

    Raises:
        QBEError: the file is damaged.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text())
        if raw["version"] != VERSION:
            return None
        states = tuple(_state(s) for s in raw["states"])
        ends = tuple(map(int, raw["ends"]))
        profile = Profile(int(raw["context"]), int(raw["windows"]), ends, float(raw["bound"]), states)
        for s in states:
            numbers = [x for of in s.gears.values() for x in (*of.kl, *of.error)] + list(s.predicted.values())
            if s.floor not in STATE_BITS or set(s.gears) != set(STATE_BITS) - {STATE_FULL_BITS}:
                raise ValueError(f"{s.name} lacks a gear, or a floor that there is")
            if not all(map(math.isfinite, numbers)) or {len(of.kl) for of in s.gears.values()} != {len(profile.ends)}:
                raise ValueError(f"{s.name} lacks a finite number for each stretch")
        return profile
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise QBEError(f"{path} is damaged ({error!r}); quantise the model again") from error


def _state(raw: Mapping[str, Any]) -> StateProfile:
    gears = {
        int(gear): Stretches(tuple(map(float, of["kl"])), tuple(map(float, of["error"])))
        for gear, of in raw["gears"].items()
    }
    predicted = {int(gear): float(of["predicted"]) for gear, of in raw["gears"].items()}
    return StateProfile(str(raw["name"]), int(raw["layer"]), gears, predicted, int(raw["floor"]))


def with_floors(table: SiteTable, profile: Profile | None) -> SiteTable:
    """The table whose recurrent states have the floors of a profile."""
    if profile is None:
        return table
    floors = {s.name: s.floor for s in profile.states}
    sites = (replace(site, state_floor=floors[site.name]) if site.name in floors else site for site in table)
    return replace(table, sites=tuple(sites))
