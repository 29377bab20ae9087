"""A run of `qbe eval needle` as a picture: a panel for each setting, lengths by depths."""

from __future__ import annotations

import io
from pathlib import Path

from qbe.bench.plot import check_plot
from qbe.eval.needle import Grid, NeedleResults
from qbe.eval.report import at, shown
from qbe.files import write_bytes

_COLUMNS = 3


def draw(outcome: NeedleResults, grid: Grid, model: str, path: Path) -> None:
    """Writes the picture as PNG, all of it or nothing. A number says how many of a place's needles were found.

    Raises:
        QBEError: matplotlib is missing, or the disk refuses.
    """
    check_plot(path)
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    lengths, depths = sorted(grid.lengths), sorted(grid.depths)
    columns = min(_COLUMNS, len(outcome.settings))
    lines = -(-len(outcome.settings) // columns)
    size = (columns * (1.4 + 0.9 * len(lengths)), 0.8 + lines * (1.1 + 0.45 * len(depths)))
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    grid_axes = figure.subplots(lines, columns, squeeze=False)
    colors = LinearSegmentedColormap.from_list("found", ["#c05621", "#f6e7d8", "#2b6cb0"])
    colors.set_bad("#edf2f7")
    for axes, setting in zip(grid_axes.flat, [*outcome.settings, *[-1] * (lines * columns)], strict=False):
        if setting == -1:
            axes.set_axis_off()
            continue
        rows = outcome.of(setting)
        places = [[at(rows, length, depth) for length in lengths] for depth in depths]
        shares = [[sum(r.found for r in p) / len(p) if p else float("nan") for p in line] for line in places]
        axes.imshow(shares, cmap=colors, vmin=0, vmax=1, aspect="auto")
        for y, line in enumerate(places):
            for x, place in enumerate(line):
                if place:
                    text = f"{sum(r.found for r in place)}/{len(place)}"
                    color = "white" if shares[y][x] in (0, 1) else "black"
                    axes.text(x, y, text, ha="center", va="center", fontsize=7, color=color)
        found = sum(r.found for r in rows.values())
        axes.set_title(f"KV {shown(setting)}: {found} of {len(rows)}", fontsize=9, loc="left", fontweight="bold")
        axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
        axes.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths])
        axes.tick_params(length=0, labelsize=8)
        axes.set_xlabel("tokens", fontsize=8)
        axes.set_ylabel("depth", fontsize=8)
        for side in axes.spines.values():
            side.set_visible(False)
    figure.suptitle(f"qbe eval needle: {model}, weights at 16 bits", fontsize=9, x=0.01, ha="left")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_bytes(path, picture.getvalue())
