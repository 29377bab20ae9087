"""The way of a request to its blueprint: its prompt becomes tokens, then `qbe.selection.selector`; with the time of
each part."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cached_property
from typing import Any

from qbe.analysis import Analyzer
from qbe.analysis.profile import PromptSignals
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.cache import BlueprintCache
from qbe.cache.traffic import LoggedRequest
from qbe.engine.context_limit import ContextLimit
from qbe.engine.result import Request
from qbe.engine.token_length import token_length_bound
from qbe.engine.tokenize import encode
from qbe.errors import QBEError, about
from qbe.explain import Explanation
from qbe.hardware import detect
from qbe.pictures.tower import PictureTower
from qbe.policies import Policy
from qbe.policies.cascade import dynamic_precision
from qbe.policies.per_token import TokenRouters
from qbe.policies.routers import gear_bits
from qbe.refresh import thresholds
from qbe.refresh.monitor import Pace
from qbe.selection.selector import BlueprintSelector
from qbe.sites import FULL_BITS, SiteTable

Choice = tuple[list[int], Explanation]  # token ids of a prompt and the blueprint for it


class RequestSelector(BlueprintSelector):
    """The selector of one engine: it takes requests, whose prompts become tokens first.

    Args:
        policy: serves requests that name none.
        name: what the caller called it.
        model: a transformers causal LM; the analysis reads its input embedding.
        model_name: for messages.
        table: the model's sites.
        context: the model's context in tokens, None when it has no limit.
        cache: asked before a policy is; None: policies are always asked.
        analysis_tier: see `qbe.analysis.Analyzer`.
        cascade: what `qbe train cascade` found, or what is said to requests for it.
        pace: of refreshes, where a request does not say.
        tower: what reads the pictures of prompts, or a line that says why nothing does.
    """

    def __init__(
        self, policy: Policy, name: str, model: Any, tokenizer: Any, model_name: str, table: SiteTable,
        context: int | None, cache: BlueprintCache | None = None, analysis_tier: int | None = None,
        cascade: TokenRouters | QBEError | None = None, pace: Pace | None = None,
        tower: PictureTower | str = "",
    ) -> None:  # fmt: skip
        analyzer = Analyzer(model.get_input_embeddings().weight, tier=analysis_tier)
        analyzer.analyze("warm up", [0], tier=analysis_tier or 2)  # the first of a process takes milliseconds
        super().__init__(policy, name, table, analyzer, thresholds.load(model_name), context, cache, pace)
        self.cascade = cascade
        self._tokenizer, self._model_name, self.tower = tokenizer, model_name, tower
        self._full_bytes = sum(s.bytes_at.get(FULL_BITS, s.parameters * FULL_BITS // 8) for s in table)
        self._prompt_format = detect(model.get_input_embeddings().weight.device).prompt_format
        self._weights = [None if s.expert is not None else model.get_submodule(s.name).weight for s in table.nested]

    @cached_property
    def context_limit(self) -> ContextLimit | None:
        """What a prompt must fit into; None: the model has no limit."""
        return None if self._context is None else ContextLimit(self._context, token_length_bound(self._tokenizer))

    def encode(self, request: Request, fits: bool = False) -> tuple[str, list[int], list[int]]:
        """The text of a prompt to analyse, its token ids, and those to run; `fits` and errors as in `choose`."""
        with about("prompt"):
            context_limit = self.context_limit if fits else None
            return encode(
                request.prompt, self._tokenizer, self._model_name, request.tools, context_limit, request.variables,
                self.tower,
            )  # fmt: skip

    def choose(self, request: Request, fits: bool = False) -> Choice:
        """Token ids of the prompt and the blueprint for it.

        Args:
            fits: whether a prompt that is longer than the context is refused, before anything that takes long.

        Raises:
            QBEError: a prompt that cannot be run, an unknown policy, or a budget that cannot be met.
        """
        text, token_ids, ids = self.encode(request, fits)
        with about("policy"):
            policy = self.policy(request.policy)
        context = len(ids) + request.params.max_tokens
        structured = request.structured or request.constraint is not None or bool(request.tools)
        selected = self.select(policy, text, token_ids, context, request.budget, ids, request.cache_salt, structured)
        start, blueprint = time.perf_counter(), self._with_bounds(selected.blueprint, request.budget)
        kept = selected.blueprint is not selected.asked
        added_ms = (time.perf_counter() - start) * 1e3
        chosen = Explanation(
            prompt_tokens=len(ids),
            profile=selected.profile,
            blueprint=blueprint,
            asked=self._with_bounds(selected.asked, request.budget) if kept else None,
            table=self._table,
            budget=request.budget,
            target_bits=request.budget.average_for(selected.profile.score, selected.profile.least_bits),
            analysis_ms=selected.analysis_ms,
            policy_ms=selected.policy_ms + added_ms,
            cache=selected.cache,
            bytes_per_token=blueprint.bytes_per_token(self._table),
            bytes_per_token_16bit=self._full_bytes,
            thresholds=self.thresholds(request.budget) if request.budget.refresh else None,
            pace=self.pace(request.budget),
            prompt_format=self._prompt_format,
            native=tuple(getattr(w, "native", None) is not None for w in self._weights),
        )
        return ids, chosen

    def reads_prompt(self, request: Request) -> bool:
        """Whether its policy chooses anew when the prompt has run."""
        return self.policy(request.policy).reads_prompt

    def again(self, request: Request, chosen: Explanation, signals: PromptSignals) -> Blueprint:
        """The blueprint for the rest of a request of such a policy. The KV cache keeps what it has."""
        profile = replace(chosen.profile, signals=signals)
        budget = replace(request.budget, kv_bits=None)  # which need not be a number, and is what it was
        refreshed = self.policy(request.policy).blueprint(profile, budget, self._table)
        return replace(chosen.blueprint, weight_bits=refreshed.weight_bits, activation_bits=refreshed.activation_bits)

    def routers(self, policy: str | None) -> TokenRouters | None:
        """Those that the policy of this name has, or the engine's. Raises QBEError for an unknown one."""
        return self.policy(policy).routers(self._table)

    def check_kept(self) -> None:
        """Raises QBEError where the cache keeps nothing of what the default policy chooses."""
        if getattr(self._default, "cache_version", None) is None:
            raise QBEError(f"the blueprint cache keeps nothing of what the policy '{self._default.name}' chooses")

    def remember(self, asked: LoggedRequest) -> None:
        """Puts the blueprint of a past request into the cache.

        Raises:
            QBEError: what `choose` raises.
        """
        if asked.profile is not None:
            context = asked.max_tokens if asked.context is None else asked.context
            profile = self.within(asked.profile, context)
        else:
            text, token_ids, ids = encode(asked.text or "", self._tokenizer, self._model_name)
            context = len(ids) + asked.max_tokens if asked.context is None else asked.context
            profile = self.profile(text, token_ids, self._default, context)
        self.blueprint(self._default, profile, asked.budget, near=False)

    def _with_bounds(self, blueprint: Blueprint, budget: Budget) -> Blueprint:
        """The same with what no policy chooses: the cascade and a bound on the KV cache's error."""
        if budget.cascade:
            with about("cascade"):
                blueprint = self._steered(blueprint)
        return blueprint if budget.kv_error is None else replace(blueprint, kv_error=float(budget.kv_error))

    def _steered(self, blueprint: Blueprint) -> Blueprint:
        if not isinstance(self.cascade, TokenRouters):
            raise QBEError(str(self.cascade))
        if blueprint.dynamic_precision is not None:
            raise QBEError(
                f"the policy '{blueprint.policy}' moves bits within a step itself: leave the cascade out, or choose "
                "another policy"
            )
        cascade = dynamic_precision(self.cascade, self._table, blueprint.weight_bits)
        if cascade is None:
            raise QBEError(
                f"the cascade has nothing to move at {blueprint.average_weight_bits(self._table):.4g} bits a weight: "
                f"leave it out, or ask for something between {gear_bits(self._table)[0]} and "
                f"{gear_bits(self._table)[-1]}"
            )
        return replace(blueprint, dynamic_precision=cascade)
