"""The blueprint: an immutable assignment of a gear to every site. Pure data, no torch."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from qbe.errors import QBEError
from qbe.sites import ATTENTION_ROLES, FULL_BITS, STATE_FULL_BITS, TURBO, KVBits, SiteTable, kv_number_bits

StateBits = tuple[int, ...] | None  # of recurrent states, one per decoder layer; None: as the model's code has them
CONTROLLERS = ("cascade", "routers")
_MANY = 1000  # sites, as only models with experts have them


@dataclass(frozen=True)
class DynamicPrecision:
    """Who may move a row's precision words within a forward pass, beginning with the blueprint's own bits.

    A plan holds it for every row as one more number (`code`), which the ops that move them read on the device.

    Attributes:
        by: one of `CONTROLLERS`.
        level: 0 to 255, how readily; what it means is the controller's.
        routers: their digest, where routers move the words: what others would do is another assignment.
    """

    by: str
    level: int = 0
    routers: str = ""

    def __post_init__(self) -> None:
        if self.by not in CONTROLLERS or not 0 <= self.level <= 255:
            raise QBEError(
                f"dynamic precision by '{self.by}' at level {self.level}: one of {', '.join(CONTROLLERS)}, 0 to 255"
            )

    @property
    def code(self) -> int:
        """Who in the second byte, and the level in the lowest."""
        return controller_code(self.by) << 8 | self.level


def controller_code(by: str) -> int:
    """The number by which a plan knows one of `CONTROLLERS`; 0 is nobody."""
    return CONTROLLERS.index(by) + 1


@dataclass(frozen=True)
class Blueprint:
    """Precision of every nested site and of every key head's KV cache, for one request.

    Attributes:
        policy: name of the policy that chose it.
        weight_bits: one gear per nested site, in the table's order.
        activation_bits: one per nested site: of its inputs.
        kv_bits: one per decoder layer: a number for all of its key heads, or a tuple with one for each (which becomes a
            number where they are equal); `qbe.sites.TURBO` is added where keys are in TurboQuant's form.
        first_kv_bits: the fewest of any key head in the first page of a sequence, whose tokens are looked at from
            everywhere; None: as in the other pages.
        state_bits: of the recurrent state, one of `qbe.sites.STATE_BITS` per decoder layer; None: 32 in every one.
        kv_error: what reading the KV cache at these bits may change (`Budget.kv_error`); None has no bound.
        dynamic_precision: what may move the weights' bits while a step runs; None: nothing.
    """

    policy: str
    weight_bits: tuple[int, ...]
    activation_bits: tuple[int, ...]
    kv_bits: tuple[KVBits, ...]
    kv_error: float | None = None
    dynamic_precision: DynamicPrecision | None = None
    first_kv_bits: int | None = None
    state_bits: StateBits = None

    def __post_init__(self) -> None:
        if self.state_bits is not None and set(self.state_bits) == {STATE_FULL_BITS}:
            object.__setattr__(self, "state_bits", None)
        # Equal assignments have one form, so that they have one key.
        object.__setattr__(self, "kv_bits", tuple(map(shortest, self.kv_bits)))
        if self.kv_bits_of(0) == self.kv_bits:
            object.__setattr__(self, "first_kv_bits", None)

    @classmethod
    def of(
        cls, policy: str, table: SiteTable, weight_bits: Sequence[int], activation_bits: Sequence[int] | None = None,
        kv_bits: Sequence[KVBits] | None = None,
    ) -> Blueprint:  # fmt: skip
        """A blueprint with these gears.

        Args:
            weight_bits: one per nested site.
            activation_bits: one per nested site (`SiteTable.activations` makes them from one number); None is 16.
            kv_bits: one per decoder layer (`qbe.policies.kv` chooses them); None is 16.

        Raises:
            QBEError: a gear that its site does not have, or the wrong number of gears.
        """
        activation_bits = (FULL_BITS,) * len(weight_bits) if activation_bits is None else activation_bits
        for gears in (weight_bits, activation_bits):
            if len(gears) != len(table.nested):
                raise QBEError(f"a blueprint for {len(gears)} sites does not fit a model with {len(table.nested)}")
        sites = table.nested
        kinds = {
            (s.gears, s.activation_gears, w, a) for s, w, a in zip(sites, weight_bits, activation_bits, strict=True)
        }
        if all(w in gears and a in widths for gears, widths, w, a in kinds):
            sites = ()  # most sites are alike, and experts are thousands
        for site, bits, activation in zip(sites, weight_bits, activation_bits, strict=False):
            if bits not in site.gears:
                have = ", ".join(map(str, site.gears))
                raise QBEError(f"{bits} bits are not in the store of {site.name} (it has {have}); choose one of those")
            if activation not in site.activation_gears:
                have = ", ".join(map(str, site.activation_gears))
                raise QBEError(f"{activation} bits are no width of {site.name}'s activations (they have {have})")
        kv_bits = (FULL_BITS,) * table.layers if kv_bits is None else kv_bits
        return cls(policy, tuple(weight_bits), tuple(activation_bits), tuple(kv_bits))

    def with_kv_bits(self, kv_bits: Sequence[KVBits]) -> Blueprint:
        """The same with another KV cache, but for a sequence's first page where that has bits of its own."""
        return replace(self, kv_bits=tuple(kv_bits))

    def kv_bits_of(self, page: int) -> tuple[KVBits, ...]:
        """KV bits of the page of this number of a sequence, as `kv_bits`."""
        if page > 0 or self.first_kv_bits is None:
            return self.kv_bits
        return tuple(_at_least(self.first_kv_bits, b) for b in self.kv_bits)

    @cached_property
    def full_activations(self) -> Blueprint:
        """The same with 16-bit activations, for tokens that are hard to predict; itself if it has no other."""
        full = (FULL_BITS,) * len(self.activation_bits)
        return self if self.activation_bits == full else replace(self, activation_bits=full)

    @cached_property
    def key(self) -> str:
        """A short name that equal assignments share, e.g. for records."""
        first = () if self.first_kv_bits is None else (f"first {self.first_kv_bits}",)
        parts = (*first, *self._error, *self._dynamic, *self._state)
        return _digest(self.weight_bits, self.activation_bits, self.kv_bits, *parts)

    @cached_property
    def linear_key(self) -> str:
        """The same of the nested sites alone: what is computed at equal ones differs in the KV cache at most.

        Not for files. It is made of bytes, since steps ask for it: as text it would be a third of a plan's new column.
        """
        bits = bytes(self.weight_bits) + b"|" + bytes(self.activation_bits)
        return hashlib.blake2b(bits + repr((*self._dynamic, *self._state)).encode(), digest_size=8).hexdigest()

    @cached_property
    def computed_key(self) -> str:
        """The same of all that keys and values depend on beside their own bits."""
        return _digest(self.weight_bits, self.activation_bits, *self._error, *self._dynamic, *self._state)

    def covers(self, asked: Blueprint) -> bool:
        """Whether keys and values computed at this one are at least as precise as at `asked`, their own bits left out:
        as many bits at every site, an error as small, and moved by the same dynamic precision."""
        return self.computed_key == asked.computed_key or (
            self.dynamic_precision == asked.dynamic_precision
            and self.state_bits == asked.state_bits
            and _bound(self) <= _bound(asked)
            and _as_many(self.weight_bits, asked.weight_bits)
            and _as_many(self.activation_bits, asked.activation_bits)
        )

    @property
    def _error(self) -> tuple[float, ...]:
        return () if self.kv_error is None else (self.kv_error,)

    @property
    def _state(self) -> tuple[str, ...]:
        return () if self.state_bits is None else (f"state {self.state_bits}",)

    @property
    def _dynamic(self) -> tuple[DynamicPrecision, ...]:
        return () if self.dynamic_precision is None else (self.dynamic_precision,)

    def average_weight_bits(self, table: SiteTable) -> float:
        """Mean bits over all weights that a token reads: experts by their use, and what is not nested at 16."""
        return table.reads.average_bits(self.weight_bits)

    def nested_weight_bits(self, table: SiteTable) -> float:
        """Mean gear over the weights in the nested store, whether a token reads them or not."""
        total = sum(s.parameters * b for s, b in zip(table.nested, self.weight_bits, strict=True))
        return total / max(1, table.nested_parameters)

    def average_kv_bits(self, table: SiteTable) -> float:
        """Mean bits of a number in the KV cache (scales and the first page not counted); 16 for a model without one."""
        total = sum(s.numbers * self.kv_bits_at(s.layer, s.head) for s in table.kv)
        return total / table.kv_numbers if table.kv_numbers else float(FULL_BITS)

    @property
    def least_state_bits(self) -> int:
        """The fewest bits of any layer's recurrent state."""
        return STATE_FULL_BITS if self.state_bits is None else min(self.state_bits, default=STATE_FULL_BITS)

    def kv_bits_at(self, layer: int, head: int) -> int:
        """Bits of a key head of a layer; layers past the end have 16."""
        bits = self.kv_bits[layer] if layer < len(self.kv_bits) else FULL_BITS
        return kv_number_bits(bits if isinstance(bits, int) else bits[head])

    def bytes_per_token(self, table: SiteTable) -> int:
        """Bytes of weights and scales that decoding one token reads at batch 1; the KV cache is not counted."""
        return table.reads.nbytes(self.weight_bits)

    def describe(self, table: SiteTable) -> dict[str, Any]:
        """The blueprint as JSON: policy, average bits, one entry per nested site and the KV bits of every layer."""
        rows, dynamic = [], None if self.dynamic_precision is None else asdict(self.dynamic_precision)
        for site, w, a in zip(table.nested, self.weight_bits, self.activation_bits, strict=True):
            kv = _plain(self.kv_bits[site.layer]) if site.role in ATTENTION_ROLES and site.layer is not None else None
            rows.append(
                {"name": site.name, "role": str(site.role), "weight_bits": w, "activation_bits": a, "kv_bits": kv}
            )
        return {
            "policy": self.policy,
            "key": self.key,
            "average_weight_bits": round(self.average_weight_bits(table), 4),
            "nested_weight_bits": round(self.nested_weight_bits(table), 4),
            "average_kv_bits": round(self.average_kv_bits(table), 4),
            "kv_error": self.kv_error,
            "dynamic_precision": dynamic,
            "steering": dynamic,  # its name in version 0.1
            "sites": rows,
            "kv_bits": [_plain(b) for b in self.kv_bits],
            "first_kv_bits": self.first_kv_bits,
            "state_bits": None if self.state_bits is None else list(self.state_bits),
        }


def tokens_by_bits(blueprint: Blueprint, table: SiteTable, tokens: int) -> dict[int, int]:
    """Gear -> how many of so many computed tokens count towards it: each by the gear's share of the weights."""
    return {g: round(tokens * n / table.reads.weights) for g, n in weights_by_bits(blueprint, table).items()}


def weights_by_bits(blueprint: Blueprint, table: SiteTable) -> dict[int, float]:
    """Bits -> weights that a token reads at them, what is not nested included."""
    found: dict[int, float] = {}
    for size, gear in zip(table.reads.sizes.tolist(), blueprint.weight_bits, strict=True):
        found[gear] = found.get(gear, 0.0) + size
    if table.reads.fixed:
        found[FULL_BITS] = found.get(FULL_BITS, 0.0) + table.reads.fixed
    return found


def _plain(bits: KVBits) -> int | str | list[Any]:
    """As JSON has it: 4, `turbo4` or a list of such."""
    if isinstance(bits, tuple):
        return [_plain(b) for b in bits]
    return f"turbo{kv_number_bits(bits)}" if bits > TURBO else bits


def shortest(bits: KVBits) -> KVBits:
    """One number for heads that all have it."""
    return bits[0] if isinstance(bits, tuple) and len(set(bits)) == 1 else bits


def _at_least(fewest: int, bits: KVBits) -> KVBits:
    if isinstance(bits, tuple):
        return shortest(tuple(max(b, fewest, key=kv_number_bits) for b in bits))
    return max(bits, fewest, key=kv_number_bits)


def kv_covers(kept: Sequence[KVBits], asked: Sequence[KVBits]) -> bool:
    """Whether a page with these KV bits (as `Blueprint.kv_bits`) is at least as precise as one with `asked`: every key
    head has as many, in the same form or at 16 bits."""
    return len(kept) == len(asked) and all(map(_kv_covers, kept, asked))


def _kv_covers(kept: KVBits, asked: KVBits) -> bool:
    if kept == asked:
        return True
    count = max(len(bits) if isinstance(bits, tuple) else 1 for bits in (kept, asked))
    pairs = zip(*(bits if isinstance(bits, tuple) else (bits,) * count for bits in (kept, asked)), strict=True)
    return all(k in (a, FULL_BITS) or (k >= a and max(k, a) < TURBO) for k, a in pairs)


def _as_many(kept: Sequence[int], asked: Sequence[int]) -> bool:
    return len(kept) == len(asked) and all(map(operator.ge, kept, asked))


def _bound(blueprint: Blueprint) -> float:
    return math.inf if blueprint.kv_error is None else blueprint.kv_error


def _digest(*parts: object) -> str:
    # Thousands of experts are bytes in a microsecond, and text in milliseconds; short ones keep the keys that they had.
    plain = [
        bytes(p) if isinstance(p, tuple) and len(p) >= _MANY and all(type(b) is int for b in p) else p for p in parts
    ]
    return hashlib.blake2b(repr(tuple(plain)).encode(), digest_size=8).hexdigest()
