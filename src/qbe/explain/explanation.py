"""The explanation of one blueprint: everything that `qbe explain` shows. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.refresh.monitor import Pace
from qbe.refresh.thresholds import Thresholds
from qbe.sites import FULL_BITS, Site, SiteTable


@dataclass(frozen=True)
class Explanation:
    """A query's way to its blueprint, without the query's text.

    Attributes:
        prompt_tokens: length of the query in the model's tokens.
        profile: its features and score.
        blueprint: what the policy chose, or what the query's conversation keeps.
        table: the model's sites.
        budget: what the caller allowed.
        target_bits: average bits that budget and score left to the policy.
        analysis_ms, policy_ms: time that each took, milliseconds.
        bytes_per_token: bytes of weights and scales that decoding one token reads at batch 1 with this blueprint.
        bytes_per_token_16bit: the same with every site at 16 bits.
        thresholds: of windows that are cause for another blueprint, where the budget asks for that and the model has
            some.
        cache: what the blueprint cache did: `exact` or `near` (hits), `miss`; None where it was not asked.
        prompt_format: `qbe.hardware.HardwareProfile.prompt_format` of the model's device, if it has one.
        native: with it, for every nested site whether its weight takes that.
        asked: what the policy chose for the query's own score, where its conversation keeps another blueprint; None
            where it does not.
        held: whether a server's health made the blueprint another one than what was asked.
        pace: of refreshes, with `thresholds`.
        ignored: options that were asked for and do nothing here, and a line of each that says why
            (`qbe.compatibility`); `budget` is without them.
    """

    prompt_tokens: int
    profile: QueryProfile
    blueprint: Blueprint
    table: SiteTable
    budget: Budget
    target_bits: float
    analysis_ms: float
    policy_ms: float
    bytes_per_token: int
    bytes_per_token_16bit: int
    cache: str | None = None
    thresholds: Thresholds | None = None
    prompt_format: str | None = None
    native: tuple[bool, ...] = ()
    asked: Blueprint | None = None
    held: bool = False
    pace: Pace = field(default_factory=Pace)
    ignored: Mapping[str, str] = field(default_factory=dict)

    @property
    def as_asked(self) -> Explanation:
        """The same with what the query's own score gives."""
        if self.asked is None:
            return self
        return replace(self, blueprint=self.asked, asked=None, bytes_per_token=self.asked.bytes_per_token(self.table))

    @property
    def asked_bits(self) -> float:
        """Mean gear over the weights that the query's own score gives."""
        return (self.asked or self.blueprint).average_weight_bits(self.table)

    @property
    def native_sites(self) -> tuple[Site, ...]:
        """Where a long prompt with this blueprint is multiplied in the device's own 8-bit format."""
        if self.prompt_format is None or self.blueprint.dynamic_precision is not None:
            return ()  # rows whose bits may move within the pass are not taken to be alike
        bits = zip(self.blueprint.weight_bits, self.blueprint.activation_bits, strict=True)
        sites = zip(self.table.nested, bits, self.native, strict=True)
        return tuple(s for s, (w, a), native in sites if native and w < FULL_BITS and a < FULL_BITS)

    @property
    def ratio(self) -> float:
        """Bytes per token with this blueprint over those at 16 bits; below 1 is a saving."""
        return self.bytes_per_token / max(1, self.bytes_per_token_16bit)

    @property
    def context(self) -> int:
        """Tokens that the request may come to have; 0 when that is not known."""
        return self.profile.context

    @property
    def fits(self) -> bool:
        """Whether the model's context has room for the prompt and a token of an answer; else it would be refused."""
        return self.table.context is None or self.prompt_tokens < self.table.context

    @property
    def average_bits(self) -> float:
        """Mean gear over the weights of the nested sites."""
        return self.blueprint.average_weight_bits(self.table)

    def describe(self) -> dict[str, Any]:
        """The explanation as JSON."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "context": self.context,
            "fits_context": self.fits,
            "profile": self.profile.describe(),
            "policy": self.blueprint.policy,
            "cache": self.cache,
            "asked_weight_bits": round(self.asked_bits, 4),
            "budget": {
                "bits": self.budget.bits,
                "activation_bits": self.budget.activation_bits,
                "high_precision_tokens": self.budget.high_precision_tokens,
                "careful_tokens": self.budget.high_precision_tokens,  # its name in version 0.1
                "tier": self.budget.tier,
                "target_bits": round(self.target_bits, 4),
                "kv_bits": self.budget.kv_bits,
                "kv_error": self.budget.kv_error,
                "state_bits": self.budget.state_bits,
                "refresh": self.budget.refresh,
                "cascade": self.budget.cascade,
            },
            "refresh": None if self.thresholds is None else {**asdict(self.thresholds), **asdict(self.pace)},
            "ignored": dict(self.ignored),
            "blueprint": self.blueprint.describe(self.table),
            "long_prompts": {"format": self.prompt_format, "sites": [s.name for s in self.native_sites]},
            "kv_measured": self.table.kv_measured,
            "bytes_per_token": self.bytes_per_token,
            "bytes_per_token_16bit": self.bytes_per_token_16bit,
            "ratio": round(self.ratio, 4),
            "timings": {"analysis_ms": round(self.analysis_ms, 4), "policy_ms": round(self.policy_ms, 4)},
        }
