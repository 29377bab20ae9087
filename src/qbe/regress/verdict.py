"""What is kept of a comparison: `verdict.json`, `items.jsonl`, `report.html`; and lines for the terminal."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from qbe.errors import QBEError
from qbe.files import reason, write_text
from qbe.regress.client import Reply
from qbe.regress.grading import Grade
from qbe.regress.observe import Observed
from qbe.regress.run import Outcome, flip_of
from qbe.regress.target import Target
from qbe.regress.weights import describe as describe_weights
from qbe.store import provenance

FORMAT = 1
EXIT = {"pass": 0, "fail": 1, "anomalous": 1, "inconclusive": 3}
FILES = ("verdict.json", "items.jsonl", "report.html")
STYLES = {"pass": "green", "fail": "bold red", "anomalous": "bold magenta", "inconclusive": "yellow", "not run": "dim"}


def check_folder(folder: Path) -> None:
    """Raises QBEError where the three files cannot be written: told before minutes of work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            if (folder / name).is_dir():
                raise QBEError(f"-o {folder}: '{name}' is a folder there; give another folder")
        trial = folder / ".qbe-regress"
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise QBEError(f"-o {folder} cannot be written: {reason(error)}") from None


def write(outcome: Outcome, folder: Path) -> dict[str, Any]:
    """Writes the three files; the verdict comes last, so that one that is there belongs to what lies beside it."""
    from qbe.regress.report import render as page

    described = describe(outcome)
    items = "".join(json.dumps(item, ensure_ascii=False, allow_nan=False) + "\n" for item in items_of(outcome))
    (folder / FILES[0]).unlink(missing_ok=True)
    write_text(folder / FILES[1], items)
    write_text(folder / FILES[2], page(described, outcome))
    described["items_sha256"] = hashlib.sha256(items.encode()).hexdigest()
    write_text(folder / FILES[0], json.dumps(described, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return described


def note(described: Mapping[str, Any], candidate: Target) -> None:
    """Notes the verdict in the provenance of the candidate's folder, where it has one.

    Raises:
        QBEError: it cannot be written there.
    """
    path, side = candidate.path, described["candidate"]
    if path is not None and (path / provenance.NAME).is_file():
        name = described["suite"]["name"]
        provenance.judged(path, described["verdict"], side["digest"], name, side["settings"])


def describe(outcome: Outcome) -> dict[str, Any]:
    """`verdict.json`."""
    import torch
    import transformers

    from qbe.version import __version__

    seen = outcome.seen
    texts = [(r.said, seen.now.replies[n].said) for n, r in seen.before.replies.items() if n in seen.now.replies]
    return {
        "format": FORMAT,
        "verdict": outcome.verdict,
        "because": [g.name for g in outcome.gates if g.status == outcome.verdict != "pass"],
        "baseline": _side(outcome.baseline, seen.before),
        "candidate": _side(outcome.candidate, seen.now),
        "suite": {"name": seen.suite.name, "digest": f"sha256:{seen.suite.digest}", "alpha": seen.suite.alpha,
                  "items": len(seen.tasks), "sampling": seen.suite.sampling.model_dump(mode="json")},
        "versions": {"qbe": __version__, "torch": torch.__version__, "transformers": transformers.__version__,
                     "python": platform.python_version()},
        "machine": platform.machine(),
        "started": outcome.started,
        "seconds": round(outcome.seconds, 1),
        "identical_answers": {"same": sum(a == b for a, b in texts), "of": len(texts)},
        "domains": _domains(outcome),
        "weights": None if seen.weights is None else describe_weights(seen.weights),
        "gates": [g.describe() for g in outcome.gates],
    }  # fmt: skip


def _side(target: Target, seen: Observed) -> dict[str, Any]:
    replies = [r for r in seen.replies.values() if not r.error]
    return {
        "where": target.where, "digest": seen.digest, "model": seen.model, "request": dict(target.request),
        "settings": None if target.is_url else f"sha256:{hashlib.sha256(target.settings.encode()).hexdigest()}",
        "options": list(target.options), "chat": seen.chats, "memory": seen.memory,
        "started_s": None if seen.started_s is None else round(seen.started_s, 2),
        "average_weight_bits": _mean([r.bits for r in replies]), "average_kv_bits": _mean([r.kv_bits for r in replies]),
    }  # fmt: skip


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return round(sum(known) / len(known), 3) if known else None


def _domains(outcome: Outcome) -> dict[str, dict[str, int]]:
    """Right answers of both, lost and gained, by domain."""
    found: dict[str, dict[str, int]] = {}
    seen = outcome.seen
    for task in seen.tasks:
        before, now = seen.before.grades.get(task.name), seen.now.grades.get(task.name)
        if before is None or now is None or task.trap:
            continue
        row = found.setdefault(task.domain, {"items": 0, "baseline": 0, "candidate": 0, "lost": 0, "gained": 0})
        row["items"] += 1
        row["baseline"] += before.right
        row["candidate"] += now.right
        if flip := flip_of(task, seen):
            row[flip] += 1
    return found


def items_of(outcome: Outcome) -> list[dict[str, Any]]:
    """A line of `items.jsonl` for each item, those that were not asked included."""
    seen = outcome.seen
    return [
        {
            "item": t.name, "domain": t.domain, "flip": flip_of(t, seen), "critical": t.critical, "trap": t.trap,
            "prompt": t.prompt, "baseline": _answer(t.name, seen.before.replies, seen.before.grades),
            "candidate": _answer(t.name, seen.now.replies, seen.now.grades),
        }
        for t in seen.tasks
    ]  # fmt: skip


def _answer(name: str, replies: Mapping[str, Reply], grades: Mapping[str, Grade]) -> dict[str, Any] | None:
    return {**asdict(replies[name]), **asdict(grades[name])} if name in replies else None


def render(described: Mapping[str, Any]) -> RenderableType:
    """For the terminal: gates that decided first, then the rest."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    order = ("fail", "anomalous", "inconclusive", "pass", "not run")
    for gate in sorted(described["gates"], key=lambda g: order.index(g["status"])):
        saw = gate["saw"] if gate["status"] == "not run" else f"{gate['saw']} ({gate['limit']})"
        if gate["status"] == "inconclusive" and gate["needed"] is not None and gate["n"] is not None:
            saw += f"; about {gate['needed']} items would decide, there are {gate['n']}"
        table.add_row(Text(gate["status"], style=STYLES[gate["status"]]), gate["name"], Text(saw))
    verdict = described["verdict"]
    because = f": {', '.join(described['because'])}" if described["because"] else ""
    title = f"{described['candidate']['where']} against {described['baseline']['where']}"
    title += f", suite {described['suite']['name']}"
    return Group(Text(f"qbe regress: {title}", style="bold"), table, Text(f"{verdict}{because}", style=STYLES[verdict]))
