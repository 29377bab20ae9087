"""The blueprint: an immutable assignment of a gear to every site. Pure data, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from qbe.errors import QBEError
from qbe.sites import ATTENTION_ROLES, FULL_BITS, SiteTable


@dataclass(frozen=True)
class Blueprint:
    """Precision of every nested site and of every layer's KV cache, for one request.

    Attributes:
        policy: name of the policy that chose it.
        weight_bits: one gear per nested site, in the table's order.
        activation_bits: one per nested site: of its inputs.
        kv_bits: one per decoder layer.
    """

    policy: str
    weight_bits: tuple[int, ...]
    activation_bits: tuple[int, ...]
    kv_bits: tuple[int, ...]

    @classmethod
    def of(
        cls, policy: str, table: SiteTable, weight_bits: Sequence[int], activation_bits: Sequence[int] | None = None
    ) -> Blueprint:
        """A blueprint with these gears and a 16-bit KV cache.

        Args:
            weight_bits: one per nested site.
            activation_bits: one per nested site (`SiteTable.activations` makes them from one number); None is 16.

        Raises:
            QBEError: a gear that its site does not have, or the wrong number of gears.
        """
        activation_bits = (FULL_BITS,) * len(weight_bits) if activation_bits is None else activation_bits
        for gears in (weight_bits, activation_bits):
            if len(gears) != len(table.nested):
                raise QBEError(f"a blueprint for {len(gears)} sites does not fit a model with {len(table.nested)}")
        for site, bits, activation in zip(table.nested, weight_bits, activation_bits, strict=True):
            if bits not in site.gears:
                have = ", ".join(map(str, site.gears))
                raise QBEError(f"{bits} bits are not in the store of {site.name} (it has {have}); choose one of those")
            if activation not in site.activation_gears:
                have = ", ".join(map(str, site.activation_gears))
                raise QBEError(f"{activation} bits are no width of {site.name}'s activations (they have {have})")
        return cls(policy, tuple(weight_bits), tuple(activation_bits), (FULL_BITS,) * table.layers)

    def with_kv_bits(self, bits: int) -> Blueprint:
        """The same with these bits for the KV cache of every layer."""
        return replace(self, kv_bits=(bits,) * len(self.kv_bits))

    @cached_property
    def key(self) -> str:
        """A short name that equal assignments share, e.g. for records."""
        import hashlib

        raw = bytes(self.weight_bits) + bytes(self.activation_bits) + bytes(self.kv_bits)
        return hashlib.blake2b(raw, digest_size=8).hexdigest()

    def average_weight_bits(self, table: SiteTable) -> float:
        """Mean gear over the weights of the nested sites, bits per weight."""
        total = sum(s.parameters * b for s, b in zip(table.nested, self.weight_bits, strict=True))
        return total / max(1, table.nested_parameters)

    def average_kv_bits(self, table: SiteTable) -> float:
        """Mean bits of the KV cache over the layers that have one (scales not counted); 16 without any."""
        layers = {s.layer for s in table if s.role in ATTENTION_ROLES and s.layer is not None}
        return sum(self.kv_bits[i] for i in layers) / len(layers) if layers else float(FULL_BITS)

    def bytes_per_token(self, table: SiteTable) -> int:
        """Bytes of weights and scales that decoding one token reads at batch 1; the KV cache is not counted."""
        bits = iter(self.weight_bits)
        total = 0
        for site in table:
            gear = next(bits) if site.nested else FULL_BITS
            total += site.bytes_at.get(gear, site.parameters * gear // 8)
        return total

    def describe(self, table: SiteTable) -> dict[str, Any]:
        """The blueprint as JSON: policy, average bits and one entry per nested site."""
        rows = []
        for site, w, a in zip(table.nested, self.weight_bits, self.activation_bits, strict=True):
            kv = self.kv_bits[site.layer] if site.role in ATTENTION_ROLES and site.layer is not None else None
            rows.append(
                {"name": site.name, "role": str(site.role), "weight_bits": w, "activation_bits": a, "kv_bits": kv}
            )
        return {
            "policy": self.policy,
            "key": self.key,
            "average_weight_bits": round(self.average_weight_bits(table), 4),
            "average_kv_bits": round(self.average_kv_bits(table), 4),
            "sites": rows,
        }
