"""Requests as a production service got them: Azure's traces (Patel et al. 2024, Splitwise), scaled to the machine."""

from __future__ import annotations

import csv
import json
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from qbe.errors import QBEError

DATA = "../shared/data"  # where --data and $QBE_DATA say nothing
TRACES = {"conv": "azure_llm_trace_conv_6000.csv", "code": "azure_llm_trace_code_3000.csv"}
TEXTS = {"gsm8k_train4000.jsonl": "question", "alpaca_seed_tasks.jsonl": "instruction"}
_LETTERS = 4.0  # of English text a token


@dataclass(frozen=True)
class Arrival:
    """One request.

    Attributes:
        at: seconds after the first.
        prompt: text.
        tokens: of its answer.
        tier: service tier.
    """

    at: float
    prompt: str
    tokens: int
    tier: str

    def body(self) -> dict[str, Any]:
        """For `/v1/completions`."""
        return {"prompt": self.prompt, "max_tokens": self.tokens, "ignore_eos": True, "temperature": 0,
                "service_tier": self.tier}  # fmt: skip


def folder_of(data: Path | None) -> Path:
    """Where the data sets are."""
    return data or Path(os.environ.get("QBE_DATA") or DATA)


class Traffic:
    """A trace with the lengths of its requests divided by `shrink`, and texts of questions in place of its prompts.

    Args:
        data: folder of the traces and texts; None takes $QBE_DATA, else ../shared/data.
        trace: of `TRACES`.
        shrink: what tokens of prompts and answers are divided by.
        shares: tier -> its part of the requests.
        longest: tokens that a prompt and its answer have at most, in all.

    Raises:
        QBEError: a file is missing or not what its name says.
    """

    def __init__(
        self, data: Path | None, trace: str, shrink: float, shares: Mapping[str, float], longest: int = 1024
    ) -> None:
        folder = folder_of(data)
        self._rows = _read(folder / TRACES[trace])
        self._words = [text for name, field in TEXTS.items() for text in _texts(folder / name, field)]
        random.Random(0).shuffle(self._words)
        self._shrink, self._shares, self._longest = shrink, shares, longest
        self._served = 0

    def take(self, count: int, rate: float, seed: int, tier: str | None = None) -> list[Arrival]:
        """So many requests in a row from somewhere in the trace, `rate` a second on average, bursts as in the trace.

        The same seed gives the same arrivals, lengths and tiers, but no prompt is ever given twice, so that no cache
        plays a part.

        Args:
            tier: of all of them; None draws by `shares`.
        """
        draw = random.Random(seed)
        first = draw.randrange(max(1, len(self._rows) - count))
        rows = list(islice(cycle(self._rows), first, first + count))
        span = rows[-1][0] - rows[0][0]
        # Once around the trace's end time runs backwards: then they come evenly.
        pace = (count - 1) / rate / span if span > 0 else 0.0
        arrivals = []
        for i, (asked, read, written) in enumerate(rows):
            tokens = max(2, round(written / self._shrink))
            size = max(8, min(round(read / self._shrink), self._longest - tokens))
            chosen = tier or draw.choices(list(self._shares), list(self._shares.values()))[0]
            when = (asked - rows[0][0]) * pace if pace else i / rate
            arrivals.append(Arrival(when, self._prompt(size), tokens, chosen))
        return arrivals

    def endless(self, seed: int, tier: str) -> Iterator[Arrival]:
        """Requests of one tier, one after the other."""
        while True:
            yield from self.take(64, 1.0, seed, tier)
            seed += 1

    def _prompt(self, tokens: int) -> str:
        """About so many tokens: a number that makes it unlike all others, and questions."""
        self._served += 1
        text, size = f"{self._served}: ", int(tokens * _LETTERS)
        i = self._served * 7919
        while len(text) < size:
            text += self._words[i % len(self._words)] + "\n"
            i += 1
        return text[:size]


def _read(path: Path) -> list[tuple[float, int, int]]:
    """Seconds, tokens of the prompt and of the answer."""
    try:
        with path.open(newline="") as file:
            rows = [
                (datetime.fromisoformat(r["TIMESTAMP"][:26]).timestamp(), int(r["ContextTokens"]),
                 int(r["GeneratedTokens"]))
                for r in csv.DictReader(file)
            ]  # fmt: skip
    except OSError:
        raise QBEError(f"there is no trace '{path}'; give --data the folder that holds it") from None
    except (ValueError, KeyError, TypeError) as error:
        raise QBEError(f"'{path}' is no trace of Azure's ({error!r}); give --data another folder") from None
    if not rows:
        raise QBEError(f"'{path}' is empty; give --data another folder")
    return sorted(rows)


def _texts(path: Path, field: str) -> list[str]:
    try:
        return [json.loads(line)[field] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError:
        raise QBEError(f"there is no '{path}'; give --data the folder that holds it") from None
    except (ValueError, KeyError) as error:
        raise QBEError(f"'{path}' has no texts ({error!r}); give --data another folder") from None
