"""vLLM's CPU worker with a planned model runner."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip  (loads what must come first)
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from qbe.kernels.cpu import build, native
from qbe.vllm.runner import PlannedRunner


class PlannedCPUModelRunner(PlannedRunner, CPUModelRunner):
    pass


class PlannedCPUWorker(CPUWorker):
    """The worker makes its runner in the middle of `init_device`, so the runner is given its class afterwards."""

    def init_device(self) -> None:
        native.load()
        build.use_openmp()  # as everything else of vLLM's does, which binds these threads to cores
        super().init_device()
        self.model_runner.__class__ = PlannedCPUModelRunner

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights=load_dummy_weights)
        self.model_runner.start_plan(self.vllm_config.quant_config)
