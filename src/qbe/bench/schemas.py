"""JSON schemas as people use them (JSONSchemaBench, Geng et al. 2025) through the engine: validity, time per token."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qbe.bench.measure import Timing
from qbe.bench.traffic import folder_of
from qbe.budget import Budget
from qbe.engine.engine import Engine
from qbe.engine.result import Request, Result
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.errors import QBEError

FOLDER = "json_schemas"
_COMPILE_S, _COMPILE_BYTES = 30.0, 1 << 20


@dataclass
class SchemaResult:
    """What came of the schemas.

    Attributes:
        refused: schemas that the compiler does not take, with what it said.
        ended: answers that came to an end by themselves.
        invalid: of these, those that do not match their schema, with what the validator said.
        cut: answers that reached their limit of tokens.
        compile_ms: of each schema, checking process included.
        seconds: CPU time per token and batch, with the constraint and without.
    """

    refused: dict[str, str]
    ended: list[str]
    invalid: dict[str, str]
    cut: list[str]
    compile_ms: list[float]
    seconds: tuple[list[float], list[float]]

    @property
    def each(self) -> tuple[Timing, Timing]:
        """Milliseconds per token with the constraint, and without."""
        with_it, without = (Timing.of([1e3 * s for s in seconds]) for seconds in self.seconds)
        return with_it, without


def read(data: Path | None, count: int) -> dict[str, dict[str, Any]]:
    """Name -> schema, spread over the folder. Raises QBEError where there are none."""
    files = sorted((folder_of(data) / FOLDER).glob("*.json"))
    if not files:
        raise QBEError(f"there are no schemas in '{folder_of(data) / FOLDER}'; give --data the folder that holds it")
    chosen = files[:: max(1, len(files) // count)][:count]
    try:
        return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in chosen}
    except ValueError as error:
        raise QBEError(f"'{folder_of(data) / FOLDER}' holds something that is not JSON: {error}") from None


def measure(
    engine: Engine, schemas: dict[str, dict[str, Any]], tokens: int, batch: int, tick: Callable[[], None]
) -> SchemaResult:
    """Answers to every schema, each batch once with the constraint and once without, of the same lengths, in turns.

    Args:
        tokens: of an answer at most.
        batch: answers at once.
        tick: called for each schema.
    """
    import jsonschema

    from qbe.server.errors import APIError
    from qbe.server.grammar import Grammars, json_schema

    measured = SchemaResult({}, [], {}, [], [], ([], []))

    async def compile_all() -> dict[str, Any]:
        grammars, made = Grammars(engine), {}
        try:
            for name, schema in schemas.items():
                begun = time.perf_counter()
                try:
                    matcher = await grammars.compile(
                        json_schema(schema, "schema"), _COMPILE_S, _COMPILE_BYTES, "schema"
                    )
                    made[name] = grammars.constraint(matcher)
                    measured.compile_ms.append(1e3 * (time.perf_counter() - begun))
                except APIError as error:
                    measured.refused[name] = error.message
        finally:
            await grammars.close()
        return made

    constraints = asyncio.run(compile_all())
    names = list(constraints)
    for first in range(0, len(names), batch):
        chosen = names[first : first + batch]
        params = SamplingParams(max_tokens=tokens, temperature=0.7, top_p=0.95, seed=first)
        asked = [Request(_prompt(schemas[name]), params, Budget(bits=6.0), constraint=constraints[name])
                 for name in chosen]  # fmt: skip
        results, with_it = _run(engine, asked)
        free = [_same_length(a, r) for a, r in zip(asked, results, strict=True)]
        _, without = _run(engine, free)
        measured.seconds[0].append(with_it)
        measured.seconds[1].append(without)
        for name, result in zip(chosen, results, strict=True):
            tick()
            if result.finish_reason != "stop":
                measured.cut.append(name)
                continue
            measured.ended.append(name)
            try:
                jsonschema.validate(json.loads(result.text), schemas[name])
            except (ValueError, jsonschema.ValidationError, jsonschema.SchemaError) as error:
                measured.invalid[name] = " ".join(str(error).split())[:200]
    return measured


def _prompt(schema: dict[str, Any]) -> list[dict[str, str]]:
    title = str(schema.get("title") or schema.get("description") or "anything that fits")[:200]
    return [{"role": "user", "content": f"Write one short JSON document: {title}"}]


def _same_length(asked: Request, result: Result) -> Request:
    """The same request without its constraint, for exactly as many tokens."""
    params = replace(asked.params, max_tokens=max(1, len(result.token_ids)), ignore_eos=True)
    return replace(asked, params=params, constraint=None)


def _run(engine: Engine, requests: Sequence[Request]) -> tuple[list[Result], float]:
    """The answers, and CPU seconds per token of the steps after all prompts were read."""
    ids = [engine.submit(r) for r in requests]
    while not all(map(engine.started, ids)):
        engine.step()
    before = sum(len(engine.sequence(i).output_ids) for i in ids)
    begun = time.process_time()
    while not all(map(engine.finished, ids)):
        engine.step()
    seconds = time.process_time() - begun
    results = [engine.take_result(i) for i in ids]
    written = sum(len(r.token_ids) for r in results) - before
    return results, seconds / max(1, written)
