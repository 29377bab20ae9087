"""The layers that are about where and how it is served: kernels, hardware, decoding, serving policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from qbe.check.report import Finding, Layer
from qbe.check.subject import Subject
from qbe.compatibility import ENGINE, REQUEST, Situation, limit
from qbe.errors import QBEError
from qbe.hardware import HardwareProfile, NumberFormat
from qbe.server import contract
from qbe.server.settings import TIER_NAMES, Settings
from qbe.store.digests import kernels_digest
from qbe.store.placement import place_of

RUNTIMES = ("qbe", "vllm")
_FULL = 0.95  # of a device's memory, beyond which steps, graphs and the driver's own find little room
_FASTER = ("compile", "speculate")  # of options that are left out in silence, those that somebody would miss


def kernels_layer(subject: Subject, profile: HardwareProfile, runtime: str) -> Iterator[Finding]:
    """Whether kernels made for the device read the store."""
    cuda = profile.capability is not None
    mine: Layer = "kernels"
    if not cuda and "avx2" not in profile.extensions:
        yield Finding(mine, "warn", f"{profile.name} has no AVX2: plain C reads the store", "choose another CPU")
    else:
        yield Finding(mine, "pass", f"{'Triton' if cuda else 'C'} kernels for {profile.family}")
    if subject.dtype is torch.bfloat16 and cuda and NumberFormat.BF16 not in profile.formats:
        yield Finding(mine, "warn", f"{profile.name} does not multiply bfloat16 natively", "serve with --dtype float16")
    if subject.situation.experts and (cuda or runtime == "vllm"):
        where = "inside vLLM" if runtime == "vllm" else "on a GPU"
        yield Finding(mine, "warn", f"experts run at 16 bits {where}", "plan memory and speed for 16-bit experts")
    if subject.situation.latent and cuda:
        yield Finding(mine, "warn", "latent attention on a GPU runs in torch, without CUDA graphs",
                      "expect slower steps, or choose another model")  # fmt: skip
    if subject.made is not None and subject.made["kernels"] != kernels_digest():
        yield Finding(mine, "warn", "the store was made with other kernels than this QBE has",
                      "run 'qbe regress' with this version before serving")  # fmt: skip


def hardware_layer(
    subject: Subject, profile: HardwareProfile, settings: Settings, runtime: str, here: bool
) -> Iterator[Finding]:
    """Whether it fits, and has run on such a device."""
    weights, gib = settings.weights, 1 << 30
    device = torch.device("cpu" if profile.capability is None else "cuda")
    if weights.device_memory is not None:
        yield Finding("hardware", "pass", f"weights and KV cache are bounded to {weights.device_memory}")
    else:
        memory = subject.memory(profile, weights, here)
        on_host = device.type == "cuda" and place_of(weights.originals, device) == "host"
        kept = memory.weights + (0 if on_host else memory.originals)
        taken = kept + (0 if runtime == "vllm" else memory.kv + memory.states)
        share = taken / profile.memory_bytes
        saw = f"{taken / gib:.2f} of {profile.memory_bytes / gib:.1f} GiB"
        if runtime == "vllm":
            saw += ", without vLLM's KV cache"
        if share > _FULL:
            status, remedy = "fail" if share > 1 else "warn", _smaller(subject, profile)
        else:
            status, remedy = "pass", ""
        yield Finding("hardware", status, saw, remedy)  # type: ignore[arg-type]
    narrow = [name for name in TIER_NAMES if getattr(settings.tiers, name).activation_bits == 8]
    if narrow and 8 not in profile.activation_formats:
        yield Finding("hardware", "warn", f"tiers.{narrow[0]} has 8-bit activations, not native to {profile.name}",
                      "set activation_bits to 16")  # fmt: skip
    if subject.made is not None:
        tried = {one.get("family") for one in subject.made["hardware"]["tried_on"]}
        if str(profile.family) not in tried:
            yield Finding("hardware", "warn", f"it was never tried on hardware of this family ({profile.family})",
                          "run 'qbe check --smoke' there")  # fmt: skip


def _smaller(subject: Subject, profile: HardwareProfile) -> str:
    bound = "bound it with --device-memory SIZE"
    if profile.capability is not None:
        return f"serve with --most-bits {subject.gears[0]}, or {bound}"
    return f"serve with --originals none, or {bound}"


def decoding_layer(subject: Subject, profile: HardwareProfile, settings: Settings, runtime: str) -> Iterator[Finding]:
    """Which options are refused, or would make nothing faster (`qbe.compatibility`)."""
    situation = replace(
        subject.situation, cuda=profile.capability is not None, vllm=runtime == "vllm",
        device_memory=settings.weights.device_memory is not None,
    )  # fmt: skip
    found = list(dict.fromkeys(_limited(situation)))
    if not found:
        yield Finding("decoding", "pass", "drafts, refresh, cascade, KV bits and compiled steps all work")
    for line in found:
        saw, _, remedy = line.rpartition(": ")
        yield Finding("decoding", "warn", saw, remedy)


def _limited(situation: Situation) -> Iterator[str]:
    tables = (REQUEST,) if situation.vllm else (REQUEST, ENGINE)
    seen = set[str]()
    for table in tables:
        for option in dict.fromkeys(one.option for one in table):
            met = limit(option, situation, table)
            if met is not None and option not in seen and (met.outcome == "refused" or option in _FASTER):
                seen.add(option)
                yield met.line(situation)


def policy_layer(
    subject: Subject, profile: HardwareProfile, settings: Settings, runtime: str, here: bool
) -> Iterator[Finding]:
    """Tiers, keys and the KV cache."""
    try:
        contract.check(settings, 0.0 if subject.lowest is None else subject.lowest)
        yield Finding("serving policy", "pass", f"the store has the bits of the tiers {', '.join(TIER_NAMES)}")
    except QBEError as error:
        saw, _, remedy = str(error).rpartition(": ")
        yield Finding("serving policy", "fail", saw, f"{remedy}, or quantise with narrower --slices")
    if subject.kv_bytes and runtime == "qbe" and settings.weights.device_memory is None:
        tokens = subject.memory(profile, settings.weights, here).kv // subject.kv_bytes
        if subject.context is not None and tokens < subject.context:
            yield Finding("serving policy", "warn",
                          f"the KV cache holds {tokens} tokens of 16 bits, the context {subject.context}",
                          "give --kv-tokens, or ask for fewer kv_bits")  # fmt: skip
    if not settings.keys:
        yield Finding("serving policy", "warn", "no keys: only this machine can be a client",
                      "make one with 'qbe serve --new-key NAME'")  # fmt: skip
