"""What `qbe bench serve` measures, and how much of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from qbe.models import DEFAULT_MODEL

PARTS = ("bound", "overhead", "priority", "schemas", "soak")


@dataclass(frozen=True)
class ServeSizes:
    """What is measured.

    Attributes:
        model: what `qbe serve --model` takes.
        policy: of the servers and the engine.
        data: folder of traces, texts and schemas.
        parts: of `PARTS`.
        trace: of `qbe.bench.traffic.TRACES`.
        shrink: what the lengths of the trace are divided by.
        shares: tier -> part of the requests.
        settings: TOML of the adaptive server; empty: its defaults.
        requests: of each trial.
        slack: the bound, in times of what answers of a server at 16 bits take that are alone.
        halvings: of the interval of rates.
        rounds: searches, each with another stretch of the trace; rounds of the overhead.
        batch: answers at once, of the overhead and of the schemas.
        tokens: of an answer of the overhead.
        threads: of the engine and of the server, for the overhead; 0 leaves them as they are.
        probes: priority requests, unloaded and again under the flood.
        flood: flex requests that are always there.
        schemas, schema_tokens: how many, and tokens of an answer at most.
        connections, hang_up: of the soak, and the part of them that hang up.
        soak_s: seconds that an hour of the trace is replayed in.
        soak_shrink: what lengths are divided by then.
    """

    model: str | Path = DEFAULT_MODEL
    policy: str = "tiered"
    data: Path | None = None
    parts: tuple[str, ...] = PARTS
    trace: str = "conv"
    shrink: float = 8.0
    shares: Mapping[str, float] = field(default_factory=lambda: {"flex": 0.5, "default": 0.3, "priority": 0.2})
    settings: str = ""
    requests: int = 48
    slack: float = 5.0
    halvings: int = 3
    rounds: int = 3
    batch: int = 8
    tokens: int = 96
    threads: int = 1
    probes: int = 100
    flood: int = 24
    schemas: int = 150
    schema_tokens: int = 192
    connections: int = 2000
    hang_up: float = 0.5
    soak_s: float = 600.0
    soak_shrink: float = 16.0
