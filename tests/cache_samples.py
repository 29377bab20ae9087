"""Profiles, a small model's site table and policies that count how often they are asked."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np

from qbe import policies
from qbe.analysis import CLASSES, QueryProfile
from qbe.analysis.classifier import default_classifier
from qbe.analysis.features import FEATURES, LOGARITHMIC
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.cache import BlueprintCache
from qbe.sites import KVSite, Role, Site, SiteTable


def small_table(layers: int = 6, seed: int = 0) -> SiteTable:
    """A measured model of so many layers with two key heads each; caches of a few dozen tokens are small for it."""
    rng = random.Random(seed)
    sites = []
    for i in range(layers):
        for role in (Role.ATTENTION_Q, Role.FFN_UP, Role.FFN_DOWN):
            kl = rng.lognormvariate(-7, 1.5)
            bits = {4: kl, 6: kl / 14, 8: kl / 200, 16: 0.0}
            sites.append(Site(f"layers.{i}.{role}", role, i, (64, 96), True, (4, 6, 8, 16), {}, bits, {8: kl / 1000}))
    kv = tuple(
        KVSite(i, h, 2, 64, {2: 0.02, 4: rng.uniform(1e-4, 5e-3), 8: 1e-5, 16: 0.0})
        for i in range(layers)
        for h in (0, 1)
    )
    return SiteTable(tuple(sites), "small", layers, kv)


def profile_of(z: np.ndarray, context: int = 0) -> QueryProfile:
    """The tier-2 profile of standardised features [FEATURES]."""
    c = default_classifier()
    x = np.maximum(z * c.scale + c.mean, 0)
    raw = np.where(np.isin(FEATURES, LOGARITHMIC), np.expm1(np.minimum(x, 12)), x)
    z = c.standardise(raw)
    p = c.probabilities(z)
    features = dict(zip(FEATURES, raw.tolist(), strict=True))
    features.update((f"p_{k}", float(v)) for k, v in zip(CLASSES, p, strict=True))
    return QueryProfile(float(c.score(z, p)), CLASSES[int(p.argmax())], 2, features, context)


def profiles(n: int, seed: int = 0, context: int = 0) -> list[QueryProfile]:
    rng = np.random.default_rng(seed)
    return [profile_of(rng.standard_normal(len(FEATURES)), context) for _ in range(n)]


def nudged(profile: QueryProfile) -> QueryProfile:
    """A query that differs in a feature by so little that class, score step and fingerprint stay."""
    changed = profile.features["punctuation_density"] + 1e-9
    return replace(profile, features={**profile.features, "punctuation_density": changed})


TIERED = policies.load("tiered")  # one, which remembers its allocations


class Counting:
    """A policy that counts how often it is asked; `cache_version` may be changed."""

    name = "tiered"
    needs_sensitivity = True
    cache_version: str | None = "1"

    def __init__(self) -> None:
        self.asked = 0

    def blueprint(self, profile: QueryProfile, budget: Budget, table: SiteTable) -> Blueprint:
        self.asked += 1
        return TIERED.blueprint(profile, budget, table)


TABLE = small_table()


def open_at(path: Path | None, table: SiteTable = TABLE) -> BlueprintCache:
    return BlueprintCache(table, "small", path)
