"""What each option needs of model, device and engine, and what happens where that is missing. Pure data.

The one source of that: the engine asks it as it starts and for every request, the table in the documentation is made of
it, and a test tries every option on every kind of model. An option without a limit here works everywhere.

What changes an answer's precision or what is promised of it is *refused* in one line. What only makes answers faster is
*said*: in a warning as the engine starts, or by name in the result (`ignored`). A request with `best_effort` is not
refused; its result names what was left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Literal

from qbe.errors import QBEError

Outcome = Literal["refused", "said"]


@dataclass(frozen=True)
class Situation:
    """What an option meets.

    Attributes:
        alone: every sequence has a forward of its own, and all of its tokens one precision.
        recurrent: the model's layers keep a state, which cannot be taken back and has no step of fixed shapes.
        recurrent_state: some of them keep more than the last inputs of a convolution.
        attention: it has attention, and so a KV cache.
        windows, experts: it has sliding windows, or experts; no option asks for either.
        latent: its cache holds latents (`qbe.kvcache.latent`).
        cuda: the device is a GPU.
        device_memory: what is on the device is bounded.
        fixed_shapes: decode steps run at fixed shapes, as compiled ones and those with draft tokens do.
        drafts: decode steps have room for draft tokens.
        measured: the sensitivities of the model's sites are known, and how hard the built-in text is.
        thresholds: it is known when an answer is hard (`qbe.refresh.thresholds`).
        scored: the policy gives another score other bits.
        no_cascade: why the cascade cannot be used, where it was not trained, its file is damaged or the model can have
            none (`qbe.policies.cascade.load`); what else to do, after a semicolon.
        own_tier: the policy needs an analysis tier of its own.
        cacheable: blueprints of the policy can be kept for queries that are alike.
        below_floors: why no state may have so few bits as the request's `state_bits`, and what else to do, likewise.
        bounded, high_precision: the request has `kv_error`, or `high_precision_tokens`.
        originals_full: host memory for 16-bit originals of pages has ended.
        vllm: the engine is vLLM.
    """

    alone: bool = False
    recurrent: bool = False
    recurrent_state: bool = False
    attention: bool = True
    windows: bool = False
    experts: bool = False
    latent: bool = False
    cuda: bool = False
    device_memory: bool = False
    fixed_shapes: bool = True
    drafts: bool = True
    measured: bool = True
    thresholds: bool = True
    scored: bool = True
    no_cascade: str = ""
    own_tier: bool = False
    cacheable: bool = True
    below_floors: str = ""
    bounded: bool = False
    high_precision: bool = False
    originals_full: bool = False
    vllm: bool = False


@dataclass(frozen=True)
class Limit:
    """Where an option does nothing.

    Attributes:
        meets: whether a situation is such a one.
        why: what is missing, as the rest of a sentence; what else to do, after a semicolon. In braces, what the
            situation says of it.
    """

    option: str
    outcome: Outcome
    meets: Callable[[Situation], bool]
    why: str

    def line(self, situation: Situation) -> str:
        """What is said."""
        why, _, instead = self.why.format(**vars(situation)).partition("; ")
        return f"{self.option} does nothing here, because {why}: {instead or 'leave it out'}"


_ALONE = "every sequence of this model has a forward of its own"
_STATE = "the model's layers keep a state"
_LATENT = "attention over latents looks up as it runs how its projection is read"
_NO_CACHE = "the model has no attention, and so no KV cache"
_VLLM = "inside vLLM the KV cache and the loop are vLLM's"
_NOT_MEASURED = "nothing was measured of this model; start with a policy that needs sensitivities, such as tiered"

ENGINE = (
    Limit("compile", "said", lambda s: s.recurrent, f"{_STATE}, and its steps have no fixed shapes"),
    Limit("compile", "said", lambda s: s.alone, f"{_ALONE}, and its steps have no fixed shapes"),
    Limit("compile", "said", lambda s: s.latent, _LATENT),
    Limit("compile", "said", lambda s: not s.fixed_shapes, "its decode steps have no fixed shapes in this dtype; "
          "choose another dtype, or leave it out"),
    Limit("speculate", "said", lambda s: s.recurrent, f"{_STATE}, which a wrong draft token would leave changed"),
    Limit("speculate", "said", lambda s: s.alone, f"{_ALONE}, in which no draft tokens are checked"),
    Limit("speculate", "said", lambda s: s.latent and s.cuda, f"{_LATENT}, so that no step has fixed shapes"),
    Limit("speculate", "said", lambda s: not s.fixed_shapes, "its decode steps have no fixed shapes in this dtype; "
          "choose another dtype, or leave it out"),
    Limit("rows", "said", lambda s: s.alone, f"{_ALONE}; each reads its own bits"),
    Limit("tune", "said", lambda s: not s.cuda, "only kernels on a GPU are tuned"),
    Limit("kv_tokens", "said", lambda s: not s.attention, _NO_CACHE),
    Limit("analysis_tier", "said", lambda s: s.own_tier, "the policy needs an analysis tier of its own"),
    Limit("blueprint_cache", "said", lambda s: not s.cacheable, "the policy has to be asked for every query"),
    Limit("max_batch_tokens", "said", lambda s: s.alone, f"{_ALONE}, and its prompt is read in one step"),
)  # fmt: skip
"""What the engine is started with; the first limit of an option that is met counts."""

REQUEST = (
    Limit("high_precision_tokens", "refused", lambda s: s.vllm, _VLLM),
    Limit("high_precision_tokens", "refused", lambda s: s.alone, f"{_ALONE}, and all of its tokens one precision"),
    Limit("high_precision_tokens", "refused", lambda s: not s.measured, _NOT_MEASURED),
    Limit("refresh", "refused", lambda s: s.alone, f"{_ALONE}, and all of its tokens one precision"),
    Limit("refresh", "refused", lambda s: not s.scored, "the policy gives every query of a tier the same bits; choose "
          "another policy, such as tiered, or leave it out"),
    Limit("refresh", "refused", lambda s: not s.thresholds, "it is not known when this model's answers are hard; "
          "'qbe quantize' finds that out, or 'qbe records --learn-refresh' from past answers"),
    Limit("cascade", "refused", lambda s: s.vllm, _VLLM),
    Limit("cascade", "refused", lambda s: s.recurrent, f"{_STATE}, for which no cascade is trained"),
    Limit("cascade", "refused", lambda s: s.alone, f"{_ALONE}, and all of its tokens one precision"),
    Limit("cascade", "refused", lambda s: not s.attention, "the model has no attention to go by"),
    Limit("cascade", "refused", lambda s: s.device_memory, "device_memory bounds what is there to be read, which bits "
          "that move within a forward pass do not heed"),
    Limit("cascade", "refused", lambda s: bool(s.no_cascade), "{no_cascade}"),
    Limit("kv_bits", "refused", lambda s: s.vllm, _VLLM),
    Limit("kv_bits", "said", lambda s: not s.attention, _NO_CACHE),
    Limit("kv_error", "refused", lambda s: s.vllm, _VLLM),
    Limit("kv_error", "said", lambda s: not s.attention, _NO_CACHE),
    Limit("kv_error", "refused", lambda s: s.latent, "its bound is on what keys and values were, and pages of this "
          "model hold latents"),
    Limit("kv_error", "refused", lambda s: s.originals_full, "the host has no memory left for the 16-bit originals of "
          "pages, without which attention's error is not bounded; ask for 16 KV bits, or let it be dropped with "
          "best_effort"),
    Limit("state_bits", "refused", lambda s: s.vllm, "inside vLLM recurrent states are vLLM's; start it with "
          "--mamba-ssm-cache-dtype"),
    Limit("state_bits", "said", lambda s: not s.recurrent_state, "the model's layers keep no recurrent state"),
    Limit("state_bits", "refused", lambda s: bool(s.below_floors), "{below_floors}"),
    Limit("speculate", "said", lambda s: s.vllm, _VLLM),
    Limit("speculate", "said", lambda s: s.recurrent, f"{_STATE}, which a wrong draft token would leave changed"),
    Limit("speculate", "said", lambda s: s.alone, f"{_ALONE}, in which no draft tokens are checked"),
    Limit("speculate", "said", lambda s: s.latent and s.cuda, f"{_LATENT}, so that no step has fixed shapes"),
    Limit("speculate", "said", lambda s: not s.drafts, "steps have no room for draft tokens; start the engine with "
          "speculate, too"),
    Limit("speculate", "said", lambda s: s.bounded or s.high_precision, "kv_error and high_precision_tokens say of "
          "each token by itself how it is read, which a draft token cannot know"),
)  # fmt: skip
"""What a request asks for, likewise."""

ANYWHERE = (
    "model", "tokenizer", "processor", "policy", "dtype", "device", "originals", "most_bits", "device_memory", "miss",
    "max_sequences", "records", "trust",
    "refresh_interval", "refresh_count", "progress",
    "bits", "tier", "activation_bits", "within", "best_effort", "min_bits", "max_bits", "max_latency_ms", "max_cost",
)  # fmt: skip
"""Options of an engine, a budget and HTTP's `qbe` that have their effect everywhere. A test holds that no other is left
out here."""

_RECURRENT = Situation(recurrent=True, recurrent_state=True, fixed_shapes=False, drafts=False)
SITUATIONS = {
    "attention": Situation(),
    "sliding windows": Situation(windows=True),
    "experts": Situation(experts=True),
    "latent attention": Situation(experts=True, latent=True),
    "attention and recurrent layers": _RECURRENT,
    "recurrent layers alone": replace(_RECURRENT, attention=False),
    "one sequence a forward": Situation(alone=True, fixed_shapes=False, drafts=False),
    "on a GPU": Situation(cuda=True),
    "with `device_memory`": Situation(device_memory=True),
    "`compile` without `speculate`": Situation(drafts=False),
    "a policy that does not read the score": Situation(scored=False),
    "a learned policy": Situation(scored=False, own_tier=True, cacheable=False),
    "nothing measured": Situation(measured=False, thresholds=False, scored=False),
    "in vLLM": Situation(cuda=True, vllm=True),
}
"""What the documentation's table shows, by name; the models on a CPU, with the policy `tiered`."""


def limit(option: str, situation: Situation, of: Collection[Limit] = REQUEST) -> Limit | None:
    """What keeps an option from its effect; None where it has one."""
    return next((found for found in of if found.option == option and found.meets(situation)), None)


def check_engine(asked: Collection[str], situation: Situation) -> None:
    """Says of each option that an engine was started with and that does nothing in it so, in one warning each."""
    for option in asked:
        found = limit(option, situation, ENGINE)
        if found is not None:
            warnings.warn(found.line(situation), RuntimeWarning, stacklevel=3)


def check_request(asked: Collection[str], situation: Situation, best_effort: bool = False) -> dict[str, str]:
    """The options of a request that do nothing, for its result to name, and a line of each that says why.

    Raises:
        QBEError: one of them must not be left out in silence; `field` names it.
    """
    ignored: dict[str, str] = {}
    for option in asked:
        found = limit(option, situation)
        if found is None:
            continue
        if found.outcome == "refused" and not best_effort:
            raise QBEError(found.line(situation), field=option)
        ignored[option] = found.line(situation)
    return ignored
