"""A request while it is being served: its tokens, how to sample, its blueprint and what it holds of the cache."""

from __future__ import annotations

import collections.abc
import math
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from qbe.blueprint import Blueprint
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.engine.scheduling.sequence_state import (
    AttentionWatch,
    BoundedReads,
    CascadeState,
    MissedReads,
    PagingState,
    SamplingState,
    SharedReads,
    TokenDifficulty,
)
from qbe.format.kv_blocks import PAGE_SIZE
from qbe.kvcache.allocator import Page
from qbe.kvcache.prefix import PagePrecision
from qbe.kvcache.state_slots import StateSlot
from qbe.pictures.placed import PlacedPicture, RotaryPositions
from qbe.selection.blueprint_history import BlueprintHistory
from qbe.sites import FULL_BITS, KVBits

if TYPE_CHECKING:
    from qbe.engine.adaptive.activation_statistics import ActivationStats
    from qbe.engine.speculation.acceptance_statistics import Speculation


@dataclass(frozen=True)
class Priority:
    """Where a request stands in line.

    Attributes:
        rank: of two that could run the lower one goes first, with its prompt too; the higher one is preempted first.
        tier: its queue's name, for a `Scheduler.choose` that has several.
        key: who asks, and `weight`, what share is due to them, for one that is fair.
    """

    rank: float = 0.0
    tier: str = ""
    key: str = ""
    weight: float = 1.0


FIRST_COME = Priority()


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One request in the engine.

    Args:
        request_id: the caller's name for it, unique among the requests in the engine.
        prompt_ids: token ids of the prompt; kept as given.
        params: how to sample.
        blueprint: precision of every site for this request's tokens; may be exchanged between two steps.

    Attributes:
        blueprint_history: that and those that it had before, by position.
        pictures: of its prompt, in their order.
        mrope: its tokens' rotary positions, where they are not their places in the sequence.
        status: where it is in its life.
        token_ids: the prompt's ids and after them the answer's.
        computed: how many of `token_ids` have gone through the model.
        max_length: `token_ids` it may grow to; the scheduler sets it from `max_tokens` and the context.
        pages: for the tokens computed and those of the step that comes.
        finish_reason: "stop", "length", "cancelled" or "error" once it has finished.
        error: one line that says what went wrong, when the reason is "error".
        priority: where it stands in line.
        preemptions: how often it gave its pages up and waited again.
        before: requests that were in the engine when its turn came and other routers than its own ran; else None.
        paging, attention, bounded, cascade, difficulty, shared_reads, missed_reads, sampling: see `sequence_state`.
        routed: int64 [2, widths] on the device: weights that its tokens have read at each width where routers chose it
            (`qbe.engine.adaptive.routing`), of the layers and of the output head, those of tokens computed again
            counted again; None where none do.
        activation_stats: what its prompt shows, for a policy that reads it: it then begins on nobody's pages. Else
            None.
        speculation: draft tokens for its next positions; None where nobody asked, or it cannot be.
        state_slot: where its states are (`qbe.kvcache.state_pool`); None while it does not run, and in a model that has
            no recurrent layers.
    """

    def __init__(self, request_id: str, prompt_ids: list[int], params: SamplingParams, blueprint: Blueprint) -> None:
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.params = params
        self.blueprint_history = BlueprintHistory(blueprint)

        self.status = Status.WAITING
        self.token_ids = list(prompt_ids)
        self.computed = 0
        self.max_length = 0
        self.pages: list[Page] = []
        self.finish_reason: str | None = None
        self.error: str | None = None

        self.pictures: tuple[PlacedPicture, ...] = ()
        self.mrope: RotaryPositions | None = None
        self.priority = FIRST_COME
        self.preemptions = 0
        self.before: frozenset[str] | None = None

        self.paging = PagingState()
        self.attention = AttentionWatch()
        self.bounded = BoundedReads()
        self.cascade = CascadeState()
        self.difficulty = TokenDifficulty()
        self.shared_reads = SharedReads()
        self.missed_reads = MissedReads()
        self.sampling = SamplingState.of(params.seed)
        self.routed: torch.Tensor | None = None
        self.activation_stats: ActivationStats | None = None
        self.speculation: Speculation | None = None
        self.state_slot: StateSlot | None = None

    @property
    def blueprint(self) -> Blueprint:
        """Precision of every site for the tokens to come."""
        return self.blueprint_history.last

    @blueprint.setter
    def blueprint(self, blueprint: Blueprint) -> None:
        """As if it had had this one since the last exchange."""
        self.blueprint_history.last = blueprint

    @property
    def routers(self) -> str:
        """The digest of the routers that choose its bits; empty where none do."""
        dynamic_precision = self.blueprint.dynamic_precision
        return "" if dynamic_precision is None else dynamic_precision.routers

    @property
    def output_ids(self) -> list[int]:
        """Token ids of the answer so far."""
        return self.token_ids[len(self.prompt_ids) :]

    def append(self, token: int) -> None:
        """Add a token of the answer."""
        self.token_ids.append(token)

    def exchange(self, blueprint: Blueprint) -> None:
        """Let the tokens that have not gone through the model yet do so at another blueprint."""
        self.blueprint_history.change(len(self.token_ids) - 1, blueprint)

    def rewind(self, count: int) -> None:
        """Forget all tokens of the answer but the first `count`: a stop string ended it among those of one step.

        The last one counts as not computed, as in an answer without draft tokens."""
        told = (self.difficulty.entropies, self.difficulty.margins, self.sampling.logprobs, self.cascade.moves)
        for of_tokens in told:
            del of_tokens[count:]
        del self.token_ids[len(self.prompt_ids) + count :]
        self.computed = min(self.computed, len(self.prompt_ids) + max(0, count - 1))

    def blueprint_at(self, position: int) -> Blueprint:
        """What the token at this position goes through the model with."""
        blueprint = self._chosen_at(position)
        return blueprint.full_activations if position in self.difficulty.high_precision_positions else blueprint

    def _chosen_at(self, position: int) -> Blueprint:
        blueprint, cascade = self.blueprint_history.at(position), self.cascade
        written = position - len(self.prompt_ids)
        if cascade.moved is None or not 0 <= written < len(cascade.moves):
            return blueprint
        return cascade.moved(blueprint, cascade.moves[written].bits)

    def rows(self, start: int, count: int) -> list[tuple[Blueprint, int]]:
        """The same of the tokens `[start, start + count)`: runs of equal blueprints and their lengths."""
        history = self.blueprint_history
        if not (self.difficulty.high_precision_positions or history.earlier or history.prefix):
            return [(self.blueprint, count)]
        runs = groupby(map(self.blueprint_at, range(start, start + count)))
        return [(blueprint, len(list(run))) for blueprint, run in runs]

    @property
    def parts(self) -> list[tuple[Blueprint, int]]:
        """The blueprints that it had and how many of its computed tokens each; those of other requests do not count."""
        return self.spans(self.paging.cached, self.computed)

    def spans(self, start: int, end: int) -> list[tuple[Blueprint, int]]:
        """The same of the positions `[start, end)`, whether computed or not; of moved ones not in their order."""
        if self.cascade.moves:
            return list(Counter(map(self._chosen_at, range(start, end))).items())
        return self.blueprint_history.spans(start, end)

    @property
    def last_alone(self) -> bool:
        """Whether its last token must go through the model as a row of its own: where its attention moves bits."""
        return self.cascade.moved is not None and len(self.token_ids) > len(self.prompt_ids)

    @property
    def first_key(self) -> str:
        """`computed_key` of the blueprint that its first token has."""
        return self.blueprint_history.first.computed_key

    @property
    def high_precision_computed(self) -> int:
        """How many tokens went through the model with 16-bit activations because they were hard to predict."""
        return sum(position < self.computed for position in self.difficulty.high_precision_positions)

    @property
    def alike(self) -> int:
        """How many tokens, from the first on, have the blueprint's own precision, as in any other request."""
        earlier = self.blueprint_history.earlier
        changed = earlier[0][0] if earlier else len(self.token_ids)
        return min(self.difficulty.high_precision_positions | {changed})

    def precision_of(self, page: int) -> PagePrecision:
        """At what its page of this number was written, or will be, where it has that of the prompt."""
        history, position = self.blueprint_history, page * PAGE_SIZE
        own = next((blueprint for end, blueprint in history.prefix if position < end), history.first)
        return PagePrecision(own, self.kv_bits_of(page))

    def positions(self, start: int, count: int) -> collections.abc.Sequence[int]:
        """Rotary positions of its tokens `[start, start + count)`; of pictures' rows with M-RoPE the one in time."""
        return range(start, start + count) if self.mrope is None else self.mrope.of(start, count)[0].tolist()

    def pictures_of(self, page: int) -> bytes:
        """The digests of the pictures that have rows in its page of this number: their tokens are the same."""
        start, end = page * PAGE_SIZE, (page + 1) * PAGE_SIZE
        return b"".join(placed.picture.digest for placed in self.pictures if placed.within(start, end))

    def kv_bits_of(self, page: int) -> tuple[KVBits, ...]:
        """KV bits of its page of this number: what it was quantised at, or will be."""
        known = self.paging.quantised_bits
        return known[page] if page < len(known) else self.blueprint.kv_bits_of(page)

    @property
    def kv_limit(self) -> float:
        """`kv_error` of its blueprint; infinity where there is none, or nothing below 16 bits that it could bound."""
        error = self.blueprint.kv_error
        if error is None:
            return math.inf
        every = (bits for layers in (self.blueprint.kv_bits, *self.paging.quantised_bits) for bits in layers)
        return error if any(bits != FULL_BITS for bits in every) else math.inf

    @property
    def remaining(self) -> int:
        """Tokens that must go through the model before the next one can be sampled."""
        return len(self.token_ids) - self.computed
