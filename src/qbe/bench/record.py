"""The best numbers of each benchmark by machine: what a new report is set against, and which only go up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qbe.bench.report import COUNT, HIGHER_IS_BETTER, BenchmarkReport, Row
from qbe.errors import QBEError
from qbe.files import reason, write_text

VERSION = 1
Entry = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """A row of a report whose quartiles do not meet those of its record.

    Attributes:
        of: `ratio` to a peer, which a slow moment of the machine changes least, or the unit of our own value.
        before, now: [median, lower quartile, upper quartile].
        better: whether it went up.
    """

    row: Row
    of: str
    before: tuple[float, float, float]
    now: tuple[float, float, float]
    better: bool

    @property
    def line(self) -> str:
        """What is said of it."""
        was, found = (f"{m:.3g} ({low:.3g} to {high:.3g})" for m, low, high in (self.before, self.now))
        where = ", ".join(filter(None, (self.row.what, self.row.shape, f"{self.row.shown_bits} bits")))
        beside = f" over {self.row.peer}" if self.of == "ratio" else f" {self.of}"
        return f"{'better' if self.better else 'worse'}: {where}: {found}{beside}, was {was}"


class Record:
    """A file with the best numbers: machine -> benchmark -> row -> values, when they were measured and by what version.

    Args:
        machines: as the file has it.
    """

    def __init__(self, machines: Mapping[str, dict[str, dict[str, Entry]]] | None = None) -> None:
        self.machines = {name: {b: dict(rows) for b, rows in of.items()} for name, of in (machines or {}).items()}

    @classmethod
    def read(cls, path: Path) -> Record:
        """Raises QBEError for a file that is not there, or no record."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise QBEError(f"the record '{path}' cannot be read: {reason(error)}; --record {path} begins one") from None
        except ValueError:
            found = None
        if (
            not isinstance(found, dict)
            or found.get("version") != VERSION
            or not isinstance(found.get("machines"), dict)
        ):
            raise QBEError(
                f"'{path}' is no record of benchmarks of version {VERSION}; --record begins one in a new file"
            )
        return cls(found["machines"])

    def write(self, path: Path) -> None:
        """All of it or nothing. Raises QBEError when the disk refuses."""
        described = {"version": VERSION, "machines": self.machines}
        write_text(path, json.dumps(described, indent=1, sort_keys=True, allow_nan=False) + "\n")

    def changes(self, report: BenchmarkReport) -> list[Change]:
        """Rows that are better or worse than here, beyond both spreads of quartiles."""
        return [c for row in report.rows if (c := _change(self._rows(report).get(key_of(row)), row)) is not None]

    def known(self, report: BenchmarkReport) -> int:
        """How many rows of the report are here."""
        return sum(key_of(row) in self._rows(report) for row in report.rows)

    def take(self, report: BenchmarkReport) -> None:
        """Takes over what is new, and what is better than here. What got worse is not forgotten: it stays."""
        rows = self.machines.setdefault(machine_of(report), {}).setdefault(report.benchmark, {})
        better = {key_of(c.row) for c in self.changes(report) if c.better}
        versions = report.hardware["versions"]
        for row in report.rows:
            key, found = key_of(row), values(row)
            if found is not None and (key not in rows or key in better):
                of, numbers = found
                rows[key] = {
                    "of": of, "values": list(numbers), "started": report.conditions["started"],
                    "qbe": versions["qbe"], "torch": versions["torch"],
                }  # fmt: skip

    def _rows(self, report: BenchmarkReport) -> dict[str, Entry]:
        return self.machines.get(machine_of(report), {}).get(report.benchmark, {})


def machine_of(report: BenchmarkReport) -> str:
    """A card's name; a processor's with the threads that ran."""
    machine = report.hardware
    return machine["device"] if machine["kind"] == "cuda" else f"{machine['device']}, {machine['threads']} threads"


def key_of(row: Row) -> str:
    """What is compared with what: the work, its shape and bits, and whom it is set beside."""
    return " | ".join((row.what, row.shape, row.shown_bits, row.peer, row.unit))


def values(row: Row) -> tuple[str, tuple[float, float, float]] | None:
    """What is kept of a row: median and quartiles of the ratio, without a peer those of our value; None: of neither."""
    if row.ours is None or row.unit == COUNT:
        return None
    if row.ratio is not None and row.ratio_spread is not None:
        return "ratio", (row.ratio, *row.ratio_spread)
    return row.unit, (row.ours.median, row.ours.low, row.ours.high)


def _change(before: Entry | None, row: Row) -> Change | None:
    found = values(row)
    if before is None or found is None or found[0] != before["of"]:
        return None
    of, now = found
    was = tuple(before["values"])
    higher = of == "ratio" or of in HIGHER_IS_BETTER
    if now[1] > was[2]:
        return Change(row, of, was, now, better=higher)
    if now[2] < was[1]:
        return Change(row, of, was, now, better=not higher)
    return None
