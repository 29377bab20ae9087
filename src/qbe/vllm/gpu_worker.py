"""vLLM's GPU worker with a planned model runner."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from qbe.vllm.runner import PlannedRunner


class PlannedGPUWorker(Worker):
    def _make_model_runner(self) -> PlannedRunner:
        return PlannedRunner(self.vllm_config, self.device)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights=load_dummy_weights)
        self.model_runner.start_plan(self.vllm_config.quant_config)
