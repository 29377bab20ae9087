"""A run of `qbe eval needle` on the terminal, and the conditions that this and other evaluations hold under."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from qbe.datasets.intervals import LEVEL, RESAMPLES
from qbe.eval.needle import Grid, Needle, NeedleResult, NeedleResults, Setting
from qbe.store.nested_linears import nested_linears

if TYPE_CHECKING:
    from qbe.datasets.results import Results
    from qbe.engine.engine import Engine


def conditions(engine: Engine) -> dict[str, Any]:
    """Model, machine and versions, as JSON."""
    return {
        **_machine(engine),
        "weights": "16 bits at every setting",
        "answers": "greedy; found: the answer contains the number",
    }


def compared(engine: Engine, datasets: Sequence[str], limit: int, results: Results) -> dict[str, Any]:
    """The same of a comparison of policies, with what is particular about the store."""
    _, _, weight = nested_linears(engine.model)[0]
    return {
        **_machine(engine),
        "gears": list(engine.table.gears()),
        "group_size": weight.group_size,
        "datasets": list(datasets),
        "limit": limit,
        "kv_cache": "16 bits at every setting",
        "answers": "greedy, in the model's chat template where it has one",
        "intervals": f"{LEVEL:.0%}, percentile bootstrap over queries, {RESAMPLES} resamples, paired in comparisons",
        "results": results.path.name,
    }


def _machine(engine: Engine) -> dict[str, Any]:
    import transformers

    from qbe.version import __version__

    device = engine.core.device
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": engine.name,
        "dtype": str(engine.core.pool.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "versions": {"qbe": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }


def shown(setting: Setting) -> str:
    """A setting in words."""
    return "default" if setting is None else f"{setting} bits" if isinstance(setting, int) else setting


def at(rows: dict[Needle, NeedleResult], length: int, depth: float) -> list[NeedleResult]:
    """The needles of a place."""
    return [r for c, r in rows.items() if (c.length, c.depth) == (length, depth)]


def render(outcome: NeedleResults, grid: Grid, model: str) -> RenderableType:
    """A line for each setting and length: needles found of those hidden at each depth; verdicts below."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in ("KV", "tokens", *(f"{d:.0%}" for d in sorted(grid.depths))):
        table.add_column(column, justify="right")
    for setting in outcome.settings:
        rows = outcome.of(setting)
        lost = set(outcome.lost(setting))
        for i, length in enumerate(sorted(grid.lengths)):
            cells = []
            for depth in sorted(grid.depths):
                here = at(rows, length, depth)
                style = "red" if any(r.cell in lost for r in here) else ""
                cells.append(Text(f"{sum(r.found for r in here)}/{len(here)}" if here else "", style=style))
            table.add_row(shown(setting) if i == 0 else "", str(length), *cells)
    return Group(
        Text(f"qbe eval needle: {model}, weights at 16 bits, found/hidden by depth", style="bold"),
        table,
        *(Text(_verdict(outcome, s), style="red" if outcome.lost(s) else "") for s in outcome.settings[1:]),
    )


def _verdict(outcome: NeedleResults, setting: Setting) -> str:
    rows = outcome.of(setting)
    bits = sum(r.average_kv_bits for r in rows.values()) / len(rows)
    name = f"{shown(setting)} (on average {bits:.1f} bits)"
    lost, full = outcome.lost(setting), sum(r.found for r in outcome.of(outcome.settings[0]).values())
    if not full:
        return f"{name}: 16 bits find no needle, so nothing can be said"
    found = sum(r.found for r in rows.values())
    if not lost:
        return f"{name}: every needle that 16 bits find is found ({found} of {len(rows)}, 16 bits {full})"
    where = ", ".join(f"{c.length} tokens {c.depth:.0%}" for c in lost[:4]) + (", ..." if len(lost) > 4 else "")
    return f"{name}: {len(lost)} of the {full} needles that 16 bits find are lost ({where})"
