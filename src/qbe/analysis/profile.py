"""What the analysis says of a query. Pure data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

CLASSES = (
    "question_answering",
    "dialogue",
    "summarisation",
    "code",
    "mathematics",
    "structured_output",
)


# The least average for an answer that must be a call or JSON, within what tier and request allow. A precaution, because
# users of other engines report broken calls at 4 bits: our nine calls did not show that they need it
# (docs/measurements/quality-weights.md, Function calls).
STRUCTURED_BITS = 6.0
STRUCTURED = "structured"  # the feature


@dataclass(frozen=True)
class PromptSignals:
    """What a prompt's prefill showed.

    Attributes:
        inputs: for each nested site the mean square of every channel of its inputs, float32 [inputs]; None where they
            were not seen.
        entropy: of the distribution that the prompt ended in, nats.
        means: as `inputs`, of the inputs themselves; empty where they were not asked for.
    """

    inputs: tuple[npt.NDArray[np.float32] | None, ...]
    entropy: float
    means: tuple[npt.NDArray[np.float32] | None, ...] = ()


@dataclass(frozen=True)
class QueryProfile:
    """Features and complexity of one query.

    Attributes:
        score: complexity in [0, 1].
        prompt_class: one of `CLASSES`.
        tier: which analysis made it: 1 thresholds, 2 trained classifier, 3 that and the sentence encoder.
        features: name -> value; what the score was computed from, and `STRUCTURED` where the answer must have a form.
        context: tokens that the request may come to have, prompt and answer; 0 when that is not known.
        cluster: the nearest of the encoder's centroids; None below tier 3.
        similarity: cosine of the query's vector and that centroid, at most 1; None below tier 3.
        vector: the encoder's vector, float32 [64] of norm 1; None below tier 3, and never recorded.
        signals: of the prefill, for policies that read it; None before it has run, and for all others.
    """

    score: float
    prompt_class: str
    tier: int
    features: dict[str, float] = field(default_factory=dict)
    context: int = 0
    cluster: int | None = None
    similarity: float | None = None
    vector: npt.NDArray[np.float32] | None = field(default=None, compare=False, repr=False)
    signals: PromptSignals | None = field(default=None, compare=False, repr=False)

    @property
    def least_bits(self) -> float:
        """The least average that the answer should have; 0 where nothing speaks for one."""
        return STRUCTURED_BITS if self.features.get(STRUCTURED) else 0.0

    def describe(self) -> dict[str, Any]:
        """The profile as JSON."""
        return {
            "score": round(self.score, 4),
            "class": self.prompt_class,
            "tier": self.tier,
            "cluster": self.cluster,
            "similarity": None if self.similarity is None else round(self.similarity, 4),
            "features": {k: round(v, 6) for k, v in self.features.items()},
        }
