"""The reference page of a server's health, from the data that it runs by; `scripts/docs_reference.py` writes it."""

from __future__ import annotations

from collections.abc import Callable

Rows = list[tuple[str, ...]]


def page(made: str, table: Callable[[tuple[str, ...], Rows], str]) -> str:
    """Syndromes, detectors and the ladder of `qbe serve`.

    Args:
        made: the line that the page begins with.
        table: makes Markdown of a head and rows.
    """
    from qbe.server.health.syndromes import DETECTORS, LADDER

    looked = [(f"`{n}`", d.what, d.source, _threshold(n)) for n, d in DETECTORS.items()]
    acted = [(f"`{n}`", r.what, f"`{r.alert}`", r.means, r.todo) for n, r in LADDER.items()]
    return "\n".join([
        made, "# Health\n", "What `qbe serve` notices of its own answers, and what it does. Thresholds are those of "
        "[`health`](settings.md#health) where the file does not say. How it works: [Watch quality](../health.md).\n",
        "## Syndromes\n", table(("syndrome", "detector", "trips", "action", "beside that"), _syndromes()),
        "## Detectors\n", table(("detector", "its number", "looks at", "trips"), looked),
        "## Actions\n", table(("action", "what is done", "alert", "what it means", "what to do"), acted),
    ])  # fmt: skip


def _syndromes() -> Rows:
    """A row for each detector of each syndrome, or one with why there is none."""
    from qbe.server.health.syndromes import DETECTORS, SYNDROMES

    rows: Rows = []
    for syndrome in SYNDROMES:
        first = (syndrome.name, syndrome.why_not)
        for name in syndrome.detectors:
            action = DETECTORS[name].action
            does = f"`{action}`" if action else "tells only"
            rows.append((first[0], f"`{name}`", _threshold(name), does, first[1]))
            first = ("", "")
        if not syndrome.detectors:
            rows.append((syndrome.name, "none", "", "", syndrome.why_not))
    return rows


def _threshold(name: str) -> str:
    from qbe.server.health.settings import Health
    from qbe.server.health.syndromes import DETECTORS

    default = Health.model_fields[name].default
    if default is None:
        return "no default"
    return f"{'below' if DETECTORS[name].below else 'above'} {default:g}"  # type: ignore[index]
