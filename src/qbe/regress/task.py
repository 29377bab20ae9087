"""One item as a server is asked it, and the items of QBE's own form: JSON lines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from qbe.datasets import answers
from qbe.datasets.items import Item
from qbe.errors import QBEError
from qbe.regress.grading import (
    Grader,
    call_grader,
    program_grader,
    refusal_grader,
    schema_grader,
    text_grader,
)

TOKENS = 64  # of an answer whose item says nothing
_MAKERS: dict[str, Callable[[Mapping[str, Any]], Grader]] = {
    "number": lambda row: text_grader(partial(answers.same_number, str(row["number"]))),
    "choice": lambda row: text_grader(partial(answers.first_choice, row["choice"], row["choices"])),
    "contains": lambda row: text_grader(partial(contains, row["contains"])),
    "regex": lambda row: text_grader(lambda text: re.search(row["regex"], text) is not None),
    "program": lambda row: program_grader(row["program"]["head"], row["program"]["test"]),
    "schema": lambda row: schema_grader(row["schema"], row.get("values")),
    "calls": lambda row: call_grader(row["calls"]),
    "refuse": lambda row: refusal_grader(bool(row["refuse"])),
}
"""What an item is graded by: the key of its row that says so."""
_KEYS = {
    *_MAKERS, "id", "prompt", "messages", "plain", "choices", "values", "tools", "max_tokens", "critical", "trap",
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """One item.

    Attributes:
        domain, name: where it counts, and what it is called.
        messages: for models with a chat template.
        plain: the same as text for the others; None: they cannot be asked.
        stop: what ends an answer to `plain`.
        fields: more of the request, such as tools.
        max_tokens: of an answer.
        grade: of a reply.
        critical: losing it alone is a failure.
        trap: its key is wrong on purpose: who answers it "right" has seen the keys.
        refuse: whether it should be refused; None where that is not the question.
    """

    domain: str
    name: str
    messages: list[dict[str, Any]]
    plain: str | None
    grade: Grader
    max_tokens: int = TOKENS
    stop: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    critical: bool = False
    trap: bool = False
    refuse: bool | None = None

    def request(self, chats: bool, temperature: float, seed: int) -> tuple[str, dict[str, Any]] | None:
        """Path and body; None: a model without chat template cannot be asked this."""
        body: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": temperature}
        if temperature:
            body["seed"] = seed
        if chats:
            return "chat/completions", {"messages": self.messages, **body, **self.fields}
        if self.plain is None:
            return None
        stop = {"stop": list(self.stop)} if self.stop else {}
        return "completions", {"prompt": self.plain, **body, **self.fields, **stop}

    @property
    def prompt(self) -> str:
        """What it asks, to be shown."""
        return "\n".join(str(m.get("content", "")) for m in self.messages)


def of_item(item: Item, domain: str, max_tokens: int | None) -> Task:
    """An item of `qbe.datasets.items`."""
    assert item.right is not None
    chat = item.chat or item.plain
    tokens = max_tokens or item.max_tokens
    messages = [{"role": "user", "content": chat.prompt}]
    return Task(domain, item.name, messages, item.plain.prompt, text_grader(item.right), tokens, item.plain.stop)


def read_rows(path: Path, domain: str, max_tokens: int | None) -> list[Task]:
    """The items of a file of JSON lines, one object each (docs/regress.md).

    Raises:
        QBEError: it cannot be read, or a line is no item; it names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise QBEError(f"items of '{path}' cannot be read: {error}") from None
    tasks, seen = [], set[str]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            task = of_row(json.loads(line), domain, max_tokens, path.stem)
        except (ValueError, KeyError, TypeError, re.error) as error:
            why = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise QBEError(f"{path}, line {number}: {why}") from None
        if task.name in seen:
            raise QBEError(f"{path}, line {number}: there is an item '{task.name}' before it; give each its own id")
        seen.add(task.name)
        tasks.append(task)
    return tasks


def of_row(row: Any, domain: str, max_tokens: int | None, prefix: str) -> Task:
    """One item. Raises ValueError, KeyError or TypeError for what is none."""
    if not isinstance(row, dict):
        raise ValueError("an item is a JSON object")
    if unknown := sorted(row.keys() - _KEYS):
        raise ValueError(f"there is no key '{unknown[0]}'; there are {', '.join(sorted(_KEYS))}")
    graded = [key for key in _MAKERS if key in row]
    if len(graded) != 1:
        raise ValueError(f"an item has exactly one of {', '.join(_MAKERS)}, this one has {len(graded)}")
    if "messages" in row:
        messages, plain = list(row["messages"]), row.get("plain")
    else:
        messages = [{"role": "user", "content": str(row["prompt"])}]
        plain = row.get("plain") or f"Question: {row['prompt']}\nAnswer:"
    own = "plain" in row
    fields: dict[str, Any] = {}
    if "schema" in row:
        named = {"name": "answer", "schema": row["schema"], "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": named}
    if "calls" in row:
        fields |= {"tools": row["tools"], "tool_choice": "required" if row["calls"] else "auto"}
        plain = None
    stop = ("\ndef ", "\nclass ", "\nprint(") if "program" in row else ("\nQuestion:",) if plain and not own else ()
    return Task(
        domain, f"{prefix}/{row['id']}", messages, plain, _MAKERS[graded[0]](row),
        max_tokens or int(row.get("max_tokens", TOKENS)), stop, fields, bool(row.get("critical")),
        bool(row.get("trap")), bool(row["refuse"]) if "refuse" in row else None,
    )  # fmt: skip


def contains(wanted: Any, text: str) -> bool:
    parts = [wanted] if isinstance(wanted, str) else list(wanted)
    return all(str(part).casefold() in text.casefold() for part in parts)
