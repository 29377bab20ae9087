"""From what a request asks to what the engine is asked for one of its prompts: budget, tokens, blueprint."""

from __future__ import annotations

import logging
from dataclasses import replace

from qbe.engine.engine import Engine
from qbe.engine.request_selector import Choice
from qbe.engine.result import PromptInput, Request
from qbe.kvcache.pages import PAGE_SIZE
from qbe.server import contract
from qbe.server.exchange import EngineRequest
from qbe.server.health.monitor import HealthMonitor
from qbe.server.speed import Speed

log = logging.getLogger(__name__)


def choose(
    engine: Engine, asked: EngineRequest, prompt: PromptInput, lowest: float, speed: Speed, health: HealthMonitor
) -> tuple[Request, Choice, EngineRequest]:
    """In a thread of its own: takes as long as tokenizing and analysing the prompt.

    Args:
        lowest: average bits of the store's lowest gears.
        health: which may ask for more bits than were chosen.

    Returns:
        what the engine is asked for, and `asked`; where a rollout's candidate fails, the stable arm's, so that no
        request does for what is tried.

    Raises:
        APIError, QBEError: the prompt or its bounds cannot be served.
    """
    about = prompt, lowest, speed, health
    stable = asked.terms.stable
    if stable is None:
        return *_chosen(engine, asked, *about), asked
    try:
        return *_chosen(engine, asked, *about), asked
    except Exception as error:  # of a policy on trial, whatever it raises
        served = replace(asked, terms=replace(stable, within=asked.terms.within))
        chosen = _chosen(engine, served, *about)
        log.warning("the candidate could not be chosen for a request, which the stable arm takes: %s", error)
        return *chosen, served


def _chosen(
    engine: Engine, asked: EngineRequest, prompt: PromptInput, lowest: float, speed: Speed, health: HealthMonitor
) -> tuple[Request, Choice]:
    params, wanted = asked.params, asked.terms.contract
    plain = Request(
        prompt, params, tools=asked.tools, structured=asked.structure is not None, variables=asked.variables,
        cache_salt=asked.client.cache_salt,
    )  # fmt: skip
    counts = wanted.max_cost is not None or wanted.max_latency_ms is not None
    tokens = len(engine.choose(plain, fits=True)[0]) if counts else 0
    limits = contract.budget(asked.terms, tokens, params.max_tokens, asked.n, lowest, speed)
    arm = None if asked.terms.arm is None else asked.terms.arm.name
    request = replace(plain, budget=limits, policy=asked.terms.policy, arm=arm)
    choice = engine.choose(request, fits=True)
    request, choice = health.hold(engine, request, choice, wanted)
    if asked.lenient:
        context_limit = engine.core.pool.num_pages * PAGE_SIZE - len(choice[0])
        request = replace(request, params=replace(params, max_tokens=max(1, min(params.max_tokens, context_limit))))
    return request, choice
