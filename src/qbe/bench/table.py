"""A report on the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from qbe.bench.report import PAIRED, BenchmarkReport, Row


def render(report: BenchmarkReport) -> RenderableType:
    """Machine and conditions, then a line per row; what is missing and the notes stand below."""
    machine = report.hardware
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items() if v is not None)
    table = Table(box=None, padding=(0, 1, 0, 0), title_justify="left")
    table.add_column("what", overflow="fold")
    table.add_column("shape", overflow="fold")
    table.add_column("bits", justify="right")
    for column in ("QBE", "peer's"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("peer", overflow="fold")
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("limit", justify="right", no_wrap=True)
    notes: dict[str, None] = {}  # in order, each once
    last: dict[str, None] = {}
    previous: Row | None = None
    for row in report.rows:
        same = previous is not None and previous.work == row.work
        described = row.describe()
        table.add_row(
            "" if same else row.what, "" if same else row.shape, "" if same else row.shown_bits,
            "" if same else _value(described["ours"], described["spread"], row.unit),
            _value(described["peer_value"], described["peer_spread"], row.unit), row.peer,
            _ratio(row), "" if row.limit_ratio is None else Text(f"{row.limit_ratio:.2f}", style="dim"),
        )  # fmt: skip
        if row.added is not None:
            added = f"{row.added.median:.1f} {row.unit} ({row.added.low:.1f} to {row.added.high:.1f})"
            notes[f"{row.what}, {row.shape}: a change adds {added}"] = None
            last[f"Added: {PAIRED}."] = None
        if described["note"]:
            notes[f"{row.peer}: {described['note']}"] = None
        previous = row
    rate, load = machine["copy_bandwidth_bytes_per_s"], machine["load_average"]
    return Group(
        Text(f"qbe bench {report.benchmark}: {machine['device']}, {machine['threads']} threads", style="bold"),
        Text(f"copies {rate / 1e9:.0f} GB/s, load {load[0]:.2f}; {versions}", style="dim"),
        table,
        *(Text(note, style="dim") for note in (*notes, *last)),
        Text("Medians, half the quartiles' distance after ±. Ratio: above 1 QBE is better, uncoloured within "
             "the quartiles. Limit: the ratio QBE would "
             "have at the measured copy bandwidth (or matrix rate, where that binds).", style="dim"),
    )  # fmt: skip


def _value(median: float | None, spread: list[float] | None, unit: str) -> Text:
    if median is None or spread is None:
        return Text("missing", style="yellow")
    half = 50 * (spread[1] - spread[0]) / median if median else 0.0
    shown = f"{median:.3g}" if median < 100 else f"{median:,.0f}"
    return Text(f"{shown} {unit.replace('tokens/s', 'tok/s')} ±{half:.0f}%")


def _ratio(row: Row) -> Text:
    if row.ratio is None:
        return Text("-", style="dim")
    return Text(f"{row.ratio:.2f}", style={None: "", True: "green", False: "red"}[row.better])
