"""`report.html`: the verdict, what each gate saw, and the flips side by side. No script, no network."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from qbe.regress.run import Outcome

MOST = 200  # flips that are shown of each kind; `items.jsonl` has all


def render(described: dict[str, Any], outcome: Outcome) -> str:
    """The page as text; everything is escaped."""
    from qbe.regress.verdict import items_of

    items = items_of(outcome)
    malformed = [i for i in items if i["candidate"] and i["candidate"]["malformed"]]
    shown = [
        ("Lost", "right at the baseline, wrong now", [i for i in items if i["flip"] == "lost"]),
        ("Gained", "wrong at the baseline, right now", [i for i in items if i["flip"] == "gained"]),
        ("Malformed", "the candidate's answer has not the form that it must have", malformed),
    ]
    return _template().render(v=described, shown=shown, most=MOST)


@cache
def _template() -> Template:
    env = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters["said"] = _said
    return env.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))


def _said(answer: dict[str, Any] | None) -> str:
    """What an answer says, calls included."""
    if answer is None:
        return "(not asked)"
    if answer["error"]:
        return f"(no answer: {answer['error']})"
    return answer["text"] + "".join(f"{name}({arguments})" for name, arguments in answer["calls"]) or "(nothing)"
