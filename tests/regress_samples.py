"""A suite and items for the tests of `qbe regress`, of which a tiny random model gets some right."""

from __future__ import annotations

import json
from pathlib import Path

SUITE = """
together = 4

[margins]
logic = 0.25
retrieval = 0.5

[limits]
coverage = 0
first_token = 50
per_token = 50
memory = 2
flips = 0.3

[probes]
passages = {passages}
long_characters = {long}
prompts = {prompts}
weights = {weights}

[[items]]
domain = "logic"
kind = "rows"
path = "rows.jsonl"

[[items]]
domain = "retrieval"
kind = "needles"
path = "built-in"
characters = [600]
limit = 4
"""


def rows(count: int = 24, tokens: int = 12) -> list[dict[str, object]]:
    """About half of which any text of random bytes gets right."""
    return [
        {"id": f"r{i}", "prompt": f"Say something about {i}.", "regex": regex, "max_tokens": tokens}
        for i, regex in zip(range(count), ("[a-m]", "[A-M]", "[^a-z]{4}", "[n-z]") * count, strict=False)
    ]


def write_suite(
    folder: Path, *, passages: int = 3, long: int = 700, prompts: int = 2, weights: bool = True, more: str = "",
    items: list[dict[str, object]] | None = None,
) -> Path:  # fmt: skip
    """The suite and its items.

    Args:
        more: at the top of the suite. items: None: `rows`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in (rows() if items is None else items))
    (folder / "rows.jsonl").write_text(lines)
    path = folder / "suite.toml"
    text = SUITE.format(passages=passages, long=long, prompts=prompts, weights=str(weights).lower())
    path.write_text(more + text)
    return path
