"""A trace as a terminal shows it while the answer is written: a heat map over time, the answer's text below.

Time runs to the right and the newest tokens stay in sight. One character shows two layers, one above the other.
"""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from qbe.explain.palette import colour
from qbe.explain.trace import Trace, grouped

_STEPS = "▁▂▃▄▅▆▇█"
_ENTROPY, _MARGIN = 4.0, 8.0  # nats and logits that a full character stands for
_LABEL = 8  # characters before the map
_TEXT = 5  # lines of text that are kept room for


class LiveView:
    """A rich renderable of a trace and the text so far; fits any width of 20 characters and more.

    Attributes:
        trace: may grow between two renderings.
        text: of the answer so far.
        gears: of the model, for the legend.
    """

    def __init__(self, trace: Trace, gears: tuple[int, ...]) -> None:
        self.trace, self.gears, self.text = trace, gears, ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height or console.size.height
        most = max(2, height - _TEXT - 7)  # lines of the map
        yield from self._map(max(4, width - _LABEL), 2 * most)
        used = -(-len(grouped([None] * self.trace.layers, 2 * most)) // 2) + 6
        lines = Text(self.text).wrap(console, width)
        yield from lines[-max(1, height - used) :]

    def _map(self, columns: int, rows: int) -> RenderResult:
        t = self.trace
        first = max(0, len(t.bits) - columns)
        shown = [grouped(bits, rows) for bits in t.bits[first:]]
        lines = len(grouped([None] * t.layers, rows))
        each = -(-t.layers // lines) if lines else 1
        for upper in range(0, lines, 2):
            line = _label("layer 0" if upper == 0 else f"{upper * each:>{_LABEL - 1}}")
            for column in shown:
                line.append(*_half(column, upper))
            yield line
        yield _bars("entropy", t.entropy[first:], _ENTROPY)
        yield _bars("margin", t.margin[first:], _MARGIN)
        marks = _label("moved")
        for i in range(first, len(t.bits)):
            marks.append(*_mark(t, i))
        yield marks
        legend = _label("bits")
        for gear in self.gears:
            legend.append("██", style=colour(gear)).append(f" {gear}  ")
        if t.average:
            legend.append(f"now {t.average[-1]:.2f}, mean {sum(t.average) / len(t.average):.2f}")
        legend.truncate(columns + _LABEL)
        yield legend
        yield Text("")


def _half(column: list[float | None], upper: int) -> tuple[str, str]:
    """A character that shows two layers, and its style."""
    above, below = column[upper], column[upper + 1] if upper + 1 < len(column) else None
    if above is None and below is None:
        return " ", ""
    if above is None:
        return "▄", colour(below)  # type: ignore[arg-type]
    return "▀", colour(above) if below is None else f"{colour(above)} on {colour(below)}"


def _label(text: str) -> Text:
    line = Text(no_wrap=True)
    return line.append(f"{text:<{_LABEL}}", style="dim")


def _bars(label: str, values: list[float], most: float) -> Text:
    line = _label(label)
    if not values:
        return line.append("not measured", style="dim")
    return line.append("".join(_STEPS[min(len(_STEPS) - 1, int(max(0.0, v) / most * len(_STEPS)))] for v in values))


def _mark(trace: Trace, i: int) -> tuple[str, str]:
    """R: a refresh; ▲ and ▼: the cascade gave more, or fewer, bits than the blueprint has."""
    if i in trace.refreshed:
        return "R", "bold"
    shift = trace.cascade[i]
    return "▲" if shift > 0 else "▼" if shift < 0 else " ", ""
