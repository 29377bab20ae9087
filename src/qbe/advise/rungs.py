"""The rungs, from the mildest to the one that costs most quality, and what each can do at best.

Predictions are bounds: a step that is bound by memory takes as long as its bytes, a time that was spent waiting may
vanish, and no more. Where nothing that was measured says, there is no number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from qbe.advise.observed import Observed
from qbe.sites import FULL_BITS

Kind = Literal["queue", "prefill", "itl", "memory", "cost"]  # of a bottleneck that fewer bytes can help
_SCALES = 0.25  # bits of scales and offsets that a weight of a gear is read with, at groups of 64
_LOW, _NATIVE, _KV_LOW = 4.0, 8.0, 4.0
_FEW = 4  # answers at once up to which draft tokens ride along
_FULL = 0.9  # of the KV cache, from where on answers wait for pages


@dataclass(frozen=True)
class Prediction:
    """What a rung can do.

    Attributes:
        value: of what is bounded, at best, in the same unit; None: nothing measured says.
        step_bytes: of weights that a step then reads; None where that does not change.
        memory: bytes in all; None where that does not change.
    """

    value: float | None = None
    step_bytes: float | None = None
    memory: float | None = None


@dataclass(frozen=True)
class Rung:
    """One.

    Attributes:
        in_use: whether the server is there already, as far as that kind of bottleneck goes.
        do: what to set.
        suite: what must pass before it serves.
        predict: of a bottleneck's value; None where it is no help there.
        can: whether QBE has it.
    """

    name: str
    in_use: Callable[[Observed, Kind], bool]
    do: str
    suite: str
    predict: Callable[[Observed, Kind, float], Prediction | None]
    can: bool = True


def read_bits(bits: float) -> float:
    """Bits that a weight is read with, scales included; an original has none."""
    return bits if bits >= FULL_BITS else bits + _SCALES


def bytes_ratio(seen: Observed, bits: float) -> float:
    """Bytes of a step at this average over those now: by the records where two of them tell, else by bits."""
    known = sorted(seen.bytes_at.items())
    if len(known) >= 2 and known[-1][0] - known[0][0] > 0.5:
        (b0, n0), (b1, n1) = known[0], known[-1]
        slope = (n1 - n0) / (b1 - b0)
        now = n0 + slope * (seen.read_bits - b0)
        return max(0.0, (n0 + slope * (bits - b0)) / now)
    return read_bits(bits) / read_bits(seen.read_bits)


def _total(seen: Observed) -> float:
    return sum(seen.memory.values())


def _scheduler(seen: Observed, kind: Kind, value: float) -> Prediction | None:
    if kind == "queue" and seen.kv_usage < _FULL and seen.queue_s is not None:
        return Prediction(max(0.0, value - seen.queue_s))
    if kind == "prefill":
        return Prediction()  # what of the prompts could be found in the cache no metric tells
    if kind == "itl" and seen.itl_median_s is not None:
        return Prediction(seen.itl_median_s)  # tokens that shared no step with a prompt
    if kind == "memory" and seen.memory.get("kv"):
        spare = seen.memory["kv"] * max(0.0, 1 - seen.kv_usage / _FULL)
        return Prediction(value - spare, memory=value - spare)
    return None


def _at_bits(seen: Observed, kind: Kind, value: float, bits: float) -> Prediction | None:
    ratio = bytes_ratio(seen, bits)
    nbytes = None if seen.step_bytes is None else seen.step_bytes * ratio
    if kind in ("itl", "queue"):
        return Prediction(value * ratio, nbytes)
    if kind == "cost":
        return Prediction(value * bits / seen.weight_bits, nbytes)
    return None


def _native(seen: Observed, kind: Kind, value: float) -> Prediction | None:
    if kind == "prefill":
        return None if seen.activation_share else Prediction(value / 2)  # twice the rate at best
    if kind == "memory":
        memory = value - seen.memory.get("originals", 0.0)
        return Prediction(memory, memory=memory)
    return _at_bits(seen, kind, value, _NATIVE) if seen.read_bits > _NATIVE else None


def _kv(seen: Observed, kind: Kind, value: float) -> Prediction | None:
    part, kv = _KV_LOW / seen.kv_bits, seen.memory.get("kv", 0.0)
    if kind == "queue" and (seen.kv_usage >= _FULL or seen.preemptions) and seen.queue_s is not None:
        return Prediction(max(0.0, value - seen.queue_s))
    if kind == "itl" and seen.step_bytes and kv:
        read = kv * seen.kv_usage
        return Prediction(value * (seen.step_bytes + read * part) / (seen.step_bytes + read))
    if kind == "memory":
        return Prediction(value - kv * (1 - part), memory=value - kv * (1 - part))
    return None


def _speculation(seen: Observed, kind: Kind, value: float) -> Prediction | None:
    return Prediction() if kind == "itl" and seen.running <= _FEW else None


def _four(seen: Observed, kind: Kind, value: float) -> Prediction | None:
    if kind == "memory":
        weights, kept = seen.memory.get("weights", 0.0), seen.memory.get("originals", 0.0)
        stored = _NATIVE + 3 * _SCALES  # bits of a weight in a store of three gears
        memory = value - kept - weights * (1 - read_bits(_LOW) / stored)
        return Prediction(memory, memory=memory)
    return _at_bits(seen, kind, value, _LOW)


def _is_native(seen: Observed, kind: Kind) -> bool:
    if kind == "prefill":
        return bool(seen.activation_share)
    return not seen.memory.get("originals") if kind == "memory" else seen.read_bits <= _NATIVE + 0.5


_SUITE = "qbe regress --baseline MODEL --candidate CANDIDATE --serve serve.toml -o verdict/"
RUNGS = (
    Rung(
        "scheduler and prefix cache", lambda *_: False,
        "raise --max-sequences and tiers.*.reserved where answers wait, lower tiers.*.prompts where prompts hold "
        "tokens up, share prefixes (keys.*.shared_prefixes), size the cache by its use (--kv-tokens)",
        "none: answers stay what they are; qbe bench serve shows what it brings", _scheduler,
    ),
    Rung(
        "8-bit native", _is_native,
        'tiers.*.bits up to 8 and activation_bits = 8; [weights] originals = "none"',
        f"{_SUITE} (logic, schema, tools)", _native,
    ),
    Rung(
        "KV cache", lambda s, _: s.kv_bits <= 5,
        "qbe.kv_bits = 4, or leave it to the policy; lower --kv-tokens where memory is short",
        f"{_SUITE} (retrieval)", _kv,
    ),
    Rung(
        "speculation", lambda s, _: s.drafted > 0, "qbe serve --speculate, and qbe.speculate in requests",
        f"{_SUITE} (runtime, latency); qbe bench speculate", _speculation,
    ),
    Rung(
        "4 bits", lambda s, kind: s.weight_bits <= 5 and kind != "memory",
        "service_tier flex, or tiers.*.bits from 4.3; [weights] most_bits = 4 where memory is short",
        f"{_SUITE} (all domains)", _four,
    ),
    Rung("sparsity", lambda *_: False, "QBE prunes nothing", "", lambda *_: None, can=False),
)  # fmt: skip
