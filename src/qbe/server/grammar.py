"""Grammars and JSON schemas: checked in another process, compiled here, asked before every token.

llguidance does the work: no step of it takes longer than its own limits on fuel and items allow.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import llguidance
import llguidance.hf

from qbe.engine.engine import Engine
from qbe.server.errors import APIError
from qbe.server.grammar_constraint import Alphabet, GrammarConstraint, Limits
from qbe.server.grammar_constraint import line as one_line

log = logging.getLogger(__name__)

_CHECKER = Path(__file__).with_name("check_grammar.py")
_WAITING = 16  # grammars that wait for their check; one more is refused
_KEPT = 256  # compiled grammars
_END_S = 5.0  # for a killed process to end
_START_S = 60.0  # for the checking process to read its tokenizer
# Bounded, because a small model may write white space without an end.
_WHITESPACE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,20}"}


def rule(schema: dict[str, Any], param: str) -> str:
    """A JSON schema within a rule of a Lark grammar. Raises APIError about this field of the body."""
    return f"%json {_dumps(_guided(schema), param)}"


def _guided(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "x-guidance": {**schema.get("x-guidance", {}), **_WHITESPACE}}


def _dumps(value: Any, param: str) -> str:
    try:
        return json.dumps(value)
    except RecursionError:
        raise APIError(400, f"{param}: a schema is nested too deeply: make it simpler", param=param,
                       code="invalid_grammar") from None  # fmt: skip


def lark(text: str) -> str:
    """A Lark grammar as `Grammars.compile` takes it."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def json_schema(schema: dict[str, Any], param: str) -> str:
    """A JSON schema, likewise. Raises APIError about this field of the body."""
    return _dumps({"grammars": [{"json_schema": _guided(schema)}]}, param)


class Grammars:
    """Compiles grammars for one model.

    Raises:
        APIError: by `compile`, for a model whose tokenizer llguidance cannot read.
    """

    def __init__(self, engine: Engine) -> None:
        self._vocabulary = engine.core.vocabulary
        self._setup: str | None = None
        self.tokenizer: llguidance.LLTokenizer | None = None
        self._missing = "this model has no fast tokenizer with an end-of-sequence token"
        backend = getattr(engine.tokenizer, "backend_tokenizer", None)
        if backend is not None and engine.core.eos_ids:
            self._read(engine.tokenizer, backend, sorted(engine.core.eos_ids))
        self._alphabet: Alphabet | None = None
        self._known: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._wrong: OrderedDict[str, str] = OrderedDict()
        self._checker: asyncio.subprocess.Process | None = None
        self._lock, self._waiting = asyncio.Lock(), 0

    def _read(self, tokenizer: Any, backend: Any, eos: list[int]) -> None:
        """Give llguidance the tokenizer. What it cannot read costs grammars, and nothing else of the server."""
        size = max(self._vocabulary, len(tokenizer))  # tokens without a row in the model, too: they are never allowed
        try:
            self.tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=size, eos_token=eos)
            self._setup = json.dumps([backend.to_str(), size, eos])
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:  # the library panics with a BaseException
            self.tokenizer = None
            self._missing = f"llguidance cannot read this model's tokenizer ({one_line(str(e)) or type(e).__name__})"
            log.warning("no grammars, JSON schemas and tools that must be called: %s", self._missing)

    async def compile(self, grammar: str, seconds: float, most_bytes: int, param: str) -> llguidance.LLMatcher:
        """A compiled grammar; `constraint` makes of it what an answer needs.

        Args:
            grammar: of `lark` or `json_schema`.
            seconds: the check may take.
            most_bytes: the grammar may have.
            param: the field of the body that it came from.

        Raises:
            APIError: it is too long, wrong, or takes too long to check, or too many wait for that.
        """
        if self.tokenizer is None:
            raise APIError(400, f"{param}: {self._missing}, which structured answers need", param=param)
        if len(grammar) > most_bytes:
            raise APIError(400, f"{param} has {len(grammar)} bytes, but at most {most_bytes} are taken", param=param,
                           code="grammar_too_long")  # fmt: skip
        if grammar in self._known:
            self._known.move_to_end(grammar)
            return self._known[grammar]
        if grammar in self._wrong:
            raise _invalid(param, self._wrong[grammar])
        if self._waiting == _WAITING:
            raise APIError(429, f"{_WAITING} grammars wait to be checked: try again later", param=param,
                           code="queue_full", retry_after=seconds)  # fmt: skip
        self._waiting += 1
        try:
            async with self._lock:
                wrong = await self._check(grammar, seconds)
        finally:
            self._waiting -= 1
        if wrong is not None:
            self._wrong[grammar] = wrong
            if len(self._wrong) > _KEPT:
                self._wrong.popitem(last=False)
            raise _invalid(param, wrong)
        matcher = await asyncio.to_thread(llguidance.LLMatcher, self.tokenizer, grammar, log_level=0)
        self._known[grammar] = matcher
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return matcher

    def constraint(self, matcher: llguidance.LLMatcher, limits: Limits | None = None) -> GrammarConstraint:
        """The same grammar at its start, for one answer."""
        if self._alphabet is None:
            assert self.tokenizer is not None
            self._alphabet = Alphabet(self.tokenizer)
        return GrammarConstraint(matcher.deep_copy(), self._alphabet, self._vocabulary, limits)

    async def matches(self, schema: dict[str, Any], text: str, seconds: float) -> bool | None:
        """Whether JSON text is of a schema, all of it; None where that cannot be found out."""
        try:
            wanted = json.dumps([schema, text])
        except RecursionError:
            return None
        async with self._lock:
            said = await self._said(wanted, seconds)
        return said if isinstance(said, bool) else None

    async def _check(self, grammar: str, seconds: float) -> str | None:
        """What is wrong with it."""
        said = await self._said(json.dumps(grammar), seconds)
        return None if said is None else str(said)

    async def _said(self, line: str, seconds: float) -> Any:
        """What the checking process says to a line."""
        if self._checker is None or self._checker.returncode is not None:
            self._checker = await asyncio.create_subprocess_exec(
                sys.executable, "-P", str(_CHECKER), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL, limit=1 << 20,
            )  # fmt: skip
            await self._ask(self._setup or "", _START_S)
        return await self._ask(line, seconds)

    async def _ask(self, line: str, seconds: float) -> Any:
        checker = self._checker
        assert checker is not None
        assert checker.stdin is not None
        assert checker.stdout is not None
        answer = b""
        try:
            async with asyncio.timeout(seconds):
                checker.stdin.write(line.encode() + b"\n")
                await checker.stdin.drain()
                answer = await checker.stdout.readline()
        except TimeoutError:
            return f"it takes longer than {seconds:g} s to compile: make it simpler"
        except (OSError, ValueError):
            answer = b""
        finally:
            if not answer:  # too long, crashed, or whoever asked has gone: what it says next would be of no use
                await self.close()
        return json.loads(answer) if answer else "it cannot be compiled: make it simpler"

    async def close(self) -> None:
        """End the checking process."""
        checker, self._checker = self._checker, None
        if checker is None:
            return
        with suppress(ProcessLookupError):
            checker.kill()
        with suppress(TimeoutError):
            await asyncio.wait_for(checker.wait(), _END_S)


def _invalid(param: str, wrong: str) -> APIError:
    return APIError(400, f"{param}: {one_line(wrong)}", param=param, code="invalid_grammar")
