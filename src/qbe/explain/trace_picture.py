"""A trace as a picture: bits by layer and token, what moved them, entropy and margin below."""

from __future__ import annotations

import io
import math
from pathlib import Path

from qbe.errors import QBEError
from qbe.explain.palette import colour
from qbe.explain.trace import Trace
from qbe.files import write_bytes, write_text

_INK, _FAINT, _ENTROPY, _MARGIN = "#1a202c", "#718096", "#c05621", "#2b6cb0"
_SCALE = 96  # colours


def check(path: Path) -> None:
    """Raises QBEError when a trace could not be kept there: told before the answer is written, not after."""
    if path.suffix.lower() not in (".png", ".json"):
        raise QBEError(f"--trace writes a picture or JSON: give a name that ends in .png or .json, not '{path}'")
    if path.suffix.lower() == ".png":
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise QBEError(
                "--trace needs matplotlib for a picture: pip install 'qbe[bench]', or give a .json"
            ) from None


def write(trace: Trace, path: Path) -> None:
    """As the file's name asks, all of it or nothing. Raises QBEError when the disk refuses, and what `check` raises."""
    import json

    check(path)
    if path.suffix.lower() == ".json":
        write_text(path, json.dumps(trace.describe(), ensure_ascii=False, allow_nan=False) + "\n")
    else:
        write_bytes(path, draw(trace))


def draw(trace: Trace) -> bytes:
    """The picture as PNG."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    tokens, measured = max(1, len(trace.bits)), bool(trace.entropy)
    heights = [min(6.0, max(2.0, 0.14 * trace.layers)), 0.25, *([0.7, 0.7] if measured else [])]
    width = min(16.0, max(7.0, 0.05 * tokens + 2))
    figure = Figure(figsize=(width, sum(heights) + 1.5), dpi=120, layout="constrained")
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    cells = [[math.nan if b is None else b for b in bits] for bits in trace.bits] or [[math.nan] * trace.layers]
    scale = ListedColormap([colour(2 + 14 * i / (_SCALE - 1)) for i in range(_SCALE)])
    axes[0].set_facecolor("#e2e8f0")  # of layers without bits
    transposed = [list(layer) for layer in zip(*cells, strict=True)]
    shown = axes[0].imshow(
        transposed, cmap=scale, vmin=2, vmax=16, aspect="auto", interpolation="nearest", origin="upper",
        extent=(0, tokens, trace.layers - 0.5, -0.5),
    )  # fmt: skip
    mean = sum(trace.average) / max(1, len(trace.average))
    axes[0].set_title(
        f"bits of each layer's weights, token by token: {mean:.2f} on average over these", loc="left", fontsize=10
    )
    axes[0].set_ylabel("layer", color=_INK)
    axes[0].yaxis.set_major_locator(MaxNLocator(integer=True))
    bar = figure.colorbar(shown, ax=axes[0], ticks=[2, 4, 6, 8, 16], pad=0.01, aspect=30)
    bar.ax.tick_params(labelsize=8)
    _marks(axes[1], trace, tokens)
    for token in sorted(trace.refreshed):
        axes[0].axvline(token, color="white", linewidth=2.5)
        axes[0].axvline(token, color=_INK, linewidth=1, linestyle=(0, (3, 2)))
    lines = ((trace.entropy, "entropy\n(nats)", _ENTROPY), (trace.margin, "margin\n(logits)", _MARGIN))
    for axis, (values, label, color) in zip(axes[2:], lines, strict=False):
        axis.fill_between([i + 0.5 for i in range(len(values))], values, color=color, alpha=0.25, linewidth=0)
        axis.plot([i + 0.5 for i in range(len(values))], values, color=color, linewidth=0.8)
        axis.set_ylabel(label, color=_INK, fontsize=8)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=8)
    axes[-1].set_xlabel("token of the answer", color=_INK)
    axes[-1].set_xlim(0, tokens)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor="white")
    return buffer.getvalue()


def _marks(axis: object, trace: Trace, tokens: int) -> None:
    """Where the cascade raised or lowered, and where the blueprint was exchanged."""
    ups = [i + 0.5 for i, shift in enumerate(trace.cascade) if shift > 0]
    downs = [i + 0.5 for i, shift in enumerate(trace.cascade) if shift < 0]
    draws = axis.scatter  # type: ignore[attr-defined]
    draws(ups, [0.5] * len(ups), marker="^", s=14, color=_INK, linewidths=0)
    draws(downs, [-0.5] * len(downs), marker="v", s=14, color=_FAINT, linewidths=0)
    for r in trace.refreshes:
        label = f"refresh: {r['kind']}, {r['bits_before']:.1f} to {r['bits']:.1f} bits"
        near = r["token"] > tokens / 2
        axis.annotate(  # type: ignore[attr-defined]
            label, (r["token"], 1.1), fontsize=7, color=_INK, ha="right" if near else "left", annotation_clip=False
        )
    axis.set_ylim(-1.2, 1.2)  # type: ignore[attr-defined]
    axis.set_yticks([0.5, -0.5], ["raised", "lowered"], fontsize=7)  # type: ignore[attr-defined]
    for side in ("top", "right", "bottom"):
        axis.spines[side].set_visible(False)  # type: ignore[attr-defined]
    axis.tick_params(bottom=False)  # type: ignore[attr-defined]
