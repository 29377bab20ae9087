"""From `service_tier` and `qbe` to a budget: what a request may have, and on which terms it is served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qbe import policies
from qbe.budget import Budget
from qbe.errors import QBEError
from qbe.server.energy.governor import tier_bits
from qbe.server.errors import APIError
from qbe.server.pricing import Pricing
from qbe.server.protocol import Contract
from qbe.server.rollout.arms import Arm
from qbe.server.rollout.settings import Candidate
from qbe.server.settings import Prices, Settings, Tier, TierName
from qbe.server.speed import Speed


@dataclass(frozen=True)
class Terms:
    """What a request is served on.

    Attributes:
        tier: the one served.
        prices, price: of the settings when it came in.
        brownout: how far its tier had sunk to its floor, 0 to 1.
        raised: how far its tier's low end had risen to the high one, 0 to 1.
        contract: what it asked for itself.
        within: the tier's range among which the query's score chooses, beside the answers that are inside; None: what
            the pressure makes of it.
        arm: of the rollout that it takes part in; None: in none.
        candidate: what it has where it does not say itself, in the candidate's arm.
        stable: what it would have in the stable arm, there.
    """

    tier: TierName
    tier_settings: Tier
    prices: Prices
    brownout: float
    contract: Contract
    raised: float = 0.0
    within: tuple[float, float] | None = None
    arm: Arm | None = None
    candidate: Candidate | None = None
    stable: Terms | None = None

    @property
    def tier_range(self) -> tuple[float, float]:
        """What the pressure makes of the tier's range."""
        return tier_bits(self.tier_settings, self.brownout, self.raised)

    @property
    def bounded(self) -> bool:
        """Whether its bits are bounded by itself, or by what is tried, which the order of the tiers does not bind."""
        own = (self.contract.bits, self.contract.min_bits, self.contract.max_bits)
        return any(bits is not None for bits in own) or (self.candidate is not None and self.candidate.bits is not None)

    @property
    def policy(self) -> str | None:
        """Which chooses its bits; None: the engine's."""
        return self.contract.policy or (None if self.candidate is None else self.candidate.policy)

    @property
    def kv_bits(self) -> float | str | None:
        """Of its cache; None: the policy's."""
        tried = None if self.candidate is None else self.candidate.kv_bits
        return tried if self.contract.kv_bits is None else self.contract.kv_bits

    @property
    def pricing(self) -> Pricing:
        """What its tokens cost."""
        return Pricing(self.prices, self.tier_settings.price)


def terms(
    tier: TierName, contract: Contract | None, settings: Settings, brownout: float, shift: float = 0.0
) -> Terms:  # fmt: skip
    """What a request is served on.

    Args:
        shift: of the default tier, for the sake of energy: -1 to its floor, 1 to its high end.

    Raises:
        APIError: the contract contradicts itself or its tier; it names the field.
    """
    contract, limits = contract or Contract(), getattr(settings.tiers, tier)
    low, high, exact = contract.min_bits, contract.max_bits, contract.bits
    if exact is not None and (low is not None or high is not None):
        raise _contradiction("bits", "stands for both bounds: leave out min_bits and max_bits, or bits")
    if exact is not None and contract.refresh:
        raise _contradiction("refresh", "chooses among bits: leave out bits, or refresh")
    for name in ("refresh_interval", "refresh_count"):
        if getattr(contract, name) is not None and not contract.refresh:
            raise _contradiction(name, "is for refresh: ask for that, too, or leave it out")
    if low is not None and high is not None and low > high:
        raise _contradiction("min_bits", f"is {low:g}, above max_bits, which is {high:g}")
    for name, bits in (("bits", exact), ("min_bits", low)):
        if bits is not None and bits > limits.ceiling:
            raise _contradiction(name, f"is {bits:g}, but tier '{tier}' goes up to {limits.ceiling:g}")
    if contract.policy is not None and contract.policy not in policies.available():
        known = ", ".join(policies.available())
        raise APIError(400, f"qbe.policy: unknown policy '{contract.policy[:64]}': choose one of {known}",
                       param="qbe.policy", code="unknown_policy")  # fmt: skip
    shift = shift if tier == "default" and exact is None else 0.0
    sinks = max(brownout, -shift) if limits.floor is not None and exact is None else 0.0
    return Terms(tier, limits, settings.prices, sinks, contract, 0.0 if sinks else max(0.0, shift))


def budget(given: Terms, prompt_tokens: int, tokens: int, n: int, lowest: float, speed: Speed) -> Budget:
    """The bounds for the policy.

    Args:
        prompt_tokens, tokens, n: of the prompt, of an answer at most, and answers.
        lowest: average bits of the store's lowest gears.

    Raises:
        APIError: the price cannot be met.
    """
    c = given.contract
    least, most = c.min_bits or c.bits or lowest, c.max_bits or c.bits or given.tier_settings.ceiling
    for name, bits in (("bits", c.bits), ("max_bits", c.max_bits)):
        if bits is not None and bits < lowest:
            raise APIError(400, f"qbe.{name} is {bits:g}, but this model's lowest average is {lowest:.2f}: raise it",
                           param=f"qbe.{name}")  # fmt: skip
    affordable = given.pricing.most_bits(c.max_cost, prompt_tokens, tokens, n)
    if affordable < least:
        raise APIError(
            400, f"qbe.max_cost is {c.max_cost:g}, but {prompt_tokens} prompt tokens and up to {n * tokens} new ones "
            f"at {least:g} bits cost {c.max_cost * least / affordable:.3g} {given.prices.currency}: "  # type: ignore[operator]
            "raise it, or lower max_tokens or the bits", param="qbe.max_cost", code="contradictory_budget",
        )  # fmt: skip
    rest: dict[str, Any] = {
        "tier": given.tier, "activation_bits": c.activation_bits or given.tier_settings.activation_bits,
        "high_precision_tokens": c.high_precision_tokens, "kv_bits": given.kv_bits, "kv_error": c.kv_error,
        "state_bits": c.state_bits, "cascade": c.cascade, "best_effort": c.best_effort,
    }  # fmt: skip
    if c.bits is not None:
        return Budget(bits=c.bits, **rest)
    most = min(most, affordable)
    if c.max_latency_ms is not None:
        fast = speed.most_bits(c.max_latency_ms, prompt_tokens, tokens)
        most = most if fast is None else max(least, min(most, fast))
    low, high = (max(least, min(b, most)) for b in given.within or given.tier_range)
    return Budget(
        within=(low, high), refresh=c.refresh, refresh_interval=c.refresh_interval, refresh_count=c.refresh_count,
        **rest,
    )  # fmt: skip


def check(settings: Settings, lowest: float) -> None:
    """Raises QBEError for tiers and a candidate that the model cannot be served at."""
    for name in ("flex", "default", "priority"):
        tier: Tier = getattr(settings.tiers, name)
        least = tier.bits[0] if tier.floor is None else tier.floor
        if least < lowest:
            raise QBEError(
                f"tiers.{name} goes down to {least:g} bits, but this model's lowest average is {lowest:.2f}: raise it"
            )
    candidate = None if settings.rollout is None else settings.rollout.candidate
    if candidate is None:
        return
    if candidate.bits is not None and candidate.bits[0] < lowest:
        raise QBEError(
            f"rollout.candidate.bits goes down to {candidate.bits[0]:g}, but this model's lowest average is "
            f"{lowest:.2f}: raise it"
        )
    if candidate.policy is not None and candidate.policy.partition(":")[0] not in policies.available():
        known = ", ".join(policies.available())
        raise QBEError(f"rollout.candidate.policy: unknown policy '{candidate.policy}': choose one of {known}")


def _contradiction(name: str, problem: str) -> APIError:
    return APIError(400, f"qbe.{name} {problem}", param=f"qbe.{name}", code="contradictory_budget")
