"""Nesting the experts of a model, and their sites: one for each expert's matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from qbe.format.layout import SliceLayout, padded
from qbe.sites import FULL_BITS, Site
from qbe.store.experts import ExpertLayer, install
from qbe.store.nested_experts import NestedExperts
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.nested_tensor import NestedTensor


def nest_layer(
    layer: ExpertLayer, config: NestedWeightConfig, device: torch.device | None, step: Callable[[], None]
) -> None:
    """Rounds every matrix of a layer's experts, one at a time on the device, and puts them in their parameters' place.

    Args:
        step: called after each parameter (a progress bar).

    Raises:
        QBEError: a weight that cannot be nested.
    """
    for parameter in layer.parameters:
        own = layer.weight(parameter, 0).device
        there = device or own

        def rounded(e: int, parameter: str = parameter, there: torch.device = there) -> NestedTensor:
            weight = layer.weight(parameter, e).to(there).contiguous()
            return NestedTensor.from_weight(weight, config.slices, config.group_size, keep_original=False)

        install(layer, parameter, assembled(layer, parameter, config, rounded))
        step()


def assembled(
    layer: ExpertLayer, parameter: str, config: NestedWeightConfig, expert: Callable[[int], NestedTensor]
) -> NestedExperts:
    """Nested matrices in the place of a plain parameter, where that is, made one by one.

    Args:
        expert: makes the matrix of an expert.
    """
    first, count = layer.weight(parameter, 0), layer.count
    layout, (n, k), own = SliceLayout.of(config.slices), first.shape, first.device
    kp = padded(k, config.group_size)
    packed = torch.empty(count, layout.total_bits, n * kp // 8, dtype=torch.uint8, device=own)
    meta = torch.empty(
        count, 2 * len(layout.precisions), n, kp // config.group_size, dtype=torch.uint8, device=own
    )  # fmt: skip
    exponents = torch.empty(count, dtype=torch.int32)
    for e in range(count):
        one = expert(e)
        packed[e], meta[e], exponents[e] = one.packed, one.meta, one.exponent
    original = originals_of(layer, parameter) if config.keep_original else None
    return NestedExperts(
        packed, meta, exponents.to(own), layout.slices, config.group_size, k, first.dtype, original
    )  # fmt: skip


def originals_of(layer: ExpertLayer, parameter: str) -> torch.Tensor:
    """A plain parameter as [E, N, K], contiguous: a copy where the model has it transposed."""
    plain: torch.Tensor = getattr(layer.module, parameter).detach()
    return plain.transpose(1, 2).contiguous() if layer.transposed else plain.contiguous()


def expert_sites(sites: Sequence[Site], model: nn.Module) -> Iterator[Site]:
    """The sites with one for each expert where experts are nested, and with one for all of them where they are not."""
    modules = dict(model.named_modules())
    for site in sites:
        name = site.name if site.expert is None else site.name.rpartition(".")[0]
        nested = modules.get(name)
        if isinstance(nested, NestedExperts):
            own = {"gears": nested.gears, "bytes_at": nested.bytes_at(), "shape": nested.shape[1:]}
            for e in range(len(nested)) if site.expert is None else (site.expert,):
                yield replace(site, name=f"{name}.{e}", expert=e, **own)  # type: ignore[arg-type]
        elif site.expert is None:
            yield site
        elif site.expert == 0:
            count = sum(s.name.rpartition(".")[0] == name for s in sites)
            size = round(count * site.parameters * FULL_BITS // 8 * site.use)
            yield replace(
                site, name=name, expert=None, shape=(count, *site.shape), gears=(FULL_BITS,),
                bytes_at={FULL_BITS: size}, sensitivity={}, activation_sensitivity={}, native_sensitivity={},
            )  # fmt: skip
