"""Requests whose blueprint is exchanged while they run: a policy's refresh, or more KV bits for pages to come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from qbe.blueprint import Blueprint
from qbe.compatibility import Situation, check_request
from qbe.engine.adaptive.cascade import Cascade
from qbe.engine.extensions.extension import Extension
from qbe.engine.scheduling.scheduler import Scheduler
from qbe.engine.scheduling.sequence import Sequence
from qbe.kvcache.pages import PagePool
from qbe.sites import FULL_BITS, KVBits


class BlueprintRefresh(Extension):
    """Exchanges blueprints between two steps; pages that are written stay.

    Args:
        situation: of the engine; where a row has no precision of its own, nothing can be exchanged.
        cascade: what moves the rows of some, if anything does.
    """

    def __init__(
        self, pool: PagePool, scheduler: Scheduler, situation: Callable[[], Situation], cascade: Cascade | None
    ) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._situation = situation
        self._cascade = cascade

    def admit(self, sequence: Sequence) -> None:
        if sequence.difficulty.monitor is not None:
            check_request(["refresh"], self._situation())
        if sequence.attention.watched and self._scheduler.paging.capacity(sequence) < self._scheduler.length(sequence):
            # Pages of fewer bits need a staging page beside them. A cache so small that this is most of it holds more
            # at 16 bits, and nobody asked for fewer.
            sequence.blueprint = sequence.blueprint.with_kv_bits((FULL_BITS,) * len(sequence.blueprint.kv_bits))
            sequence.attention.watched = False

    def raise_kv(self, sequence: Sequence, kv_bits: tuple[KVBits, ...]) -> None:
        """As `qbe.engine.core.Core.raise_kv`."""
        before = sequence.blueprint
        sequence.blueprint = before.with_kv_bits(kv_bits)
        if not self._pool.has_number(kv_bits, self._scheduler.allocator.uses) or (
            self._scheduler.paging.capacity(sequence) < sequence.max_length
        ):
            sequence.blueprint = before

    def exchange(self, sequence: Sequence, blueprint: Blueprint) -> bool:
        """As `qbe.engine.core.Core.refresh`."""
        before = sequence.blueprint
        cascade = None if sequence.cascade.moved is None else self._cascade
        # A policy's own dynamic precision comes with its bits.
        dynamic_precision = blueprint.dynamic_precision if cascade is None else before.dynamic_precision
        blueprint = replace(
            blueprint, kv_error=before.kv_error, state_bits=before.state_bits, dynamic_precision=dynamic_precision
        )
        if blueprint.key == before.key:
            return False
        if cascade is not None:
            blueprint = cascade.compensated(blueprint, sequence)
        sequence.exchange(blueprint.with_kv_bits(before.kv_bits))
        self.raise_kv(sequence, blueprint.kv_bits)
        return True
