"""What a sequence keeps beside its tokens and pages, by what it is about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from qbe.blueprint import Blueprint
from qbe.engine.sampling.constraint import Constraint
from qbe.sites import KVBits

if TYPE_CHECKING:
    from qbe.engine.sampling.logprobs import Logprob
    from qbe.engine.scheduling.sequence import Sequence
    from qbe.refresh.monitor import Monitor


@dataclass(eq=False)
class PagingState:
    """What the pages of a sequence hold, and who else may have them (`qbe.engine.scheduling.paging`).

    Attributes:
        quantised: how many pages, from the first on, its next token sees as they are quantised.
        version: changes whenever an entry of `Sequence.pages` does.
        page_keys: what its full pages are known by, as far as they are.
        quantised_bits: of the KV cache, for every page that was ever full: computed again, it gets the same.
        keyed_by: `first_key` as all of its tokens up to `alike` had it; None once it was another.
        fork_parent: a sequence of the same prompt whose pages it may begin with; None once it has begun.
        cache_salt: whose pages it may begin with: those of sequences with the same one.
        more, more_kv: whether pages will do that were computed, or quantised, with more bits than its own.
        cached: tokens of the prompt whose pages were there already when it was first admitted.
        average_kv_bits: of the numbers in its pages when it ended, scales not counted; None before.
        alone_at: length at which it gave its pages up although no other sequence ran.
    """

    quantised: int = 0
    version: int = 0
    page_keys: list[bytes] = field(default_factory=list)
    quantised_bits: list[tuple[KVBits, ...]] = field(default_factory=list)
    keyed_by: str | None = None
    fork_parent: Sequence | None = field(default=None, repr=False)
    cache_salt: bytes = b""
    more: bool = False
    more_kv: bool = False
    cached: int = 0
    average_kv_bits: float | None = None
    alone_at: int = 0


@dataclass(eq=False)
class AttentionWatch:
    """How spread its attention is, for whoever raises the KV bits of pages to come.

    Attributes:
        watched: whether to gather `entropies`.
        entropies: of the attention in the steps of one token that filled a page, one list each: per key head the mean
            of its query heads, as in `qbe.sites.KVSite.entropy`.
    """

    watched: bool = False
    entropies: list[list[float]] = field(default_factory=list)


@dataclass(eq=False)
class BoundedReads:
    """What attention with a bounded error has read.

    Attributes:
        pages_read: below 16 bits, by its tokens, once for each layer and key head.
        best_effort: whether the answer goes on without a bound where none can be kept any more; else it ends.
        dropped: whether that has happened.
        pages_raised, host_bytes: those of them that were read again from their originals, and the bytes of that.
    """

    pages_read: int = 0
    pages_raised: int = 0
    host_bytes: int = 0
    best_effort: bool = False
    dropped: bool = False

    def count(self, read: int, raised: int, nbytes: int) -> None:
        """Add what was counted in a step (`qbe.kernels.ops.bounded_attention`)."""
        self.pages_read += read
        self.pages_raised += raised
        self.host_bytes += nbytes


class Move(NamedTuple):
    """What the cascade made of a token: the bits of every nested site, a byte each, and how many more on average than
    its blueprint has."""

    bits: bytes
    shift: float


@dataclass(eq=False)
class CascadeState:
    """What the cascade has done to its tokens (`qbe.engine.adaptive.cascade`).

    Attributes:
        moved: what it makes of a blueprint and a token's bits; None: it moves nothing.
        moves: of the answer's tokens that have gone through the model, when `moved` asks.
        excess: bits of the average that these had more than their blueprints say, summed.
    """

    moved: Callable[[Blueprint, bytes], Blueprint] | None = None
    moves: list[Move] = field(default_factory=list)
    excess: float = 0.0


@dataclass(eq=False)
class TokenDifficulty:
    """How hard its tokens were to predict, and what follows from that.

    Attributes:
        threshold: entropy of a token's distribution, nats, above which the token goes through the model with 16-bit
            activations; None where nobody asked for that or its blueprint has no others.
        monitor: decides when another blueprint is due (`qbe.refresh.monitor`); None where nobody asked.
        entropies: of the distributions that the answer's tokens were drawn from, nats, when either asks.
        margins: likewise, by how much the likeliest token's logit exceeds the next one's.
        high_precision_positions: positions of the tokens above the threshold.
    """

    threshold: float | None = None
    monitor: Monitor | None = None
    entropies: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    high_precision_positions: set[int] = field(default_factory=set)

    @property
    def measured(self) -> bool:
        """Whether `entropies` and `margins` are asked for."""
        return self.threshold is not None or self.monitor is not None


@dataclass(eq=False)
class SharedReads:
    """What its rows have read beyond what its blueprints say (`qbe.store.shared_rows`).

    Attributes:
        tokens: that went through the model, draft tokens with those that were verified only, and those that were
            computed again counted again.
        bits: of the weights' average, summed over them.
        nbytes: of weights and scales, summed over the passes that gave it a token or a draft token.
    """

    tokens: int = 0
    bits: float = 0.0
    nbytes: int = 0

    @property
    def average_bits(self) -> float:
        """More bits than were asked for, of a token."""
        return self.bits / self.tokens if self.tokens else 0.0


@dataclass(eq=False)
class MissedReads:
    """What its rows asked for and did not find on the device (`qbe.residency`).

    Attributes:
        tokens: as of `SharedReads`.
        misses: times that one of them asked a site for more than was there.
        bits: of the weights' average that were not read, summed over them.
        nbytes: of codes that were not read, summed over the passes that gave it a token or a draft token.
    """

    tokens: int = 0
    misses: int = 0
    bits: float = 0.0
    nbytes: int = 0

    @property
    def average_bits(self) -> float:
        """Bits that a token lacked."""
        return self.bits / self.tokens if self.tokens else 0.0


@dataclass(frozen=True)
class Scoring:
    """Whose logits are wanted beside the last one's (`qbe.engine.sampling.scoring`).

    Attributes:
        start: the first position.
        take: called with a position and the logits float32 [n, vocabulary] of the tokens from there on, as they come;
            once more for those that a preempted sequence computes again.
    """

    start: int
    take: Callable[[int, torch.Tensor], None]


@dataclass(eq=False)
class SamplingState:
    """What the sampler keeps, and what it is to hand out.

    Attributes:
        generator: of its random numbers.
        constraint: what the answer may be; None allows everything.
        scoring: whose logits are handed out, if any are.
        logprobs: of the answer's tokens, when `params.logprobs` asks.
        prompt_logprobs: of the prompt's tokens from the second on, as far as they are computed, when asked for.
        seen: bool [vocabulary], kept by the sampler for penalties; None: not needed so far.
    """

    generator: torch.Generator
    constraint: Constraint | None = None
    scoring: Scoring | None = None
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    seen: torch.Tensor | None = field(default=None, repr=False)

    @classmethod
    def of(cls, seed: int | None) -> SamplingState:
        """One that draws by this seed, or by any."""
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        return cls(generator)
