"""Trains PAQ's router: labels by perplexity, a linear classifier of the sentence encoder's vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qbe.analysis.encoder import default_encoder
from qbe.datasets.intervals import interval
from qbe.datasets.items import Item
from qbe.datasets.results import Results
from qbe.engine.engine import Engine
from qbe.errors import QBEError
from qbe.eval.compare import FULL, Comparison, ComparisonResult, Setting
from qbe.policies.learned import Learned
from qbe.policies.paq import THRESHOLDS, logarithms
from qbe.sites import FULL_BITS

SEEDS = 3  # of the split in training and held-out prompts
HELD_OUT = 0.25
STRENGTH = 10.0  # scikit-learn's C
NEVER = -30.0  # logit of a width that no training prompt has

Numbers = npt.NDArray[np.float64]
Classes = npt.NDArray[np.int64]


def comparison(engine: Engine, items: Sequence[Item], results: Results) -> Comparison:
    """Every item at every width of the store, by teacher forcing; what `labels` are made of."""
    widths = [g for g in engine.table.gears() if g < FULL_BITS]
    return Comparison(engine, items, [Setting("uniform", w) for w in widths], results)


def labels(outcome: ComparisonResult, threshold: float) -> Classes:
    """For each query the place, among the settings and then 16 bits, of the first one whose perplexity is within the
    threshold of 16 bits', int64 [queries].
    """
    levels = []
    for query in outcome.queries:
        full = query.measured[FULL].fidelity
        over = [(query.measured[s].fidelity.loss - full.loss) / full.tokens for s in outcome.settings]
        levels.append(next((i for i, x in enumerate(over) if x <= math.log(threshold)), len(over)))
    return np.array(levels)


def vectors(outcome: ComparisonResult) -> Numbers:
    """The encoder's vectors of the prompts, [queries, 64]."""
    prompts = [q.encoded.prompt for q in outcome.queries]
    texts = [p if isinstance(p, str) else p[-1]["content"] for p in prompts]
    return np.array([default_encoder().encode(t) for t in texts], np.float64)


def fit(x: Numbers, y: Classes, classes: int) -> tuple[Numbers, Numbers]:
    """Weight [64, classes] and bias [classes] of a logistic regression in which every class weighs the same, as in the
    paper, which evens the classes out by leaving prompts away.
    """
    from qbe.learning.fitting import logistic_regression

    weight, bias = np.zeros((x.shape[1], classes)), np.full(classes, NEVER)
    present = np.unique(y)
    if len(present) == 1:
        bias[present] = 0.0
        return weight, bias
    model = logistic_regression(x, y, STRENGTH)
    rows, offsets = model.coef_, model.intercept_
    if len(present) == 2:  # scikit-learn gives the second class's
        rows, offsets = np.concatenate([-rows, rows]) / 2, np.concatenate([-offsets, offsets]) / 2
    weight[:, present], bias[present] = rows.T, offsets
    return weight, bias


def train(engine: Engine, items: Sequence[Item], results: Results, tick: Callable[[], None] = lambda: None) -> Learned:
    """Measures the items, which goes on where an interrupted run was, and fits a router for each threshold.

    The router that is kept is that of the first split; what is reported is of each split's held-out prompts.

    Raises:
        QBEError: too few prompts, or what `Comparison` raises.
    """
    outcome = comparison(engine, items, results).run(tick)
    if (n := len(outcome.queries)) < 8:
        raise QBEError(f"{n} prompts are too few to train on; give a higher --limit")
    x = vectors(outcome)
    widths = np.array([*(s.bits for s in outcome.settings), FULL_BITS], np.int64)
    tensors: dict[str, npt.NDArray[Any]] = {"widths": widths}
    about: dict[str, Any] = {"prompts": n, "left_out": len(outcome.left_out), "widths": widths.tolist(), "routers": []}
    for tier, threshold in THRESHOLDS.items():
        y = labels(outcome, threshold)
        reports = []
        for seed in range(SEEDS):
            order = np.random.default_rng(seed).permutation(n)
            held, kept = order[: round(n * HELD_OUT)], order[round(n * HELD_OUT) :]
            weight, bias = fit(x[kept], y[kept], len(widths))
            reports.append(_report(x[held] @ weight + bias, y[held], y[kept], widths))
            if seed == 0:
                tensors[f"{tier}.weight"], tensors[f"{tier}.bias"] = weight.astype("f4"), bias.astype("f4")
                if tier == "default":
                    tensors["sample"] = logarithms(x @ weight + bias).astype("f4")
        about["routers"].append({"tier": tier, "threshold": threshold, "seeds": reports})
    return Learned(tensors, about)


def _report(logits: Numbers, y: Classes, trained_on: Classes, widths: Classes) -> dict[str, Any]:
    """How the router does on held-out prompts; `constant` is what always giving training's commonest width would do."""
    chosen = logits.argmax(-1)
    right = (chosen == y).astype(np.float64)
    constant = np.bincount(trained_on, minlength=len(widths)).argmax()
    recalls = [right[y == c].mean() for c in np.unique(y)]
    return {
        "held_out": len(y),
        "accuracy": float(right.mean()),
        "accuracy_interval": interval(right, np.ones(len(y))),
        "balanced_accuracy": float(np.mean(recalls)),
        "constant_accuracy": float((y == constant).mean()),
        "share": _shares(chosen, widths),
        "share_of_labels": _shares(y, widths),
        "bits": float(widths[chosen].mean()),
        "bits_of_labels": float(widths[y].mean()),
    }


def _shares(classes: Classes, widths: Classes) -> dict[str, float]:
    counts = np.bincount(classes, minlength=len(widths)) / len(classes)
    return {str(w): round(float(c), 4) for w, c in zip(widths, counts, strict=True)}
