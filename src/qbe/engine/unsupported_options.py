"""A request without what this engine cannot do for it (`qbe.compatibility`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qbe.budget import Budget
from qbe.compatibility import Situation, check_request
from qbe.engine.result import Request

_WITHOUT: dict[str, dict[str, Any]] = {
    "high_precision_tokens": {"high_precision_tokens": False},
    "refresh": {"refresh": False, "refresh_interval": None, "refresh_count": None},
    "cascade": {"cascade": False},
    "kv_bits": {"kv_bits": None},
    "kv_error": {"kv_error": None},
    "state_bits": {"state_bits": None},
}
"""Options of a budget, and what it is without them."""


def bound_was_dropped() -> dict[str, str]:
    """What is said of a request whose bound on attention's error could not be kept to its end."""
    return check_request(["kv_error"], Situation(originals_full=True), best_effort=True)


def without_unsupported(request: Request, situation: Situation) -> tuple[Budget, dict[str, str]]:
    """Its budget without options that do nothing here, and which these are, with a line of each that says why.

    Raises:
        QBEError: one of them must not be left out in silence.
    """
    budget = request.budget
    asked = [name for name in _WITHOUT if getattr(budget, name) not in (None, False)]
    if request.params.speculate:
        asked.append("speculate")
    ignored = check_request(asked, situation, budget.best_effort)
    for name in ignored:
        budget = replace(budget, **_WITHOUT.get(name, {}))
    return budget, ignored
