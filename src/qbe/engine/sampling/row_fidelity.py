"""How far lowered logits are from those of the widest gear on the same tokens, row by row; `qbe eval` and a server that
scores its own answers both count it here."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy

from qbe.store.sensitivity import BROKEN, divergence_of_rows

ROWS = 32  # of logits at a time, so that temporaries stay in cache


class RowFidelity(NamedTuple):
    """Of each row; float32 [n].

    Attributes:
        kl: divergence from the reference to the lowered distribution, nats; not a number where one of them is none.
        agreed: 1 where both find the same next token likeliest.
        loss: negative log likelihood of the token that came, by the lowered logits, nats.
        margin: where they do not agree, by how much the reference's logit of its own likeliest token exceeds that of
            the lowered one's (the flip's margin, nats); else 0.
    """

    kl: torch.Tensor
    agreed: torch.Tensor
    loss: torch.Tensor
    margin: torch.Tensor


def compare_rows(reference: torch.Tensor, lowered: torch.Tensor, targets: torch.Tensor) -> RowFidelity:
    """Compares row by row.

    Args:
        reference, lowered: logits float32 [n, vocabulary], on one device.
        targets: the tokens that came, int64 [n].
    """
    found = [
        _compare(reference[i : i + ROWS], lowered[i : i + ROWS], targets[i : i + ROWS])
        for i in range(0, len(targets), ROWS)
    ]
    return RowFidelity(*map(torch.cat, zip(*found, strict=True)))


def summed_divergence(kl: torch.Tensor) -> float:
    """Nats of all rows. What breaks the model must not look harmless: without numbers each row counts as `BROKEN`."""
    total = float(kl.double().sum())
    return max(0.0, total) if math.isfinite(total) else BROKEN * len(kl)


def _compare(reference: torch.Tensor, lowered: torch.Tensor, targets: torch.Tensor) -> RowFidelity:
    best, best_lowered = reference.argmax(-1, keepdim=True), lowered.argmax(-1, keepdim=True)
    margin = (reference.gather(-1, best) - reference.gather(-1, best_lowered)).squeeze(-1)
    return RowFidelity(
        divergence_of_rows(reference, reference.softmax(-1), lowered),
        (best == best_lowered).squeeze(-1).float(),
        cross_entropy(lowered, targets, reduction="none"),
        margin,
    )
