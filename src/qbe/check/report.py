"""What a check came to: one finding for each thing that was looked at, and a status for each of seven layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Layer = Literal["model", "format", "kernels", "hardware", "decoding", "serving policy", "validation"]
Status = Literal["pass", "warn", "fail"]
LAYERS: tuple[Layer, ...] = (
    "model", "format", "kernels", "hardware", "decoding", "serving policy", "validation",
)  # fmt: skip
_WORST: tuple[Status, ...] = ("fail", "warn", "pass")


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        layer: it belongs to.
        status: `fail`: it will not run, or not as asked; `warn`: it will, but slower, or unproven.
        saw: what is there.
        remedy: what to do; "" for a pass.
    """

    layer: Layer
    status: Status
    saw: str
    remedy: str = ""


def status_of(findings: Sequence[Finding]) -> Status | Literal["not run"]:
    """The worst; `not run` where nothing could be looked at."""
    found = {finding.status for finding in findings}
    return next((status for status in _WORST if status in found), "not run")


def describe(findings: Sequence[Finding]) -> dict[str, Any]:
    """As JSON: the layers in order, each with its findings."""
    layers = []
    for layer in LAYERS:
        mine = [finding for finding in findings if finding.layer == layer]
        layers.append({"layer": layer, "status": status_of(mine), "findings": [_without_layer(f) for f in mine]})
    return {"status": status_of(findings), "layers": layers}


def _without_layer(finding: Finding) -> dict[str, str]:
    return {key: value for key, value in asdict(finding).items() if key != "layer"}
