"""What can go wrong, what notices it, and what is done: pure data, of which the table in the documentation is made.

Detectors look at answers (all, or those that were scored) and at what clients tell of them. Each says a number; beyond
its threshold it trips, and the ladder takes its action, or the next one up where that is taken already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qbe.server.health.settings import DetectorName

Action = Literal["arm_aborted", "speculation_off", "kv_16_bits", "floor_up", "widest_gear"]
Source = Literal["every answer", "scored answers", "feedback", "prompts"]


@dataclass(frozen=True)
class Rung:
    """An action of the ladder.

    Attributes:
        what: is done, to requests that come from then on.
        alert: its rule in `deploy/helm/qbe/files/alerts.yml`.
        means: for whoever is called, and `todo`, what to do.
    """

    what: str
    alert: str
    means: str
    todo: str


LADDER: dict[Action, Rung] = {
    "arm_aborted": Rung(
        "no request goes to the rollout's candidate any more", "QBEArmAborted",
        "the candidate is worse than the stable arm, or a detector tripped while it was tried",
        "see in `GET /v1/qbe/rollout` which metric it was; try another candidate, or resume by `POST /v1/qbe/rollout`",
    ),
    "speculation_off": Rung(
        "requests run without draft tokens", "QBESpeculationOff",
        "draft tokens are mostly wrong, or changed what greedy answers say",
        "look at `acceptance` and `parity`; measure with `qbe bench speculate`; where parity tripped, report a bug "
        "with the request's record",
    ),
    "kv_16_bits": Rung(
        "pages of the KV cache have 16 bits", "QBEKVFull",
        "long prompts lose more than short ones, or attention is unlike that of the calibration text",
        "run `qbe eval needle` at the served KV bits; quantise again with a set that has prompts as long as the "
        "traffic's; the cache holds fewer tokens meanwhile: watch `vllm:kv_cache_usage_perc`",
    ),
    "floor_up": Rung(
        "tiers give at least `floor_bits`", "QBEFloorUp",
        "answers differ too much from the widest gear's, or clients say that they fail",
        "run `qbe regress` against the 16-bit model; calibrate on the traffic; raise the tiers' bits in the settings",
    ),
    "widest_gear": Rung(
        "every answer is at the widest gear, with KV and activations of 16 bits", "QBEWidestGear",
        "what is below did not help, or steps fail",
        "run `qbe check` and `qbe info --verify`; roll back (`qbe rollback`) to the last release that passed",
    ),
}  # fmt: skip
"""From the lowest rung to the highest."""

RUNGS: tuple[Action, ...] = tuple(LADDER)[1:]
"""Those that are held for a while. A candidate, while there is one, is aborted first, and stays so."""


@dataclass(frozen=True)
class Detector:
    """Something that is counted.

    Attributes:
        what: its number, in one line.
        source: what it looks at.
        action: where it begins on the ladder; None: it only tells.
        below: whether it trips below its threshold rather than above.
    """

    what: str
    source: Source
    action: Action | None
    below: bool = False


DETECTORS: dict[DetectorName, Detector] = {
    "live_kl": Detector(
        "divergence from the widest gear, nats a token, of the worst tier", "scored answers", "floor_up"
    ),
    "top1_agreement": Detector(
        "share of tokens at which both find the same next one likeliest, of the worst tier", "scored answers",
        "floor_up", below=True,
    ),
    "opening_kl": Detector(
        "divergence in an answer's first eight tokens, in which it is decided whether it refuses", "scored answers",
        "floor_up",
    ),
    "long_context_kl": Detector(
        "divergence after long prompts beyond that after others, nats a token", "scored answers", "kv_16_bits"
    ),
    "loops": Detector(
        "share of answers that end in a loop of tokens; small models do so at 16 bits, too", "every answer", None
    ),
    "kv_raised": Detector(
        "share of answers whose attention asked for more KV bits while they were written", "every answer", "kv_16_bits"
    ),
    "grammar": Detector(
        "share of structured answers whose grammar was exhausted, looped or grew too long", "every answer", "floor_up"
    ),
    "acceptance": Detector("share of draft tokens that were right", "every answer", "speculation_off", below=True),
    "parity": Detector(
        "share of tokens of greedy answers with draft tokens that are not what their own bits find likeliest",
        "scored answers", "speculation_off",
    ),
    "activation_range": Detector(
        "times that inputs of sites exceed those of the calibration text, by their largest channels, at the 95th "
        "percentile of sites", "scored answers",
        "floor_up",
    ),
    "drift": Detector(
        "population stability index of prompts' classes against the calibration set's", "prompts", None
    ),
    "errors": Detector("share of answers that end in an error", "every answer", "widest_gear"),
    "failures": Detector("share of rated answers that failed", "feedback", "floor_up"),
    "structured_failures": Detector("share of rated structured answers that failed", "feedback", "floor_up"),
    "retries": Detector("retries for each answer told of", "feedback", "floor_up"),
    "cost_per_success": Detector("cost of rated answers over those that succeeded", "feedback", "floor_up"),
}  # fmt: skip


@dataclass(frozen=True)
class Syndrome:
    """A way in which an optimisation fails.

    Attributes:
        name: as in maps of failure modes.
        detectors: that notice it here.
        why_not: where there are none, why; else what they do not see.
    """

    name: str
    detectors: tuple[DetectorName, ...] = ()
    why_not: str = ""


SYNDROMES = (
    Syndrome("Fluent degradation", ("live_kl", "top1_agreement", "loops", "failures")),
    Syndrome(
        "Outlier clipping", ("activation_range",),
        "8-bit activations have a scale for each row and group of inputs, so that nothing is clipped; what can be off "
        "is what codes were chosen for",
    ),
    Syndrome("Calibration-set mismatch", ("drift", "activation_range"), "`drift` needs `health.calibration`"),
    Syndrome(
        "Dequantisation in the critical path",
        why_not="kernels read packed codes, and there is no other path to fall back to; whether they are fast is "
        "measured before traffic (`qbe check --smoke`, the gate on latency of `qbe regress`)",
    ),
    Syndrome("Kernel incompatibility", ("errors",), "what is wrong before traffic `qbe check` finds"),
    Syndrome("Speculation overhead", ("acceptance",)),
    Syndrome(
        "Speculative parity drift", ("parity",),
        "of sampled answers no token is certain, so that only greedy ones are replayed",
    ),
    Syndrome("Parser deadlock", ("grammar",), "an answer that loops is closed by its grammar's own way to an end"),
    Syndrome("Semantic-validity gap", ("structured_failures",), "whether a field is true only its reader can tell"),
    Syndrome("Long-context divergence", ("long_context_kl", "kv_raised")),
    Syndrome(
        "Pruning collapse",
        why_not="QBE prunes nothing, and a checkpoint that was pruned is its own widest gear: `qbe regress` compares "
        "it with the dense one",
    ),
    Syndrome("Safety boundary shift", ("opening_kl",), "which answers are refused `qbe regress` counts (XSTest)"),
    Syndrome("Cost-per-success regression", ("cost_per_success", "retries")),
    Syndrome(
        "Fallback failure",
        why_not="the ladder itself: `qbe:health_exhausted` is 1, and QBEHealthExhausted fires, where its last rung "
        "does not help",
    ),
)  # fmt: skip
