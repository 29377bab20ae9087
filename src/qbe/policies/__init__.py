"""Policies: query profile + budget + site table -> blueprint.

A policy is a subclass of `Policy` (`qbe.policies.base`), registered under the entry-point group `qbe.policies`. It sees
profiles, budgets and the site table, never a tensor of the model.
"""

from __future__ import annotations

import inspect
from importlib.metadata import entry_points

from qbe.errors import QBEError
from qbe.policies.base import DuckTypedPolicy, Policy

__all__ = ["GROUP", "Policy", "available", "load"]

GROUP = "qbe.policies"


def available() -> tuple[str, ...]:
    """Names of the installed policies, the built-in ones among them."""
    return tuple(sorted(e.name for e in entry_points(group=GROUP)))


def load(name: str) -> Policy:
    """The policy called `name`; one that draws numbers takes a seed after a colon: `random:1`.

    Raises:
        QBEError: no such policy, its package cannot be imported, or a seed that is none or for a policy without one.
    """
    name, colon, seed = name.partition(":")
    entry = next((e for e in entry_points(group=GROUP) if e.name == name), None)
    if entry is None:
        if not available():
            raise QBEError("no policy is registered: install this source tree ('pip install -e .') or the package qbe")
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
    if isinstance(policy, Policy):
        return policy
    if not all(hasattr(policy, part) for part in ("name", "needs_sensitivity", "blueprint")):
        raise QBEError(f"policy '{name}' ({entry.value}) is not one: it lacks name, needs_sensitivity or blueprint")
    return DuckTypedPolicy(policy)
