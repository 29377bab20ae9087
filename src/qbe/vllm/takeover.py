"""What QBE changes in the config of an engine that serves with `--quantization qbe`, and what it refuses."""

from __future__ import annotations

from typing import Any

from vllm import envs

from qbe.store.shared_rows import ROWS
from qbe.vllm import QUANTIZATION, transfer

WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "qbe.vllm.cpu_worker.PlannedCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": "qbe.vllm.gpu_worker.PlannedGPUWorker",
}
FORMATS = ("auto", "hf", "safetensors")  # of weights, that QBE's loader can stand in for
ROWS_KEY = "qbe_rows"  # in --additional-config


def take_over(vllm_config: Any) -> None:
    """Sets worker, scheduler and weight loader. Idempotent: vLLM makes the config anew in some processes.

    Raises:
        ValueError: something that QBE cannot serve, in one line.
    """
    for unsupported, option in (
        (vllm_config.speculative_config is not None, "speculative decoding"),
        (vllm_config.parallel_config.enable_dbo, "dual-batch overlap"),
        (vllm_config.parallel_config.prefill_context_parallel_size > 1, "prefill context parallelism"),
        (vllm_config.cache_config.kv_sharing_fast_prefill, "--kv-sharing-fast-prefill"),
        # It hands requests to the engine without asking the platform, which gives them their blueprints.
        (envs.VLLM_USE_RUST_FRONTEND, "vLLM's front end in Rust (VLLM_USE_RUST_FRONTEND=1)"),
        (vllm_config.use_v2_model_runner, "vLLM's second model runner (VLLM_USE_V2_MODEL_RUNNER=1)"),
    ):
        if unsupported:
            raise ValueError(f"--quantization {QUANTIZATION} does not go with {option}; leave one of them out")
    vllm_config.quant_config.fetches = transfer.check(vllm_config)
    vllm_config.quant_config.shared_rows = _rows(vllm_config.additional_config) == "shared"
    parallel, scheduler, load = vllm_config.parallel_config, vllm_config.scheduler_config, vllm_config.load_config
    if parallel.worker_cls not in WORKERS.values():
        if parallel.worker_cls not in WORKERS:
            raise ValueError(
                f"--quantization {QUANTIZATION} brings its own worker: leave out --worker-cls {parallel.worker_cls}"
            )
        parallel.worker_cls = WORKERS[parallel.worker_cls]
    ours = f"qbe.vllm.scheduler.Planned{'Async' if scheduler.async_scheduling else ''}Scheduler"
    if scheduler.scheduler_cls not in (None, ours):
        raise ValueError(
            f"--quantization {QUANTIZATION} brings its own scheduler: leave out --scheduler-cls "
            f"{scheduler.scheduler_cls}"
        )
    scheduler.scheduler_cls = ours
    if vllm_config.quant_config.served.manifest is not None and load.load_format != QUANTIZATION:
        if load.load_format not in FORMATS:
            raise ValueError(
                f"{vllm_config.quant_config.served.name} was written by 'qbe quantize' and cannot be loaded with "
                f"--load-format {load.load_format}; leave that out"
            )
        load.load_format = QUANTIZATION


def _rows(additional: Any) -> str:
    """What requests of one step read (`qbe.store.shared_rows`), as `--additional-config` says.

    Raises:
        ValueError: it is neither.
    """
    rows = additional.get(ROWS_KEY, "shared") if isinstance(additional, dict) else "shared"
    if rows not in ROWS:
        raise ValueError(f"--additional-config: {ROWS_KEY} is {str(rows)[:80]!r}, but must be {' or '.join(ROWS)}")
    return str(rows)
