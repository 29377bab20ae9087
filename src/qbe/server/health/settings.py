"""The table `[health]` of the settings file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict, StrictBool

from qbe.server.settings_table import SettingsTable

DetectorName = Literal[
    "live_kl", "top1_agreement", "opening_kl", "long_context_kl", "loops", "kv_raised", "grammar", "acceptance",
    "parity", "activation_range", "drift", "errors", "failures", "structured_failures", "retries", "cost_per_success",
]  # fmt: skip
_Share = Annotated[float, Strict(), Field(ge=0, le=1)]
_Nats = Annotated[float, Strict(), Field(gt=0)]
_Count = Annotated[int, Strict(), Field(ge=1, le=4096)]


class Health(SettingsTable):
    """What is watched of answers, and from where on something is done. The thresholds bear the detectors' names.

    Attributes:
        sample: share of finished answers that are scored by the widest gear while nobody waits; 0 scores none.
        tokens: of an answer that are scored at most.
        ladder: whether anything is done; false only tells.
        off: detectors that say nothing.
        window: answers that a detector looks back on.
        least: of these, without which it says nothing.
        hold_s: seconds without cause after which the last action is taken back; each time that it was too soon doubles
            them, up to 16 times.
        floor_bits: average bits that every tier gives at least once the floor is up; None: the highest of any tier.
        calibration: set or text that the model was calibrated on, which `drift` compares prompts with; empty: none.
        live_kl: nats a token. The default is 2.5 times what the lowest average of `flex` costs the model measured to
            suffer most from it.
        top1_agreement: least share of tokens with the same likeliest next token.
        opening_kl: nats a token, over an answer's first eight.
        long_context_kl: nats a token that prompts of `long_context` tokens and more cost beyond others.
        long_context: tokens of a prompt that counts as long.
        loops: share of answers that end in a loop.
        kv_raised: share of answers whose attention asked for more KV bits than were chosen.
        grammar: share of structured answers that could not go on or had to be closed.
        acceptance: least share of draft tokens that are right.
        parity: share of tokens of greedy answers with draft tokens that their own bits do not find likeliest.
        activation_range: times that the largest channels of prompts' inputs exceed those of the built-in calibration
            text, at the 95th percentile of sites.
        drift: population stability index of prompts' classes against the calibration set's.
        errors: share of answers that end in an error.
        failures: share of rated answers that failed, of those that clients told of (`POST /v1/qbe/feedback`).
        structured_failures: likewise, of structured answers.
        retries: retries an answer that clients told of.
        cost_per_success: cost of rated answers over those that succeeded, in the currency of `prices`; None: unwatched.
    """

    sample: _Share = 0.01
    tokens: _Count = 128
    ladder: StrictBool = True
    off: tuple[DetectorName, ...] = ()
    window: _Count = 64
    least: _Count = 16
    hold_s: Annotated[float, Strict(), Field(gt=0)] = 600.0
    floor_bits: Annotated[float, Strict(), Field(ge=1, le=16)] | None = None
    calibration: str = ""
    live_kl: _Nats = 0.5
    top1_agreement: _Share = 0.6
    opening_kl: _Nats = 0.5
    long_context_kl: _Nats = 0.1
    long_context: Annotated[int, Strict(), Field(ge=1)] = 2048
    loops: _Share = 0.25
    kv_raised: _Share = 0.8
    grammar: _Share = 0.1
    acceptance: _Share = 0.2
    parity: _Share = 0.01
    activation_range: Annotated[float, Strict(), Field(gt=1)] = 2.0
    drift: Annotated[float, Strict(), Field(gt=0)] = 0.25
    errors: _Share = 0.05
    failures: _Share = 0.3
    structured_failures: _Share = 0.2
    retries: Annotated[float, Strict(), Field(ge=0)] = 0.3
    cost_per_success: Annotated[float, Strict(), Field(gt=0)] | None = None
