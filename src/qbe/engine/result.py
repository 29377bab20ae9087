"""What goes into the engine for one request and what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint, weights_by_bits
from qbe.budget import Budget
from qbe.engine.prompt_pictures import with_pictures
from qbe.engine.sampling.constraint import Constraint
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.engine.scheduling.sequence import FIRST_COME, Priority
from qbe.refresh.monitor import Refresh
from qbe.sites import FULL_BITS, SiteTable

PromptInput = str | list[dict[str, Any]] | list[int]


@dataclass(frozen=True)
class Request:
    """One prompt and how to answer it.

    Attributes:
        prompt: text, or chat messages `{"role": ..., "content": ...}` for the model's chat template, or token ids.
            Content is text, or parts: `{"type": "text", "text": ...}`, `{"type": "image", "image": ...}` with a path,
            bytes or an image of Pillow, `{"type": "image_url", "image_url": {"url": "data:..."}}`.
        params: how tokens are sampled and when to stop.
        budget: bounds on precision.
        policy: name of the policy; None takes the engine's.
        tools: JSON descriptions of functions, for the chat template.
        structured: whether the answer must have a form that neither `tools` nor `constraint` tells of (yet).
        variables: more that the chat template may read, such as `enable_thinking`.
        constraint: what the answer may be; it belongs to this request alone.
        priority: where it stands in line; without one requests come in the order in which they were made.
        cache_salt: whose cached prefixes it may find: those of requests with the same one.
        arm: of a server's rollout, `stable` or `candidate`, for its record.
    """

    prompt: PromptInput
    params: SamplingParams = field(default_factory=SamplingParams)
    budget: Budget = field(default_factory=Budget)
    policy: str | None = None
    tools: list[dict[str, Any]] | None = None
    structured: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    constraint: Constraint | None = None
    priority: Priority = FIRST_COME
    cache_salt: bytes = b""
    arm: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", with_pictures(self.prompt))


@dataclass(frozen=True)
class Result:
    """One answer and how it was made.

    Attributes:
        id: of the request and of its record.
        text: the answer, without the stop string or the end-of-sequence token.
        token_ids: what was generated, the end-of-sequence token included.
        finish_reason: `stop`, `length`, `cancelled` or `error`.
        stop_reason: the stop string that ended the answer; None where none did.
        error: one line when the reason is `error`.
        bytes_per_token: bytes of weights and scales that decoding one token reads at batch 1.
        computed_tokens: of prompt and answer, that went through the model.
        cached_tokens: of the prompt, whose keys and values another request had left.
        cached_parts: at what those were computed, and how many each: at the blueprint or, where the budget leaves the
            bits to the tier, at one that has as many everywhere.
        asked: the blueprint of the query's own score, where its conversation keeps another; None where it does not.
        high_precision_tokens: of the answer, that went through the model with 16-bit activations although the blueprint
            has 8, because they had been hard to predict.
        average_kv_bits: of the keys and values this request had at its end, scales not counted; the last tokens, which
            fill no page, are kept at 16 bits.
        kv_error: of bounded mode; None where nothing was bounded.
        pages_read: pages below 16 bits that its tokens read in bounded mode, once for each token, layer and key head.
        pages_raised: those of them that were read again at 16 bits.
        host_bytes: bytes of these, most of them in host memory.
        routed: bits -> weights that a token read at them, on average, where routers chose that within
            the forward pass (`qbe.engine.adaptive.routing`); empty where the blueprints say it.
        parts: the blueprints that it had and how many of the computed tokens each; more than one after a refresh.
        refreshes: where its blueprint was exchanged while it wrote, and why.
        raised_tokens, lowered_tokens: of the answer, whose attention raised or lowered the bits of later layers; those
            with a change either way count in both. What they had is in `parts`.
        drafted_tokens: draft tokens that were verified. accepted_tokens: those that were right.
        shared_bits: how many more bits its tokens read on average than their blueprints say, because they shared steps
            with others (`rows="shared"`).
        missed_bits: how many fewer they read, because slices were not on the device (`device_memory`).
        misses: times that a token asked a site for more than was there; with `miss="wait"` it waited for that.
        kv_raises: how often its pages to come got more KV bits, because its attention was unlike calibration's.
        ignored: options that were asked for and did nothing, and a line of each that says why (`qbe.compatibility`);
            `kv_error` is among them where host memory ended meanwhile.
        analysis_ms, policy_ms, prefill_ms, decode_ms: milliseconds; prefill ends with the first token.
    """

    id: str
    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    profile: QueryProfile
    blueprint: Blueprint
    table: SiteTable = field(repr=False)
    bytes_per_token: int
    analysis_ms: float
    policy_ms: float
    prefill_ms: float
    decode_ms: float
    error: str | None = None
    stop_reason: str | None = None
    computed_tokens: int = 0
    cached_tokens: int = 0
    high_precision_tokens: int = 0
    average_kv_bits: float = float(FULL_BITS)
    kv_error: float | None = None
    pages_read: int = 0
    pages_raised: int = 0
    host_bytes: int = 0
    routed: Mapping[int, float] = field(default_factory=dict)
    parts: tuple[tuple[Blueprint, int], ...] = ()
    refreshes: tuple[Refresh, ...] = ()
    raised_tokens: int = 0
    lowered_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    shared_bits: float = 0.0
    missed_bits: float = 0.0
    misses: int = 0
    cached_parts: tuple[tuple[Blueprint, int], ...] = ()
    asked: Blueprint | None = None
    ignored: Mapping[str, str] = field(default_factory=dict)
    kv_raises: int = 0

    @property
    def asked_weight_bits(self) -> float:
        """Mean gear over the weights of what the query's own score gives."""
        return (self.asked or self.blueprint).average_weight_bits(self.table)

    @property
    def priced_weight_bits(self) -> float:
        """The bits that the answer costs: those that its tokens asked for, or read where that is less; no more than its
        own score's, where it keeps a conversation's."""
        bits = min(self.average_weight_bits, self.read_weight_bits)
        return bits if self.asked is None or self.refreshes else min(bits, self.asked_weight_bits)

    @property
    def cached_weight_bits(self) -> float | None:
        """Mean gear over the weights at which the cached tokens were computed; None where there are none."""
        return _average(self.cached_parts, self.table)

    @property
    def careful_tokens(self) -> int:
        """The name that `high_precision_tokens` had in version 0.1."""
        return self.high_precision_tokens

    @property
    def average_weight_bits(self) -> float:
        """Mean bits over all weights that a token reads, and over tokens where these differ: what was asked for."""
        if self.routed:
            return sum(g * n for g, n in self.routed.items()) / self.table.reads.weights
        average = _average(self.parts, self.table)
        return self.blueprint.average_weight_bits(self.table) if average is None else average

    @property
    def read_weight_bits(self) -> float:
        """The same of what was read: less only where slices were missing."""
        return self.average_weight_bits + self.shared_bits - self.missed_bits

    @property
    def nested_weight_bits(self) -> float:
        """Mean gear over the weights in the nested store, as the blueprint has it that it began with."""
        return self.blueprint.nested_weight_bits(self.table)

    @property
    def tokens_by_bits(self) -> dict[int, int]:
        """Gear -> tokens computed at it. Sites differ within a token: it counts by its share of weights."""
        if self.routed:
            return {g: round(self.computed_tokens * n / self.table.reads.weights) for g, n in self.routed.items()}
        by_bits: dict[int, float] = {}
        for blueprint, tokens in self.parts or ((self.blueprint, self.computed_tokens),):
            for bits, weights in weights_by_bits(blueprint, self.table).items():
                by_bits[bits] = by_bits.get(bits, 0) + tokens * weights / self.table.reads.weights
        return {bits: round(count) for bits, count in by_bits.items()}

    @property
    def decode_tokens_per_s(self) -> float:
        """Speed after the first token; 0 when there was only one."""
        return (len(self.token_ids) - 1) / self.decode_ms * 1e3 if self.decode_ms > 0 else 0.0

    def describe(self) -> dict[str, Any]:
        """The result as JSON."""
        return {
            "id": self.id,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "error": self.error,
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": len(self.token_ids),
                "total_tokens": self.prompt_tokens + len(self.token_ids),
                "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
                "completion_tokens_details": {
                    "high_precision_tokens": self.high_precision_tokens,
                    "careful_tokens": self.high_precision_tokens,  # its name in version 0.1
                    "raised_tokens": self.raised_tokens,
                    "lowered_tokens": self.lowered_tokens,
                    "drafted_tokens": self.drafted_tokens,
                    "accepted_tokens": self.accepted_tokens,
                },
                "average_weight_bits": round(self.average_weight_bits, 4),
                "read_weight_bits": round(self.read_weight_bits, 4),
                "precision_misses": self.misses,
                "asked_weight_bits": round(self.asked_weight_bits, 4),
                "cached_weight_bits": None if self.cached_weight_bits is None else round(self.cached_weight_bits, 4),
                "nested_weight_bits": round(self.nested_weight_bits, 4),
                "average_kv_bits": round(self.average_kv_bits, 4),
                "state_bits": self.blueprint.least_state_bits,
                "kv_error": self.kv_error,
                "kv_pages_read": self.pages_read,
                "kv_pages_raised": self.pages_raised,
                "kv_host_bytes": self.host_bytes,
                "ignored": dict(self.ignored),
            },
            "profile": self.profile.describe(),
            "blueprint": self.blueprint.describe(self.table),
            "refreshes": [r.describe() for r in self.refreshes],
            "bytes_per_token": self.bytes_per_token,
            "timings": {
                "analysis_ms": round(self.analysis_ms, 4),
                "policy_ms": round(self.policy_ms, 4),
                "prefill_ms": round(self.prefill_ms, 3),
                "decode_ms": round(self.decode_ms, 3),
                "decode_tokens_per_s": round(self.decode_tokens_per_s, 2),
            },
        }


def _average(parts: Sequence[tuple[Blueprint, int]], table: SiteTable) -> float | None:
    """Mean gear over the weights and over so many tokens; None where there are none."""
    total = sum(n for _, n in parts)
    return sum(b.average_weight_bits(table) * n for b, n in parts) / total if total else None
