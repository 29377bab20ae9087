"""QBE's numbers in vLLM's registry, where `/metrics` shows them beside its own. Counted where requests are admitted."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from qbe.blueprint import Blueprint
from qbe.sites import SiteTable
from qbe.vllm.blueprint_payload import BlueprintPayload

REQUESTS = Counter("qbe:requests", "Requests that got a blueprint.", ["policy", "tier"])
BITS = Histogram(
    "qbe:weight_bits", "Average bits a weight of the blueprints chosen.", ["tier"],
    buckets=(4, 4.5, 5, 5.5, 6, 6.5, 7, 7.5, 8, 16),
)  # fmt: skip
SECONDS = Histogram(
    "qbe:choice_seconds", "Time of analysis and policy for a request.", buckets=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 1e-1, 1)
)


def admitted(payload: BlueprintPayload, blueprint: Blueprint, table: SiteTable) -> None:
    """Count a request that got a blueprint."""
    tier = payload.budget["tier"]
    name = payload.policy.partition(":")[0]  # without a seed: whoever asks would make a series for each
    REQUESTS.labels(name, tier).inc()
    BITS.labels(tier).observe(blueprint.average_weight_bits(table))
    SECONDS.observe((payload.analysis_ms + payload.policy_ms) / 1e3)
