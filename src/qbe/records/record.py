"""One record: what a request asked for, what it was given and what that cost. Pure data.

Prices, the proxy scorer and the reports are computed from records alone, so a record holds the
features of a prompt, never its text.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from qbe.blueprint import shortest
from qbe.errors import QBEError


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True, kw_only=True)
class Query:
    """What the analysis made of the prompt.

    Attributes:
        score: complexity in [0, 1]; None when the query was not analysed.
        prompt_class: class of the query; None when it was not analysed.
        analysis_tier: which analysis made the profile: 1 thresholds, 2 trained classifier, 3 sentence encoder as well.
        features: name -> value, what the score was computed from.
        cluster: of the sentence encoder's clusters, the nearest one; None below tier 3.
    """

    score: float | None = None
    prompt_class: str | None = None
    analysis_tier: int | None = None
    features: Mapping[str, float] = field(default_factory=dict)
    cluster: int | None = None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was asked for, and the blueprint that was chosen.

    Attributes:
        policy: name of the policy that chose the blueprint.
        tier: the budget's tier.
        budget_bits: average bits the caller asked for; None when it was left to tier and score.
        blueprint_key: `Blueprint.key` of the blueprint it began with.
        average_weight_bits: mean gear over the weights of the nested sites, bits per weight.
        weight_bits, activation_bits: one per nested site, in plan order.
        kv_bits: one per decoder layer: of all its key heads, or a list with one for each. Those of the blueprint it
            began with; pages written later may have more. 64 is added where keys are in TurboQuant's form.
        first_kv_bits: the fewest of any key head in the first page; None where that had `kv_bits`, and in older files.
        state_bits: of the recurrent state, one per decoder layer; None where all had 32, and in older files.
        kv_error: what attention was bounded to; None when it was not.
        bytes_per_token: bytes of weights and scales that decoding one token reads at batch 1.
        cache: what the blueprint cache did: `exact` or `near` (hits), `miss`; None where it was not asked.
        asked_weight_bits: bits per weight that the query's own score gives; its conversation may keep others. None in
            files of older versions.
    """

    policy: str
    tier: str
    budget_bits: float | None = None
    blueprint_key: str | None = None
    average_weight_bits: float | None = None
    weight_bits: Sequence[int] = ()
    activation_bits: Sequence[int] = ()
    kv_bits: Sequence[int | Sequence[int]] = ()
    first_kv_bits: int | None = None
    state_bits: Sequence[int] | None = None
    kv_error: float | None = None
    bytes_per_token: int = 0
    cache: str | None = None
    asked_weight_bits: float | None = None


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the model did for it.

    Attributes:
        prompt_tokens, completion_tokens: tokens read and tokens written.
        bytes_moved: bytes of weights and scales over all steps of the request, as they were read.
        tokens_by_bits: gear -> tokens computed at it.
        tokens_by_activation_bits: bits of the activations -> tokens computed at them; empty in records of older files.
        pages_read, pages_raised, host_bytes: see `qbe.engine.result.Result`; None in a file of version 1.
        drafted_tokens, accepted_tokens: see `qbe.engine.result.Result`; None in files of older versions.
        read_weight_bits: as `average_weight_bits`, of what was read: more where steps shared it (`rows = "shared"`);
            None in files of older versions.
        precision_misses: times that a token asked a site for more than was on the device; None in older files.
        cached_tokens, cached_weight_bits: likewise: of the prompt, and at how many bits others had computed them.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    bytes_moved: int = 0
    tokens_by_bits: Mapping[int, int] = field(default_factory=dict)
    tokens_by_activation_bits: Mapping[int, int] = field(default_factory=dict)
    pages_read: int | None = None
    pages_raised: int | None = None
    host_bytes: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    read_weight_bits: float | None = None
    cached_tokens: int | None = None
    cached_weight_bits: float | None = None
    precision_misses: int | None = None


@dataclass(frozen=True, kw_only=True)
class Difficulty:
    """How hard the answer was to predict.

    Attributes:
        entropies: of the output distribution, nats per token; None when not measured.
        margins: by how much the likeliest token's logit exceeded the next one's, per token; None when not measured.
        refreshes: where the blueprint was exchanged and why, as `qbe.refresh.monitor.Refresh.describe`; None for never.
    """

    entropies: Sequence[float] | None = None
    margins: Sequence[float] | None = None
    refreshes: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Times:
    """Milliseconds spent in each part."""

    analysis_ms: float = 0.0
    policy_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Record(Query, Choice, Work, Difficulty, Times):
    """A finished, failed or cancelled request: all of the above, in one flat row. What it never reached keeps its
    default.

    Attributes:
        id: 32 hex digits.
        time: when it ended, UTC, ISO 8601.
        model: name of the model.
        finish_reason: `stop`, `length`, `cancelled` or `error`.
        error: what went wrong, one line; None when nothing did.
        quality: how far the answer was from the widest gear's (`qbe.engine.sampling.answer_scoring.AnswerScore`): `kl`
            (nats a token), `top1`, `flip_margin` (nats), of so many `tokens` from the `first` on, against
            `reference_bits`; `windows` of 32 tokens, each with its `kl`, mean entropy and mean margin; None where it
            was not scored, and in older files. It is written after the rest.
        arm: of a server's rollout, `stable` or `candidate`; None without one, and in older files.
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    time: str = field(default_factory=_now)
    model: str
    finish_reason: str
    error: str | None = None
    quality: Mapping[str, Any] | None = None
    arm: str | None = None

    def describe(self) -> dict[str, Any]:
        """The record as JSON, in the order of the fields."""
        return {name: _plain(getattr(self, name)) for name in FIELDS}

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Record:
        """The record that `describe` (possibly through JSON) was made from."""
        return cls(**{k: _DECODE.get(k, _same)(v) for k, v in described.items()})

    def to_row(self) -> tuple[Any, ...]:
        """One SQLite value per field; lists and mappings as JSON text.

        Raises:
            QBEError: a value that JSON or SQLite cannot hold, such as NaN or an integer above 64 bits.
        """
        return tuple(_column(name, getattr(self, name)) for name in FIELDS)

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Record:
        """The record of a row that `to_row` made."""
        pairs = zip(FIELDS, row, strict=True)
        return cls.of({k: json.loads(v) if k in JSON_FIELDS and v is not None else v for k, v in pairs})


@dataclass(frozen=True)
class Quality:
    """What becomes known of an answer after its record was written.

    Attributes:
        id: of the record.
        quality: as `Record.quality`.
    """

    id: str
    quality: Mapping[str, Any]

    def to_column(self) -> Any:
        """The SQLite value. Raises QBEError as `Record.to_row`."""
        return _column("quality", self.quality)


# In the order of the columns and of the JSON keys, which files keep: a new field comes last, whatever its group.
FIELDS = (
    "id", "time", "model", "policy", "tier", "budget_bits", "prompt_tokens", "completion_tokens", "finish_reason",
    "score", "prompt_class", "analysis_tier", "features", "blueprint_key", "average_weight_bits", "weight_bits",
    "activation_bits", "kv_bits", "bytes_per_token", "bytes_moved", "tokens_by_bits", "tokens_by_activation_bits",
    "entropies", "analysis_ms", "policy_ms", "prefill_ms", "decode_ms", "error", "kv_error", "pages_read",
    "pages_raised", "host_bytes", "cluster", "cache", "margins", "refreshes", "drafted_tokens", "accepted_tokens",
    "first_kv_bits", "read_weight_bits", "asked_weight_bits", "cached_tokens", "cached_weight_bits",
    "precision_misses", "state_bits", "quality", "arm",
)  # fmt: skip
JSON_FIELDS = frozenset(
    {
        "features", "weight_bits", "activation_bits", "kv_bits", "tokens_by_bits", "tokens_by_activation_bits",
        "entropies", "margins", "refreshes", "state_bits", "quality",
    }
)  # fmt: skip


def _plain(value: Any) -> Any:
    """Mappings and sequences of any kind as the two that JSON knows."""
    if isinstance(value, Mapping):
        return dict(value)
    return [_plain(v) for v in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


def _same(value: Any) -> Any:
    return value


# What JSON loses: integer keys become strings, tuples become lists.
_DECODE: dict[str, Callable[[Any], Any]] = {
    "tokens_by_bits": lambda d: {int(k): v for k, v in d.items()},
    "tokens_by_activation_bits": lambda d: {int(k): v for k, v in (d or {}).items()},
    "weight_bits": tuple,
    "activation_bits": tuple,
    "kv_bits": lambda x: tuple(shortest(tuple(b)) if isinstance(b, Sequence) else b for b in x),
    "entropies": lambda x: None if x is None else tuple(x),
    "margins": lambda x: None if x is None else tuple(x),
    "state_bits": lambda x: None if x is None else tuple(x),
    "refreshes": lambda x: None if x is None else tuple(x),
}


def _column(name: str, value: Any) -> Any:
    if name in JSON_FIELDS:
        if value is None:
            return None
        try:
            return json.dumps(_plain(value), allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError) as e:
            raise QBEError(f"the record's {name} cannot be stored: {e}; give finite numbers") from e
    if value is not None and not isinstance(value, str | int | float):  # a tensor or NumPy scalar would become a blob
        raise QBEError(f"the record's {name} is a {type(value).__name__}; give a plain number or text")
    if isinstance(value, float) and not -float("inf") < value < float("inf"):
        raise QBEError(f"the record's {name} is {value}; give a finite number")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise QBEError(f"the record's {name} is {value}, which does not fit in 64 bits")
    # An error may quote bytes that were no UTF-8 (lone surrogates), which SQLite refuses.
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
