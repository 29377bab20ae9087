"""Policies side by side on the same queries: fidelity to 16 bits by teacher forcing, and answers.

Every query runs at 16 bits once and then under each policy and budget; what was measured before is taken from
`qbe.datasets.results`. The KV cache has 16 bits throughout: what differs is the bits of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from qbe import policies
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.datasets.items import Encoded, Item, encode
from qbe.datasets.results import Results, digest
from qbe.engine.engine import Engine
from qbe.engine.result import Request
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.errors import QBEError
from qbe.eval.fidelity import Fidelity, Teacher
from qbe.sites import FULL_BITS, SiteTable

TOGETHER = 8  # answers that are written in the same steps


@dataclass(frozen=True)
class Setting:
    """A policy at a budget.

    Attributes:
        policy: its name. bits: the average asked for. seed: of a policy that draws.
    """

    policy: str
    bits: float
    seed: int | None = None

    @property
    def name(self) -> str:
        """What `qbe.policies.load` takes."""
        return f"{self.policy}:{self.seed}" if self.seed else self.policy

    @property
    def budget(self) -> Budget:
        return Budget(bits=self.bits, kv_bits=FULL_BITS)


FULL = Setting("uniform", FULL_BITS)


def settings_of(names: Sequence[str], bits: Sequence[float], seeds: int) -> list[Setting]:
    """Each of these policies at each budget, with as many seeds if it draws, or with the one that `random:1` names.

    Raises:
        QBEError: an unknown policy.
    """
    settings = []
    for b in bits:
        for name in names:
            drawing, (plain, _, given) = hasattr(policies.load(name), "seed"), name.partition(":")
            drawn = [int(given)] if given else range(seeds)
            settings += [Setting(plain, b, seed) for seed in drawn] if drawing else [Setting(name, b)]
    return list(dict.fromkeys(settings))


@dataclass(frozen=True)
class GradedAnswer:
    """What the model wrote. `tokens` counts it, the end token included."""

    text: str
    tokens: int
    right: bool


@dataclass(frozen=True)
class QueryResult:
    """One query under one setting."""

    bits: float
    bytes_per_token: int
    fidelity: Fidelity
    answer: GradedAnswer | None = None


@dataclass
class Query:
    """An item for one model, and what was measured of it."""

    item: Item
    encoded: Encoded
    blueprints: dict[Setting, Blueprint] = field(default_factory=dict)
    measured: dict[Setting, QueryResult] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return digest([self.encoded.prompt_ids, self.encoded.reference_ids])


@dataclass
class ComparisonResult:
    """All that was measured.

    Attributes:
        queries: each with every setting of `settings` and with `FULL`.
        settings: in the order asked for.
        skipped: one line for each setting that the store cannot run.
        left_out: names of items that are longer than the model's context.
    """

    queries: list[Query]
    settings: list[Setting]
    skipped: list[str]
    left_out: list[str]


class Comparison:
    """Prepares a comparison; `run` makes it.

    Args:
        engine: serves nobody else meanwhile.
        items: to ask.
        settings: to compare with 16 bits and each other.
        results: where measurements are kept.

    Raises:
        QBEError: no setting can be run, the store has no 16 bits, or no item fits the model's context.
    """

    def __init__(self, engine: Engine, items: Sequence[Item], settings: Sequence[Setting], results: Results) -> None:
        self.engine, self.results = engine, results
        self._table = as_served(engine.table, engine.core.pool.dtype)
        queries = [Query(item, encode(item, engine.tokenizer)) for item in items]
        context = engine.core.context or 1 << 40
        sizes = [(len(q.encoded.prompt_ids), len(q.encoded.reference_ids)) for q in queries]
        fits = [bool(p and r) and p + r < context for p, r in sizes]
        self.queries = [q for q, fit in zip(queries, fits, strict=True) if fit]
        self.left_out = [q.item.name for q, fit in zip(queries, fits, strict=True) if not fit]
        if not self.queries:
            raise QBEError(f"no query fits the context of {engine.name}, {context} tokens: give other --datasets")
        self.settings, self.skipped = [], list[str]()
        for setting in settings:
            try:
                engine.make_ready(setting.name)
                for query in self.queries:
                    query.blueprints[setting] = self._blueprint(query, setting)
                self.settings.append(setting)
            except QBEError as error:
                self.skipped.append(str(error))
        if not self.settings:
            raise QBEError(self.skipped[0])
        for query in self.queries:
            query.blueprints[FULL] = self._blueprint(query, FULL)

    @property
    def steps(self) -> int:
        """How often `run` calls `on_step`."""
        return sum((1 + (q.item.right is not None)) * (len(self.settings) + 1) for q in self.queries)

    def run(self, on_step: Callable[[], None] = lambda: None) -> ComparisonResult:
        """Measures every query under every setting, 16 bits included; `on_step` is called after each."""
        for query in self.queries:
            full, e = query.blueprints[FULL], query.encoded
            teacher = Teacher(self.engine.core, full, e.prompt_ids, e.reference_ids, self._table)
            for setting in (FULL, *self.settings):
                blueprint = query.blueprints[setting]
                fidelity, table = self._fidelity(query, teacher, setting), self._table
                query.measured[setting] = QueryResult(
                    blueprint.average_weight_bits(table) if fidelity.bits is None else fidelity.bits,
                    blueprint.bytes_per_token(table) if fidelity.bytes_per_token is None else fidelity.bytes_per_token,
                    fidelity,
                )
                on_step()
        asked = [q for q in self.queries if q.item.right is not None]
        for i in range(0, len(asked), TOGETHER):
            for setting in (FULL, *self.settings):
                self._answer(asked[i : i + TOGETHER], setting, on_step)
        return ComparisonResult(self.queries, self.settings, self.skipped, self.left_out)

    def _blueprint(self, query: Query, setting: Setting) -> Blueprint:
        """Of a policy that reads the prompt, which then runs here, the one that the answer has."""
        prompt, budget, name = query.encoded.prompt, setting.budget, setting.name
        if getattr(policies.load(name), "reads_prompt", False):
            return self.engine.generate(prompt, SamplingParams(max_tokens=1), budget=budget, policy=name).blueprint
        return self.engine.explain(prompt, _params(query), budget=budget, policy=name).blueprint

    def _fidelity(self, query: Query, teacher: Teacher, setting: Setting) -> Fidelity:
        blueprint = query.blueprints[setting]
        known = self.results.get("forced", query.key, blueprint.key)
        if known is None:
            self.engine.make_ready(setting.name)
            known = teacher.compare(blueprint).describe()
            self.results.put("forced", query.key, blueprint.key, known)
        return Fidelity(**known)

    def _answer(self, queries: Sequence[Query], setting: Setting, on_step: Callable[[], None]) -> None:
        """Answers that are not known yet, greedily and in shared steps."""
        keys = [digest([q.encoded.prompt_ids, q.encoded.stop, q.item.max_tokens]) for q in queries]
        blueprint_keys = [q.blueprints[setting].key for q in queries]
        known = [self.results.get("answer", k, key) for k, key in zip(keys, blueprint_keys, strict=True)]
        missing = [i for i, known_answer in enumerate(known) if known_answer is None]
        asked = [queries[i] for i in missing]
        requests = [Request(q.encoded.prompt, _params(q), setting.budget, setting.name) for q in asked]
        for i, result in zip(missing, self.engine.generate_batch(requests) if requests else [], strict=True):
            if result.error is not None:
                raise QBEError(f"{queries[i].item.name} with {setting.name} at {setting.bits:g} bits: {result.error}")
            known[i] = {"text": result.text, "tokens": len(result.token_ids)}
            self.results.put("answer", keys[i], blueprint_keys[i], known[i] or {})
        for query, known_answer in zip(queries, known, strict=True):
            assert known_answer is not None
            assert query.item.right is not None
            answer = GradedAnswer(known_answer["text"], known_answer["tokens"], query.item.right(known_answer["text"]))
            query.measured[setting] = replace(query.measured[setting], answer=answer)
            on_step()


def as_served(table: SiteTable, dtype: torch.dtype) -> SiteTable:
    """The table of a model in `dtype` as it is in a dtype of 16 bits: so is it served, though compared in float32."""
    sites = tuple(
        replace(s, bytes_at={g: n * 2 // dtype.itemsize if g == FULL_BITS else n for g, n in s.bytes_at.items()})
        for s in table
    )
    return replace(table, sites=sites)


def _params(query: Query) -> SamplingParams:
    """Greedy, as long as the item's answers may be."""
    return SamplingParams(max_tokens=max(1, query.item.max_tokens), stop=query.encoded.stop)
