"""Trains the query analysis and writes `src/qbe/analysis/classifier.json`.

    python scripts/train_analysis.py --model SmolLM2-135M-Instruct.Q4_1.gguf [--data DIR] [--labels FILE]

The score is fitted to the measured damage of 4-bit weights over a whole answer: the KL divergence summed over the
answer's tokens (`analysis_labels.py`), which by the chain rule estimates the divergence between the two models'
distributions of answers, mapped to [0, 1] by its quantile among the training prompts. Labels are measured once
and kept in `--labels`; a run stops measuring after `--minutes` and the next goes on. Held-out prompts use other
templates, other articles, other BIG-Bench-Hard tasks and gsm8k's test file, and choose nothing: regularisation is
cross-validated on training prompts.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from analysis_labels import ANSWER_TOKENS, load, measure
from analysis_pairs import Pair, pairs
from scipy.optimize import lsq_linear
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegressionCV, RidgeCV
from sklearn.model_selection import StratifiedKFold

from qbe.analysis import thresholds
from qbe.analysis.classifier import Array, Classifier, transform
from qbe.analysis.entropy import SemanticEntropy
from qbe.analysis.features import FEATURES, LOGARITHMIC, extract
from qbe.analysis.profile import CLASSES

OUT = Path(__file__).parents[1] / "src/qbe/analysis/classifier.json"
LENGTH_WEIGHT = 0.1
COMMAND = "python scripts/train_analysis.py --model SmolLM2-135M-Instruct.Q4_1.gguf"


def read_labels(items: list[Pair], path: Path) -> tuple[Array, Array]:
    """Total and mean KL of each pair, float64 [pairs]; NaN where it was not measured."""
    rows = {r["key"]: r for r in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
    missing = {"total_kl": np.nan, "mean_kl": np.nan}
    found = [rows.get(p.key, missing) if p.measure else missing for p in items]
    return np.array([r["total_kl"] for r in found]), np.array([r["mean_kl"] for r in found])


def quantile(values: Array, reference: Array) -> Array:
    """The share of `reference` at or below each value, counting ties half: in [0, 1]."""
    r = np.sort(reference)
    return (np.searchsorted(r, values, "left") + np.searchsorted(r, values, "right")) / (2 * len(r))


def named(names: tuple[str, ...], values: Array) -> dict[str, float]:
    return {n: round(float(v), 5) for n, v in zip(names, values, strict=True)}


def fit(raw: Array, marks: Array, y: Array, label: Array, train: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """The artefact without its metadata.

    Args:
        raw: features [prompts, FEATURES]; marks: [prompts, MARKS]; y: class indices [prompts].
        label: what the score should be, NaN where not measured; train: which prompts to fit on, bool [prompts].
    """
    x = transform(raw[train])
    artefact: dict[str, Any] = {
        "features": list(FEATURES),
        "logarithmic": list(LOGARITHMIC),
        "classes": list(CLASSES),
        "marks": list(thresholds.MARKS),
        "mean": named(FEATURES, x.mean(0)),
        "scale": named(FEATURES, np.maximum(x.std(0), 1e-3)),
        "class_weights": {c: {**dict.fromkeys(FEATURES, 0.0), "bias": 0.0} for c in CLASSES},
        "score_weights": {**dict.fromkeys((*FEATURES, *CLASSES), 0.0), "bias": 0.0},
        "thresholds": {**dict.fromkeys(thresholds.MARKS, 0.0), "level": 0.0},
        "metadata": {},
    }
    z = Classifier(artefact).standardise(raw)
    model = LogisticRegressionCV(
        Cs=[0.01, 0.03, 0.1, 0.3, 1.0],
        cv=StratifiedKFold(5, shuffle=True, random_state=0),
        class_weight="balanced",
        scoring="balanced_accuracy",
        max_iter=3000,
        l1_ratios=(0.0,),
        use_legacy_attributes=False,
    ).fit(z[train], y[train])
    for c, w, b in zip(CLASSES, model.coef_, model.intercept_, strict=True):
        artefact["class_weights"][c] = {**named(FEATURES, w), "bias": round(float(b), 5)}

    measured = train & ~np.isnan(label)
    inputs = np.concatenate([z, Classifier(artefact).probabilities(z)], -1)
    ridge = RidgeCV(np.logspace(-1, 3, 17)).fit(inputs[measured], label[measured])
    artefact["score_weights"] = {**named((*FEATURES, *CLASSES), ridge.coef_), "bias": round(float(ridge.intercept_), 5)}
    artefact["thresholds"] = fit_thresholds(marks[measured], label[measured])
    artefact["metadata"]["regularisation"] = {"C": float(model.C_), "alpha": round(float(ridge.alpha_), 3)}
    return artefact


def fit_thresholds(marks: Array, label: Array) -> dict[str, float]:
    """Tier 1's weights by least squares with signs held to what the marks mean.

    Longer queries are to be treated more conservatively, but the data give the prompt's length next to nothing (see the
    baseline in the results), so its weight is held to at least `LENGTH_WEIGHT`.
    """
    low = dict.fromkeys(thresholds.MARKS, -1.0) | {"length": LENGTH_WEIGHT, "asks_long": 0.0}
    high = dict.fromkeys(thresholds.MARKS, 1.0) | {"fact": 0.0, "asks_short": 0.0}
    x = np.concatenate([marks, np.ones((len(marks), 1))], -1)
    bounds = ([*low.values(), 0.0], [*high.values(), 1.0])
    return named((*thresholds.MARKS, "level"), lsq_linear(x, label, bounds).x)


def evaluate(
    classifier: Classifier, items: list[Pair], raw: Array, marks: Array, y: Array, total: Array, mean: Array
) -> dict[str, Any]:
    """What the classifier reaches on the held-out prompts, beside simple baselines."""
    held = np.array([p.held_out for p in items])
    z = classifier.standardise(raw)
    p = classifier.probabilities(z)
    blind = raw.copy()
    blind[:, FEATURES.index("semantic_entropy")] = 0
    zb = classifier.standardise(blind)
    weights = np.array([classifier.thresholds[m] for m in thresholds.MARKS])
    rule = np.array(
        [CLASSES.index(thresholds.marks(q.prompt, int(n))[0]) for q, n in zip(items, raw[:, 0], strict=True)]
    )
    measured = held & ~np.isnan(total)
    short = measured & (raw[:, 0] < 32)

    def accuracy(predicted: npt.NDArray[np.intp]) -> dict[str, float]:
        rows = {c: round(float((predicted == i)[held & (y == i)].mean()), 3) for i, c in enumerate(CLASSES)}
        return {**rows, "all": round(float((predicted == y)[held].mean()), 3)}

    def rank(values: Array, target: Array, where: npt.NDArray[np.bool_]) -> float:
        return round(float(spearmanr(values[where], target[where]).statistic), 3)

    scores = {
        "tier 2": classifier.score(z, p),
        "tier 2 without embedding": classifier.score(zb, classifier.probabilities(zb)),
        "tier 1": np.clip(marks @ weights + classifier.thresholds["level"], 0, 1),
        "baseline: prompt tokens": raw[:, 0],
        "baseline: semantic entropy": raw[:, FEATURES.index("semantic_entropy")],
    }
    return {
        "held_out_prompts": int(held.sum()),
        "held_out_measured": int(measured.sum()),
        "held_out_measured_under_32_tokens": int(short.sum()),
        "class_accuracy_tier_2": accuracy(p.argmax(-1)),
        "class_accuracy_tier_1": accuracy(rule),
        "spearman_with_answer_kl": {k: rank(s, total, measured) for k, s in scores.items()},
        "spearman_with_answer_kl_under_32_tokens": {k: rank(s, total, short) for k, s in scores.items()},
        "spearman_with_mean_kl_per_token": {k: rank(s, mean, measured) for k, s in scores.items()},
        "median_kl_by_class": {
            c: {
                "answer_nats": round(float(np.nanmedian(total[y == i])), 3),
                "nats_per_token": round(float(np.nanmedian(mean[y == i])), 4),
            }
            for i, c in enumerate(CLASSES)
        },
    }


def main() -> None:
    """Measures labels when missing, fits, evaluates, writes the artefact and prints its metadata."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, required=True, help="GGUF file or transformers folder of SmolLM2-135M-Instruct"
    )
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("QBE_DATA", "../shared/data")))
    parser.add_argument("--labels", type=Path, default=Path.home() / ".cache/qbe/analysis_labels.jsonl")
    parser.add_argument("--minutes", type=float, default=12, help="stop measuring labels after this long")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)

    items = pairs(args.data)
    args.labels.parent.mkdir(parents=True, exist_ok=True)
    measure([p for p in items if p.measure], args.model, args.labels, 60 * args.minutes)
    total, mean = read_labels(items, args.labels)

    model, tokenizer = load(args.model)
    entropy = SemanticEntropy(model.get_input_embeddings().weight.detach())
    ids = [tokenizer(p.prompt, add_special_tokens=False)["input_ids"] for p in items]
    raw = np.array([extract(p.prompt, i, entropy(i)) for p, i in zip(items, ids, strict=True)])
    marks = np.array([thresholds.marks(p.prompt, len(i))[1] for p, i in zip(items, ids, strict=True)])
    y = np.array([CLASSES.index(p.prompt_class) for p in items])
    train = np.array([not p.held_out for p in items])
    label = quantile(total, total[train & ~np.isnan(total)])
    label[np.isnan(total)] = np.nan

    artefact = fit(raw, marks, y, label, train)
    artefact["metadata"] |= {
        "command": COMMAND,
        "label": f"quantile of the KL divergence (nats) summed over the answer's first {ANSWER_TOKENS} tokens, "
        "bfloat16 SmolLM2-135M-Instruct to the same with its decoder's linears rounded to 4 bits, group 64",
        "training_prompts": int(train.sum()),
        "training_measured": int((train & ~np.isnan(total)).sum()),
        "results": evaluate(Classifier(artefact), items, raw, marks, y, total, mean),
    }
    temporary = args.out.with_name(args.out.name + ".part")
    temporary.write_text(json.dumps(artefact, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, args.out)
    print(json.dumps(artefact["metadata"], indent=1))


if __name__ == "__main__":
    main()
