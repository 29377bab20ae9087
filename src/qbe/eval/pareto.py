"""Quality against what it costs: a line for each policy, over average bits and over bytes a token."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from qbe.bench.plot import check_plot
from qbe.files import write_bytes

_COLORS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b83280", "#718096")
_COSTS = {"average_bits": ("average bits a weight", 1.0), "bytes_per_token": ("MB of weights read for a token", 1e-6)}


def draw(described: dict[str, Any], model: str, path: Path) -> None:
    """Writes the picture as PNG, all of it or nothing. Bars are 95 % intervals over queries; each seed has its points.

    A row of panels for each data set and measure: KL to 16 bits (logarithmic) and, where answers were written, the
    share that is right, with 16 bits as a dashed line. Later policies are drawn thinner, so that equal ones show.

    Raises:
        QBEError: matplotlib is missing, or the disk refuses.
    """
    check_plot(path)
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    measures = []
    for reference in described["reference"]:
        measures.append((reference, "kl", "KL to 16 bits, nats"))
        if reference["accuracy"] is not None:
            measures.append((reference, "accuracy", "right answers"))
    figure = Figure(figsize=(9.5, 0.9 + 2.9 * len(measures)), dpi=110, layout="constrained")
    grid = figure.subplots(len(measures), len(_COSTS), squeeze=False, sharey="row")
    policies = list(dict.fromkeys(r["policy"] for r in described["rows"]))
    colors = {p: _COLORS[i % len(_COLORS)] for i, p in enumerate(policies)}
    for line, (reference, measure, title) in zip(grid, measures, strict=True):
        rows = [r for r in described["rows"] if r["dataset"] == reference["dataset"]]
        for axes, (cost, (label, unit)) in zip(line, _COSTS.items(), strict=True):
            for i, policy in enumerate(policies):
                for seed in dict.fromkeys(r["seed"] for r in rows if r["policy"] == policy):
                    points = sorted(
                        (r for r in rows if (r["policy"], r["seed"]) == (policy, seed)), key=lambda r: r[cost]
                    )
                    _line(axes, points, cost, unit, measure, colors[policy], len(policies) - i)
            if measure == "kl":
                if all(r["kl"] > 0 for r in rows):
                    axes.set_yscale("log")
            else:
                axes.axhline(reference[measure], color="#1a202c", linewidth=0.8, linestyle="--")
            axes.set_xlabel(label, fontsize=8)
            axes.tick_params(which="both", labelsize=8, length=2)
            axes.grid(color="#edf2f7", which="both", zorder=0)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        line[0].set_ylabel(title, fontsize=8)
        line[0].set_title(
            f"{reference['dataset']}, {reference['n']} queries", fontsize=9, loc="left", fontweight="bold"
        )
    legend = [Line2D([], [], color=colors[p], marker="o", markersize=4, label=p) for p in policies]
    if any(measure == "accuracy" for _, measure, _ in measures):
        legend.append(Line2D([], [], color="#1a202c", linewidth=0.8, linestyle="--", label="16 bits"))
    figure.legend(handles=legend, loc="outside lower left", ncols=6, fontsize=8, frameon=False)
    figure.suptitle(f"qbe eval: {model}", fontsize=9, x=0.01, ha="left")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_bytes(path, picture.getvalue())


def _line(axes: Any, rows: list[dict[str, Any]], cost: str, unit: float, measure: str, color: str, rank: int) -> None:
    costs, values = np.asarray([r[cost] * unit for r in rows]), np.asarray([r[measure] for r in rows])
    spans = [r[f"{measure}_interval"] or (r[measure], r[measure]) for r in rows]
    bars = np.abs(np.asarray(spans).T - values)
    axes.errorbar(costs, values, bars, color=color, marker="o", markersize=2.5 + rank, linewidth=0.4 + 0.8 * rank,
                  elinewidth=0.8, capsize=2, alpha=0.8, zorder=2)  # fmt: skip
