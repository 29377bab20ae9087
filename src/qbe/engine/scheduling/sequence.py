"""A request while it is being served: its tokens, how to sample, its blueprint and what it holds of the cache."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from qbe.blueprint import Blueprint
from qbe.engine.sampling.constraint import Constraint
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.kvcache.allocator import Page
from qbe.sites import FULL_BITS, KVBits

if TYPE_CHECKING:
    from qbe.engine.adaptive.activation_statistics import ActivationStats
    from qbe.engine.sampling.logprobs import Logprob
    from qbe.engine.speculation.draft_tokens import Speculation
    from qbe.refresh.monitor import Monitor


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


@dataclass(frozen=True)
class Priority:
    """Where a request stands in line.

    Attributes:
        rank: of two that could run the lower one goes first, with its prompt too; the higher one is preempted first.
        tier: its queue's name, for a `Scheduler.choose` that has several.
    """

    rank: float = 0.0
    tier: str = ""


FIRST_COME = Priority()


class Move(NamedTuple):
    """What the cascade made of a token: the bits of every nested site, a byte each, and how many more on average than
    its blueprint has."""

    bits: bytes
    shift: float


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One request in the engine.

    Attributes:
        request_id: the caller's name for it, unique among the requests in the engine.
        prompt_ids: token ids of the prompt; kept as given.
        params: how to sample.
        blueprint: precision of every site for this request's tokens; may be exchanged between two steps.
        token_ids: the prompt's ids and after them the answer's.
        computed: how many of `token_ids` have gone through the model.
        max_length: `token_ids` it may grow to; the scheduler sets it from `max_tokens` and the context.
        pages: for the tokens computed and those of the step that comes.
        quantised: how many of them, from the first on, its next token sees as they are quantised.
        version: changes whenever an entry of `pages` does.
        page_keys: what its full pages are known by, as far as they are.
        quantised_bits: of the KV cache, for every page that was ever full: computed again, it gets the same.
        keyed_by: `first_key` as all of its tokens up to `alike` had it; None once it was another.
        fork_parent: a sequence of the same prompt whose pages it may begin with; None once it has begun.
        watched: whether to gather `entropies`.
        entropies: of the attention in the steps of one token that filled a page, one list each: per key head the mean
            of its query heads, as in `qbe.sites.KVSite.entropy`.
        cached: tokens of the prompt whose pages were there already when it was first admitted.
        average_kv_bits: of the numbers in its pages when it ended, scales not counted; None before.
        pages_read: below 16 bits, by its tokens, once for each layer and key head. Bounded mode counts these.
        pages_raised, host_bytes: those of them that were read again from their originals, and the bytes of that.
        preemptions: how often it gave its pages up and waited again.
        alone_at: length at which it did so although no other sequence ran.
        blueprint_history: blueprints that it had before, each with the position up to which; the first one first.
        moved: what the cascade makes of a blueprint and a token's bits (`qbe.engine.adaptive.cascade`); None: it moves
            nothing.
        moves: of the answer's tokens that have gone through the model, when `moved` asks.
        excess: bits of the average that these had more than their blueprints say, summed.
        difficult: entropy of a token's distribution, nats, above which the token goes through the model with 16-bit
            activations; None where nobody asked for that or its blueprint has no others.
        monitor: decides when another blueprint is due (`qbe.refresh.monitor`); None where nobody asked.
        token_entropies: of the distributions that the answer's tokens were drawn from, nats, when `difficult` or
            `monitor` asks.
        token_margins: likewise, by how much the likeliest token's logit exceeds the next one's.
        high_precision_positions: positions of the tokens that do so.
        scoring: whose logits are handed out, if any are.
        logprobs: of the answer's tokens, when `params.logprobs` asks.
        prompt_logprobs: of the prompt's tokens from the second on, as far as they are computed, when asked for.
        routed: int64 [2, widths] on the device: weights that its tokens have read at each width where routers chose it
            (`qbe.engine.adaptive.routing`), of the layers and of the output head, those of tokens computed again
            counted again; None where none do.
        constraint: what the answer may be; None allows everything.
        priority: where it stands in line.
        before: requests that were in the engine when its turn came and other routers than its own steered; else None.
        activation_stats: what its prompt shows, for a policy that reads it: it then begins on nobody's pages. Else
            None.
        speculation: guesses of its next tokens; None where nobody asked, or it cannot be.
        recurrent: per recurrent layer transformers' cache layer with the state (`qbe.kvcache.cache.State`), or None.
        finish_reason: "stop", "length", "cancelled" or "error" once it has finished.
        error: one line that says what went wrong, when the reason is "error".
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    blueprint: Blueprint
    status: Status = Status.WAITING
    token_ids: list[int] = field(init=False)
    computed: int = 0
    max_length: int = 0
    pages: list[Page] = field(default_factory=list)
    quantised: int = 0
    version: int = 0
    page_keys: list[bytes] = field(default_factory=list)
    quantised_bits: list[tuple[KVBits, ...]] = field(default_factory=list)
    keyed_by: str | None = None
    fork_parent: Sequence | None = field(default=None, repr=False)
    watched: bool = False
    entropies: list[list[float]] = field(default_factory=list)
    cached: int = 0
    average_kv_bits: float | None = None
    pages_read: int = 0
    pages_raised: int = 0
    host_bytes: int = 0
    preemptions: int = 0
    alone_at: int = 0
    blueprint_history: list[tuple[int, Blueprint]] = field(default_factory=list)
    moved: Callable[[Blueprint, bytes], Blueprint] | None = None
    moves: list[Move] = field(default_factory=list)
    excess: float = 0.0
    difficult: float | None = None
    monitor: Monitor | None = None
    token_entropies: list[float] = field(default_factory=list)
    token_margins: list[float] = field(default_factory=list)
    high_precision_positions: set[int] = field(default_factory=set)
    scoring: Scoring | None = None
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    routed: torch.Tensor | None = field(default=None, repr=False)
    constraint: Constraint | None = None
    priority: Priority = FIRST_COME
    before: frozenset[str] | None = None
    activation_stats: ActivationStats | None = None
    speculation: Speculation | None = None
    recurrent: dict[int, Any] | None = None
    finish_reason: str | None = None
    error: str | None = None
    generator: torch.Generator = field(init=False, repr=False)
    seen: torch.Tensor | None = field(default=None, repr=False)  # bool [vocabulary], kept by the sampler

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)
        self.generator = torch.Generator()
        if self.params.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(self.params.seed)

    def count(self, read: int, raised: int, nbytes: int) -> None:
        """Add what bounded attention counted in a step (`qbe.kernels.ops.bounded_attention`)."""
        self.pages_read, self.pages_raised = self.pages_read + read, self.pages_raised + raised
        self.host_bytes += nbytes

    @property
    def output_ids(self) -> list[int]:
        """Token ids of the answer so far."""
        return self.token_ids[len(self.prompt_ids) :]

    def append(self, token: int) -> None:
        """Add a token of the answer."""
        self.token_ids.append(token)

    def exchange(self, blueprint: Blueprint) -> None:
        """Let the tokens that have not gone through the model yet do so at another blueprint."""
        self.blueprint_history.append((len(self.token_ids) - 1, self.blueprint))
        self.blueprint = blueprint

    def rewind(self, count: int) -> None:
        """Forget all tokens of the answer but the first `count`: a stop string ended it among those of one step.

        The last one counts as not computed, as in an answer without guesses."""
        for each in (self.token_entropies, self.token_margins, self.logprobs, self.moves):
            del each[count:]
        del self.token_ids[len(self.prompt_ids) + count :]
        self.computed = min(self.computed, len(self.prompt_ids) + max(0, count - 1))

    def blueprint_at(self, position: int) -> Blueprint:
        """What the token at this position goes through the model with."""
        found = self._chosen_at(position)
        return found.full_activations if position in self.high_precision_positions else found

    def _chosen_at(self, position: int) -> Blueprint:
        found = next((b for end, b in self.blueprint_history if position < end), self.blueprint)
        at = position - len(self.prompt_ids)
        return found if self.moved is None or not 0 <= at < len(self.moves) else self.moved(found, self.moves[at].bits)

    def rows(self, start: int, count: int) -> list[tuple[Blueprint, int]]:
        """The same of the tokens `[start, start + count)`: runs of equal blueprints and their lengths."""
        if not self.high_precision_positions and not self.blueprint_history:
            return [(self.blueprint, count)]
        runs = groupby(map(self.blueprint_at, range(start, start + count)))
        return [(blueprint, len(list(run))) for blueprint, run in runs]

    @property
    def parts(self) -> list[tuple[Blueprint, int]]:
        """The blueprints that it had and how many of its computed tokens each; those of other requests do not count."""
        return self.spans(self.cached, self.computed)

    def spans(self, start: int, end: int) -> list[tuple[Blueprint, int]]:
        """The same of the positions `[start, end)`, whether computed or not; of moved ones not in their order."""
        if self.moves:
            return list(Counter(map(self._chosen_at, range(start, end))).items())
        ends = [min(max(start, at), end) for at, _ in self.blueprint_history] + [max(start, end)]
        blueprints = (*(b for _, b in self.blueprint_history), self.blueprint)
        return [(b, at - before) for b, before, at in zip(blueprints, [start, *ends], ends, strict=False)]

    @property
    def last_alone(self) -> bool:
        """Whether its last token must go through the model as a row of its own: where its attention moves bits."""
        return self.moved is not None and len(self.token_ids) > len(self.prompt_ids)

    @property
    def first_key(self) -> str:
        """`computed_key` of the blueprint that its first token has."""
        return (self.blueprint_history[0][1] if self.blueprint_history else self.blueprint).computed_key

    @property
    def high_precision_computed(self) -> int:
        """How many tokens went through the model with 16-bit activations because they were hard to predict."""
        return sum(position < self.computed for position in self.high_precision_positions)

    @property
    def alike(self) -> int:
        """How many tokens, from the first on, have the blueprint's own precision, as in any other request."""
        changed = self.blueprint_history[0][0] if self.blueprint_history else len(self.token_ids)
        return min(self.high_precision_positions | {changed})

    def kv_bits_of(self, page: int) -> tuple[KVBits, ...]:
        """KV bits of its page of this number: what it was quantised at, or will be."""
        return self.quantised_bits[page] if page < len(self.quantised_bits) else self.blueprint.kv_bits_of(page)

    @property
    def kv_limit(self) -> float:
        """`kv_error` of its blueprint; infinity where there is none, or nothing below 16 bits that it could bound."""
        error = self.blueprint.kv_error
        if error is None:
            return math.inf
        every = (bits for layers in (self.blueprint.kv_bits, *self.quantised_bits) for bits in layers)
        return error if any(bits != FULL_BITS for bits in every) else math.inf

    @property
    def remaining(self) -> int:
        """Tokens that must go through the model before the next one can be sampled."""
        return len(self.token_ids) - self.computed
