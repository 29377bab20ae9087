"""vLLM's CPU worker with a planned model runner."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip  (loads what must come first)
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from qbe.kernels.cpu import build, native
from qbe.vllm.runner import PlannedRunner


class PlannedCPUModelRunner(PlannedRunner, CPUModelRunner):
    pass


class PlannedCPUWorker(CPUWorker):
    """vLLM's worker makes its runner at the end of `init_device` and asks nobody of which class, so ours is made in its
    place. A runner has no weights and no KV cache yet."""

    def init_device(self) -> None:
        native.load()
        build.use_openmp()  # as everything else of vLLM's does, which binds these threads to cores
        super().init_device()
        self.model_runner = PlannedCPUModelRunner(self.vllm_config, self.device)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights=load_dummy_weights)
        self.model_runner.start_plan(self.vllm_config.quant_config)
