"""A small batch through the public engine, on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from qbe.check.report import Finding
from qbe.errors import QBEError
from qbe.hardware import HardwareProfile
from qbe.server.settings import Settings
from qbe.store import provenance

_TOKENS = 8
_PROMPTS = ("What is the capital of France?", "def add(a, b):", '{"name": "', "Count from one to ten: one,")


def smoke(path: Path, profile: HardwareProfile, settings: Settings) -> Iterator[Finding]:
    """Every tier, a quantised KV cache and 16-bit weights in one batch; all must answer.

    A folder that does notes that it was tried on this device.
    """
    from qbe.budget import Budget
    from qbe.engine.engine import Engine, Request
    from qbe.engine.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)
    budgets = [*(Budget(tier=tier) for tier in ("flex", "default", "priority")), Budget(kv_bits=8, best_effort=True)]
    requests = [Request(prompt, params, budget) for prompt, budget in zip(_PROMPTS, budgets, strict=True)]
    weights = settings.weights
    try:
        with Engine(
            path, device=profile.device, records=False, blueprint_cache=False, rows=weights.rows,
            originals=weights.originals, most_bits=weights.most_bits, device_memory=weights.device_memory,
            miss=weights.miss,
        ) as engine:  # fmt: skip
            results = engine.generate_batch(requests)
    except QBEError as error:
        yield Finding("kernels", "fail", f"a batch of {len(requests)} was not answered: {error}", "mend what it says")
        return
    short = [r for r in results if len(r.token_ids) != _TOKENS]
    if short:
        yield Finding("kernels", "fail", f"{len(short)} of {len(results)} answers have not {_TOKENS} tokens",
                      "run 'qbe regress', which says which")  # fmt: skip
        return
    yield Finding("kernels", "pass", f"a batch of {len(results)} requests of all tiers is answered on {profile.name}")
    if (path / provenance.NAME).is_file():
        try:
            provenance.tried_on(path, profile)
        except QBEError as error:
            yield Finding("hardware", "warn", f"that it ran here cannot be noted: {error}", "make the folder writable")
