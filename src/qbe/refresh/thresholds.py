"""When an answer is hard or easy to predict, for each model: from the built-in text, or learned from records.

A window is some tokens of an answer, 32 by default. It is hard when its mean entropy is high and its mean margin low,
easy the other way round: both must say so. High is the upper quarter of all windows seen. The windows that every store
knows are those of the built-in text (`qbe.sites.TextDifficulty`); those of a model's own answers, which `qbe records
--learn-refresh` learns from, go first.

A server that scores its answers (`qbe.server.health`) knows what low precision did to their windows. Where that grows
with entropy, and falls with the margin, high is what comes with `FACTOR` times the usual divergence at the same bits,
and low with as little: log divergence is regressed on one of them and on the bits of the weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qbe.errors import QBEError
from qbe.files import write_text
from qbe.records.record import Record
from qbe.sites import TextDifficulty

WINDOW = 32  # tokens, by default; learned thresholds are of such windows
RUN = 3  # windows in a row that are cause for another blueprint, by default
LEAST = 32  # windows that thresholds are learned from
FACTOR = 1.5  # times the usual divergence
SURE = 1.7  # standard errors: Student's t at 95 %, one-sided, with the degrees of freedom of `LEAST` windows
NO_KL = 1e-7  # nats a token, below which rounding is all that is seen
Numbers = npt.NDArray[np.float64]
HARD, EASY, USUAL = "hard", "easy", "usual"


@dataclass(frozen=True)
class Thresholds:
    """Of one model.

    Attributes:
        hard_entropy, easy_entropy: mean entropy of a window's tokens, nats, above and below which it may be one.
        hard_margin, easy_margin: mean difference of the two highest logits, below and above which it may.
        windows: how many these were learned from.
        scored: of which a divergence decided; 0: shares of the windows did.
    """

    hard_entropy: float
    easy_entropy: float
    hard_margin: float
    easy_margin: float
    windows: int
    scored: int = 0

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
    """The thresholds of every model whose records have enough windows; model -> thresholds.

    Windows are those of answers that were watched (`entropies`), and those that were scored (`quality`).
    """
    seen: dict[str, list[tuple[float, float]]] = {}
    scored: dict[str, list[tuple[float, float, float, float]]] = {}
    for r in records:
        own = (r.quality or {}).get("windows") or []
        if r.average_weight_bits is not None and not r.refreshes:
            scored.setdefault(r.model, []).extend(
                (kl, entropy, margin, r.average_weight_bits) for kl, entropy, margin in own if kl > NO_KL
            )
        if r.entropies and r.margins:
            seen.setdefault(r.model, []).extend(windows(r.entropies, r.margins))
        else:
            seen.setdefault(r.model, []).extend((entropy, margin) for _, entropy, margin in own)
    found = {model: _of(measured) for model, measured in seen.items() if len(measured) >= LEAST}
    return {model: _by_divergence(scored.get(model, []), usual) or usual for model, usual in found.items()}


def _by_divergence(scored: list[tuple[float, float, float, float]], usual: Thresholds) -> Thresholds | None:
    """Thresholds at which windows diverge `FACTOR` times as much as usual, and as little; None where too few were
    scored, or neither number says anything of it.

    Args:
        scored: windows' divergence, entropy, margin and bits.
    """
    if len(scored) < LEAST:
        return None
    kl, entropy, margin, bits = np.array(scored).T
    hard_entropy, easy_entropy = _around(entropy, bits, np.log(kl), 1) or (None, None)
    hard_margin, easy_margin = _around(margin, bits, np.log(kl), -1) or (None, None)
    if hard_entropy is None or easy_entropy is None or hard_margin is None or easy_margin is None:
        return None
    return Thresholds(hard_entropy, easy_entropy, hard_margin, easy_margin, usual.windows, len(scored))


def _around(x: Numbers, bits: Numbers, log_kl: Numbers, sign: int) -> tuple[float, float] | None:
    """Where the regression of the divergence on `x` is `FACTOR` times its mean, and where as little.

    None where its slope may as well have the other sign (`SURE`).
    """
    around = [x - x.mean(), np.ones(len(x)), *([bits - bits.mean()] if np.ptp(bits) > 0 else [])]
    design = np.stack(around, 1)
    found, _, rank, _ = np.linalg.lstsq(design, log_kl, rcond=None)
    free = len(x) - design.shape[1]
    if rank < design.shape[1]:
        return None
    noise = float(((log_kl - design @ found) ** 2).sum()) / free
    deviation = float(np.sqrt(noise * np.linalg.inv(design.T @ design)[0, 0]))
    slope = float(found[0])
    if slope * sign <= SURE * deviation:
        return None
    step = float(np.log(FACTOR)) / slope
    return float(x.mean()) + step, float(x.mean()) - step


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
