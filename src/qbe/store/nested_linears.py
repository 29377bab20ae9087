"""Linear layers whose weights are nested: the torchao config that makes them, and finding them in a model."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.quantization import quantize_
from torchao.quantization.transform_module import register_quantize_module_handler

from qbe.errors import QBEError
from qbe.format.gears import DEFAULT_SLICES
from qbe.format.layout import SliceLayout, check_group_size
from qbe.store.nested_tensor import NestedTensor

__all__ = ["NestedWeightConfig", "nest", "nested_linears", "quantize_", "set_weight"]


@dataclass
class NestedWeightConfig(AOBaseConfig):
    """`quantize_(model, NestedWeightConfig(...))` replaces each linear layer's weight by a NestedTensor.

    Such a layer is for inference, and its bias is frozen: a backward pass through it raises QBEError. As a plain layer
    it takes inputs of the dtype it had (any, under autocast) and returns that.

    Attributes:
        group_size: inputs that share a scale, a multiple of 64.
        slices: widths of the slices, most significant first; their running sums are the precisions.
        keep_original: keep the 16-bit weight, so that gear 16 is exact.

    Raises:
        QBEError: a group size or slices that the store cannot have.
    """

    group_size: int = 64
    slices: tuple[int, ...] = DEFAULT_SLICES
    keep_original: bool = True

    def __post_init__(self) -> None:
        check_group_size(self.group_size)
        SliceLayout.of(self.slices)


@register_quantize_module_handler(NestedWeightConfig)
def _nest(module: nn.Module, config: NestedWeightConfig, **_: Any) -> nn.Module:
    if not isinstance(module, nn.Linear):
        raise QBEError(f"only nn.Linear can be nested, not {type(module).__name__}; filter it out")
    if isinstance(module.weight, NestedTensor):
        raise QBEError(
            f"a linear layer of {module.in_features} inputs and {module.out_features} outputs is nested already; "
            "nest the 16-bit model once, or filter out what is nested"
        )
    weight = NestedTensor.from_weight(module.weight, config.slices, config.group_size, config.keep_original)
    set_weight(module, weight)
    return module


def set_weight(module: nn.Linear, weight: NestedTensor) -> None:
    """Makes `weight` the layer's weight, its `extra_repr` tell so, and its bias as frozen as the weight."""
    module.weight = nn.Parameter(weight, requires_grad=False)
    if module.bias is not None:
        module.bias.requires_grad_(False)
    module.extra_repr = types.MethodType(  # type: ignore[method-assign]
        lambda self: f"in_features={self.in_features}, out_features={self.out_features}, weight={self.weight!r}", module
    )


def nested_linears(model: nn.Module) -> list[tuple[str, nn.Linear, NestedTensor]]:
    """Name, layer and weight of every linear layer of `model` that is nested, in module order."""
    return [
        (name, module, module.weight)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and isinstance(module.weight, NestedTensor)
    ]


def nest(
    model: nn.Module,
    names: Sequence[str],
    config: NestedWeightConfig | None = None,
    on_site: Callable[[str], None] | None = None,
) -> None:
    """Nests the linear layers called `names`, through torchao's `quantize_`.

    Args:
        on_site: called with each name when its layer is done (a progress bar).
    """
    wanted = set(names)

    def chosen(module: nn.Module, name: str) -> bool:
        if name not in wanted:
            return False
        if on_site is not None:
            on_site(name)
        return True

    quantize_(model, config or NestedWeightConfig(), filter_fn=chosen)
