"""What an answer must be: the grammar of its format and of its calls, and what is checked when it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from llguidance import LLMatcher

from qbe.server import tools
from qbe.server.errors import APIError
from qbe.server.grammar import json_schema, lark, rule
from qbe.server.grammar_constraint import Limits
from qbe.server.json_scan import Where
from qbe.server.protocol import ChatRequest, GrammarFormat, JsonObjectFormat, JsonSchemaFormat, ResponseFormat, Tool
from qbe.server.schemas import Schema, limits, normal, relaxed
from qbe.server.service import Service

FORMAT = "response_format"
_INVALID = "invalid_grammar"
_ANY_ARGUMENTS: Schema = {"type": "object"}


@dataclass(frozen=True)
class Structure:
    """What an answer must be.

    Attributes:
        matcher, limits: the grammar, and what JSON in it may grow to.
        checks: schemas that the grammar does not keep to in all, by the function whose arguments they are of; "" is the
            text's.
    """

    matcher: LLMatcher
    limits: Limits
    checks: Mapping[str, Schema] = field(default_factory=dict)

    async def holds(self, text: str, calls: Sequence[tuple[str, str]], service: Service) -> bool | None:
        """Whether what the grammar leaves open holds, too; None where that cannot be found out.

        Args:
            text: of the answer.
            calls: names and arguments.
        """
        said = [("", text)] if not calls else list(calls)
        results = [await service.matches(self.checks[name], value) for name, value in said if name in self.checks]
        return False if False in results else None if None in results else True


async def of_format(wanted: ResponseFormat | None, service: Service) -> Structure | None:
    """That of a `response_format`; None allows any text. Raises APIError."""
    if isinstance(wanted, GrammarFormat):
        return Structure(await service.compile(lark(wanted.grammar), FORMAT), Limits())
    schema = _schema_of(wanted)
    if schema is None:
        return None
    kept = await _kept(schema, _is_strict(wanted), FORMAT, service, _deadline(service))
    matcher = await service.compile(json_schema(kept, FORMAT), FORMAT)
    return Structure(matcher, limits([schema], "all"), {} if kept is schema else {"": schema})


async def of_tools(body: ChatRequest, offered: Sequence[Tool], service: Service) -> Structure:
    """That of an answer that may call functions. Raises APIError."""
    if isinstance(body.response_format, GrammarFormat):
        raise APIError(400, f"{FORMAT}: a grammar and tools exclude each other: use one of them", param=FORMAT)
    schemas = {t.name: tools.parameters(t) for t in offered}
    text = _schema_of(body.response_format)
    json_in: Where = "calls" if text is None else "all"

    async def compiled(schemas: Mapping[str, Schema], text: Schema | None) -> LLMatcher:
        written = None if text is None else f"text: {rule(text, FORMAT)}"
        return await service.compile(lark(tools.grammar(body, offered, written, schemas)), "tools")

    try:
        return Structure(await compiled(schemas, text), limits([*schemas.values(), text or {}], json_in))
    except APIError as error:
        if error.code != _INVALID:
            raise
    ends = _deadline(service)
    kept = {t.name: await _arguments(t, schemas[t.name], service, ends) for t in offered}
    kept_text = text
    if text is not None:
        kept_text = await _kept(text, _is_strict(body.response_format), FORMAT, service, ends)
    try:
        matcher = await compiled(kept, kept_text)
    except APIError as error:
        if error.code != _INVALID:
            raise
        kept |= {t.name: _ANY_ARGUMENTS for t in offered if t.function is not None and not t.function.strict}
        matcher = await compiled(kept, kept_text)
    checks = {name: schemas[name] for name in kept if kept[name] is not schemas[name]}
    if text is not None and kept_text is not text:
        checks[""] = text
    return Structure(matcher, limits([*schemas.values(), text or {}], json_in), checks)


async def _arguments(tool: Tool, schema: Schema, service: Service, ends: float) -> Schema:
    """What a grammar keeps to of a tool's schema."""
    strict = tool.function is None or bool(tool.function.strict)
    try:
        if (grammar := tools.own_grammar(tool)) is not None:
            await service.compile(lark(grammar), "tools")
            return schema
        return await _kept(schema, strict, "tools", service, ends)
    except APIError as error:
        if error.code != _INVALID:
            raise
        if strict:
            said = error.message.removeprefix("tools: ")
            raise APIError(400, f"tools: '{tool.name}': {said}", param="tools", code=_INVALID) from None
        return _ANY_ARGUMENTS


async def _kept(schema: Schema, strict: bool, param: str, service: Service, ends: float) -> Schema:
    """The schema, or as much of it as a grammar can be made of. Raises APIError."""

    async def works(schema: Schema) -> Schema:
        await service.compile(json_schema(schema, param), param)
        return schema

    return await _first(works, [schema] if strict else [schema, *relaxed(schema)], ends)


async def _first(works: Callable[[Schema], Awaitable[Schema]], schemas: Sequence[Schema], ends: float) -> Schema:
    first: APIError | None = None
    for schema in schemas:
        try:
            return await works(schema)
        except APIError as error:
            if error.code != _INVALID:
                raise
            first = first or error
        if asyncio.get_running_loop().time() > ends:
            break
    assert first is not None
    raise first


def _schema_of(wanted: ResponseFormat | None) -> Schema | None:
    if isinstance(wanted, JsonObjectFormat):
        return {"type": "object"}
    if not isinstance(wanted, JsonSchemaFormat):
        return None
    return normal(wanted.json_schema.schema_ or {"type": "object"}, FORMAT)


def _is_strict(wanted: ResponseFormat | None) -> bool:
    return isinstance(wanted, JsonSchemaFormat) and bool(wanted.json_schema.strict)


def _deadline(service: Service) -> float:
    """Until when schemas are tried with less in them."""
    return asyncio.get_running_loop().time() + service.settings.limits.grammar_s
