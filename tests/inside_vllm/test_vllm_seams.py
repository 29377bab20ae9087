"""Where QBE hangs on vLLM: what it overrides is there, is called as vLLM calls it, and nothing abstract is left.

`make test-vllm` runs this and the parts a second time on the source of the newest vLLM, of which there is no build for
CPUs.
"""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from qbe.vllm import QUANTIZATION, takeover

CLASSES = [
    ("qbe.vllm.scheduler", "PlannedScheduler"), ("qbe.vllm.scheduler", "PlannedAsyncScheduler"),
    ("qbe.vllm.runner", "PlannedRunner"), ("qbe.vllm.gpu_worker", "PlannedGPUWorker"),
    ("qbe.vllm.cpu_worker", "PlannedCPUWorker"), ("qbe.vllm.measured", "MeasuredLater"),
    ("qbe.vllm.config", "QBEConfig"), ("qbe.vllm.loader", "QBELoader"),
]  # fmt: skip


def overridden(ours: type) -> dict[str, Any]:
    """Methods of a class of QBE that vLLM has, too, and vLLM's own."""
    bases = [base for base in ours.__mro__[1:] if base.__module__.startswith("vllm.")]
    found = {}
    for name, method in vars(ours).items():
        theirs = next((vars(base)[name] for base in bases if name in vars(base)), None)
        if inspect.isfunction(method) and theirs is not None and name != "__init__":
            found[name] = inspect.unwrap(getattr(theirs, "__func__", theirs))
    return found


@pytest.mark.parametrize(("module", "name"), CLASSES, ids=[name for _, name in CLASSES])
def test_what_is_overridden_takes_what_vllm_gives(module: str, name: str) -> None:
    ours = getattr(importlib.import_module(module), name)
    assert not inspect.isabstract(ours)
    for method, theirs in overridden(ours).items():
        mine = inspect.signature(vars(ours)[method])
        given = list(inspect.signature(theirs).parameters.values())
        positional = [p.name for p in given if p.kind is p.POSITIONAL_OR_KEYWORD]
        mine.bind(*positional, **{p.name: None for p in given if p.kind is p.KEYWORD_ONLY})
        required = [p.name for p in given if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
        mine.bind(*required)


@pytest.mark.parametrize(
    ("module", "name", "methods"),
    [
        ("qbe.vllm.scheduler", "PlannedScheduler",
         {"add_request", "schedule", "update_from_output", "_connector_finished", "_free_request", "shutdown"}),
        ("qbe.vllm.runner", "PlannedRunner",
         {"_update_states", "_prepare_inputs", "_dummy_run", "sample_tokens", "_get_prompt_logprobs_dict"}),
    ],
)  # fmt: skip
def test_no_method_that_vllm_calls_has_gone(module: str, name: str, methods: set[str]) -> None:
    assert methods <= set(overridden(getattr(importlib.import_module(module), name)))


def config(**more: Any) -> Any:
    """An engine's config as far as it is looked at before the first refusal."""
    parts = SimpleNamespace(enable_dbo=False, prefill_context_parallel_size=1)
    cache = SimpleNamespace(kv_sharing_fast_prefill=False)
    return SimpleNamespace(speculative_config=None, parallel_config=parts, cache_config=cache,
                           use_v2_model_runner=False, **more)  # fmt: skip


def test_the_front_end_in_rust_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would send requests to the engine that have no blueprint."""
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(ValueError, match=f"{QUANTIZATION} does not go with .*VLLM_USE_RUST_FRONTEND=1") as refused:
        takeover.take_over(config())
    assert "\n" not in str(refused.value)


def test_a_refresh_never_renames_what_the_prefix_cache_has() -> None:
    """vLLM names blocks of tokens that were computed before it tells of a refresh; those end where that one starts."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from qbe.vllm.cache_salt import resalt_blocks

    init_none_hash(sha256)
    block = 4
    for written in range(1, 9):
        for in_flight in (0, 1):  # with async scheduling the next step is on its way
            request = Request("r", list(range(8)), SamplingParams(max_tokens=9), None,
                              block_hasher=get_request_block_hasher(block, sha256))  # fmt: skip
            request.append_output_token_ids(list(range(written)))
            request.num_computed_tokens = request.num_tokens - 1 + in_flight
            cached = list(request.block_hashes[: (request.num_computed_tokens - in_flight) // block])
            start = max(request.num_tokens - 1, request.num_computed_tokens)
            resalt_blocks(request, start, "b", block)
            assert request.block_hashes[: len(cached)] == cached
