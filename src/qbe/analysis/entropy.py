"""Semantic entropy: how many directions of meaning the tokens of a query spread over.

It is the von Neumann entropy of the covariance of the prompt's token embeddings: its eigenvalues, scaled to sum to one,
are a probability distribution over directions, whose entropy is low when the tokens say one thing and high when they
say many. Embeddings are first projected at random to 16 dimensions (Johnson-Lindenstrauss), so that one query costs
a 16 x 16 eigenvalue problem, and whitened over the vocabulary, so that the value means the same for every model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from qbe.errors import QBEError

DIMENSIONS = 16
_CHUNK = 8192  # rows of the embedding held in float32 at a time
_SAMPLE = 512  # tokens of a prompt that are read, evenly spaced


class SemanticEntropy:
    """Entropy of a prompt under one model's input embedding.

    Attributes:
        table: float32 [vocabulary, 16], the projected and whitened embedding; a token costs 64 bytes.
        rank: directions that the table spans, at most 16.
    """

    def __init__(self, embedding: torch.Tensor) -> None:
        """Projects `embedding` [vocabulary, hidden], any float dtype and device, once.

        Raises:
            QBEError: it is not a matrix of numbers.
        """
        if embedding.ndim != 2 or not embedding.is_floating_point() or embedding.is_meta or not embedding.numel():
            raise QBEError(
                f"an input embedding must be a loaded [vocabulary, hidden] float matrix, not {embedding.dtype} "
                f"{list(embedding.shape)} on {embedding.device}: pass model.get_input_embeddings().weight"
            )
        hidden = embedding.shape[1]
        projection = torch.from_numpy(np.random.default_rng(0).standard_normal((hidden, DIMENSIONS), np.float32))
        projection = (projection / hidden**0.5).to(embedding.device)
        with torch.no_grad():
            rows = [(chunk.float().nan_to_num(0, 0, 0) @ projection).cpu() for chunk in embedding.split(_CHUNK)]
            x = torch.cat(rows).double()
        x -= x.mean(0)
        values, vectors = torch.linalg.eigh(x.T @ x / x.shape[0])
        keep = values > 1e-6 * values[-1].clamp_min(1e-30)
        self.rank = int(keep.sum())
        scale = torch.where(keep, values.clamp_min(1e-30).rsqrt(), 0)
        self.table = np.ascontiguousarray((x @ (vectors * scale)).float().numpy())

    def __call__(self, token_ids: Sequence[int]) -> float:
        """Entropy of these tokens in [0, 1], relative to the most that so many tokens can have.

        0 for fewer than three tokens. Ids outside the vocabulary are left out.
        """
        n = len(token_ids)
        ids = np.asarray(token_ids if n <= _SAMPLE else token_ids[:: -(-n // _SAMPLE)], np.int64)
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= len(self.table)):
            ids = ids[(ids >= 0) & (ids < len(self.table))]
        most = min(self.rank, len(ids) - 1)
        if most < 2:
            return 0.0
        x = self.table[ids]
        x -= x.mean(0)
        p = np.linalg.eigvalsh(x.T @ x).clip(0)
        total = float(p.sum())
        if not total > 1e-12:
            return 0.0
        p = p[p > 1e-9 * total] / total
        return float(min(1.0, max(0.0, -(p * np.log(p)).sum() / np.log(most))))
