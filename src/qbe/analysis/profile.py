"""What the analysis says of a query. Pure data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

CLASSES = (
    "question_answering",
    "dialogue",
    "summarisation",
    "code",
    "mathematics",
    "structured_output",
)


@dataclass(frozen=True)
class QueryProfile:
    """Features and complexity of one query.

    Attributes:
        score: complexity in [0, 1].
        prompt_class: one of `CLASSES`.
        tier: which analysis made it: 1 thresholds, 2 trained classifier.
        features: name -> value; what the score was computed from.
        context: tokens that the request may come to have, prompt and answer; 0 when that is not known.
    """

    score: float
    prompt_class: str
    tier: int
    features: dict[str, float] = field(default_factory=dict)
    context: int = 0

    def describe(self) -> dict[str, Any]:
        """The profile as JSON."""
        return {
            "score": round(self.score, 4),
            "class": self.prompt_class,
            "tier": self.tier,
            "features": {k: round(v, 6) for k, v in self.features.items()},
        }
