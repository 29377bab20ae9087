"""The budget: what a caller allows for one request. Pure data, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from qbe.errors import QBEError
from qbe.sites import ACTIVATION_GEARS, FULL_BITS, KV_BITS, STATE_BITS, TURBO_KINDS

# Range of average bits that each tier leaves to the score (a score of 0 gets the low end, 1 the high end).
# Names are OpenAI's `service_tier` values; `auto` and `default` are the middle.
TIER_BITS: dict[str, tuple[float, float]] = {
    "flex": (4.3, 5.5),
    "default": (5.0, 7.0),
    "priority": (6.5, 8.0),
}
TIER_ALIASES = {"auto": "default", "scale": "default", "fast": "priority"}
TIERS = (*TIER_BITS, *TIER_ALIASES)

# What the score chooses among within a range: multiples of this, so that requests share prefixes, which only equal
# blueprints do. Thirds of two bits leave two averages to flex and three to default and priority; those of default are
# the middles of the thirds of its range. Neighbours have one in common.
AVERAGES_STEP = 2 / 3

MOST_PACE = 1024  # tokens of a window that a refresh goes by, and windows in a row
MOST_KV_ERROR = 1_000_000  # so that it is a number for every kernel; a bound of 100 is none already


@dataclass(frozen=True, init=False)
class Budget:
    """Bounds on precision for one request.

    Attributes:
        bits: average bits over the weights of the nested sites; met within 0.05 bits from below. None leaves the
            choice to the tier and the query's score.
        tier: `flex`, `default` or `priority` (`auto`, `scale` and `fast` are other names of the last two).
        activation_bits: of the inputs of nested sites, 8 or 16. 8 makes prompts faster where the hardware multiplies
            8-bit numbers; the output head and the few sites that would cost most keep 16.
        high_precision_tokens: where activations have 8 bits, read tokens of the answer that were hard to predict with
            16.
        refresh: choose again while the answer is written, within what tier or range allow, when it has become hard or
            easy to predict and stays so (`qbe.refresh.monitor`); not beside `bits`.
        refresh_interval, refresh_count: with `refresh`: tokens of a window that is hard, easy or neither, and how many
            of one kind in a row are cause, 1 to 1 024; None takes the engine's.
        cascade: let what the attention of layers shows of a token of the answer choose the bits of later layers'
            weights, around the same average (`qbe.engine.adaptive.cascade`).
        kv_bits: average bits over the numbers of the KV cache, 2 to 16, scales not counted; met from below, within
            0.05 bits where the model has enough key heads for it. Or `turbo2` or `turbo4`: keys in TurboQuant's form
            everywhere. None leaves the choice to the policy.
        within: the range of average bits left to the query's score, in place of the tier's; not beside `bits`.
        kv_error: bounded mode, where the KV cache has less than 16 bits: by how much the output of an attention head
            may differ from what 16 bits give, as a part of its norm (0.05: 5 %); 0 reads everything at 16 bits. Pages
            for which that cannot be guaranteed are read again from 16-bit originals in host memory. None: no bound.
        state_bits: of the recurrent state of every layer that has one, 8, 10, 16 or 32; 10 are 8 and an error-feedback
            slice of 2. None is 32, as the model's own code keeps it.
        best_effort: where the model, the device or the engine cannot do what is asked for here, leave it out, and let
            the result name it (`ignored`), rather than refuse (`qbe.compatibility`).

    `careful_tokens`, the name that `high_precision_tokens` had in version 0.1, is taken and can be read, too.

    Raises:
        QBEError: an unknown tier, bits or a range outside 1 to 16, or activation, KV or state bits that there are not,
            or a KV error that is no number of at least 0 or above a million, or a refresh of bits that are fixed, or
            high-precision tokens where activations have 16 bits anyway, or a refresh's pace without a refresh.
    """

    bits: float | None
    tier: str
    activation_bits: int
    kv_bits: float | str | None
    high_precision_tokens: bool
    kv_error: float | None
    within: tuple[float, float] | None
    refresh: bool
    cascade: bool
    refresh_interval: int | None
    refresh_count: int | None
    best_effort: bool
    state_bits: int | None

    def __init__(  # by hand for `careful_tokens`: `dataclasses.replace` gives an `InitVar` again
        self,
        bits: float | None = None,
        tier: str = "default",
        activation_bits: int = FULL_BITS,
        kv_bits: float | str | None = None,
        high_precision_tokens: bool = False,
        kv_error: float | None = None,
        within: tuple[float, float] | None = None,
        refresh: bool = False,
        cascade: bool = False,
        refresh_interval: int | None = None,
        refresh_count: int | None = None,
        best_effort: bool = False,
        state_bits: int | None = None,
        *,
        careful_tokens: bool | None = None,
    ) -> None:
        values = {
            "bits": bits,
            "tier": tier,
            "activation_bits": activation_bits,
            "kv_bits": kv_bits,
            "high_precision_tokens": high_precision_tokens if careful_tokens is None else careful_tokens,
            "kv_error": kv_error,
            "within": within,
            "refresh": refresh,
            "cascade": cascade,
            "refresh_interval": refresh_interval,
            "refresh_count": refresh_count,
            "best_effort": best_effort,
            "state_bits": state_bits,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)  # frozen
        self._check()

    @property
    def careful_tokens(self) -> bool:
        """The name that `high_precision_tokens` had in version 0.1."""
        return self.high_precision_tokens

    @property
    def plain_tier(self) -> str:
        """The tier by its first name: `flex`, `default` or `priority`."""
        return TIER_ALIASES.get(self.tier, self.tier)

    def _check(self) -> None:
        if self.tier not in TIERS:
            raise QBEError(f"unknown tier {self.tier!r:.66}: choose one of {', '.join(TIERS)}")
        if not isinstance(self.activation_bits, int) or self.activation_bits not in ACTIVATION_GEARS:
            have = " or ".join(map(str, ACTIVATION_GEARS))
            raise QBEError(f"activation_bits is {_told(self.activation_bits)}, but must be {have}")
        if self.kv_bits is not None:
            check_kv_bits(self.kv_bits)
        if self.state_bits is not None and (not _is_number(self.state_bits) or self.state_bits not in STATE_BITS):
            *others, last = map(str, STATE_BITS)
            raise QBEError(f"state_bits is {_told(self.state_bits)}, but must be {', '.join(others)} or {last}")
        error = self.kv_error
        if error is not None and (not _is_number(error) or not 0 <= error <= MOST_KV_ERROR):
            raise QBEError(
                f"kv_error is {_told(error)}, but must be at least 0 and at most {MOST_KV_ERROR}, such as 0.05 for 5 %"
            )
        for name in ("high_precision_tokens", "cascade", "best_effort"):
            if not isinstance(value := getattr(self, name), bool):
                raise QBEError(f"{name} is {_told(value)}, but must be true or false")
        for name in ("refresh_interval", "refresh_count"):
            if (pace := getattr(self, name)) is not None:
                check_pace(name, pace)
                if not self.refresh:
                    raise QBEError(f"{name} is for refresh: ask for that, too, or leave it out", field=name)
        if self.high_precision_tokens and self.activation_bits == FULL_BITS:
            raise QBEError(
                "high_precision_tokens is for activation_bits 8, and they are 16: ask for 8, or leave it out",
                field="high_precision_tokens",
            )
        if self.within is not None:
            ends = self.within if isinstance(self.within, tuple | list) else ()
            rises = len(ends) == 2 and all(map(_is_number, ends)) and 1 <= ends[0] <= ends[1] <= FULL_BITS
            if not rises or self.bits is not None:
                raise QBEError(
                    f"within is {_told(self.within)}, but must be two numbers of bits that rise, lie between 1 and 16 "
                    "and stand alone"
                )
        if self.bits is None:
            return
        if self.refresh:
            raise QBEError("refresh chooses among the bits that a tier allows: leave out bits, or refresh")
        if not _is_number(self.bits) or not 1 <= self.bits <= 16:
            raise QBEError(f"a budget of {_told(self.bits)} bits is out of range: give an average between 1 and 16")

    def bits_for(self, score: float, least: float = 0.0) -> float:
        """Average bits for a query of complexity `score` in [0, 1] that should have `least` bits.

        `least` raises the low end of the range, to the high one at most: what the caller bounds goes first.
        """
        if self.bits is not None:
            return self.bits
        low, high = self.range
        return max(low + (high - low) * min(1.0, max(0.0, score)), min(least, high))

    def score_for(self, bits: float) -> float:
        """The score to which the range gives this average; its ends for averages beyond them."""
        low, high = self.range
        return min(1.0, max(0.0, (bits - low) / (high - low))) if high > low else 0.5

    @property
    def range(self) -> tuple[float, float]:
        """The averages among which the score chooses, where `bits` does not fix one."""
        return self.within or TIER_BITS[self.plain_tier]

    def average_for(self, score: float, least: float = 0.0) -> float:
        """The one of the range's few averages (`averages`) that is nearest to `bits_for`, among those of `least` bits
        and more, or the highest where all have fewer; or `bits`."""
        if self.bits is not None:
            return self.bits
        wanted, few = self.bits_for(score), averages(*self.range)
        return min([bits for bits in few if bits >= least] or few[-1:], key=lambda bits: abs(bits - wanted))


@lru_cache(maxsize=256)
def averages(low: float, high: float) -> tuple[float, ...]:
    """The average bits that a range leaves to the score, ascending: multiples of `AVERAGES_STEP`, to two decimals, or
    the middle of a range that has none. Of two ranges the one whose ends are no lower gives no score fewer bits.
    """
    first, last = math.ceil((low - 0.005) / AVERAGES_STEP), math.floor((high + 0.005) / AVERAGES_STEP)
    steps = (round(i * AVERAGES_STEP, 2) for i in range(first, last + 1))
    return tuple(bits for bits in steps if low <= bits <= high) or (round((low + high) / 2, 2),)


def check_kv_bits(value: object) -> None:
    """Raises QBEError for what is neither an average of the KV cache's bits nor a name of TurboQuant's form."""
    least, *_ = KV_BITS
    average = _is_number(value) and least <= value <= FULL_BITS  # type: ignore[operator]
    if not average and not (isinstance(value, str) and value in TURBO_KINDS):
        have = " or ".join(TURBO_KINDS)
        raise QBEError(f"kv_bits is {_told(value)}, but must be an average between {least} and {FULL_BITS}, or {have}")


def check_pace(name: str, value: object) -> None:
    """Raises QBEError for what is no number of tokens or windows that a refresh can go by."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_PACE:
        raise QBEError(f"{name} is {_told(value)}, but must be a whole number, 1 to {MOST_PACE}", field=name)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _told(value: object) -> str:
    """What was given, in a few characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:30]}..."
