"""When an answer is hard or easy to predict, for each model: from the built-in text, or learned from records.

A window is some tokens of an answer, 32 by default. It is hard when its mean entropy is in the upper quarter of all
windows seen and its mean margin in the lower quarter, easy the other way round: both must say so. The windows that
every store knows are those of the built-in text (`qbe.sites.TextDifficulty`); those of a model's own answers, which
`qbe records --learn-refresh` learns from, go first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qbe.errors import QBEError
from qbe.files import write_text
from qbe.records.record import Record
from qbe.sites import TextDifficulty

WINDOW = 32  # tokens, by default; learned thresholds are of such windows
RUN = 3  # windows in a row that are cause for another blueprint, by default
LEAST = 32  # windows that thresholds are learned from
HARD, EASY, USUAL = "hard", "easy", "usual"


@dataclass(frozen=True)
class Thresholds:
    """Of one model.

    Attributes:
        hard_entropy, easy_entropy: mean entropy of a window's tokens, nats, above and below which it may be one.
        hard_margin, easy_margin: mean difference of the two highest logits, below and above which it may.
        windows: how many these were learned from.
    """

    hard_entropy: float
    easy_entropy: float
    hard_margin: float
    easy_margin: float
    windows: int

    def kind(self, entropy: float, margin: float) -> str:
        """What a window with these means is: `hard`, `easy` or `usual`."""
        if entropy > self.hard_entropy and margin < self.hard_margin:
            return HARD
        return EASY if entropy < self.easy_entropy and margin > self.easy_margin else USUAL


def moved(score: float, kind: str) -> float:
    """A query's score once its answer has turned out hard or easy: half of the way to the end of its range."""
    return (score + 1) / 2 if kind == HARD else score / 2


def windows(entropies: Iterable[float], margins: Iterable[float]) -> Iterator[tuple[float, float]]:
    """Mean entropy and mean margin of each whole window of an answer."""
    pairs = list(zip(entropies, margins, strict=True))
    for end in range(WINDOW, len(pairs) + 1, WINDOW):
        part = pairs[end - WINDOW : end]
        yield sum(e for e, _ in part) / WINDOW, sum(m for _, m in part) / WINDOW


def of_text(text: TextDifficulty | None, window: int = WINDOW) -> Thresholds | None:
    """Those of the windows of a text, wherever they begin; None where it has fewer than `LEAST`."""
    if text is None or len(text.entropies) < window + LEAST - 1:
        return None
    entropies, margins = (
        np.convolve(values, np.full(window, 1 / window), "valid") for values in (text.entropies, text.margins)
    )
    return _of(list(zip(entropies.tolist(), margins.tolist(), strict=True)))


def learn(records: Iterable[Record]) -> dict[str, Thresholds]:
    """The thresholds of every model whose records have enough windows; model -> thresholds."""
    seen: dict[str, list[tuple[float, float]]] = {}
    for r in records:
        if r.entropies and r.margins:
            seen.setdefault(r.model, []).extend(windows(r.entropies, r.margins))
    return {model: _of(measured) for model, measured in seen.items() if len(measured) >= LEAST}


def _of(windows: list[tuple[float, float]]) -> Thresholds:
    entropies, margins = np.asarray(windows).T
    easy_entropy, hard_entropy = np.quantile(entropies, (0.25, 0.75))
    hard_margin, easy_margin = np.quantile(margins, (0.25, 0.75))
    return Thresholds(float(hard_entropy), float(easy_entropy), float(hard_margin), float(easy_margin), len(windows))


def default_path() -> Path:
    """`refresh.json` in the cache folder."""
    from qbe.files import cache_dir

    return cache_dir() / "refresh.json"


def load(model: str, path: Path | None = None) -> Thresholds | None:
    """Those of a model; None where none were learned.

    Raises:
        QBEError: the file is not one that `save` wrote.
    """
    values = _read(default_path() if path is None else path).get(model)
    return None if values is None else Thresholds(**values)


def save(learned: dict[str, Thresholds], path: Path | None = None) -> Path:
    """Write them beside those of other models; returns where. Raises QBEError when the disk refuses."""
    path = default_path() if path is None else path
    path.parent.mkdir(parents=True, exist_ok=True)
    every = _read(path) | {model: asdict(thresholds) for model, thresholds in learned.items()}
    write_text(path, json.dumps(every, indent=1, sort_keys=True) + "\n")
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        by_model: dict[str, Any] = json.loads(path.read_text("utf-8"))
        for values in by_model.values():
            Thresholds(**values)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise QBEError(
            f"{path} holds no thresholds: delete it and run 'qbe records --learn-refresh' again ({error})"
        ) from error
    return by_model
