"""Shared reading: the rows of a step read each site at the highest bits that any of them has there.

A step that is bound by memory costs the bytes of the highest bits that any row reads: a row below saves nothing, and
reading it higher costs nothing. So its rows read alike and take the kernels of one precision, whatever was asked.

- *Activations keep each row's own bits.* They take no memory to read; more of them cost arithmetic, on a CPU twice as
  much. Kernels need weights alike, not whole words: the few rows of a CPU share unpacked codes, those of a GPU load the
  same slices, and a row of 8 bits leaves the low byte of its inputs out. It also lets somebody alone have the answers
  that she has with `exact`: her hard tokens have other activations than the rest.
- *Rows of dynamic precision (routers, the cascade) stay as they are*, raised by nobody and raising nobody: what they
  read is decided within the pass, on the device, for that token.
- *Pages of the KV cache are known by the blueprint that was asked for*, as in `exact`: what was read higher is at least
  as good for whoever asks for as much, and nobody with another blueprint is given it.

It is decided on the host, which knows every row's blueprint: a raised row has another column of the plan. A CUDA graph
therefore holds what it held before, and a padded row, which has the last row's column, raises nobody.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from qbe.blueprint import Blueprint
from qbe.errors import QBEError
from qbe.sites import SiteTable

ROWS = ("exact", "shared")  # what a step's rows read: each its own bits, or the highest of any
_KEPT = 256  # sets of blueprints that are remembered


def check_rows(rows: str) -> None:
    """Raises QBEError for what is none of `ROWS`."""
    if rows not in ROWS:
        raise QBEError(f"rows is {rows!r}, but must be {' or '.join(ROWS)}")


class SharedRow(NamedTuple):
    """What a row of a step reads.

    Attributes:
        blueprint: whose columns of nested sites it reads; its KV bits mean nothing.
        bits: of the weights' average, beyond those of the row's own blueprint.
        nbytes: of weights and scales, likewise, for a row alone.
    """

    blueprint: Blueprint
    bits: float
    nbytes: int


class SharedRows:
    """Raises the rows of steps.

    Args:
        table: the sites of their blueprints.
    """

    def __init__(self, table: SiteTable) -> None:
        # An expert sees few rows of a step, so that each reads what it asked for.
        self._apart = [i for i, s in enumerate(table.nested) if s.expert is not None]
        self._known: OrderedDict[frozenset[str], Mapping[str, SharedRow]] = OrderedDict()  # least recently used first
        self._cost = functools.lru_cache(maxsize=_KEPT)(functools.partial(_cost, table))

    def of(self, blueprints: Iterable[Blueprint]) -> Mapping[str, SharedRow]:
        """`Blueprint.linear_key` of each row of a step -> what the row reads."""
        distinct = {b.linear_key: b for b in blueprints}
        key = frozenset(distinct)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        if len(self._known) == _KEPT:
            self._known.popitem(last=False)
        found = self._known[key] = self._raised(distinct)
        return found

    def _raised(self, distinct: Mapping[str, Blueprint]) -> dict[str, SharedRow]:
        fixed = [b.weight_bits for b in distinct.values() if b.dynamic_precision is None]
        highest = tuple(map(max, zip(*fixed, strict=True)))
        found = {}
        for key, blueprint in distinct.items():
            raised = self._with_own_experts(highest, blueprint.weight_bits)
            if blueprint.dynamic_precision is not None or blueprint.weight_bits == raised:
                found[key] = SharedRow(blueprint, 0.0, 0)
                continue
            (bits, nbytes), (own, own_bytes) = self._cost(raised), self._cost(blueprint.weight_bits)
            found[key] = SharedRow(replace(blueprint, weight_bits=raised), bits - own, nbytes - own_bytes)
        return found

    def _with_own_experts(self, highest: tuple[int, ...], own: tuple[int, ...]) -> tuple[int, ...]:
        if not self._apart:
            return highest
        bits = list(highest)
        for i in self._apart:
            bits[i] = own[i]
        return tuple(bits)


def _cost(table: SiteTable, weight_bits: tuple[int, ...]) -> tuple[float, int]:
    """Average bits and bytes of a token that reads these."""
    blueprint = Blueprint("", weight_bits, (), ())
    return blueprint.average_weight_bits(table), blueprint.bytes_per_token(table)
