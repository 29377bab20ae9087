"""The quantization config `qbe`: which of vLLM's layers are sites of the model, and the plan that they read."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from qbe.errors import QBEError
from qbe.store.plan import Plan
from qbe.vllm import QUANTIZATION, served
from qbe.vllm.cpu_linear import CPUNestedLinearMethod
from qbe.vllm.full_rows import FullRows
from qbe.vllm.linear import NestedLinearMethod

_active: QBEConfig | None = None


class QBEConfig(QuantizationConfig):
    """Made in the front end from the model's folder, then pickled to the engine core and to every worker.

    Attributes:
        served: the model.
        fetches: whether prompts may be computed by another server.
        shared_rows: whether requests of one step read each site at the highest bits of any (`qbe.store.shared_rows`).
        plan: in a worker, what its layers read; None before a layer was made.
        full_rows: what the CPU's layers read beside it: of the tokens, and of those whose logits are kept.
    """

    served: served.ServedModel
    fetches: bool
    shared_rows: bool
    plan: Plan | None
    full_rows: tuple[FullRows, FullRows]

    def __init__(self) -> None:
        super().__init__()
        self.fetches, self.shared_rows, self.plan, self.full_rows = False, True, None, (FullRows(), FullRows())
        self._rows: dict[str, int] = {}  # vLLM's name of a site -> its row in the plan
        self._found: set[int] = set()
        # vLLM has two model runners; QBE extends the first, which every platform has.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"

    @classmethod
    def get_name(cls) -> str:
        return QUANTIZATION

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QBEConfig:
        raise ValueError(
            f"this model is already quantised ({config.get('quant_method', '?')}); give QBE the unquantised checkpoint"
        )

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Reads the model's folder. Raises ValueError where QBE cannot serve it."""
        try:
            self.served = served.describe(model_name, revision)
        except QBEError as error:
            raise ValueError(str(error)) from error
        self._rows = {site.name: row for row, site in enumerate(self.served.table.nested)}
        activate(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "plan": None, "full_rows": (FullRows(), FullRows()), "_found": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        activate(self)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self._rows = hf_to_vllm_mapper.apply_dict(self._rows)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Nested where all matrices that vLLM made one layer of are nested sites, else as without QBE."""
        if not isinstance(layer, LinearBase | ParallelLMHead):
            return None
        rows = self._rows_of(prefix)
        if rows is None:
            return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else UnquantizedEmbeddingMethod()
        self._found.update(rows)
        if current_platform.is_cpu():
            full_rows = self.full_rows[isinstance(layer, ParallelLMHead)]
            return CPUNestedLinearMethod(self.served, self._plan(), rows, full_rows)
        return NestedLinearMethod(self.served, self._plan(), rows)

    def check_found(self, layers: range, last: bool) -> None:
        """Raises ValueError when a site of the table is no layer of vLLM's model: blueprints would promise too much.

        Args:
            layers: decoder layers that this worker has.
            last: whether it has what comes after them, too.
        """
        table = self.served.table
        layer_of = [layers.stop if s.layer is None else s.layer for s in table.nested]
        here = {i for i, layer in enumerate(layer_of) if layers.start <= layer and (last or layer < layers.stop)}
        missing = sorted(here - self._found)
        if missing:
            raise ValueError(
                f"vLLM builds {self.served.name} otherwise than transformers: {len(missing)} sites are missing, the "
                f"first is {table.nested[missing[0]].name}; QBE cannot serve this model in vLLM"
            )

    def _rows_of(self, prefix: str) -> list[int] | None:
        parent, _, leaf = prefix.rpartition(".")
        names = [f"{parent}.{part}" if parent else part for part in self.packed_modules_mapping.get(leaf, [leaf])]
        rows = [self._rows[n] for n in names if n in self._rows]
        if len(rows) == len(names):
            return rows
        return [self._rows[prefix]] if prefix in self._rows else None

    def _plan(self) -> Plan:
        """The worker's plan, made with its first layer; on the device that vLLM is building the model on."""
        if self.plan is None:
            vllm = get_current_vllm_config()
            rows = max(
                vllm.scheduler_config.max_num_batched_tokens, vllm.compilation_config.max_cudagraph_capture_size or 0
            )
            device = torch.get_default_device()
            self.plan = Plan(self.served.table, -(-rows // 4) * 4, device, shared=self.shared_rows)
        return self.plan


def activate(config: QBEConfig | None) -> None:
    """Remember the config that this process serves with: the front end's hook is told no config with a request."""
    global _active
    _active = config


def active() -> QBEConfig | None:
    """The config of the model that this process serves with QBE."""
    return _active
