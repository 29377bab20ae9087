"""A report as a picture: a bar per row from 1 to its ratio, the quartiles, and where the physical limit lies.

Rows that know what an action adds have a bar of that time in place of the ratio.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

from qbe.bench.report import COUNT, BenchmarkReport, Row
from qbe.errors import QBEError
from qbe.files import write_bytes

_BETTER, _WORSE, _NOISE, _LIMIT, _FAINT = "#2b6cb0", "#c05621", "#cbd5e0", "#1a202c", "#718096"
_ROW_INCHES = 0.25
_COLUMNS = 3


def check_plot(path: Path, option: str = "--plot") -> None:
    """Raises QBEError when a picture could not be made: told before minutes of measuring, not after."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise QBEError(f"{option} needs matplotlib, which is not installed: pip install 'qbe[bench]'") from None
    if path.suffix.lower() != ".png":
        raise QBEError(f"{option} writes a PNG; give it a name that ends in .png, not '{path}'")


def draw(report: BenchmarkReport, path: Path) -> None:
    """Writes the picture as PNG, all of it or nothing: a panel for each case (batch size, group size).

    Raises:
        QBEError: matplotlib is missing, or the disk refuses.
    """
    check_plot(path)
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    panels: dict[str, list[Row]] = {}
    rows = [r for r in report.rows if r.unit != COUNT]
    for row in rows:
        panels.setdefault(row.case, []).append(row)
    columns = min(_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    tallest = max(map(len, panels.values()))
    size = (8.5 * columns, 1.6 + lines * (1.0 + _ROW_INCHES * tallest))
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    adds = any(r.added is not None for r in rows)
    span = _times(rows) if adds else _ratios(rows)
    for axes, case in zip(grid.flat, [*panels, *[None] * (lines * columns - len(panels))], strict=True):
        if case is None:
            axes.set_axis_off()
        else:
            _panel(axes, case, panels[case], span, tallest)
    machine = report.hardware
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items() if v is not None)
    figure.suptitle(
        f"qbe bench {report.benchmark}: {machine['device']}, {machine['threads']} threads, "
        f"copies {machine['copy_bandwidth_bytes_per_s'] / 1e9:,.0f} GB/s\n{versions}",
        fontsize=9, x=0.01, ha="left",
    )  # fmt: skip
    legend = [
        Line2D([], [], color=_BETTER, linewidth=6, label="takes time off" if adds else "QBE better"),
        Line2D([], [], color=_WORSE, linewidth=6, label="adds time" if adds else "QBE worse"),
        Line2D([], [], color=_NOISE, linewidth=6, label="cannot be told from noise"),
        Line2D([], [], color=_FAINT, linewidth=1.2, label="quartiles"),
    ]
    if any(row.limit_ratio for row in rows):
        label = "QBE at the physical limit, the peer as measured"
        legend.append(
            Line2D([], [], color=_LIMIT, marker="|", linestyle="", markersize=11, markeredgewidth=2.5, label=label)
        )
    figure.legend(handles=legend, loc="outside lower left", ncols=5, fontsize=8, frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_bytes(path, picture.getvalue())


def _panel(axes: Any, case: str, rows: list[Row], span: tuple[float, float], tallest: int) -> None:
    start = 0 if rows[0].added is not None else 1
    for y, row in enumerate(rows):
        if y and row.work != rows[y - 1].work:
            axes.axhline(y - 0.5, color="#e2e8f0", linewidth=0.8, zorder=0)
        color = {None: _FAINT, True: _BETTER, False: _WORSE}[row.better]
        length, ends = row.ratio, row.ratio_spread
        if row.added is not None:
            length, ends = row.added.median, (row.added.low, row.added.high)
        if length is not None and ends is not None:
            bar = _NOISE if row.better is None else color
            axes.barh(y, length - start, left=start, height=0.62, color=bar, zorder=2)
            axes.plot(ends, [y, y], color=_LIMIT, linewidth=1.2, marker="|", markersize=6, zorder=3)
        if row.limit_ratio:
            axes.plot([row.limit_ratio] * 2, [y - 0.42, y + 0.42], color=_LIMIT, linewidth=2.5, zorder=3)
        axes.annotate(_figures(row), (1, y), (6, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                      va="center", fontsize=8, color=color)  # fmt: skip
    axes.axvline(start, color=_LIMIT, linewidth=0.8, zorder=1)
    axes.set_xlim(*span)
    if start:
        _ratio_axis(axes, span)
    else:
        axes.locator_params(axis="x", nbins=6)
    axes.grid(axis="x", color="#edf2f7", zorder=0)
    axes.set_yticks(range(len(rows)), [_label(rows, i) for i in range(len(rows))])
    axes.set_ylim(tallest - 0.4, -0.6)
    axes.tick_params(length=0, labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title(case, fontsize=9, loc="left", fontweight="bold")
    added = f"{rows[0].unit} that a change adds: median of paired differences"
    axes.set_xlabel("times better than the peer" if start else added, fontsize=8)


def _ratio_axis(axes: Any, span: tuple[float, float]) -> None:
    """A logarithmic axis, so that half and twice are equally far from 1."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log")
    axes.set_xlim(*span)
    octaves = range(math.ceil(math.log2(span[0])), math.floor(math.log2(span[1])) + 1)
    ticks = [i for i in octaves if i % (1 + len(octaves) // 8) == 0]
    axes.xaxis.set_major_locator(FixedLocator([2.0**i for i in ticks]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}x" if v >= 1 else f"1/{1 / v:g}"))


def _ratios(rows: list[Row]) -> tuple[float, float]:
    """The span of an axis that has room for all ratios and their quartiles."""
    seen = [v for r in rows for v in (r.ratio, r.limit_ratio, *(r.ratio_spread or ())) if v] + [1.0]
    return min(0.5, min(seen) / 1.25), max(2.0, max(seen) * 1.25)


def _times(rows: list[Row]) -> tuple[float, float]:
    """The same for times that are added, or taken off."""
    seen = [v for r in rows if r.added is not None for v in (r.added.low, r.added.high)] + [0.0]
    room = 0.06 * (max(seen) - min(seen)) or 1.0
    return min(seen) - room, max(seen) + room


def _label(rows: list[Row], i: int) -> str:
    """The whole label where the work changes, and the peer alone below it."""
    row = rows[i]
    if i and row.work == rows[i - 1].work:
        return f"vs {row.peer}"
    bits = "" if row.bits == "any" else f"  {row.shown_bits} bits"
    return f"{row.what}  {row.size}{bits}  vs {row.peer}"


def _figures(row: Row) -> str:
    if row.peer_value is None or row.ours is None:
        return "missing"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
    if row.added is not None:
        return f"{row.added.median:,.1f} {row.unit} ({row.added.low:,.1f} to {row.added.high:,.1f})"
    return ratio if row.limit_ratio is None else f"{ratio} of {row.limit_ratio:.1f}x"
