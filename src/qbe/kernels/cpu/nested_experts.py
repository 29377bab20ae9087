"""`qbe::nested_experts` on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from qbe.kernels.ops.nested_experts import ExpertMatrices
from qbe.kernels.reference.nested_experts import nested_experts as reference


def nested_experts(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, rows: torch.Tensor, *matrices: Any
) -> torch.Tensor:
    """Arguments and result as those of the op."""
    gate_up, down, rest = ExpertMatrices(*matrices[:6]), ExpertMatrices(*matrices[6:12]), matrices[12:]
    return reference(x, topk_ids, topk_weights, rows, gate_up, down, *rest)
