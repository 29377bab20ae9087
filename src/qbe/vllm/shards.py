"""This worker's part of a nested matrix that `qbe quantize` wrote, cut out by vLLM's own weight loaders."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.utils import set_weight_attrs

from qbe.errors import QBEError
from qbe.format.layout import BLOCK, SliceLayout, padded
from qbe.format.packing import from_blocks, to_blocks
from qbe.sites import Site
from qbe.store.folding import AGAIN
from qbe.store.nested_tensor import NestedTensor
from qbe.vllm.served import ServedModel


def stored_shard(
    model: ServedModel, layer: nn.Module, site: Site, weight: torch.Tensor, index: int, sizes: Sequence[int]
) -> NestedTensor | None:
    """The codes of one site of a layer, of the rows and columns that this worker has.

    Args:
        weight: [N, K] of this worker, 16-bit.
        index: of the site among those that the layer is made of.
        sizes: outputs of each of them here.

    Returns:
        None where no codes are stored, or where the worker's inputs end within a group: they are nested anew then.

    Raises:
        QBEError: a damaged file.
    """
    if model.manifest is None:
        return None
    n, k = weight.shape
    (whole_n, whole_k), group = model.manifest.sites[site.name].shape, model.nesting.group_size
    if k != whole_k and k % group:
        return None
    layout, kp, whole = SliceLayout.of(model.nesting.slices), padded(k, group), padded(whole_k, group)
    path = model.folder / model.manifest.sites[site.name].file
    try:
        with safe_open(path, framework="pt") as stored:
            packed, meta = stored.get_tensor(f"{site.name}.packed"), stored.get_tensor(f"{site.name}.meta")
        blocks = to_blocks(packed, layout, whole_n)
        meta = meta.view(2 * len(layout.precisions), whole_n, whole // group).permute(1, 2, 0)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise QBEError(f"{path} is damaged ({error}); {AGAIN}") from error
    shard = None if len(sizes) == 1 else _shard_id(layer, index)
    blocks = _cut(layer, blocks, (n, kp // BLOCK, 8 * layout.total_bits), shard, sizes, index)
    meta = _cut(layer, meta, (n, kp // group, 2 * len(layout.precisions)), shard, sizes, index)
    return NestedTensor(
        from_blocks(blocks, layout), meta.permute(2, 0, 1).contiguous(), torch.zeros(1, dtype=torch.int32),
        list(layout.slices), group, model.manifest.sites[site.name].exponent, k, weight.dtype,
    )  # fmt: skip


def _shard_id(layer: nn.Module, index: int) -> str | int:
    if isinstance(layer, QKVParallelLinear):
        return "qkv"[index]
    assert isinstance(layer, MergedColumnParallelLinear)
    return index


def _cut(
    layer: nn.Module, whole: torch.Tensor, shape: tuple[int, ...], shard: str | int | None, sizes: Sequence[int],
    index: int,
) -> torch.Tensor:  # fmt: skip
    """What the layer's weight loader copies of a tensor [outputs, inputs, ...] into one of this worker's shape."""
    holder = nn.Parameter(torch.zeros(sum(sizes), *shape[1:], dtype=whole.dtype, device="cpu"), requires_grad=False)
    set_weight_attrs(holder, {"output_dim": 0, "input_dim": 1})
    if shard is None:
        layer.weight_loader(holder, whole)  # type: ignore[operator]
    else:
        layer.weight_loader(holder, whole, shard)  # type: ignore[operator]
    return holder.data.split(list(sizes))[index]
