"""What tokens cost at so many bits, and what an answer used and cost: its `usage`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qbe.engine.result import Result
from qbe.records.ledger import UNIT
from qbe.server.settings import Prices
from qbe.sites import FULL_BITS

if TYPE_CHECKING:
    from qbe.server.contract import Terms

_MILLION = 1e6


@dataclass(frozen=True)
class Pricing:
    """Prices of a tier: b bits cost b/16 of what 16 bits do.

    Attributes:
        prices: per million tokens at 16 bits.
        factor: of the tier.
    """

    prices: Prices
    factor: float

    def cost(self, read: int, cached: int, written: int, bits: float) -> int:
        """Of so many tokens at an average of `bits`, in the ledger's units of the currency.

        Args:
            read, cached: tokens of the prompt that were computed, and that were not.
        """
        at_full = read * self.prices.input + cached * self.prices.cached_input + written * self.prices.output
        return round(self._per_bit(at_full) * bits * UNIT)

    def most_bits(self, max_cost: float | None, prompt_tokens: int, tokens: int, n: int) -> float:
        """The average at which n answers of so many tokens cost `max_cost`; infinity without one."""
        if max_cost is None:
            return float("inf")
        per_bit = self._per_bit(prompt_tokens * self.prices.input + n * tokens * self.prices.output)
        return max_cost / per_bit if per_bit else float("inf")

    def _per_bit(self, at_full: float) -> float:
        return at_full / _MILLION * self.factor / FULL_BITS


def read_tokens(result: Result) -> int:
    """Tokens of the prompt that are charged as computed: those of an answer that was cut within it went no further."""
    fresh = max(0, result.prompt_tokens - result.cached_tokens)
    # With a token of the answer the whole prompt went through the model, whatever was computed again for it.
    return fresh if result.token_ids else min(fresh, result.computed_tokens)


def usage(
    given: Terms, groups: Sequence[Sequence[Result]], hidden: int = 0, joules: float = 0.0, source: str = "model"
) -> dict[str, Any]:  # fmt: skip
    """Tokens, precision and cost of the answers to the prompts of one request.

    It costs what the bits do that were asked for, or that were read where slices were missing.

    Args:
        groups: for each prompt its answers.
        hidden: tokens of each answer that were not asked for.
        joules, source: what they took, and who says so.
    """
    results = [r for group in groups for r in group]
    firsts = [group[0] for group in groups if group]
    read, written = sum(r.prompt_tokens for r in firsts), sum(len(r.token_ids) - hidden for r in results)
    weights = [max(1, r.computed_tokens) for r in results]
    by_bits: dict[int, int] = {}
    for result in results:
        for bits, count in result.tokens_by_bits.items():
            by_bits[bits] = by_bits.get(bits, 0) + count
    cost = 0
    for group in groups:
        for i, r in enumerate(group):
            prompt = (read_tokens(r), min(r.cached_tokens, r.prompt_tokens)) if i == 0 else (0, 0)
            cost += given.pricing.cost(*prompt, len(r.token_ids) - hidden, r.priced_weight_bits)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": sum(r.cached_tokens for r in firsts)},
        "cost": cost / UNIT,
        "qbe": {
            "average_weight_bits": _mean([r.average_weight_bits for r in results], weights),
            "read_weight_bits": _mean([r.read_weight_bits for r in results], weights),
            "precision_misses": sum(r.misses for r in results),
            "asked_weight_bits": _mean([r.asked_weight_bits for r in results], weights),
            "cached_weight_bits": _mean_of_cached(firsts),
            "nested_weight_bits": _mean([r.nested_weight_bits for r in results], weights),
            "average_kv_bits": _mean([r.average_kv_bits for r in results], weights),
            "state_bits": min(r.blueprint.least_state_bits for r in results),
            "tokens_by_bits": {str(bits): by_bits[bits] for bits in sorted(by_bits)},
            "policy": firsts[0].blueprint.policy,
            **({} if given.arm is None else {"arm": given.arm.name}),
            "brownout": given.brownout,
            "raised": given.raised,
            "energy": {"joules": round(joules, 6), "source": source},
            "currency": given.prices.currency,
        },
    }


def _mean_of_cached(results: Sequence[Result]) -> float | None:
    """Bits at which the prompts' cached tokens were computed; None where there are none."""
    known = [(r.cached_weight_bits, r.cached_tokens) for r in results if r.cached_weight_bits is not None]
    return _mean(*zip(*known, strict=True)) if known else None


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    return round(sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights), 4)
