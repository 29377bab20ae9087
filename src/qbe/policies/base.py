"""What a policy is: the base class with the defaults of all that a policy may say of itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.sites import SiteTable

if TYPE_CHECKING:
    from qbe.policies.per_token import TokenRouters


class Policy(ABC):
    """What an entry point of the group `qbe.policies` makes when called without arguments, or with `seed`.

    Attributes:
        name: what `--policy` calls it.
        needs_sensitivity: whether the site table must carry measured sensitivities.
        cache_version: a text, or None. With one the blueprint cache (`qbe.cache`) serves queries that are alike without
            asking the policy. It says that the blueprint follows from profile, budget and table alone, from the context
            as `qbe.policies.kv.average_bits` goes by it, and from what the text names: it changes with trained weights,
            say. A random policy has none.
        analysis_tier: of the profiles that it needs; None takes the engine's.
        reads_prompt: whether it is asked once more when the prompt has run, then with `profile.signals`; what it says
            then is for the answer.
        has_routers: whether it has `routers`, which choose bits within a step.
        reads_score: whether another score can give another blueprint, as refreshes need it.
    """

    name: str
    needs_sensitivity: bool = False
    cache_version: str | None = None
    analysis_tier: int | None = None
    reads_prompt: bool = False
    has_routers: bool = False
    reads_score: bool = True

    @abstractmethod
    def blueprint(self, profile: QueryProfile, budget: Budget, table: SiteTable) -> Blueprint:
        """The blueprint for one query. Raises QBEError when the budget cannot be met.

        A policy gives the sites their weights' bits as it likes and, unless it has reasons of its own, the activation
        bits that the budget asks for, `table.activations(budget.activation_bits)`, and the KV bits that
        `qbe.policies.kv` finds.
        """

    def prepare(self, table: SiteTable) -> None:  # noqa: B027  (there may be nothing to prepare)
        """Called when an engine takes the policy. Raises QBEError where it cannot serve that model."""

    def routers(self, table: SiteTable) -> TokenRouters | None:
        """The routers that move its blueprints' bits within a step (`Blueprint.dynamic_precision`), if it has any."""
        return None


class DuckTypedPolicy(Policy):
    """A plug-in's policy that is no subclass of `Policy` (version 0.1 asked for the attributes alone)."""

    def __init__(self, plain: Any) -> None:
        self.plain = plain
        for attribute in ("name", "needs_sensitivity", "cache_version", "analysis_tier", "reads_prompt", "reads_score"):
            if hasattr(plain, attribute):
                setattr(self, attribute, getattr(plain, attribute))
        self.has_routers = hasattr(plain, "routers")

    def blueprint(self, profile: QueryProfile, budget: Budget, table: SiteTable) -> Blueprint:
        made: Blueprint = self.plain.blueprint(profile, budget, table)
        return made

    def prepare(self, table: SiteTable) -> None:
        if hasattr(self.plain, "prepare"):
            self.plain.prepare(table)

    def routers(self, table: SiteTable) -> TokenRouters | None:
        return self.plain.routers(table) if self.has_routers else None
