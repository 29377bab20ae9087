"""The way of a request to its blueprint: tokens -> analysis -> policy -> blueprint, with the time of each."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from qbe import policies
from qbe.analysis import Analyzer, QueryProfile
from qbe.blueprint import Blueprint
from qbe.engine.result import Request
from qbe.engine.tokenize import encode
from qbe.errors import QBEError
from qbe.explain import Explanation
from qbe.policies import Policy
from qbe.sites import TURBO_KINDS, SiteTable


class Chooser:
    """Chooses the blueprints of one engine's requests.

    Args:
        policy: serves requests that name none.
        name: what the caller called it.
        model: a transformers causal LM; the analysis reads its input embedding.
        model_name: for messages.
        table: the model's sites.
        context: the model's context in tokens, None when it has no limit.
    """

    def __init__(
        self, policy: Policy, name: str, model: Any, tokenizer: Any, model_name: str, table: SiteTable,
        context: int | None,
    ) -> None:  # fmt: skip
        self._default, self._policies = policy, {name: policy}
        self._tokenizer, self._model_name, self._table, self._context = tokenizer, model_name, table, context
        self._analyzer = Analyzer(model.get_input_embeddings().weight)
        self._analyzer.analyze("warm up", [0], tier=2)  # the first analysis of a process takes milliseconds
        full = Blueprint.of("full", table, tuple(s.gears[-1] for s in table.nested))
        self._full_bytes = full.bytes_per_token(table)

    def choose(self, request: Request) -> tuple[list[int], Explanation]:
        """Token ids of the prompt and the blueprint for it.

        Raises:
            QBEError: a prompt that cannot be run, an unknown policy, or a budget that cannot be met.
        """
        text, words, ids = encode(request.prompt, self._tokenizer, self._model_name)
        policy = self._policy(request.policy)
        start = time.perf_counter()
        profile: QueryProfile = self._analyzer.analyze(text, words)
        analysed = time.perf_counter()
        context = len(ids) + request.params.max_tokens
        profile = replace(profile, context=context if self._context is None else min(context, self._context))
        budget, turbo = request.budget, TURBO_KINDS.get(str(request.budget.kv_bits))
        if turbo is None:
            blueprint = policy.blueprint(profile, budget, self._table)
        else:  # policies choose numbers of bits
            blueprint = policy.blueprint(profile, replace(budget, kv_bits=None), self._table)
            blueprint = blueprint.with_kv_bits((turbo,) * self._table.layers)
        if request.budget.kv_error is not None:
            blueprint = replace(blueprint, kv_error=float(request.budget.kv_error))
        done = time.perf_counter()
        chosen = Explanation(
            prompt_tokens=len(ids),
            profile=profile,
            blueprint=blueprint,
            table=self._table,
            budget=request.budget,
            target_bits=request.budget.bits_for(profile.score),
            analysis_ms=(analysed - start) * 1e3,
            policy_ms=(done - analysed) * 1e3,
            bytes_per_token=blueprint.bytes_per_token(self._table),
            bytes_per_token_16bit=self._full_bytes,
        )
        return ids, chosen

    def _policy(self, name: str | None) -> Policy:
        if name is None:
            return self._default
        if name not in self._policies:
            self._policies[name] = policies.load(name)
        if self._policies[name].needs_sensitivity and not self._table.measured:
            raise QBEError(f"this engine was started without a sensitivity table; start it with policy='{name}'")
        return self._policies[name]
