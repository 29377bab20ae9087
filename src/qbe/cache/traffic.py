"""Traffic logs: what the blueprint cache is warmed with."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from qbe.analysis.features import FEATURES
from qbe.analysis.profile import CLASSES, QueryProfile
from qbe.analysis.thresholds import MARKS
from qbe.budget import Budget
from qbe.errors import QBEError
from qbe.files import reason
from qbe.sites import FULL_BITS

MAX_TOKENS = 128  # of an answer, where a line does not say; what `qbe generate` takes

Lengths = tuple[int, int]


@dataclass(frozen=True)
class LoggedRequest:
    """A request of the past.

    Attributes:
        text: the prompt, of a conversation the last message; None in a record, which keeps none.
        profile: of a record; None where there is the text.
        max_tokens: of the answer.
        budget: that it had.
        context: tokens of prompt and answer; None: those of this text and `max_tokens`.
    """

    text: str | None
    profile: QueryProfile | None = None
    max_tokens: int = MAX_TOKENS
    budget: Budget = field(default_factory=Budget)
    context: int | None = None


def read_traffic(path: Path, lengths: Path | None = None) -> list[LoggedRequest]:
    """The requests of a log, one JSON value a line.

    A line is a text, an object with `prompt` or OpenAI's `messages` (and, where they are given, `max_tokens`,
    `service_tier` or `tier`, `bits`, `activation_bits`, `kv_bits`), or a record that `qbe records --export` wrote.

    Args:
        lengths: a trace with the columns ContextTokens and GeneratedTokens (Azure's LLM traces have them): the requests
            get its lengths in turn, from the first on. A trace longer than the log makes it go round.

    Raises:
        QBEError: a file that cannot be read, or a line that is none of these, by its number.
    """
    asked = []
    for number, line in enumerate(_text(path).split("\n"), 1):  # JSON may hold what other functions take for ends
        if not line.strip():
            continue
        try:
            asked.append(_line(json.loads(line)))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError, QBEError) as error:
            said = str(error) if isinstance(error, QBEError) else "not a prompt, a request or a record in JSON"
            raise QBEError(f"{path}, line {number}: {said}") from None
    if not asked:
        raise QBEError(f"{path} has no requests; give a file with one JSON value a line")
    return asked if lengths is None else with_lengths(asked, read_lengths(lengths))


def with_lengths(asked: Sequence[LoggedRequest], lengths: Sequence[Lengths]) -> list[LoggedRequest]:
    """As many requests as the longer of both has, prompts and lengths taken in turn."""
    n = max(len(asked), len(lengths))
    pairs = zip(islice(cycle(asked), n), islice(cycle(lengths), n), strict=True)
    return [
        LoggedRequest(a.text, a.profile, generated, a.budget, context + generated) for a, (context, generated) in pairs
    ]


def read_lengths(path: Path) -> list[Lengths]:
    """Tokens of context and of the answer for each row of a trace.

    Raises:
        QBEError: it cannot be read, or is no such trace.
    """
    try:
        rows = [(int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in csv.DictReader(_text(path).splitlines())]
    except (KeyError, TypeError, ValueError, csv.Error):
        rows = []
    if not rows or min(min(r) for r in rows) < 0:
        raise QBEError(f"{path} is no trace of lengths: give a CSV with whole ContextTokens and GeneratedTokens")
    return rows


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise QBEError(f"'{path}' cannot be read: {reason(error)}") from None
    except ValueError:
        raise QBEError(f"'{path}' is not valid UTF-8; convert it first") from None


def _line(said: Any) -> LoggedRequest:
    if isinstance(said, str):
        return LoggedRequest(_worded(said))
    if "features" in said:
        return _record(said)
    text = said["messages"][-1]["content"] if "messages" in said else said["prompt"]
    tier = said.get("service_tier") or said.get("tier") or "default"
    budget = Budget(said.get("bits"), tier, said.get("activation_bits") or FULL_BITS, said.get("kv_bits"))
    most = said.get("max_tokens")
    most = MAX_TOKENS if most is None else most  # some clients write null for what they leave out
    if not isinstance(most, int) or most < 1:
        raise QBEError(f"max_tokens is {most!r}, but must be a whole number, 1 or more")
    return LoggedRequest(_worded(text), None, most, budget)


def _worded(text: Any) -> str:
    if isinstance(text, list):  # OpenAI's parts of a message
        text = "".join(part["text"] for part in text if part["type"] == "text")
    if not isinstance(text, str) or not text.strip():
        raise QBEError("the prompt is empty, or no text")
    text.encode("utf-8")  # a ValueError for lone surrogates
    return text


def _record(said: dict[str, Any]) -> LoggedRequest:
    """A record has the bits of every site, from which the budget's are seen, but for those of the KV cache."""
    eight = min(said["activation_bits"], default=FULL_BITS)
    budget = Budget(said["budget_bits"], said["tier"], eight)
    tier, features = said["analysis_tier"], {str(k): float(v) for k, v in said["features"].items()}
    lacking = set(MARKS if tier == 1 else FEATURES) - set(features)
    sound = all(0 <= v < float("inf") for v in features.values())
    if said["prompt_class"] not in CLASSES or tier not in (1, 2, 3) or lacking or not sound:
        raise QBEError("the record is of another version's analysis")
    profile = QueryProfile(float(said["score"]), said["prompt_class"], tier, features, cluster=said["cluster"])
    context = int(said["prompt_tokens"]) + int(said["completion_tokens"])
    return LoggedRequest(None, profile, int(said["completion_tokens"]), budget, context)
