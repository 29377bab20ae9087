"""The blueprint cache: asked before a policy is. Memory first, then disk, then the policy itself.

A query gets another one's blueprint where both have the same budget, cluster and score step, the policy tells their
contexts not apart, and their features are the same (an exact hit) or alike (a near one, see `NEAR_BITS`). The
policies of this package read nothing else of a profile, so that a hit is what they would have chosen; for one that
reads the features themselves, `NEAR_BITS` bounds how far away they were.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.cache.disk import Disk, default_path
from qbe.cache.fingerprint import Fingerprint
from qbe.cache.memory import CachedBlueprint, Memory
from qbe.cache.version import version_of
from qbe.policies import Policy
from qbe.policies.kv import same_contexts
from qbe.sites import SiteTable

CAPACITY = 131_072  # entries in memory, about 300 bytes each
BATCH = 256  # entries of a transaction while the cache is warmed


@dataclass
class CacheNumbers:
    """What the cache did since it was made.

    Attributes:
        exact, near: hits.
        misses: policies asked; requests of those that may not be cached do not count.
        entries: in memory.
        dropped: entries on disk that were damaged, and deleted.
    """

    exact: int = 0
    near: int = 0
    misses: int = 0
    entries: int = 0
    dropped: int = 0


class BlueprintCache:
    """Blueprints of one model for queries like those seen before. Threads may share it.

    Args:
        table: the model's sites.
        model: its name, for `qbe cache info`.
        path: the SQLite file; None keeps blueprints in memory only.
        capacity: entries in memory; those asked for least recently go first.
    """

    def __init__(self, table: SiteTable, model: str, path: Path | None = None, capacity: int = CAPACITY) -> None:
        self.table, self.model, self.capacity = table, model, capacity
        self.disk = None if path is None else Disk(path)
        self._numbers = CacheNumbers()
        self._memories: dict[str, tuple[str, Memory]] = {}  # by policy: its version, its entries in memory
        self._lock = threading.Lock()
        self._new: dict[tuple[str, str], list[CachedBlueprint]] = {}  # by version and policy: not on disk yet
        self._waiting = 1  # how many of a version may wait

    def blueprint(
        self, policy: Policy, profile: QueryProfile, budget: Budget, near: bool = True
    ) -> tuple[Blueprint, str | None]:
        """The blueprint for a query, and what the cache did: `exact` or `near` (hits), or `miss`.

        Policies without `cache_version` are always asked; None then.

        Args:
            near: whether the blueprint of a query like it will do. Without it the cache gets one for every query, so
                that more of those to come are near one.

        Raises:
            QBEError: the policy was asked and cannot meet the budget.
        """
        version_of_policy = policy.cache_version
        if version_of_policy is None:
            return policy.blueprint(profile, budget, self.table), None
        query = Fingerprint(profile, budget)
        with self._lock:
            version, memory = self._memory(policy, version_of_policy)
            hit = memory.get(query, profile.context, near)
            if hit is None and query.cell not in memory:
                memory.open(query.cell, self.disk.get(version, query.cell, self.table) if self.disk else ())
                hit = memory.get(query, profile.context, near)
            if hit is not None:
                if hit[1] == "exact":
                    self._numbers.exact += 1
                else:
                    self._numbers.near += 1
                return hit
        blueprint = policy.blueprint(profile, budget, self.table)
        first, last = same_contexts(profile.context, budget, self.table, blueprint.bytes_per_token(self.table))
        entry = CachedBlueprint(query.cell, query.digest, query.bits, first, last, blueprint)
        with self._lock:
            self._numbers.misses += 1
            memory.open(query.cell, [entry])
        self._keep(version, policy.name, entry)
        return blueprint, "miss"

    def prepare(self, policy: Policy) -> None:
        """Finds the version of a policy's entries and opens the file, which its first request would do otherwise."""
        policy_version = policy.cache_version
        if policy_version is not None:
            with self._lock:
                version, _ = self._memory(policy, policy_version)
            if self.disk:
                self.disk.get(version, (), self.table)

    @property
    def numbers(self) -> CacheNumbers:
        """Hits, misses and entries, as they are now."""
        with self._lock:
            self._numbers.entries = sum(m.entries for _, m in self._memories.values())
            self._numbers.dropped = self.disk.dropped if self.disk else 0
            return CacheNumbers(**vars(self._numbers))

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Entries made within go to disk many at a time."""
        self._waiting = BATCH
        try:
            yield
        finally:
            self._waiting = 1
            self._flush()

    def close(self) -> None:
        """Closes the file. Every entry is in it already."""
        if self.disk:
            self.disk.close()

    def _memory(self, policy: Policy, policy_version: str) -> tuple[str, Memory]:
        if policy.name not in self._memories:
            version = version_of(self.table, policy, policy_version)
            self._memories[policy.name] = version, Memory(self.capacity)
        return self._memories[policy.name]

    def _keep(self, version: str, policy: str, entry: CachedBlueprint) -> None:
        with self._lock:
            waiting = self._new.setdefault((version, policy), [])
            waiting.append(entry)
        if len(waiting) >= self._waiting:
            self._flush()

    def _flush(self) -> None:
        with self._lock:
            new, self._new = self._new, {}
        if self.disk:
            for (version, policy), entries in new.items():
                self.disk.put(version, self.model, policy, entries)


def open_cache(where: str | Path | bool | None, table: SiteTable, model: str) -> BlueprintCache | None:
    """The cache in that file; None takes the user's. None for False, or where the user has switched it off."""
    path = Path(where) if isinstance(where, str | Path) else default_path()
    return None if where is False or path is None else BlueprintCache(table, model, path)
