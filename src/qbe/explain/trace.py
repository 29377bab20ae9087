"""How an answer's precision moved while it was written: bits by layer and token, and what moved them. Pure data."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from qbe.blueprint import Blueprint
from qbe.errors import QBEError
from qbe.sites import SiteTable


class CascadeMove(Protocol):
    """What the cascade did to a token: by how many bits of the average."""

    @property
    def shift(self) -> float: ...


class TracedCascade(Protocol):
    """What it did to the tokens of an answer."""

    @property
    def moves(self) -> collections.abc.Sequence[CascadeMove]: ...


class TracedDifficulty(Protocol):
    """How hard the tokens of an answer were to predict, where somebody measured that."""

    entropies: list[float]
    margins: list[float]


class TracedAnswer(Protocol):
    """What a trace reads of a running answer (an engine's `Sequence`)."""

    prompt_ids: list[int]

    @property
    def output_ids(self) -> collections.abc.Sequence[int]: ...

    @property
    def cascade(self) -> TracedCascade: ...

    @property
    def difficulty(self) -> TracedDifficulty: ...

    def blueprint_at(self, position: int) -> Blueprint: ...


@dataclass
class Trace:
    """Column i tells of the pass that gave the answer's i-th token.

    Attributes:
        layers: of the model.
        bits: [tokens][layers], mean bits of a layer's weights; None for a layer without nested sites.
        average: [tokens], over the weights of all nested sites.
        entropy, margin: [tokens], of the distribution that the token was drawn from, nats and logits; empty where
            nobody measured them.
        cascade: [tokens], by how many bits of the average the cascade raised (or lowered) that pass.
        refreshes: as `qbe.refresh.monitor.Refresh.describe`.
        texts: [tokens], each token by itself.
    """

    layers: int
    bits: list[tuple[float | None, ...]] = field(default_factory=list)
    average: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    margin: list[float] = field(default_factory=list)
    cascade: list[float] = field(default_factory=list)
    refreshes: list[dict[str, Any]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def follow(self, sequence: TracedAnswer, table: SiteTable) -> None:
        """Add the tokens that the sequence has written since the last call."""
        first = len(sequence.prompt_ids) - 1
        for i in range(len(self.bits), len(sequence.output_ids)):
            blueprint = sequence.blueprint_at(first + i)
            if blueprint.dynamic_precision is not None and blueprint.dynamic_precision.by != "cascade":
                raise QBEError(
                    f"the policy '{blueprint.policy}' chooses bits within each step and keeps their sum only: "
                    "there is no trace of them; choose another policy"
                )
            self.bits.append(by_layer(blueprint, table))
            self.average.append(blueprint.average_weight_bits(table))
            moves = sequence.cascade.moves
            self.cascade.append(moves[i - 1].shift if 0 < i <= len(moves) else 0.0)
        self.entropy, self.margin = list(sequence.difficulty.entropies), list(sequence.difficulty.margins)

    @property
    def refreshed(self) -> set[int]:
        """Tokens at which a blueprint took another one's place."""
        return {int(r["token"]) for r in self.refreshes}

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "layers": self.layers,
            "tokens": [
                {
                    "text": self.texts[i] if i < len(self.texts) else None,
                    "bits": [None if b is None else round(b, 3) for b in bits],
                    "average_bits": round(self.average[i], 4),
                    "entropy": round(self.entropy[i], 4) if i < len(self.entropy) else None,
                    "margin": round(self.margin[i], 4) if i < len(self.margin) else None,
                    "cascade": round(self.cascade[i], 4),
                    "refreshed": i in self.refreshed,
                }
                for i, bits in enumerate(self.bits)
            ],
            "refreshes": self.refreshes,
        }


@lru_cache(maxsize=1024)
def by_layer(blueprint: Blueprint, table: SiteTable) -> tuple[float | None, ...]:
    """Mean bits of each layer's nested weights."""
    bits, weights = [0.0] * table.layers, [0] * table.layers
    for site, b in zip(table.nested, blueprint.weight_bits, strict=True):
        if site.layer is not None and site.layer < table.layers:
            bits[site.layer] += b * site.parameters
            weights[site.layer] += site.parameters
    return tuple(b / w if w else None for b, w in zip(bits, weights, strict=True))


def grouped(bits: collections.abc.Sequence[float | None], rows: int) -> list[float | None]:
    """Layers taken together so that there are at most so many rows, first layers first."""
    each = -(-len(bits) // max(1, rows))
    means: list[float | None] = []
    for i in range(0, len(bits), each):
        known = [b for b in bits[i : i + each] if b is not None]
        means.append(sum(known) / len(known) if known else None)
    return means
