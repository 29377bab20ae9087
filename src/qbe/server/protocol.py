"""The bodies of requests: OpenAI's, the sampling fields that vLLM adds, and `qbe`. An unknown field is refused, unless
it is null: then it asks for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, ValidationInfo, field_validator, model_validator

from qbe.budget import MOST_KV_ERROR
from qbe.engine.sampling.sampling_params import MOST_ANSWERS
from qbe.server.fields import (
    MOST_BIASES,
    MOST_PROMPTS,
    Bits,
    Body,
    KVBits,
    Name,
    Pace,
    Refused,
    ServiceTier,
    Text,
    Token,
    Tokens,
    few,
)
from qbe.server.messages import Lenient, Message


class Contract(Body):
    """Bounds on precision, time and price; what is left out is the tier's.

    Attributes:
        bits: average bits of the weights, met within 0.05 from below.
        min_bits, max_bits: bounds of that average instead; the query's score chooses between them.
        kv_bits: average bits of the KV cache, or `turbo2` or `turbo4` (keys in TurboQuant's form).
        kv_error: what these may change of attention's outputs, as a part of their norm.
        state_bits: of recurrent states, 8, 10 (8 with error feedback), 16 or 32; left out, 32.
        activation_bits: of the inputs of linear layers, 8 or 16; left out, the tier's.
        high_precision_tokens: with 8, read tokens of the answer that were hard to predict with 16.
        max_latency_ms: the answer ends by then: precision is lowered as far as that is foreseen to need, what is not
            written yet is cut (`finish_reason` `length`).
        max_cost: the most that the request may cost, in the server's currency; bounds the bits.
        policy: which policy chooses the bits.
        refresh: choose again within the range while the answer is hard or easy; not beside `bits`.
        refresh_interval, refresh_count: with `refresh`: tokens after which the answer is looked at, and looks in a row
            that must say the same; left out, those of `[refresh]` in the settings.
        best_effort: leave out what this model or server cannot do, and name it in `usage.qbe.ignored`, rather than
            refuse.
        cascade: let each token's attention move the bits of later layers, around the same average.
        speculate: draft tokens and check several at once where that is faster.
    """

    bits: Bits | None = None
    min_bits: Bits | None = None
    max_bits: Bits | None = None
    kv_bits: KVBits | None = None
    kv_error: Annotated[float, Field(ge=0, le=MOST_KV_ERROR)] | None = None
    state_bits: Literal[8, 10, 16, 32] | None = None
    activation_bits: Literal[8, 16] | None = None
    high_precision_tokens: StrictBool = False
    max_latency_ms: Annotated[float, Field(gt=0)] | None = None
    max_cost: Annotated[float, Field(gt=0)] | None = None
    policy: Annotated[str, Field(max_length=64)] | None = None
    refresh: StrictBool = False
    refresh_interval: Pace | None = None
    refresh_count: Pace | None = None
    best_effort: StrictBool = False
    cascade: StrictBool = False
    speculate: StrictBool = False

    @model_validator(mode="before")
    @classmethod
    def _names_of_version_0_1(cls, body: object) -> object:
        if isinstance(body, dict) and "careful_tokens" in body:
            if "high_precision_tokens" in body:
                raise ValueError("careful_tokens is the older name of high_precision_tokens: give one of them")
            rest = {k: v for k, v in body.items() if k != "careful_tokens"}
            return {**rest, "high_precision_tokens": body["careful_tokens"]}
        return body


class StreamOptions(Body):
    """What a stream carries beside the answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None


class BaseRequest(Body):
    """What every endpoint that writes takes."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[Token, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MOST_BIASES), few(MOST_BIASES)
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    qbe: Contract | None = None

    def shared(self) -> dict[str, Any]:
        """These fields as they were given, for the request of another endpoint."""
        return {name: getattr(self, name) for name in BaseRequest.model_fields if name in self.model_fields_set}


class OpenAIRequest(BaseRequest):
    """What OpenAI's endpoints take."""

    stop: Text | Annotated[list[Text], Field(max_length=16, fail_fast=True)] | None = None
    service_tier: ServiceTier | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None


class Common(OpenAIRequest):
    """What chat and completions take."""

    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    stream_options: StreamOptions | None = None


class Function(Lenient):
    """A function that the model may call. Its arguments match `parameters`: with `strict` a schema that cannot be kept
    to is refused; without, what of it cannot be kept to is left to be checked.
    """

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextInput(Lenient):
    """Any text."""

    type: Literal["text"]


class InputGrammar(Body):
    """What the input of a custom tool may be."""

    syntax: Literal["regex", "lark"]
    definition: Annotated[str, Field(min_length=1)]


class GrammarInput(Lenient):
    """Text of a grammar."""

    type: Literal["grammar"]
    grammar: InputGrammar


class CustomTool(Lenient):
    """A tool that takes a text."""

    name: Name
    description: str | None = None
    format: Annotated[TextInput | GrammarInput, Field(discriminator="type")] | None = None


class Tool(Lenient):
    """A function, or a custom tool."""

    type: Literal["function", "custom"]
    function: Function | None = None
    custom: CustomTool | None = None

    @model_validator(mode="after")
    def _has_it(self) -> Tool:
        if getattr(self, self.type) is None:
            raise ValueError(f"a tool of type '{self.type}' has its name in '{self.type}'")
        return self

    @property
    def name(self) -> str:
        """What it is called by."""
        found = self.custom if self.type == "custom" else self.function
        assert found is not None
        return found.name


class ToolName(Lenient):
    """Which tool."""

    name: Name


class NamedTool(Body):
    """The tool that must be called, or one of those allowed."""

    type: Literal["function", "custom"]
    function: ToolName | None = None
    custom: ToolName | None = None

    @model_validator(mode="after")
    def _has_it(self) -> NamedTool:
        if getattr(self, self.type) is None:
            raise ValueError(f"a tool of type '{self.type}' has its name in '{self.type}'")
        return self

    @property
    def name(self) -> str:
        """What it is called by."""
        found = self.custom if self.type == "custom" else self.function
        assert found is not None
        return found.name


class Allowed(Body):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=128, fail_fast=True)]


class AllowedTools(Body):
    """The tools that may be called in this turn; the model is told of all."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


class JsonSchema(Body):
    """A schema that the answer must match."""

    name: Name
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextFormat(Body):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class GrammarFormat(Body):
    """Text of a context-free grammar in llguidance's variant of Lark."""

    type: Literal["grammar"]
    grammar: Annotated[str, Field(min_length=1)]


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | GrammarFormat, Field(discriminator="type")
]


class ChatRequest(Common):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    prediction: dict[str, Any] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=16, fail_fast=True)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    functions: Refused = None
    function_call: Refused = None
    audio: Refused = None
    moderation: Refused = None
    web_search_options: Refused = None


class CompletionRequest(Common):
    """Body of `/v1/completions`."""

    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    best_of: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    suffix: Literal[""] | None = None
    response_format: ResponseFormat | None = None

    @field_validator("best_of")
    @classmethod
    def _all_are_returned(cls, best_of: int | None, info: ValidationInfo) -> int | None:
        if best_of not in (None, 1, info.data.get("n")):
            raise ValueError("this server does not choose among answers: leave it out, or give the number of 'n'")
        return best_of
