"""Policies: query profile + budget + site table -> blueprint.

A policy is a class with a `name` and a `blueprint` method, registered under the entry-point group `qbe.policies`. It
sees profiles, budgets and the site table, never a tensor of the model.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Protocol, runtime_checkable

from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.errors import QBEError
from qbe.sites import SiteTable

GROUP = "qbe.policies"


@runtime_checkable
class Policy(Protocol):
    """What an entry point of the group `qbe.policies` must make when called without arguments.

    Attributes:
        name: what `--policy` calls it.
        needs_sensitivity: whether the site table must carry measured sensitivities.
    """

    name: str
    needs_sensitivity: bool

    def blueprint(self, profile: QueryProfile, budget: Budget, table: SiteTable) -> Blueprint:
        """The blueprint for one query. Raises QBEError when the budget cannot be met.

        A policy gives the sites their weights' bits as it likes and, unless it has reasons of its own, the activation
        bits that the budget asks for, `table.activations(budget.activation_bits)`, and the KV bits that
        `qbe.policies.kv` finds.
        """
        ...


def available() -> tuple[str, ...]:
    """Names of the installed policies."""
    return tuple(sorted({"tiered", "uniform", *(e.name for e in entry_points(group=GROUP))}))


def load(name: str) -> Policy:
    """The policy called `name`.

    Raises:
        QBEError: no such policy, or its package cannot be imported.
    """
    if name == "uniform":  # the built-in ones also work from a source tree that was not installed
        from qbe.policies.uniform import UniformPolicy

        return UniformPolicy()
    if name == "tiered":
        from qbe.policies.tiered import TieredPolicy

        return TieredPolicy()
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            try:
                policy = entry.load()()
            except Exception as error:
                raise QBEError(f"policy '{name}' ({entry.value}) cannot be loaded: {error}") from error
            if not isinstance(policy, Policy):
                raise QBEError(
                    f"policy '{name}' ({entry.value}) is not one: it lacks name, needs_sensitivity or blueprint"
                )
            return policy
    raise QBEError(f"unknown policy '{name}': choose one of {', '.join(available())}")
