"""Tier 2: the trained classifier, read from `classifier.json` and evaluated with numpy.

Two linear maps of the standardised features: a multinomial logistic regression gives the probability of each prompt
class, and a ridge regression on the features and those probabilities gives the score. The file is JSON with names
beside every weight, so that a person can read why a query got its score.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qbe.analysis.features import FEATURES, LOGARITHMIC
from qbe.analysis.profile import CLASSES
from qbe.analysis.thresholds import MARKS
from qbe.errors import QBEError

ARTEFACT = "classifier.json"
RETRAIN = "make it again with scripts/train_analysis.py"
_LOG = np.array([f in LOGARITHMIC for f in FEATURES])
_ENTROPY = FEATURES.index("semantic_entropy")

Array = npt.NDArray[np.float64]


def transform(raw: Array) -> Array:
    """Counts as log(1 + count), the rest unchanged; the last axis is `FEATURES`."""
    return np.where(_LOG, np.log1p(np.maximum(raw, 0)), raw)


class Classifier:
    """The weights of tiers 1 and 2 and their evaluation.

    Attributes:
        thresholds: tier 1's weight for each mark, and under "level" that of a short query without marks.
        metadata: how the file was made and what it reached on held-out prompts.
    """

    def __init__(self, artefact: dict[str, Any]) -> None:
        """Checks `artefact` (the parsed JSON) against this code.

        Raises:
            QBEError: it was made for other features, classes or marks, or a weight is missing or not finite.
        """
        try:
            expected = {"features": FEATURES, "classes": CLASSES, "marks": MARKS}
            for name, ours in expected.items():
                if tuple(artefact[name]) != ours:
                    raise QBEError(f"{ARTEFACT} was made for other {name} than this version of qbe has: {RETRAIN}")
            self.mean = np.array([artefact["mean"][f] for f in FEATURES], np.float64)
            self.scale = np.array([artefact["scale"][f] for f in FEATURES], np.float64)
            rows = artefact["class_weights"]
            self.class_weights = np.array([[rows[c][f] for f in FEATURES] for c in CLASSES], np.float64)
            self.class_bias = np.array([rows[c]["bias"] for c in CLASSES], np.float64)
            score = artefact["score_weights"]
            self.score_weights = np.array([score[name] for name in (*FEATURES, *CLASSES)], np.float64)
            self.score_bias = float(score["bias"])
            self.thresholds = {name: float(artefact["thresholds"][name]) for name in (*MARKS, "level")}
            self.metadata: dict[str, Any] = artefact["metadata"]
        except (KeyError, TypeError, ValueError) as e:
            raise QBEError(f"{ARTEFACT} is damaged ({type(e).__name__}: {e}): {RETRAIN}") from e
        numbers = (self.mean, self.scale, self.class_weights, self.class_bias, self.score_weights)
        if not all(np.isfinite(a).all() for a in numbers) or (self.scale <= 0).any():
            raise QBEError(f"{ARTEFACT} is damaged (a weight is not a finite number): {RETRAIN}")

    @classmethod
    def load(cls, path: Path) -> Classifier:
        """Reads a classifier from a JSON file.

        Raises:
            QBEError: the file can't be read or does not fit this code.
        """
        try:
            return cls(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, json.JSONDecodeError) as e:
            raise QBEError(f"can't read the query classifier {path}: {e}") from e

    def standardise(self, raw: Array) -> Array:
        """Features [..., len(FEATURES)] with mean 0 and deviation 1 over the training set, held within 4 deviations.

        A semantic entropy of 0 means that there was none (no embedding, or under three tokens): it counts as average.
        """
        z = np.clip((transform(raw) - self.mean) / self.scale, -4, 4)
        z[..., _ENTROPY] *= raw[..., _ENTROPY] > 0
        return z

    def probabilities(self, z: Array) -> Array:
        """Class probabilities [..., len(CLASSES)] of standardised features."""
        logits = z @ self.class_weights.T + self.class_bias
        p = np.exp(logits - logits.max(-1, keepdims=True))
        return p / p.sum(-1, keepdims=True)

    def score(self, z: Array, probabilities: Array) -> Array:
        """Scores [...] in [0, 1] of standardised features and their class probabilities."""
        x = np.concatenate([z, probabilities], -1)
        return np.clip(x @ self.score_weights + self.score_bias, 0, 1)


@cache
def default_classifier() -> Classifier:
    """The classifier that ships with the package."""
    return Classifier.load(Path(str(files("qbe.analysis") / ARTEFACT)))
