"""The explanation in a terminal, and the one-line strip of a blueprint for the demo.

Colours are never alone: each cell carries its number, and the strip's blocks are as high as their bits, so both read
the same with NO_COLOR or in a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from qbe.analysis.encoder import default_encoder
from qbe.blueprint import Blueprint
from qbe.explain.explanation import Explanation
from qbe.explain.heatmap import HeatMap, HeatmapCell, KVCell, activations, bits_text, kv_note, notes, number, size
from qbe.explain.palette import colour, ink
from qbe.sites import SiteTable

BLOCKS = " ▁▂▃▄▅▆▇█"  # n eighths high for n bits
_ASCII = str.maketrans("·━─", ".#-")
_CACHE = {None: "", "miss": "", "exact": ", cached", "near": ", cached for a query like it,"}
_BAR_BITS = 5.0  # the bars' colour is that of 5 bits: it reads on dark and on light


def render(explanation: Explanation) -> RenderableType:
    """Features, score, policy, budget, heat map and bytes per token, for `rich.console.Console.print`."""
    e = explanation
    heat = HeatMap.of(e.blueprint, e.table)
    return _Report(
        Group(
            _heading("Query", f"{_length(e)} · {e.profile.prompt_class.replace('_', ' ')}"),
            _indent(_bars([("complexity", e.profile.score, f"{e.profile.score:.2f}")])),
            _indent(_Features(e.profile.features)),
            _indent(Text(_analysis(e), "dim")),
            "",
            _heading("Blueprint", f"{e.blueprint.policy}{_CACHE[e.cache]} in {e.policy_ms:.2f} ms · {_asked(e)}"),
            "",
            _indent(_Heat(heat)),
            "",
            _indent(Text(_rest(e, heat), "dim")),
            "",
            _heading("Bytes per token", _saving(e)),
            _indent(
                _bars(
                    [
                        ("this blueprint", e.ratio, size(e.bytes_per_token)),
                        ("16 bits", 1.0, size(e.bytes_per_token_16bit)),
                    ]
                )
            ),
        )
    )


def strip(blueprint: Blueprint, table: SiteTable) -> Text:
    """One character per decoder layer, coloured by its mean bits and as many eighths high, then the output head."""
    heat = HeatMap.of(blueprint, table)
    text = Text(no_wrap=True)
    for cell in heat.mean:
        text.append(*_block(cell))
    for cell in heat.outside.values():
        text.append(" ")
        text.append(*_block(cell))
    return text


def shares(routed: Mapping[int, float]) -> Text:
    """What part of the weights was read at which gear, where every token chose: gear -> weights."""
    text = Text("tokens chose", "dim", no_wrap=True)
    for gear, weights in sorted(routed.items()):
        text.append(f" {gear} ", Style(color=ink(gear), bgcolor=colour(gear)))
        text.append(f" {weights / sum(routed.values()):.0%}", "dim")
    return text


def _block(cell: HeatmapCell | None) -> tuple[str, Style]:
    if cell is None:
        return "·", Style(dim=True)
    return BLOCKS[max(1, min(8, round(cell.bits)))], Style(color=colour(cell.bits))


def _indent(renderable: RenderableType) -> Padding:
    return Padding(renderable, (0, 0, 0, 2))


def _heading(title: str, rest: str) -> Text:
    return Text.assemble((title, "bold"), "  ", rest)


def _asked(e: Explanation) -> str:
    asked = (
        f"budget {e.budget.bits:g}" if e.budget.bits is not None else f"tier {e.budget.tier} asks {e.target_bits:.2f}"
    )
    return f"{asked}, average {e.average_bits:.2f} bits"


def _analysis(e: Explanation) -> str:
    line = f"analysis tier {e.profile.tier} in {e.analysis_ms:.2f} ms"
    if e.profile.cluster is None or e.profile.similarity is None:
        return line
    name = default_encoder().names[e.profile.cluster]
    return f"{line}; cluster {e.profile.cluster} ({name}), cosine {e.profile.similarity:.2f}"


def _length(e: Explanation) -> str:
    told = f"{e.prompt_tokens} tokens"
    return told if e.fits else f"{told}, too long for the model's context of {e.table.context}: it would be refused"


def _saving(e: Explanation) -> str:
    return f"{1 / e.ratio:.1f} times fewer than at 16 bits" if 0 < e.ratio < 0.995 else "as many as at 16 bits"


def _rest(e: Explanation, heat: HeatMap) -> str:
    line = f"activations {activations(e)}, {kv_note(e)}"
    if heat.fixed:
        kept = ", ".join(f"{n} {role.replace('_', ' ')}" for role, n in heat.fixed.items())
        line += f"; always at 16 bits: {kept}"
    return "\n".join([line, *notes(e)])


def _bars(rows: Sequence[tuple[str, float, str]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(max_width=40, ratio=1)
    table.add_column(no_wrap=True, justify="right")
    for name, fraction, value in rows:
        table.add_row(name, _Bar(fraction), value)
    return table


@dataclass
class _Report:
    """The whole, in plain ASCII where the output can carry no more."""

    body: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.body, options):
            text = segment.text.translate(_ASCII).encode("ascii", "replace").decode() if options.ascii_only else None
            yield segment if text is None else Segment(text, segment.style, segment.control)


@dataclass
class _Bar:
    """A horizontal bar of `fraction` of the width."""

    fraction: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        full = round(options.max_width * min(1.0, max(0.0, self.fraction)))
        yield Text.assemble(("━" * full, Style(color=colour(_BAR_BITS))), ("─" * (options.max_width - full), "dim"))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(8, options.max_width)


@dataclass
class _Features:
    """Name and value of each feature, in as many columns as fit."""

    features: dict[str, float]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        items = [(name.replace("_", " "), number(value)) for name, value in self.features.items()]
        if not items:
            return
        width = max(len(n) for n, _ in items) + 1 + max(len(v) for _, v in items)
        columns = max(1, min(3, (options.max_width + 4) // (width + 4)))
        height = -(-len(items) // columns)
        table = Table.grid(padding=(0, 1, 0, 0))
        for c in range(columns):
            if c:
                table.add_column(width=2)
            table.add_column(style="dim", overflow="fold")
            table.add_column(justify="right", no_wrap=True)
        for r in range(height):
            row: list[Text] = []
            for c in range(columns):
                name, value = items[c * height + r] if c * height + r < len(items) else ("", "")
                row += [Text(t) for t in (("", name, value) if c else (name, value))]  # a Text is not read as markup
            table.add_row(*row)
        yield table


@dataclass
class _Heat:
    """The heat map, in bands of layers when the terminal is narrow."""

    heat: HeatMap

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        heat, plain = self.heat, console.no_color or console.color_system is None
        rows: dict[str, Sequence[HeatmapCell | KVCell | None]] = {**heat.rows, "mean": heat.mean}
        if heat.kv:
            rows["kv"] = heat.kv
        labels = [*rows, *heat.outside, "layer"]
        margin = max(map(len, labels)) + 1
        room = max(4, options.max_width - margin)
        # Without colour two digits need a blank between the cells, or `16` runs into its neighbour.
        cell = 3 if plain or heat.layers * 3 <= room else 2
        fit = max(1, room // cell)
        even = -(-heat.layers // -(-heat.layers // fit)) if heat.layers else 1
        band = min(fit, -(-even // 5) * 5)  # bands of about one length, beginning at a numbered layer
        for start in range(0, heat.layers, band):
            stop = min(start + band, heat.layers)
            yield Text("layer".ljust(margin) + _ruler(start, stop, cell), "dim", no_wrap=True)
            for name, cells in rows.items():
                dim = "dim" if name == "mean" else ""
                yield Text.assemble((name.ljust(margin), dim), *_cells(cells[start:stop], cell, plain), no_wrap=True)
            if stop < heat.layers:
                yield ""
        last: list[str | tuple[str, str | Style]] = []
        for name, outside in heat.outside.items():
            last += [name.ljust(margin), *_cells([outside], cell, plain), "   "]
        if not plain:
            last += [("bits ", "dim"), *_legend(heat.gears)]
        if last:
            yield Text.assemble("\n", *last)


def _cells(cells: Iterable[HeatmapCell | KVCell | None], width: int, plain: bool) -> Iterator[tuple[str, Style]]:
    for cell in cells:
        if cell is None:
            yield "·".rjust(2).ljust(width), Style(dim=True)
        else:
            style = Style() if plain else Style(color=ink(cell.bits), bgcolor=colour(cell.bits))
            yield bits_text(cell.bits).rjust(2).ljust(width), style


def _legend(gears: Sequence[int]) -> Iterator[tuple[str, Style]]:
    for gear in gears:
        yield f" {gear} ", Style(color=ink(gear), bgcolor=colour(gear))


def _ruler(start: int, stop: int, cell: int) -> str:
    """The number of every fifth layer over its column."""
    line = [" "] * ((stop - start) * cell + 2)
    for i in range(start, stop):
        if i % 5 == 0:
            text = str(i).rjust(2)
            line[(i - start) * cell : (i - start) * cell + len(text)] = text
    return "".join(line).rstrip()
