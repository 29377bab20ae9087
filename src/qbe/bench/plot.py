"""A report as a picture: a bar per row from 1 to its ratio, and where the physical limit lies."""

from __future__ import annotations

import io
from pathlib import Path

from qbe.bench.report import Report, Row
from qbe.errors import QBEError
from qbe.files import reason, replacing

_BETTER, _WORSE, _LIMIT = "#2b6cb0", "#c05621", "#1a202c"
_ROW_INCHES = 0.27


def check_plot(path: Path) -> None:
    """Raises QBEError when a picture could not be made: told before minutes of measuring, not after."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise QBEError("--plot needs matplotlib, which is not installed: pip install 'qbe[bench]'") from None
    if path.suffix.lower() != ".png":
        raise QBEError(f"--plot writes a PNG; call it {path.name or 'plot'}.png rather than '{path}'")


def draw(report: Report, path: Path) -> None:
    """Writes the picture as PNG, all of it or nothing.

    Raises:
        QBEError: matplotlib is missing, or the disk refuses.
    """
    check_plot(path)
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    rows = report.rows
    figure = Figure(figsize=(11, 1.9 + _ROW_INCHES * len(rows)), dpi=130, layout="constrained")
    axes = figure.subplots()
    seen = [v for r in rows for v in (r.ratio, r.limit_ratio) if v] + [1.0]
    low, high = min(0.5, min(seen) / 1.25), max(2.0, max(seen) * 1.6)
    for y, row in enumerate(rows):
        if y and row.work != rows[y - 1].work:
            axes.axhline(y - 0.5, color="#e2e8f0", linewidth=0.8, zorder=0)
        if row.ratio:
            color = _BETTER if row.ratio >= 1 else _WORSE
            axes.barh(y, row.ratio - 1, left=1, height=0.62, color=color, zorder=2)
            axes.annotate(f"{row.ratio:.2f}x", (max(row.ratio, 1), y), (4, 0), textcoords="offset points", va="center",
                          fontsize=8, color=color, zorder=4, backgroundcolor=(1, 1, 1, 0.75))  # fmt: skip
        else:
            axes.annotate("missing", (1, y), (4, 0), textcoords="offset points", va="center", fontsize=8,
                          color="#718096", style="italic")  # fmt: skip
        if row.limit_ratio:
            axes.plot([row.limit_ratio] * 2, [y - 0.4, y + 0.4], color=_LIMIT, linewidth=2.2, zorder=3)
    axes.axvline(1, color=_LIMIT, linewidth=1, zorder=3)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator([2.0**i for i in range(-6, 11)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.grid(axis="x", color="#edf2f7", zorder=0)
    axes.set_yticks(range(len(rows)), [_label(rows, i) for i in range(len(rows))], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel("times better than the peer (left of 1x: worse)")
    machine = report.hardware
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items() if v is not None)
    axes.set_title(
        f"qbe bench {report.benchmark}: {machine['device']}, {machine['threads']} threads\n", fontsize=11, loc="left"
    )
    axes.annotate(f"{versions}; copies {machine['copy_bandwidth_bytes_per_s'] / 1e9:.0f} GB/s", (0, 1), (0, 6),
                  xycoords="axes fraction", textcoords="offset points", fontsize=7.5, color="#4a5568")  # fmt: skip
    legend = [
        Line2D([], [], color=_BETTER, linewidth=6, label="QBE better"),
        Line2D([], [], color=_WORSE, linewidth=6, label="QBE worse"),
        Line2D([], [], color=_LIMIT, linewidth=2.2, marker="|", linestyle="", markersize=11, markeredgewidth=2.2,
               label="QBE at the physical limit"),
    ]  # fmt: skip
    figure.legend(handles=legend, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    try:
        with replacing(path) as file:
            file.write(picture.getvalue())
    except OSError as error:
        raise QBEError(f"'{path}' cannot be written: {reason(error)}") from error


def _label(rows: list[Row], i: int) -> str:
    """The whole label where the work changes, and the peer alone below it."""
    row = rows[i]
    if i and row.work == rows[i - 1].work:
        return f"vs {row.peer}"
    bits = "" if row.bits == "any" else f", {row.bits} bits" if not isinstance(row.bits, str) else f", {row.bits}"
    return f"{row.what}  {row.shape}{bits}  vs {row.peer}"
