"""The explanation as one page: no script, no network, light and dark, narrow and wide."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from qbe.explain.explanation import Explanation
from qbe.explain.heatmap import (
    HeatMap,
    HeatmapCell,
    KVCell,
    activations,
    bits_text,
    kv_note,
    label,
    notes,
    number,
    size,
)
from qbe.explain.palette import colour, ink

BAND = 40  # most layers side by side; deeper models get several bands


def render(explanation: Explanation, prompt: str | None = None) -> str:
    """The page as text. The prompt is in it only if it is given; everything is escaped."""
    e = explanation
    heat = HeatMap.of(e.blueprint, e.table)
    bands = max(1, -(-heat.layers // BAND))
    step = max(1, -(-heat.layers // bands))
    return _template().render(
        e=e,
        heat=heat,
        bands=[range(i, min(i + step, heat.layers)) for i in range(0, heat.layers, step)],
        prompt=prompt,
        sites=list(zip(e.table.nested, e.blueprint.weight_bits, e.blueprint.activation_bits, strict=True)),
        activations=activations(e),
        kv=kv_note(e),
        notes=notes(e),
    )


@cache
def _template() -> Template:
    env = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    filters: dict[str, Any] = {"colour": colour, "ink": ink, "size": size, "number": number, "bits_text": bits_text}
    env.filters.update(filters, tip=_tip, kv_tip=_kv_tip, label=label)
    return env.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))


def _tip(cell: HeatmapCell) -> str:
    """What a cell says when it is pointed at: one line per site."""
    lines = []
    for site, bits in cell.sites:
        line = f"{site.name}: {bits} bits, {' × '.join(map(str, site.shape))}"
        if bits in site.bytes_at:
            line += f", {size(site.bytes_at[bits])} per token"
        if bits in site.sensitivity:
            line += f", KL {site.sensitivity[bits]:.2g} nats"
        lines.append(line)
    return "\n".join(lines)


def _kv_tip(cell: KVCell) -> str:
    """The same of a layer's KV cache: one line per key head."""
    lines = []
    for head, bits in cell.heads:
        line = f"layer {head.layer}, key head {head.head}: KV {bits} bits, read by {head.query_heads} query heads"
        if bits in head.sensitivity:
            line += f", KL {head.sensitivity[bits]:.2g} nats"
        if head.entropy is not None:
            line += f", entropy {head.entropy[0]:.0%}"
        lines.append(line)
    return "\n".join(lines)
