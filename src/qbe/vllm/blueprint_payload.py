"""A request's blueprint on its way from the front end to the scheduler and the workers.

It is an entry of `SamplingParams.extra_args`, which vLLM sends to all of them with the request, so it holds plain data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from qbe.analysis import QueryProfile
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.errors import QBEError
from qbe.sites import FULL_BITS, SiteTable

KEY = "qbe"


@dataclass(frozen=True)
class BlueprintPayload:
    """What was chosen for a request, and from what.

    Attributes:
        policy: that chose the blueprint.
        asked_policy: that was asked for by name, to be asked again at a refresh; None for the default.
        weight_bits, activation_bits: a byte for each nested site.
        digest: of the site table; a worker of another model refuses it.
        budget: fields of the `Budget`.
        profile: score, prompt_class, tier, features and cluster of the `QueryProfile`.
        context: tokens of the prompt and the longest answer.
        analysis_ms, policy_ms: milliseconds.
        cache: what the blueprint cache did (`Record.cache`).
        asked_weight_bits: as in a record.
    """

    policy: str
    asked_policy: str | None
    weight_bits: bytes
    activation_bits: bytes
    digest: str
    budget: dict[str, Any]
    profile: dict[str, Any]
    context: int
    analysis_ms: float
    policy_ms: float
    cache: str | None = field(default=None)
    asked_weight_bits: float | None = None

    def pack(self) -> dict[str, Any]:
        """As an entry of `extra_args`."""
        return asdict(self)

    @classmethod
    def find(cls, params: Any) -> BlueprintPayload | None:
        """That of a request's sampling parameters; None for one that the front end did not see (a warm-up)."""
        packed: Mapping[str, Any] | None = (getattr(params, "extra_args", None) or {}).get(KEY)
        return None if packed is None else cls(**packed)

    def blueprint(self, table: SiteTable) -> Blueprint:
        """Raises QBEError for a payload of another model."""
        if self.digest != table.digest:
            raise QBEError("this request's blueprint is for another model: one process can serve one model with QBE")
        return blueprint_of(self.policy, self.weight_bits, self.activation_bits, table)

    def as_profile(self) -> QueryProfile:
        """What the front end's policy was told of the query."""
        return QueryProfile(**self.profile, context=self.context)

    def as_budget(self) -> Budget:
        return Budget(**self.budget)


def blueprint_of(policy: str, weight_bits: bytes, activation_bits: bytes, table: SiteTable) -> Blueprint:
    """A blueprint out of bytes; the KV cache is vLLM's own."""
    return Blueprint(policy, tuple(weight_bits), tuple(activation_bits), (FULL_BITS,) * table.layers)
