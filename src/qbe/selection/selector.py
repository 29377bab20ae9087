"""The way of a query to its blueprint, in both engines: analysis of text and tokens, then cache or policy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from qbe import policies
from qbe.analysis import Analyzer, QueryProfile
from qbe.analysis.profile import STRUCTURED
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.cache import BlueprintCache
from qbe.errors import QBEError, about
from qbe.policies import Policy
from qbe.refresh.monitor import Cause, Pace
from qbe.refresh.thresholds import Thresholds, moved, of_text
from qbe.selection.conversations import Conversations, Turn
from qbe.selection.state_floors import above_floors
from qbe.sites import TURBO_KINDS, SiteTable

_WIDER = ("--originals device or host", "a larger --most-bits, or --originals device or host")


@dataclass(frozen=True)
class Selection:
    """What was chosen for a query.

    Attributes:
        profile: what the policy was told of it.
        asked: what that gives; `blueprint` is another where a conversation keeps what it had.
        cache: what the blueprint cache did (`Record.cache`).
        analysis_ms, policy_ms: milliseconds.
    """

    profile: QueryProfile
    asked: Blueprint
    blueprint: Blueprint
    cache: str | None
    analysis_ms: float
    policy_ms: float


class BlueprintSelector:
    """Selects the blueprints of one model's queries, in both engines.

    Args:
        policy: serves queries that name none.
        name: what the caller called it.
        table: the model's sites.
        analyzer: of the model.
        learned: when an answer is hard or easy to predict, from records; None where nobody learned that.
        pace: of refreshes, where a query does not say.
        context: the model's context in tokens, None when it has no limit.
        cache: asked before a policy is; None: policies are always asked.
    """

    def __init__(
        self, policy: Policy, name: str, table: SiteTable, analyzer: Analyzer, learned: Thresholds | None,
        context: int | None, cache: BlueprintCache | None = None, pace: Pace | None = None,
    ) -> None:  # fmt: skip
        self.analyzer, self.cache = analyzer, cache
        self.conversations = Conversations()
        self._learned, self._pace = learned, pace or Pace()
        if cache is not None:
            cache.prepare(policy)
        policy.prepare(table)
        self._default, self._policies = policy, {name: policy}
        self._table, self._context = table, context

    def select(
        self, policy: Policy, text: str, token_ids: Sequence[int], context: int, budget: Budget,
        prompt_ids: Sequence[int] = (), salt: bytes = b"", structured: bool = False,
    ) -> Selection:  # fmt: skip
        """The blueprint of a query: analysis, then cache or policy, then what its conversation had.

        Args:
            text, token_ids, context, structured: as for `profile`.
            prompt_ids: of the whole prompt, which may go on with one that `began`.
            salt: whose.

        Raises:
            QBEError: the budget cannot be met.
        """
        start = time.perf_counter()
        profile = self.profile(text, token_ids, policy, context, structured)
        analysed = time.perf_counter()
        with about("bits"):
            asked, cached = self.blueprint(policy, profile, budget)
        turn = None if policy.reads_prompt else self.conversations.find(salt, prompt_ids)
        kept = asked if turn is None else turn.kept(asked, budget, profile, self._table)
        chosen = time.perf_counter()
        return Selection(profile, asked, kept, cached, (analysed - start) * 1e3, (chosen - analysed) * 1e3)

    def began(
        self, blueprint: Blueprint, budget: Budget, context: int, prompt_ids: Sequence[int], salt: bytes = b""
    ) -> None:
        """A prompt runs at this blueprint: prompts that go on with it keep that."""
        if blueprint.dynamic_precision is None or blueprint.dynamic_precision.by == "cascade":
            plain = replace(blueprint, kv_error=None, dynamic_precision=None)
            turn = Turn(plain, budget.plain_tier, context, budget.kv_bits is None)
            self.conversations.began(salt, prompt_ids, turn)

    def select_again(
        self, policy: str | None, profile: QueryProfile, budget: Budget, cause: Cause
    ) -> tuple[QueryProfile, Blueprint]:
        """Profile and blueprint of a query whose answer has become hard or easy to predict.

        Args:
            policy: that was asked for by name; None for the default.

        Raises:
            QBEError: the budget cannot be met.
        """
        profile = replace(profile, score=moved(profile.score, cause.kind))
        return profile, self.blueprint(self.policy(policy), profile, budget)[0]

    def profile(
        self, text: str, token_ids: Sequence[int], policy: Policy, context: int, structured: bool = False
    ) -> QueryProfile:
        """What a policy is told of a query.

        Args:
            text, token_ids: to analyse, and its token ids.
            context: tokens of the prompt and of the longest answer.
            structured: whether the answer must have a form, by a schema, a grammar or tools.
        """
        found = self.analyzer.analyze(text, token_ids, tier=policy.analysis_tier)
        if structured:
            found = replace(found, features={**found.features, STRUCTURED: 1.0})
        return self.within(found, context)

    def within(self, profile: QueryProfile, context: int) -> QueryProfile:
        """The profile with a context that the model can have."""
        return replace(profile, context=context if self._context is None else min(context, self._context))

    def blueprint(
        self, policy: Policy, profile: QueryProfile, budget: Budget, near: bool = True
    ) -> tuple[Blueprint, str | None]:
        """The blueprint, and what the cache did (`Record.cache`). Raises QBEError when the budget cannot be met."""
        widest = self._table.gears()[-1]
        least = budget.bits if budget.bits is not None else budget.within[0] if budget.within is not None else 0
        if least > widest:
            raise QBEError(
                f"a budget of {least:g} bits needs weights that are not loaded; the widest here have {widest} "
                f"bits: ask for at most {widest}, or start with {_WIDER[widest < 8]}",
                field="bits",
            )
        # Of these no policy chooses otherwise.
        budget = replace(
            budget, refresh=False, cascade=False, refresh_interval=None, refresh_count=None, best_effort=False
        )
        state_bits, budget = budget.state_bits, replace(budget, state_bits=None)
        turbo = TURBO_KINDS.get(str(budget.kv_bits))
        if turbo is not None:  # policies choose numbers of bits
            budget = replace(budget, kv_bits=None)
        if self.cache is None:
            blueprint, cached = policy.blueprint(profile, budget, self._table), None
        else:
            blueprint, cached = self.cache.blueprint(policy, profile, budget, near)
        if turbo is not None:
            blueprint = replace(blueprint, kv_bits=(turbo,) * self._table.layers, first_kv_bits=None)
        asked = blueprint.state_bits if state_bits is None else (state_bits,) * self._table.layers
        if asked is not None:
            blueprint = replace(blueprint, state_bits=above_floors(self._table, asked))
        return blueprint, cached

    def pace(self, budget: Budget) -> Pace:
        """How soon an answer gives cause for another blueprint."""
        return self._pace.asked(budget)

    def thresholds(self, budget: Budget) -> Thresholds | None:
        """When its windows are hard or easy to predict: as learned from records, else as those of the built-in text;
        None where neither is known."""
        return self._learned or of_text(self._table.text, self.pace(budget).interval)

    def policy(self, name: str | None) -> Policy:
        """The policy of that name, or the default one. Raises QBEError where it cannot serve this model."""
        if name is None:
            return self._default
        if name not in self._policies:
            policy = policies.load(name)
            policy.prepare(self._table)
            self._policies[name] = policy
        if self._policies[name].needs_sensitivity and not self._table.measured:
            raise QBEError(
                f"the policy '{name}' needs measured sensitivities, and this engine has none: start it with "
                f"policy='{name}'; inside vLLM serve a folder that 'qbe quantize' wrote"
            )
        return self._policies[name]
