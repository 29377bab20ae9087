"""The table `[rollout]` of the settings file."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, Strict, model_validator

from qbe.server.fields import KVBits
from qbe.server.settings_table import SettingsTable
from qbe.sites import FULL_BITS

if TYPE_CHECKING:
    from qbe.server.settings import Tiers

MetricName = Literal[
    "errors", "malformed", "loops", "failures", "ttft", "itl", "live_kl", "top1_agreement", "flip_margin",
]  # fmt: skip
_Bits = Annotated[float, Strict(), Field(ge=1, le=FULL_BITS)]
_Share = Annotated[float, Strict(), Field(ge=0, le=1)]
_Nats = Annotated[float, Strict(), Field(gt=0)]
_Times = Annotated[float, Strict(), Field(ge=1)]
_Count = Annotated[int, Strict(), Field(ge=2, le=4096)]
_ELSEWHERE = (
    "a server has one store: for another folder leave [rollout.candidate] out, run servers of both releases and split "
    "between them with what 'qbe releases --manifest argo' or 'kserve' prints"
)


class Candidate(SettingsTable):
    """What is tried, in place of what the tiers' tables and the command line say.

    Attributes:
        tiers: whose requests take part.
        bits: the average bits that the query's score chooses among, lowest and highest.
        policy: which chooses the bits.
        kv_bits: average bits of the KV cache, or `turbo2` or `turbo4`.
        activation_bits: of the inputs of linear layers.
    """

    tiers: Annotated[tuple[Literal["flex", "default", "priority"], ...], Field(min_length=1)] = (
        "flex", "default", "priority",
    )  # fmt: skip
    bits: tuple[_Bits, _Bits] | None = None
    policy: Annotated[str, Field(max_length=64)] | None = None
    kv_bits: KVBits | None = None
    activation_bits: Literal[8, 16] | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_this_store(cls, given: Any) -> Any:
        if isinstance(given, dict) and "model" in given:
            raise ValueError(f"model: {_ELSEWHERE}")
        return given

    @model_validator(mode="after")
    def _differs(self) -> Self:
        if all(v is None for v in (self.bits, self.policy, self.kv_bits, self.activation_bits)):
            raise ValueError("it changes nothing: give bits, policy, kv_bits or activation_bits")
        if self.bits is not None and self.bits[0] > self.bits[1]:
            raise ValueError("bits: the two must rise")
        return self


class Step(SettingsTable):
    """A part of the way.

    Attributes:
        weight: percent of keys, or of conversations, that the candidate answers.
        minutes: before it may go on to the next.
    """

    weight: Annotated[float, Strict(), Field(gt=0, lt=100)]
    minutes: Annotated[float, Strict(), Field(gt=0)]


class RolloutLimits(SettingsTable):
    """How much worse the candidate may be. They bear the metrics' names.

    Attributes:
        errors: share of answers that end in an error, or that the candidate cannot choose bits for, beyond the stable
            arm's.
        malformed: likewise, of structured answers that could not go on or had to be closed.
        loops: likewise, of answers that end in a loop of tokens.
        failures: likewise, of rated answers that failed (`POST /v1/qbe/feedback`).
        ttft: times the stable arm's time to the first token, at the 95th percentile.
        itl: likewise, of an answer's mean time between tokens.
        live_kl: nats a token from the widest gear, mean of scored answers.
        top1_agreement: least share of tokens with the same likeliest next token, mean of scored answers.
        flip_margin: nats by which the widest gear prefers its own token where they differ, mean of scored answers.
    """

    errors: _Share = 0.02
    malformed: _Share = 0.05
    loops: _Share = 0.1
    failures: _Share = 0.1
    ttft: _Times = 1.5
    itl: _Times = 1.5
    live_kl: _Nats = 0.5
    top1_agreement: _Share = 0.6
    flip_margin: _Nats = 2.0


class Rollout(SettingsTable):
    """A canary. The candidate gets more of the traffic step by step, and nothing once it is found to be worse.

    Attributes:
        candidate: what is tried; without it a server does nothing, and manifests for fleets are made from the rest.
        steps: weights that rise. After the last one the candidate answers everything.
        salt: of the hash that puts a key or conversation into an arm; another one draws anew.
        sticky: what stays in one arm: a `key`, or a `conversation`, as `prompt_cache_key` says.
        sample: share of the candidate's answers that are scored by the widest gear, where `health.sample` is less.
        window: answers of an arm that are looked back on.
        least: of these, without which nothing is decided.
        least_scored: likewise, of scored answers.
        off: metrics that are not looked at.
        limits: how much worse the candidate may be.
    """

    candidate: Candidate | None = None
    steps: Annotated[tuple[Step, ...], Field(min_length=1, max_length=32)]
    salt: Annotated[str, Field(max_length=64)] = ""
    sticky: Literal["key", "conversation"] = "key"
    sample: _Share = 0.2
    window: _Count = 100
    least: _Count = 20
    least_scored: _Count = 8
    off: tuple[MetricName, ...] = ()
    limits: RolloutLimits = RolloutLimits()

    @model_validator(mode="after")
    def _rises(self) -> Self:
        weights = [step.weight for step in self.steps]
        if any(after <= before for before, after in pairwise(weights)):
            raise ValueError("steps: their weights must rise")
        if max(self.least, self.least_scored) > self.window:
            raise ValueError("least and least_scored are at most window")
        return self


def check_ceilings(rollout: Rollout | None, tiers: Tiers) -> None:
    """Raises ValueError for a candidate with more bits than a tier may have."""
    candidate = None if rollout is None else rollout.candidate
    if candidate is None or candidate.bits is None:
        return
    for name in candidate.tiers:
        ceiling: float = getattr(tiers, name).ceiling
        if candidate.bits[1] > ceiling:
            raise ValueError(
                f"rollout.candidate.bits: {candidate.bits[1]:g} is above the ceiling of tier '{name}', {ceiling:g}: "
                "lower it, or name other tiers in rollout.candidate.tiers"
            )
