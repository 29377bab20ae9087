"""Policies: query profile + budget + site table -> blueprint.

A policy is a class with a `name` and a `blueprint` method, registered under the entry-point group `qbe.policies`. It
sees profiles, budgets and the site table, never a tensor of the model.
"""

from __future__ import annotations

import inspect
from importlib.metadata import EntryPoint, entry_points
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

    A policy may also have `cache_version`, a text. The blueprint cache (`qbe.cache`) then serves queries that are alike
    without asking it. It says that the blueprint follows from profile, budget and table alone, from the context as
    `qbe.policies.kv.average_bits` goes by it, and from what the text names: it changes with trained weights, say. A
    random policy has none.

    `analysis_tier` says that it needs profiles of that tier, and `prepare(table)` is called when an engine takes the
    policy: it raises QBEError where it cannot serve that model. One with `reads_prompt` is asked once more when the
    prompt has run, now with `profile.signals`; what it says then is for the answer. One whose blueprints are steered by
    routers of its own (`Blueprint.dynamic_precision`) has `routers(table)`, a `qbe.policies.per_token.TokenRouters`.
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


# The built-in ones also work from a source tree that was not installed.
_BUILT_IN = {
    "tiered": "qbe.policies.tiered:TieredPolicy",
    "uniform": "qbe.policies.uniform:UniformPolicy",
    "static": "qbe.policies.static:StaticPolicy",
    "random": "qbe.policies.random:RandomPolicy",
    "paq": "qbe.policies.paq:PAQPolicy",
    "fixed": "qbe.policies.predicted:FixedPolicy",
    "predicted": "qbe.policies.predicted:PredictedPolicy",
    "proxy": "qbe.policies.proxy:ProxyPolicy",
    "qaq": "qbe.policies.qaq:QAQPolicy",
    "mobi": "qbe.policies.per_token:MobiPolicy",
    "tokenwise": "qbe.policies.per_token:TokenwisePolicy",
}


def available() -> tuple[str, ...]:
    """Names of the installed policies."""
    return tuple(sorted({*_BUILT_IN, *(e.name for e in entry_points(group=GROUP))}))


def load(name: str) -> Policy:
    """The policy called `name`; one that draws numbers takes a seed after a colon: `random:1`.

    Raises:
        QBEError: no such policy, its package cannot be imported, or a seed that is none or for a policy without one.
    """
    name, colon, seed = name.partition(":")
    if name in _BUILT_IN:
        entry = EntryPoint(name, _BUILT_IN[name], GROUP)
    elif (found := next((e for e in entry_points(group=GROUP) if e.name == name), None)) is not None:
        entry = found
    else:
        raise QBEError(f"unknown policy {name!r:.66}: choose one of {', '.join(available())}")
    if colon and not (seed.isascii() and seed.isdigit()):
        raise QBEError(f"the seed '{seed}' of policy '{name}' is no whole number; give '{name}:1' for example")
    try:
        made = entry.load()
        seeded = "seed" in inspect.signature(made).parameters
        policy = made(seed=int(seed)) if colon and seeded else made()
    except Exception as error:
        raise QBEError(f"policy '{name}' ({entry.value}) cannot be loaded: {error}") from error
    if colon and not seeded:
        raise QBEError(f"policy '{name}' takes no seed: give its name alone")
    if not isinstance(policy, Policy):
        raise QBEError(f"policy '{name}' ({entry.value}) is not one: it lacks name, needs_sensitivity or blueprint")
    return policy
