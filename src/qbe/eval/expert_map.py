"""A model's experts as a picture: layer by expert, how often each is used and the bits that it gets."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qbe.bench.plot import check_plot
from qbe.budget import TIER_BITS
from qbe.errors import QBEError
from qbe.files import write_bytes
from qbe.policies.allocate import allocate
from qbe.residency.at_start import AtStart
from qbe.sites import SiteTable

Numbers = npt.NDArray[np.float64]


def use_map(table: SiteTable) -> tuple[list[int], Numbers]:
    """Layers that have nested experts, and share of the tokens that use each: float64 [layers, experts], NaN for none.

    Raises:
        QBEError: the model has no nested experts.
    """
    return _map(table, {s.name: s.use for s in table.nested})


def bits_map(table: SiteTable, average_bits: float) -> Numbers:
    """Mean bits over the weights of each expert, in the best fixed assignment at this average over all weights."""
    gears = allocate(table, max(average_bits, table.reads.lowest_average), {})
    return _map(table, {s.name: float(g) for s, g in zip(table.nested, gears, strict=True)})[1]


def resident_map(table: SiteTable, resident: AtStart) -> Numbers:
    """Mean bits over the weights of each expert that are on the device, as `use_map`."""
    return _map(table, {s.name: float(b) for s, b in zip(table.nested, resident.bits, strict=True)})[1]


def _map(table: SiteTable, values: dict[str, float]) -> tuple[list[int], Numbers]:
    experts = [s for s in table.nested if s.expert is not None]
    if not experts:
        raise QBEError(f"{table.model_name or 'this model'} has no nested experts to show; leave out --experts")
    layers = sorted({s.layer if s.layer is not None else -1 for s in experts})
    totals = np.zeros((len(layers), 1 + max(s.expert or 0 for s in experts)))
    weights = np.zeros_like(totals)
    for s in experts:
        at = layers.index(s.layer if s.layer is not None else -1), s.expert or 0
        totals[at] += s.parameters * values[s.name]
        weights[at] += s.parameters
    with np.errstate(invalid="ignore"):
        return layers, totals / weights


def describe(table: SiteTable, resident: AtStart | None = None) -> dict[str, Any]:
    """What the picture shows, as JSON: layers, and for each their experts' use and bits at the middle of each tier; and
    the bits of each that are on the device, where that is bounded."""
    layers, use = use_map(table)
    bits = {tier: np.round(bits_map(table, sum(ends) / 2), 3).tolist() for tier, ends in TIER_BITS.items()}
    there = {} if resident is None else {"resident_bits": np.round(resident_map(table, resident), 3).tolist()}
    return {"layers": layers, "use": np.round(use, 6).tolist(), "bits": bits, **there}


def draw(table: SiteTable, model: str, path: Path, resident: AtStart | None = None) -> None:
    """Writes the picture as PNG, all of it or nothing.

    Args:
        resident: what is on the device, where that is bounded.

    Raises:
        QBEError: no nested experts or sensitivities, matplotlib is missing, or the disk refuses.
    """
    layers, use = use_map(table)
    check_plot(path, "--experts")
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    panels = {tier: bits_map(table, sum(ends) / 2) for tier, ends in TIER_BITS.items()}
    count, lines = use.shape[1], len(layers)
    width, height = min(6.0, max(2.6, 0.16 * count)), min(9.0, max(1.6, 0.16 * lines))
    across = 2 if resident is None else 3
    figure = Figure(figsize=(1.2 + width * across, 1.4 + height * 2), dpi=110, layout="constrained")
    axes = figure.subplots(2, across, squeeze=False).flat
    first = next(axes)
    shown = first.imshow(100 * use, cmap="viridis", vmin=0, aspect="auto", interpolation="nearest")
    first.set_title("used by % of the tokens", fontsize=9, loc="left", fontweight="bold")
    figure.colorbar(shown, ax=first).ax.tick_params(labelsize=7)
    colors = ListedColormap(["#f6e7d8", "#f0b27a", "#5b9bd5", "#1f4e8c"])
    for (tier, bits), panel in zip(panels.items(), axes, strict=False):
        # Colours by the gear that the mean of an expert's matrices is next to.
        shown = panel.imshow(np.digitize(bits, [5, 7, 12]), cmap=colors, vmin=-0.5, vmax=3.5, aspect="auto",
                             interpolation="nearest")  # fmt: skip
        ends = TIER_BITS[tier]
        average = max(sum(ends) / 2, table.reads.lowest_average)
        panel.set_title(f"bits, {tier} ({average:.3g} on average)", fontsize=9, loc="left", fontweight="bold")
        bar = figure.colorbar(shown, ax=panel, ticks=range(4))
        bar.ax.set_yticklabels(["4", "6", "8", "16"], fontsize=7)
    if resident is not None:
        panel = next(axes)
        # An expert that has nothing there is read from the host's memory.
        there = ListedColormap(["#eeeeee", "#fbf3ea", "#f6e7d8", "#f0b27a", "#5b9bd5"])
        shown = panel.imshow(np.digitize(resident_map(table, resident), [1, 3, 5, 7]), cmap=there, vmin=-0.5, vmax=4.5,
                             aspect="auto", interpolation="nearest")  # fmt: skip
        panel.set_title("bits on the device at the start", fontsize=9, loc="left", fontweight="bold")
        bar = figure.colorbar(shown, ax=panel, ticks=range(5))
        bar.ax.set_yticklabels(["host", "2", "4", "6", "8"], fontsize=7)
        next(axes).remove()
    for panel in figure.axes[: 4 + (resident is not None)]:
        panel.set_yticks(range(0, lines, max(1, lines // 12)), [str(n) for n in layers[:: max(1, lines // 12)]])
        panel.set_xticks(range(0, count, max(1, count // 8)))
        panel.tick_params(length=2, labelsize=7)
        panel.set_xlabel("expert", fontsize=8)
        panel.set_ylabel("layer", fontsize=8)
    figure.suptitle(f"experts of {model}", fontsize=9, x=0.01, ha="left")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_bytes(path, picture.getvalue())
