"""What both endpoints make of a body: sampling parameters, what they ignore, the frame of its answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from qbe.engine.sampling.constraint import Closing
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.server import contract
from qbe.server.contract import Terms
from qbe.server.energy.spending import MODEL
from qbe.server.errors import APIError
from qbe.server.exchange import Exchange
from qbe.server.keys import Client
from qbe.server.pricing import usage
from qbe.server.protocol import ChatRequest, Common, StreamOptions
from qbe.server.service import Service
from qbe.server.structure import Structure
from qbe.version import __version__

# Of `apply_chat_template`, which are not its template's.
_OURS = {
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize", "padding",
    "continue_final_message", "truncation", "max_length", "tokenizer_kwargs", "sanitize_control_tokens",
}  # fmt: skip
_WISHES = ("verbosity", "prediction", "store", "prompt_cache_retention", "prompt_cache_options")


def check_model(body: Common, service: Service) -> None:
    """Raises APIError for a model that is not served here."""
    if body.model is not None and body.model not in service.names:
        raise APIError(404, f"there is no model '{body.model[:200]}' here, only '{service.names[0]}'", param="model",
                       code="model_not_found")  # fmt: skip


def terms(body: Common, client: Client, service: Service) -> Terms:
    """What a request is served on, by its arm where a rollout runs. Raises APIError."""
    tier, observer = client.tier(body.service_tier or "auto"), service.observer
    found = contract.terms(tier, body.qbe, service.settings, service.brownout(tier), observer.governor.shift)
    return observer.rollout.assign(found, client, body.prompt_cache_key)


def check_stream(body: Common) -> StreamOptions:
    """The options of the stream. Raises APIError where there is none."""
    if body.stream_options is not None and not body.stream:
        raise APIError(400, "stream_options is given, but stream is not true", param="stream_options")
    return body.stream_options or StreamOptions()


def sampling(body: Common, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None = None) -> SamplingParams:
    """The engine's parameters; OpenAI's defaults."""
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=1 if body.top_p == 0 else max(0, body.top_k or 0),
        top_p=body.top_p or 1.0,
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=dict(body.logit_bias) if body.logit_bias else None,
        seed=None if body.seed is None else body.seed % 2**63,
        stop=stop,
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        speculate=body.qbe is not None and body.qbe.speculate,
    )


def variables(body: ChatRequest) -> dict[str, Any]:
    """What the chat template is told beside messages and tools. Raises APIError for what is not the client's to say."""
    given = body.chat_template_kwargs or {}
    taken = next((name for name in given if name in _OURS or name.startswith(("_", "return_"))), None)
    if taken is not None:
        raise APIError(400, f"chat_template_kwargs: '{taken[:64]}' cannot be set: leave it out",
                       param="chat_template_kwargs")  # fmt: skip
    return given | ({} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort})


def ignored(body: Common, template: str = "") -> list[str]:
    """Fields of a body that ask for something and change nothing here.

    Args:
        template: the chat template, which may read some.
    """
    wanted = [name for name in _WISHES if getattr(body, name, None)]
    more = [] if not isinstance(body, ChatRequest) else [*(body.chat_template_kwargs or ())]
    if getattr(body, "reasoning_effort", None) is not None and "reasoning_effort" not in template:
        wanted.append("reasoning_effort")
    return wanted + [f"chat_template_kwargs.{name}" for name in more if name not in template]


Answer = tuple[str, list[tuple[str, str]]]  # its text; names and arguments of its calls


class Frame:
    """What every object of one answer has: id, time, model, the tier served."""

    def __init__(self, kind: str, service: Service, exchange: Exchange) -> None:
        self.exchange, self._service = exchange, service
        self._fields = {
            "id": exchange.id,
            "object": kind,
            "created": int(time.time()),
            "model": service.names[0],
            "service_tier": exchange.asked.terms.tier,
            "system_fingerprint": f"qbe-{__version__}",
        }

    def object(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """One object."""
        return {**self._fields, "choices": choices, **more}

    async def usage(self, answers: Sequence[Answer] = ()) -> dict[str, Any]:
        """Of all answers, when they have ended.

        Args:
            answers: what they came to, where something was asked of their form.
        """
        groups = [[r for r in job.results if r is not None] for job in self.exchange.jobs]
        asked, accounts = self.exchange.asked, self.exchange.accounts
        joules, source = sum(a.joules for a in accounts), (accounts[0].energy if accounts else "") or MODEL
        found = usage(asked.terms, groups, asked.hidden, joules, source)
        if asked.structure is not None:
            found["qbe"] |= await self._form(asked.structure, answers)
        ours = dict.fromkeys(f"qbe.{name}" for group in groups for r in group for name in r.ignored)
        if asked.ignored or ours:
            found["qbe"]["ignored"] = [*asked.ignored, *ours]
        return found

    async def _form(self, structure: Structure, answers: Sequence[Answer]) -> dict[str, Any]:
        """Whether all answers are what was asked for, and why any was brought to its end."""
        constraints = [r.constraint for job in self.exchange.jobs for r in job.requests if r.constraint is not None]
        valid: list[bool | None] = [bool(getattr(c, "complete", False)) for c in constraints]
        if all(valid):
            valid += [await structure.holds(text, calls, self._service) for text, calls in answers]
        cut = next((c.cut for c in constraints if isinstance(c, Closing) and c.cut is not None), None)
        return {"valid": False if False in valid else None if None in valid else True, "cut": cut}

    def usage_so_far(self, written: int) -> dict[str, Any]:
        """Tokens alone, while answers are written."""
        read = sum(job.choice[1].prompt_tokens for job in self.exchange.jobs)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
