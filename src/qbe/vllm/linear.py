"""vLLM's linear layers on the nested store. One of them may be several sites: queries, keys and values; gate and up."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.utils import set_weight_attrs

from qbe.kernels.ops import merged_linear as merged_ops  # noqa: F401  (they define the custom ops)
from qbe.store.nested_tensor import NestedTensor
from qbe.store.placement import device_layout
from qbe.store.plan import Plan
from qbe.vllm.served import ServedModel
from qbe.vllm.shards import stored_shard


class NestedLinearMethod(LinearMethodBase):
    """Loads 16-bit weights as vLLM does, nests this worker's shard of them, and reads each row at its word of the plan.

    The plan's rows are persistent buffers of the layer, so that compiled code and CUDA graphs read what was written
    last (as vLLM's LoRA layers read their indices).

    Args:
        rows: of the plan, one for each site that the layer is made of.
    """

    def __init__(self, model: ServedModel, plan: Plan, rows: list[int]) -> None:
        self.model, self.plan, self.rows = model, plan, tuple(rows)

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        weight = nn.Parameter(
            torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype), requires_grad=False
        )
        set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0, **extra_weight_attrs})
        layer.register_parameter("weight", weight)
        whole = len(self.rows) != len(output_partition_sizes)  # the checkpoint has them as one matrix, too
        self.sizes = [sum(output_partition_sizes)] if whole else list(output_partition_sizes)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.exponents = []
        device = layer.weight.device
        for i, (row, part) in enumerate(zip(self.rows, layer.weight.data.split(self.sizes), strict=True)):
            nested = stored_shard(self.model, layer, self.model.table.nested[row], part, i, self.sizes)
            if nested is None:
                nested = NestedTensor.from_weight(part, self.model.nesting.slices, self.model.nesting.group_size, False)
            packed, meta = device_layout(nested, device)
            self.exponents.append(nested.exponent)
            for name, tensor in (("packed", packed), ("meta", meta), ("words", self.plan.precision_words[row])):
                layer.register_buffer(f"qbe_{name}_{i}", tensor, persistent=False)
        self.slices = list(self.model.nesting.slices)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = self.nested(layer, rows, bias, [w[: rows.shape[0]] for w in self.precision_words(layer)])
        return y.view(*x.shape[:-1], y.shape[-1])

    def precision_words(self, layer: Any) -> list[torch.Tensor]:
        """The plan's rows of the layer's sites, int32 [most rows] each."""
        return [getattr(layer, f"qbe_words_{i}") for i in range(len(self.rows))]

    def nested(
        self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None, precision_words: list[torch.Tensor]
    ) -> torch.Tensor:
        """The product [rows, outputs] of x [rows, inputs] by the custom ops.

        Args:
            precision_words: int32 [rows] for each site.
        """
        packed, meta = (
            [getattr(layer, f"qbe_{name}_{i}") for i in range(len(precision_words))] for name in ("packed", "meta")
        )
        if len(precision_words) == 1:
            return torch.ops.qbe.nested_linear(
                x, packed[0], meta[0], precision_words[0], layer.weight, bias, self.slices, self.exponents[0]
            )
        originals = list(layer.weight.split(self.sizes))
        biases = [] if bias is None else list(bias.split(self.sizes))
        return torch.ops.qbe.nested_linears(
            x, packed, meta, precision_words, originals, biases, self.slices, self.exponents
        )
