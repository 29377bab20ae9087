"""The 16-bit matrices of a model that is not nested yet, of linear layers and of experts, by their sites' names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from qbe.store.experts import ExpertLayer, expert_layers


class Matrices:
    """Looks them up.

    Attributes:
        experts: name of a site -> the layer, the parameter and the expert.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.layers = model, expert_layers(model)
        self.experts: dict[str, tuple[ExpertLayer, str, int]] = {
            name: (layer, parameter, e) for layer in self.layers for name, parameter, e in layer.sites()
        }

    def weight(self, name: str) -> torch.Tensor:
        """[N, K], detached and contiguous; of a transposed parameter a copy."""
        if name in self.experts:
            layer, parameter, e = self.experts[name]
            return layer.weight(parameter, e).detach().contiguous()
        module: Any = self.model.get_submodule(name)
        weight: torch.Tensor = module.weight
        return weight.detach()

    def inputs(self, name: str) -> int:
        """K."""
        if name in self.experts:
            layer, parameter, e = self.experts[name]
            return layer.weight(parameter, e).shape[1]
        return int(self.weight(name).shape[1])

    def layers_of(self, names: Mapping[str, Any] | list[str]) -> Iterator[ExpertLayer]:
        """The layers that some of these sites are experts of."""
        some = {self.experts[name][0].name for name in names if name in self.experts}
        return (layer for layer in self.layers if layer.name in some)

    def parameters(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Matrices by the names of the model's parameters that they take the place of.

        Args:
            weights: by site; of a layer's experts all or none.
        """
        found = {f"{n}.weight": w for n, w in weights.items() if n not in self.experts}
        for layer in self.layers_of(weights):
            for parameter in layer.parameters:
                each = torch.stack([weights[layer.site(parameter, e)] for e in range(layer.count)])
                found[f"{layer.name}.{parameter}"] = each.transpose(1, 2) if layer.transposed else each
        return found
