"""What both endpoints make of a body: sampling parameters, the grammar of its format, the frame of its answer."""

from __future__ import annotations

import time
from typing import Any

from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.server import contract
from qbe.server.energy.spending import MODEL
from qbe.server.errors import APIError
from qbe.server.exchange import Exchange
from qbe.server.grammar import json_schema, lark, rule
from qbe.server.protocol import (
    Common,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    StreamOptions,
)
from qbe.server.service import Service
from qbe.version import __version__

FORMAT = "response_format"


def check_model(body: Common, service: Service) -> None:
    """Raises APIError for a model that is not served here."""
    if body.model is not None and body.model not in service.names:
        raise APIError(404, f"there is no model '{body.model[:200]}' here, only '{service.names[0]}'", param="model",
                       code="model_not_found")  # fmt: skip


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
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else body.top_p,
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


def format_grammar(wanted: ResponseFormat | None) -> str | None:
    """The grammar of a `response_format`; None allows any text."""
    if isinstance(wanted, JsonObjectFormat):
        return json_schema({"type": "object"}, FORMAT)
    if isinstance(wanted, JsonSchemaFormat):
        return json_schema(wanted.json_schema.schema_ or {"type": "object"}, FORMAT)
    return lark(wanted.grammar) if isinstance(wanted, GrammarFormat) else None


def format_rule(wanted: ResponseFormat | None) -> str | None:
    """The same as a Lark rule named `text`, to stand beside others. Raises APIError for a grammar of its own."""
    if isinstance(wanted, GrammarFormat):
        raise APIError(400, f"{FORMAT}: a grammar and tools exclude each other: use one of them", param=FORMAT)
    if not isinstance(wanted, JsonObjectFormat | JsonSchemaFormat):
        return None
    schema = wanted.json_schema.schema_ if isinstance(wanted, JsonSchemaFormat) else None
    return f"text: {rule(schema or {'type': 'object'}, FORMAT)}"


class Frame:
    """What every object of one answer has: id, time, model, the tier served."""

    def __init__(self, kind: str, service: Service, exchange: Exchange) -> None:
        self.exchange = exchange
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

    def usage(self) -> dict[str, Any]:
        """Of all answers, when they have ended."""
        groups = [[r for r in job.results if r is not None] for job in self.exchange.jobs]
        asked, accounts = self.exchange.asked, self.exchange.accounts
        joules, source = sum(a.joules for a in accounts), (accounts[0].energy if accounts else "") or MODEL
        return contract.usage(asked.terms, groups, asked.hidden, joules, source)

    def usage_so_far(self, written: int) -> dict[str, Any]:
        """Tokens alone, while answers are written."""
        read = sum(job.choice[1].prompt_tokens for job in self.exchange.jobs)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
