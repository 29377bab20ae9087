"""The query analyser: text and tokens -> profile. Runs on the CPU beside the GPU's work and never touches a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from qbe.analysis import thresholds
from qbe.analysis.classifier import default_classifier
from qbe.analysis.encoder import default_encoder
from qbe.analysis.entropy import SemanticEntropy
from qbe.analysis.features import FEATURES, extract
from qbe.analysis.profile import CLASSES, QueryProfile
from qbe.errors import QBEError


class Analyzer:
    """Scores queries with tier 1 (thresholds) or 2 (trained classifier); tier 3 places them, too.

    The score in [0, 1] says how much a whole answer is expected to suffer from low precision, relative to other
    queries. It predicts the KL divergence between the 16-bit model and the same model at 4 bits, summed over the
    answer's tokens: by the chain rule, the divergence between their distributions of answers. 0.5 means as much as
    the median training prompt. Two honest limits. The sum grows with the answer, so most of what the score knows is
    how long and how free the answer will be: a one-line fact scores low, an open explanation high, sums and programs
    between. And it was measured on one small model with divergence, not correctness, as the measure: free talk
    diverges easily without being wrong. `classifier.json` holds how well it predicts, under "metadata".

    Tier 3 is tier 2 and a sentence encoder: the profile says which of its clusters of training prompts the query is
    nearest to. The score is tier 2's.
    """

    def __init__(
        self, embedding: torch.Tensor | None = None, *, fast_path_tokens: int = 32, tier: int | None = None
    ) -> None:
        """Prepares the analysis for one model.

        Args:
            embedding: the model's input embedding [vocabulary, hidden], any float dtype and device; projected once
                to float32 [vocabulary, 16] and not kept. None leaves the semantic entropy out.
            fast_path_tokens: queries with fewer tokens take tier 1 unless a tier is asked for.
            tier: of queries for which none is asked; None as `analyze` says.

        Raises:
            QBEError: a tier that does not exist, the embedding is not a loaded float matrix, or a trained artefact does
                not fit this code.
        """
        self.fast_path_tokens = fast_path_tokens
        self.tier = _checked(tier)
        self.entropy = None if embedding is None else SemanticEntropy(embedding)
        self.classifier = default_classifier()

    def analyze(self, text: str, token_ids: Sequence[int], *, tier: int | None = None) -> QueryProfile:
        """The profile of one query.

        Args:
            text: what the user wrote, without a chat template, which would add its own marks and tokens.
            token_ids: its tokens.
            tier: 1, 2 or 3; None takes the analyser's, or else 1 for queries under `fast_path_tokens` tokens and 2 for
                the others.

        Raises:
            QBEError: a tier that does not exist.
        """
        tier = _checked(tier) or self.tier
        if tier == 1 or (tier is None and len(token_ids) < self.fast_path_tokens):
            weights = self.classifier.thresholds
            return thresholds.analyze(text, token_ids, weights, weights["level"])
        entropy = self.entropy(token_ids) if self.entropy else 0.0
        raw = extract(text, token_ids, entropy)
        z = self.classifier.standardise(raw)
        p = self.classifier.probabilities(z)
        features = dict(zip(FEATURES, raw.tolist(), strict=True))
        features.update((f"p_{c}", v) for c, v in zip(CLASSES, p.tolist(), strict=True))
        profile = QueryProfile(float(self.classifier.score(z, p)), CLASSES[int(p.argmax())], 2, features)
        if tier != 3:
            return profile
        encoder = default_encoder()
        vector = encoder.encode(text)
        cluster, similarity = encoder.nearest(vector)
        return replace(profile, tier=3, cluster=cluster, similarity=similarity, vector=vector)


def _checked(tier: int | None) -> int | None:
    if tier not in (None, 1, 2, 3):
        raise QBEError(
            f"there is no analysis tier {tier}: choose 1 (thresholds), 2 (trained classifier) or 3 (sentence encoder)"
        )
    return tier
