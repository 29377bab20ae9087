"""What a request runs at while actions of the ladder are in force. It is charged what it asked for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from qbe.engine.engine import Engine
from qbe.engine.request_selector import Choice
from qbe.engine.result import Request
from qbe.engine.sampling.answer_scoring import widest
from qbe.format.kv_blocks import PAGE_SIZE
from qbe.server.health.syndromes import Action
from qbe.server.protocol import Contract
from qbe.sites import FULL_BITS

_BOUNDS = ("bits", "min_bits", "max_bits", "max_cost", "max_latency_ms")  # of what the score chooses among
# What a request may ask for that the widest gear has more of, or that chooses among bits.
_OVERRIDDEN = ("bits", "max_bits", "activation_bits", "kv_bits", "state_bits", "refresh", "cascade", "policy")


def held(
    actions: Collection[Action], engine: Engine, request: Request, choice: Choice, contract: Contract, floor: float
) -> tuple[Request, Choice]:  # fmt: skip
    """The request and its choice as the actions have it; what it asked for and does not get is named in its result.

    Args:
        choice: what the engine chose for it.
        contract: what it asked for itself. A raised floor leaves alone who bounds its bits.
        floor: average bits that a raised floor gives at least.

    Raises:
        QBEError: what `Engine.choose` raises.
    """
    named: list[str] = []
    if "speculation_off" in actions and request.params.speculate:
        request, named = replace(request, params=replace(request.params, speculate=False)), ["speculate"]
    first, fits = choice[1], len(choice[0]) + request.params.max_tokens <= engine.core.pool.num_pages * PAGE_SIZE
    if "widest_gear" in actions:
        request, choice = _widest(engine, request, choice, fits)
        named += [name for name in _OVERRIDDEN if _asked(contract, name) and (fits or name != "kv_bits")]
    else:
        if "floor_up" in actions and not any(getattr(contract, name) is not None for name in _BOUNDS):
            request, choice = _raised(engine, request, choice, floor)
        if "kv_16_bits" in actions and fits:  # else it keeps what it has: a cache at 16 bits could not hold it
            choice = _with_full_cache(choice)
            named += ["kv_bits"] if contract.kv_bits not in (None, FULL_BITS) else []
    ids, chosen = choice
    if chosen.blueprint.key != first.blueprint.key or named:
        lines = {name: f"{name} does nothing here, because the server's health asks for more" for name in named}
        chosen = replace(
            chosen, asked=first.asked or first.blueprint, held=True, ignored={**chosen.ignored, **lines},
            bytes_per_token=chosen.blueprint.bytes_per_token(chosen.table),
        )  # fmt: skip
    return request, (ids, chosen)


def _asked(contract: Contract, name: str) -> bool:
    """Whether it asked for this, and for less than there is."""
    given = getattr(contract, name)
    return given not in (None, False) and (name not in ("activation_bits", "kv_bits") or given != FULL_BITS)


def _raised(engine: Engine, request: Request, choice: Choice, floor: float) -> tuple[Request, Choice]:
    """Chosen again, among averages from the floor on."""
    low, high = request.budget.range
    least = min(floor, widest(engine.table).average_weight_bits(engine.table))
    if low >= least:
        return request, choice
    request = replace(request, budget=replace(request.budget, within=(least, max(high, least))))
    return request, engine.choose(request, fits=True)


def _widest(engine: Engine, request: Request, choice: Choice, fits: bool) -> tuple[Request, Choice]:
    """At the widest gear, and nothing that would choose again."""
    ids, chosen = choice
    still: dict[str, Any] = {"refresh": False, "cascade": False, "refresh_interval": None, "refresh_count": None}
    blueprint, before = widest(engine.table), chosen.blueprint
    if not fits:
        blueprint = replace(blueprint, kv_bits=before.kv_bits, first_kv_bits=before.first_kv_bits)
    request = replace(request, budget=replace(request.budget, **still), policy="uniform")  # which reads no prompt
    return request, (ids, replace(chosen, blueprint=blueprint, budget=replace(chosen.budget, **still)))


def _with_full_cache(choice: Choice) -> Choice:
    ids, chosen = choice
    blueprint = chosen.blueprint
    full = replace(blueprint, kv_bits=(FULL_BITS,) * len(blueprint.kv_bits), first_kv_bits=None)
    return ids, replace(chosen, blueprint=full)
