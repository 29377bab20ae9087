"""What a server's metrics say since it began, and its records beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from qbe.errors import QBEError
from qbe.files import reason
from qbe.records.record import Record
from qbe.sites import FULL_BITS

_WAIT_S = 10.0
_MOST_BYTES = 64 << 20
_OURS = "qbe:average_weight_bits"


@dataclass(frozen=True)
class Observed:
    """A server since its start. What nothing was counted of is None.

    Attributes:
        model: its name.
        ttft_s, itl_s, queue_s: at the quantile; `itl_median_s` at one half.
        weight_bits, read_bits, kv_bits: averages of an answer, asked, read and of its KV cache.
        step_bytes: of weights that a step reads.
        memory: use -> bytes.
        kv_usage: part of the KV cache's bytes that is used now.
        running: answers in the batch now.
        preemptions: answers that gave their pages up.
        prefix_share: of the prompts' tokens that were in the cache.
        drafted, accepted: draft tokens.
        rated, succeeded, cost: what clients told of.
        live_kl: nats a token.
        activation_share: of the tokens, that had 8-bit activations (records).
        bytes_at: average bits -> bytes of weights for a token (records).
    """

    model: str = ""
    ttft_s: float | None = None
    itl_s: float | None = None
    itl_median_s: float | None = None
    queue_s: float | None = None
    weight_bits: float = float(FULL_BITS)
    read_bits: float = float(FULL_BITS)
    kv_bits: float = float(FULL_BITS)
    step_bytes: float | None = None
    memory: Mapping[str, float] = field(default_factory=dict)
    kv_usage: float = 0.0
    running: float = 0.0
    preemptions: float = 0.0
    prefix_share: float | None = None
    drafted: float = 0.0
    accepted: float = 0.0
    rated: float = 0.0
    succeeded: float = 0.0
    cost: float = 0.0
    live_kl: float | None = None
    activation_share: float | None = None
    bytes_at: Mapping[float, float] = field(default_factory=dict)


def fetch(source: str) -> str:
    """The text of `/metrics`: of a URL, or in a file. Raises QBEError."""
    scheme = source.partition("://")[0].lower() if "://" in source else ""
    try:
        if scheme in ("http", "https"):
            return _served(source).decode()
        if scheme:
            raise QBEError(f"--metrics {source} cannot be read: give an address that begins with http:// or https://")
        return Path(source).read_bytes().decode()
    except UnicodeDecodeError:
        raise QBEError(f"--metrics {source}: this is no text of Prometheus metrics") from None
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise QBEError(f"--metrics {source} cannot be read: {why}") from None


def _served(url: str) -> bytes:
    """What a server answers. Raises QBEError."""
    path = url if url.rstrip("/").endswith("/metrics") else f"{url.rstrip('/')}/metrics"
    try:
        with urlopen(path, timeout=_WAIT_S) as answer:
            raw: bytes = answer.read(_MOST_BYTES)
            if answer.length:  # a read of so many bytes does not say that there were fewer than announced
                raise IncompleteRead(raw, answer.length)
            return raw
    except HTTPError as error:
        hint = "; http.private hides it: give a file with its text" if error.code in (401, 403) else ""
        raise QBEError(f"--metrics {url}: the server answers {error.code} {error.reason}{hint}") from None
    except (OSError, ValueError, HTTPException) as error:
        cause = getattr(error, "reason", error)  # an URLError's is an error or a text
        if isinstance(cause, TimeoutError):
            why = f"there was no answer for {_WAIT_S:g} s; check that this is the address of a 'qbe serve'"
        else:
            said = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
            why = f"{said}; check the address, and that the server runs"
        raise QBEError(f"--metrics {url} cannot be reached: {why}") from None


def observe(text: str, quantile: float, records: Iterable[Record] = ()) -> Observed:
    """Reads metrics in Prometheus's text form.

    Raises:
        QBEError: it is no such text, or not of `qbe serve`.
    """
    try:
        families = {f.name: f for f in text_string_to_metric_families(text)}
    except ValueError as error:
        raise QBEError(f"--metrics: this is no text of Prometheus metrics: {error}") from None
    if _OURS not in families:
        raise QBEError(f"--metrics: there is no {_OURS}: give the address or text of a 'qbe serve'")
    models = sorted({s.labels.get("model_name", "") for s in families[_OURS].samples})
    if len(models) > 1:
        raise QBEError(f"--metrics: these are of several models ({', '.join(models)}): give those of one server")

    def total(name: str, **labels: str) -> float:
        family = families.get(name)
        return 0.0 if family is None else _sum(family, f"{name}_total", labels)

    def now(name: str) -> float:
        family = families.get(name)
        return 0.0 if family is None else _sum(family, name, {})

    def at(name: str, q: float) -> float | None:
        return _quantile(families.get(name), q)

    def mean(name: str, default: float) -> float:
        family = families[name]
        count = _sum(family, f"{name}_count", {})
        return _sum(family, f"{name}_sum", {}) / count if count else default

    steps = _sum(families["vllm:iteration_tokens_total"], "vllm:iteration_tokens_total_count", {})
    queried, scored = total("vllm:prefix_cache_queries"), total("qbe:scored_tokens")
    memory = {s.labels["use"]: _counted(s) for s in families["qbe:memory_bytes"].samples}
    model = next(iter(models), "")
    share, bytes_at = _of_records(records, model)
    return Observed(
        model=model, ttft_s=at("vllm:time_to_first_token_seconds", quantile),
        itl_s=at("vllm:inter_token_latency_seconds", quantile),
        itl_median_s=at("vllm:inter_token_latency_seconds", 0.5),
        queue_s=at("vllm:request_queue_time_seconds", quantile),
        weight_bits=mean(_OURS, FULL_BITS), read_bits=mean("qbe:read_weight_bits", FULL_BITS),
        kv_bits=mean("qbe:average_kv_bits", FULL_BITS),
        step_bytes=total("qbe:weight_bytes") / steps if steps else None, memory=memory,
        kv_usage=now("vllm:kv_cache_usage_perc"), running=now("vllm:num_requests_running"),
        preemptions=total("vllm:num_preemptions"),
        prefix_share=total("vllm:prefix_cache_hits") / queried if queried else None,
        drafted=total("vllm:spec_decode_num_draft_tokens"), accepted=total("vllm:spec_decode_num_accepted_tokens"),
        rated=total("qbe:feedback", outcome="success") + total("qbe:feedback", outcome="failure"),
        succeeded=total("qbe:feedback", outcome="success"), cost=total("qbe:feedback_cost"),
        live_kl=total("qbe:scored_kl_nats") / scored if scored else None, activation_share=share, bytes_at=bytes_at,
    )  # fmt: skip


def _of_records(records: Iterable[Record], model: str) -> tuple[float | None, dict[float, float]]:
    """`activation_share` and `bytes_at`."""
    eight = tokens = 0
    bytes_at: dict[float, float] = {}
    for r in records:
        if r.model == model and r.average_weight_bits is not None:
            eight += r.tokens_by_activation_bits.get(8, 0)
            tokens += sum(r.tokens_by_activation_bits.values())
            bytes_at[r.average_weight_bits] = float(r.bytes_per_token)
    return eight / tokens if tokens else None, bytes_at


def _counted(sample: Sample) -> float:
    """Its value. Raises QBEError for what cannot have been counted."""
    if not 0 <= sample.value < math.inf:
        raise QBEError(f"--metrics: {sample.name} is {sample.value:g}, which no server counts: read them again")
    return sample.value


def _sum(family: Metric, name: str, labels: Mapping[str, str]) -> float:
    return math.fsum(
        _counted(s) for s in family.samples
        if s.name == name and all(s.labels.get(k) == v for k, v in labels.items())
    )  # fmt: skip


def _quantile(family: Metric | None, q: float) -> float | None:
    """As `histogram_quantile`: even within a bucket, the last bound for what lies beyond. None without a sample."""
    bounds: dict[float, float] = {}
    for s in () if family is None else family.samples:
        if s.name.endswith("_bucket"):
            bound = float(s.labels["le"])
            bounds[bound] = bounds.get(bound, 0.0) + _counted(s)
    count = bounds.get(math.inf, 0.0)
    if not count:
        return None
    below, before = 0.0, 0.0
    for bound, seen in sorted(bounds.items()):
        if seen >= q * count:
            if bound == math.inf:
                return below
            return below + (bound - below) * (q * count - before) / (seen - before)
        below, before = bound, seen
    return below
