"""A request in vLLM's front end: its budget, analysis and policy give it a blueprint before it is sent to the engine.

This runs where vLLM tokenises, in the API server's process and its pool of threads, so the engine never waits for it.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch
from vllm.exceptions import VLLMValidationError

from qbe import policies
from qbe.analysis import Analyzer
from qbe.cache import open_cache
from qbe.errors import QBEError
from qbe.models.folder_weights import lazy_state_dict
from qbe.models.load import load_config_and_tokenizer
from qbe.refresh import thresholds
from qbe.selection.selector import BlueprintSelector
from qbe.sites import Role
from qbe.vllm import metrics, transfer
from qbe.vllm.blueprint_payload import KEY, BlueprintPayload
from qbe.vllm.cache_salt import cache_salt, own_salt
from qbe.vllm.config import QBEConfig
from qbe.vllm.request_options import RequestOptions, check_supported
from qbe.vllm.served import ServedModel

MOST_TEXT = 1 << 16  # characters of `qbe_text` that are looked at: other requests wait meanwhile

_lock = threading.Lock()
_front_ends: dict[str, FrontEnd] = {}  # by digest of the table


class FrontEnd:
    """Chooses blueprints for the requests of one model."""

    def __init__(self, model: ServedModel) -> None:
        config, self.tokenizer = load_config_and_tokenizer(model.folder)
        self.model = model
        self.context = getattr(config.get_text_config(), "max_position_embeddings", None)
        self.selector = make_selector(model, Analyzer(_embedding(model)), self.context)

    def choose(
        self, prompt: Any, asked: RequestOptions, max_tokens: int | None, structured: bool = False
    ) -> BlueprintPayload:
        """The blueprint of a prompt, which prompts with the same cache salt keep that go on with it.

        Args:
            structured: whether the answer must have a form.

        Raises:
            QBEError: a budget that cannot be met, or a prompt that cannot be analysed.
        """
        ids = prompt.get("prompt_token_ids")
        if not ids:
            raise QBEError(
                "an empty prompt, or one of embeddings, has no text that QBE could analyse; give text or tokens"
            )
        start = time.perf_counter()
        if asked.text is not None:
            text = asked.text[:MOST_TEXT]
            token_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            text, token_ids = prompt.get("prompt") or str(self.tokenizer.decode(ids)), ids
        policy = self.selector.policy(asked.policy)
        if policy.reads_prompt or policy.has_routers:
            raise QBEError(f"the policy '{policy.name}' reads what a step computes, which only QBE's own engine has")
        check_supported(asked.budget, policy, self.selector)
        context = len(ids) + (max_tokens if max_tokens is not None else self.context or 0)
        text_ms = (time.perf_counter() - start) * 1e3
        salt = own_salt(prompt.get("cache_salt")).encode()
        selected = self.selector.select(policy, text, token_ids, context, asked.budget, ids, salt, structured)
        blueprint, profile, budget = selected.blueprint, selected.profile, asked.budget
        self.selector.began(blueprint, budget, profile.context, ids, salt)
        return BlueprintPayload(
            policy=blueprint.policy, asked_policy=asked.policy, weight_bits=bytes(blueprint.weight_bits),
            activation_bits=bytes(blueprint.activation_bits), digest=self.model.table.digest,
            budget={"bits": budget.bits, "tier": budget.plain_tier,
                    "activation_bits": budget.activation_bits, "refresh": budget.refresh},
            profile={"score": profile.score, "prompt_class": profile.prompt_class, "tier": profile.tier,
                     "features": profile.features, "cluster": profile.cluster},
            context=profile.context, analysis_ms=text_ms + selected.analysis_ms, policy_ms=selected.policy_ms,
            cache=selected.cache, asked_weight_bits=selected.asked.average_weight_bits(self.model.table),
        )  # fmt: skip


def admit(config: QBEConfig, prompt: Any, params: Any) -> None:
    """Gives a request its blueprint payload and a cache salt, so that prefixes are shared only where they were
    computed alike.

    Args:
        prompt: vLLM's processed input; its `cache_salt` is set.
        params: the caller's `SamplingParams`, which vLLM copies after this; its `extra_args` are replaced, not changed.

    Raises:
        VLLMValidationError: which becomes HTTP 400, or the caller's exception.
    """
    args = {k: v for k, v in (params.extra_args or {}).items() if k != KEY}  # that of an earlier prompt
    try:
        structured = getattr(params, "structured_outputs", None) is not None
        asked = RequestOptions.of(args)
        payload = front_end(config.served).choose(prompt, asked, params.max_tokens, structured)
        if config.fetches:
            payload = transfer.taken(payload, args.get("kv_transfer_params"), config.served.table)
        blueprint = payload.blueprint(config.served.table)
    except QBEError as error:
        raise VLLMValidationError(str(error)) from error
    prompt["cache_salt"] = cache_salt(prompt.get("cache_salt"), payload.digest + blueprint.computed_key)
    params.extra_args = {**args, KEY: payload.pack()}
    metrics.admitted(payload, blueprint, config.served.table)


def front_end(model: ServedModel) -> FrontEnd:
    """That of a model, made for its first request."""
    with _lock:
        key = model.table.digest
        if key not in _front_ends:
            _front_ends[key] = FrontEnd(model)
        return _front_ends[key]


def make_selector(model: ServedModel, analyzer: Analyzer, context: int | None) -> BlueprintSelector:
    """Selector with the default policy: `tiered`, or `uniform` where the folder has no measured sensitivities."""
    name = "tiered" if model.table.measured else "uniform"
    cache = open_cache(None, model.table, model.name)
    return BlueprintSelector(
        policies.load(name), name, model.table, analyzer, thresholds.load(model.name), context, cache
    )


def _embedding(model: ServedModel) -> torch.Tensor | None:
    """The input embedding [vocabulary, hidden] out of the checkpoint; None where it has another name there."""
    weights = lazy_state_dict(Path(model.folder))
    site = next((s for s in model.table if s.role is Role.EMBEDDING), None)
    weight = None if site is None else weights.get(f"{site.name}.weight")
    return None if weight is None else weight.to()
