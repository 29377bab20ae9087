"""What a request asks of QBE, in `SamplingParams.extra_args` (in an HTTP body `vllm_xargs`).

service_tier          flex, default, priority, auto, scale or fast: OpenAI's names
qbe_bits              average bits of the weights
qbe_activation_bits   8 or 16
qbe_policy            name of a policy
qbe_refresh           1: choose again while the answer is hard or easy to predict
qbe_text              the text to analyse; left out, the whole prompt
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qbe.budget import Budget
from qbe.compatibility import Situation, check_request
from qbe.errors import QBEError
from qbe.policies import Policy
from qbe.selection.selector import BlueprintSelector
from qbe.sites import FULL_BITS

PREFIX = "qbe_"
KNOWN = ("service_tier", "qbe_bits", "qbe_activation_bits", "qbe_policy", "qbe_refresh", "qbe_text")


@dataclass(frozen=True)
class RequestOptions:
    """A request's wishes.

    Attributes:
        policy: None takes the model's default.
        text: None takes the prompt.
    """

    budget: Budget
    policy: str | None = None
    text: str | None = None

    @classmethod
    def of(cls, args: Mapping[str, Any] | None) -> RequestOptions:
        """Raises QBEError for a name that there is not, or a value that cannot be."""
        args = args or {}
        unknown = [k for k in args if k.startswith(PREFIX) and k not in KNOWN]
        if unknown:
            raise QBEError(f"unknown argument {unknown[0]!r:.66}: QBE takes {', '.join(KNOWN)}")
        refresh = args.get("qbe_refresh", 0)
        if refresh not in (0, 1):  # JSON's true and false are among them
            raise QBEError(f"qbe_refresh is {refresh!r:.66}, but must be 0 or 1")
        for name in ("qbe_bits", "qbe_activation_bits"):
            given = args.get(name, 0)
            if given is not None and (isinstance(given, bool) or not isinstance(given, (int, float))):
                raise QBEError(f"{name} is {given!r:.66}, but must be a number")
        budget = Budget(
            bits=args.get("qbe_bits"),
            tier="default" if args.get("service_tier") is None else args["service_tier"],
            activation_bits=args.get("qbe_activation_bits", FULL_BITS),
            refresh=bool(refresh),
        )
        for name in ("qbe_policy", "qbe_text"):
            if not isinstance(args.get(name, ""), str):
                raise QBEError(f"{name} is {args[name]!r:.66}, but must be text")
        if any("\ud800" <= c <= "\udfff" for c in args.get("qbe_text", "")):
            raise QBEError("qbe_text has half a surrogate pair, which is no character")
        return cls(budget, args.get("qbe_policy"), args.get("qbe_text"))


def check_supported(budget: Budget, policy: Policy, selector: BlueprintSelector) -> None:
    """Raises QBEError for a budget of which something would do nothing here."""
    situation = Situation(
        vllm=True, scored=policy.reads_score, thresholds=budget.refresh and selector.thresholds(budget) is not None
    )
    check_request(["refresh"] if budget.refresh else [], situation)
