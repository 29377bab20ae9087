"""What every implementation of `qbe::nested_experts` refuses before it hands a pointer to a kernel."""

from __future__ import annotations

import torch

from qbe.kernels.ops.experts.nested import ExpertMatrices


def check_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    rows: torch.Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
) -> None:
    """Raises RuntimeError, in one line, for shapes or dtypes that do not belong together."""
    experts, hidden, both = gate_up.packed.shape[0], down.meta.shape[-2], gate_up.meta.shape[-2]
    if x.dim() != 2 or x.shape[1] != hidden:
        raise RuntimeError(f"x is {list(x.shape)}, but these experts take and give rows of {hidden}")
    if topk_ids.dim() != 2 or topk_ids.shape != topk_weights.shape or topk_ids.shape[0] != x.shape[0]:
        raise RuntimeError(
            f"{len(x)} tokens need as many rows of experts and of weights, not {list(topk_ids.shape)} and "
            f"{list(topk_weights.shape)}"
        )
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"numbers of experts are int32 or int64, not {topk_ids.dtype}")
    if rows.dtype is not torch.int32 or rows.shape != x.shape[:1]:
        raise RuntimeError(f"rows must be int32 [{len(x)}], one per token, not {rows.dtype} {list(rows.shape)}")
    if both % 2:
        raise RuntimeError(f"gate and up have {both} outputs together, which is no even number")
    plan_rows = gate_up.precision.shape[0]
    _check_matrices("gate_up", gate_up, (experts, both, hidden), plan_rows)
    _check_matrices("down", down, (experts, hidden, both // 2), plan_rows)


def _check_matrices(name: str, one: ExpertMatrices, shape: tuple[int, int, int], plan_rows: int) -> None:
    experts, outputs, inputs = shape
    for part, dtype in (("packed", torch.uint8), ("meta", torch.uint8), ("exponents", torch.int32)):
        tensor = getattr(one, part)
        shape_only = part == "packed" and one.addresses is not None
        whole = shape_only or tensor.is_contiguous()
        if tensor.dtype is not dtype or not whole or tensor.shape[:1] != (experts,):
            raise RuntimeError(
                f"{name}'s {part} must be contiguous {dtype} of {experts} experts, not {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
    precision = one.precision
    if precision.dtype is not torch.uint8 or precision.shape != (plan_rows, experts):
        raise RuntimeError(
            f"{name}'s precision must be uint8 {[plan_rows, experts]}, not {precision.dtype} {list(precision.shape)}"
        )
    if experts > 1 and precision.stride(1) != 1:
        raise RuntimeError(f"{name}'s precision must be contiguous in its last dimension")
    groups = one.meta.shape[-1]
    padded = one.packed.shape[-1] * 8 // max(outputs, 1)
    if one.meta.dim() != 4 or one.meta.shape[2] != outputs or not padded - padded // max(groups, 1) < inputs <= padded:
        raise RuntimeError(
            f"{name}'s packed {list(one.packed.shape)} and meta {list(one.meta.shape)} are not nested matrices of "
            f"{outputs} outputs and {inputs} inputs"
        )
    addresses = one.addresses
    if addresses is not None and (
        addresses.dtype is not torch.int64 or not addresses.is_contiguous() or addresses.shape[:1] != (experts,)
    ):
        raise RuntimeError(
            f"{name}'s addresses must be contiguous torch.int64 of {experts} experts, not {addresses.dtype} "
            f"{list(addresses.shape)}"
        )
    for tensor_name, wanted in (("original", shape), ("bias", shape[:2])):
        tensor = getattr(one, tensor_name)
        if tensor is not None and tensor.shape != wanted:
            raise RuntimeError(f"{name}'s {tensor_name} must be {list(wanted)}, not {list(tensor.shape)}")
