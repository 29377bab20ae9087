"""The drift of recurrent states as a picture: predicted divergence of every layer and gear, floors, and the curves."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

from qbe.errors import QBEError
from qbe.files import write_bytes
from qbe.store.drift_curve import Profile

_INK, _FAINT, _BOUND = "#1a202c", "#718096", "#c05621"
_LEAST = 1e-12  # nats; what is less is drawn there


def check(path: Path) -> None:
    """Raises QBEError when the picture could not be made: told before a model is looked for."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise QBEError("--drift needs matplotlib, which is not installed: pip install 'qbe[bench]'") from None
    if path.suffix.lower() != ".png":
        raise QBEError(f"--drift writes a PNG; give it a name that ends in .png, not '{path}'")


def draw(profile: Profile, model: str, path: Path) -> None:
    """Writes the picture as PNG, all of it or nothing.

    Raises:
        QBEError: matplotlib is missing, or the disk refuses.
    """
    check(path)
    from matplotlib.figure import Figure

    gears = sorted(profile.states[0].gears)
    width = min(16.0, max(8.0, 2 + 0.3 * len(profile.states)))
    figure = Figure(figsize=(width, 2.2 + 0.35 * len(gears) + 3.2), dpi=110, layout="constrained")
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=[1.2 + 0.35 * len(gears), 3.2])[:, 0]
    _map(above, profile, gears)
    panels = below.subplots(1, len(gears), sharey=True, squeeze=False)[0]
    for panel, gear in zip(panels, gears, strict=True):
        _curves(panel, profile, gear)
    panels[0].set_ylabel("KL divergence, nats a token", fontsize=8, color=_INK)
    figure.suptitle(f"drift of recurrent states: {model}, at a context of {profile.context:,}", fontsize=9, x=0.01,
                    ha="left")  # fmt: skip
    picture = io.BytesIO()
    figure.savefig(picture, format="png", facecolor="white")
    write_bytes(path, picture.getvalue())


def _map(figure: Any, profile: Profile, gears: list[int]) -> None:
    axes, states = figure.subplots(), profile.states
    ratios = [[math.log10(max(_LEAST, s.predicted[g]) / profile.bound) for s in states] for g in gears]
    shown = axes.imshow(ratios, cmap="RdBu_r", vmin=-4, vmax=4, aspect="auto", interpolation="nearest")
    for column, state in enumerate(states):
        if state.floor in gears:
            axes.text(column, gears.index(state.floor), "floor", ha="center", va="center", fontsize=6, color=_INK)
    every = max(1, len(states) // 24)
    axes.set_xticks(range(0, len(states), every), [str(s.layer) for s in states[::every]])
    axes.set_yticks(range(len(gears)), [f"{g} bits" for g in gears])
    axes.tick_params(length=2, labelsize=7)
    axes.set_xlabel("layer", fontsize=8)
    axes.set_title("predicted KL over the bound of a layer; layers without a floor here keep 32 bits", fontsize=8,
                   loc="left")  # fmt: skip
    bar = figure.colorbar(shown, ax=axes, ticks=[-4, -2, 0, 2, 4], pad=0.01)
    bar.ax.set_yticklabels(["1e-4", "1e-2", "1", "1e2", "1e4"], fontsize=7)


def _curves(axes: Any, profile: Profile, gear: int) -> None:
    from matplotlib import colormaps

    starts = (0, *profile.ends)
    middles = [(a + b) / 2 for a, b in zip(starts, profile.ends, strict=False)]
    for i, state in enumerate(profile.states):
        color = colormaps["viridis"](i / max(1, len(profile.states) - 1))
        kl = [max(_LEAST, x) for x in state.gears[gear].kl]
        axes.plot(middles, kl, color=color, linewidth=1, label=f"layer {state.layer}")
        ahead = [middles[-1], profile.context], [kl[-1], max(_LEAST, state.predicted[gear])]
        axes.plot(*ahead, color=color, linewidth=0.8, linestyle=(0, (2, 2)), marker=".", markevery=[1])
    axes.axhline(profile.bound, color=_BOUND, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(f"{gear} bits: measured, then predicted", fontsize=8, loc="left")
    axes.set_xlabel("token", fontsize=8)
    axes.tick_params(labelsize=7)
    if len(profile.states) <= 8:
        axes.legend(fontsize=6, frameon=False)
