"""Draws the picture of docs/architecture.md: `python scripts/draw_request_flow.py docs/request-flow.svg`.

An SVG of its own, so that the page loads nothing from elsewhere; narrow enough for a telephone. A request goes down the
left column. Dashed lines are what is read.
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path
from typing import NamedTuple

WIDTH = 440
LEFT, RIGHT = (8, 204), (262, 170)  # x and width of the two columns
LINE, PAD = 16, 9  # between two lines of text, and around them

STYLE = """
  svg { color-scheme: light dark; font: 12px ui-sans-serif, system-ui, sans-serif;
        --ink: #1f2430; --box: #eef1fb; --edge: #5c6bc0; }
  @media (prefers-color-scheme: dark) { svg { --ink: #e3e6f0; --box: #262b3d; --edge: #8c9eff; } }
  rect { fill: var(--box); stroke: var(--edge); }
  rect.data { stroke-dasharray: 3 3; }
  text { fill: var(--ink); text-anchor: middle; }
  text.where { font-weight: 600; }
  text.arrow { font-size: 11px; font-style: italic; text-anchor: start; }
  path { fill: none; stroke: var(--edge); stroke-width: 1.4; marker-end: url(#head); }
  path.read { stroke-dasharray: 4 3; }
  marker path { fill: var(--edge); stroke: none; marker-end: none; }
"""


class Box(NamedTuple):
    """A rectangle with a folder's name and what happens there, a line each."""

    x: float
    y: float
    width: float
    lines: tuple[str, ...]
    height: float
    data: bool

    @property
    def middle(self) -> float:
        return self.y + self.height / 2

    @property
    def centre(self) -> float:
        return self.x + self.width / 2

    @property
    def end(self) -> float:
        return self.y + self.height

    def svg(self) -> str:
        first = self.middle - (len(self.lines) - 1) * LINE / 2 + 4
        texts = [
            f'<text class="{"" if i else "where"}" x="{self.centre:g}" y="{first + i * LINE:g}">{escape(line)}</text>'
            for i, line in enumerate(self.lines)
        ]
        rect = (
            f'<rect class="{"data" if self.data else ""}" x="{self.x:g}" y="{self.y:g}" width="{self.width:g}" '
            f'height="{self.height:g}" rx="{14 if self.data else 4}"/>'
        )
        return "\n".join([rect, *texts])


def box(column: tuple[int, int], y: float, *lines: str, height: float | None = None, data: bool = False) -> Box:
    return Box(column[0], y, column[1], lines, height or len(lines) * LINE + 2 * PAD - 4, data)


def arrow(points: str, label: str = "", at: tuple[float, float] = (0, 0), read: bool = False) -> str:
    """A line with a head along an SVG path; its label begins at a point."""
    text = f'\n<text class="arrow" x="{at[0]:g}" y="{at[1]:g}">{escape(label)}</text>' if label else ""
    return f'<path class="{"read" if read else ""}" d="{points}"/>{text}'


def down(above: Box, below: Box, label: str = "", read: bool = False) -> str:
    points = f"M{above.centre:g} {above.end:g}V{below.y - 2:g}"
    return arrow(points, label, (above.centre + 8, (above.end + below.y) / 2 + 3), read)


def across(left: Box, right: Box, y: float, back: bool = False, read: bool = False) -> str:
    start, end = left.x + left.width, right.x
    return arrow(f"M{end:g} {y:g}H{start + 2:g}" if back else f"M{start:g} {y:g}H{end - 2:g}", read=read)


def draw() -> str:
    """The whole SVG."""
    asked = box(LEFT, 8, "prompt and budget", "cli/, engine/engine.py")
    analysis = box(LEFT, 76, "analysis/", "features, class, score in [0, 1]")
    cache = box(LEFT, 144, "cache/", "blueprints of queries", "like this one", data=True)
    policies = box(LEFT, 228, "policies/", "score + budget → average bits;", "exact allocation over sites")
    scheduling = box(LEFT, 322, "engine/scheduling/", "continuous batching, pages")
    execution = box(LEFT, 396, "engine/execution/", "runs one step")
    model = box(LEFT, 470, "transformers' own", "model code", height=224)
    sampling = box(LEFT, 734, "engine/sampling/", "logits → tokens")
    text = box(LEFT, 808, "text")

    table = box(RIGHT, 220, "sites.py, tagger/", "roles, gears, bytes,", "measured sensitivity", data=True)
    plan = box(RIGHT, 388, "store/plan.py", "precision_words", "[site, row]", data=True)
    kernels = box(RIGHT, 484, "kernels/", "qbe::nested_linear")
    store = box(RIGHT, 558, "store/", "nested codes, scales,", "16-bit originals", data=True)
    kvcache = box(RIGHT, 642, "kvcache/", "pages of 16, 8, 4, 2 bits")
    records = box(RIGHT, 734, "records/", "one row per request", data=True)

    bypass = LEFT[0] + LEFT[1] + 14  # from the cache past the policies
    arrows = [
        down(asked, analysis), down(analysis, cache, "profile"), down(cache, policies, "none"),
        down(policies, scheduling, "blueprint"), down(scheduling, execution, "rows of this step"),
        down(execution, model), down(model, sampling, "logits"), down(sampling, text),
        arrow(f"M{LEFT[0] + LEFT[1]} {cache.middle:g}H{bypass}V{scheduling.middle:g}H{LEFT[0] + LEFT[1] + 2}",
              "blueprint", (bypass + 6, cache.middle + 4)),
        across(policies, table, policies.middle, back=True, read=True), across(execution, plan, execution.middle),
        down(plan, kernels, read=True), across(model, kernels, kernels.middle),
        arrow(f"M{store.centre:g} {store.y:g}V{kernels.end + 2:g}", read=True), across(model, kvcache, kvcache.middle),
        across(sampling, records, sampling.middle),
    ]  # fmt: skip
    boxes = (asked, analysis, cache, policies, scheduling, execution, model, sampling, text,
             table, plan, kernels, store, kvcache, records)  # fmt: skip
    size = f'viewBox="0 0 {WIDTH} {text.end + 8:g}" width="{WIDTH}" height="{text.end + 8:g}"'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        "<title>A query's way through the code</title>", f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z"/></marker></defs>',
        *arrows, *(b.svg() for b in boxes), "</svg>", "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.parse_args().file.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
