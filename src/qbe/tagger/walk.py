"""The walk over a model's modules that makes its site table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from qbe.errors import QBEError
from qbe.sites import FULL_BITS, Role, Site, SiteTable
from qbe.tagger.regions import (
    ENCODER_SIDE,
    ModelFacts,
    Region,
    Scope,
    enter,
    is_layer_list,
    is_learned_input,
    state_shape,
)
from qbe.tagger.roles import STATE_PARAMETERS, attention_role, ffn_role, is_norm, mixer_role

_REGION_ROLES = {
    Region.VISION: Role.VISION_ENCODER,
    Region.PROJECTOR: Role.PROJECTOR,
    Region.AUDIO: Role.UNKNOWN,  # the site table has no role for sound
}


def tag(model: nn.Module, *, name: str = "") -> SiteTable:
    """The site table of a transformers causal LM, hybrids with state-space layers included.

    Every module that owns parameters directly becomes one site, in module order. Two kinds differ:

    - stacked experts (`[experts, ...]` parameters) become one site per parameter tensor, e.g.
      `model.layers.3.mlp.experts.down_proj`, which includes its bias tensor `down_proj_bias`;
    - the recurrence of a state-space mixer (`A_log`, `D`, `dt_bias`) becomes one site `<mixer>.state`, whose shape is
      that of the recurrent state of one sequence, because that is what its precision will be set for.

    `shape` is the weight's own shape, `(out_features, in_features)` for `nn.Linear`. `is_linear` is true for exactly
    `nn.Linear` (a subclass may compute something else) with an ordinary 2-D weight. `bytes_at[16]` is what decoding
    one token reads at the dtype of the parameters, biases included: one row of an embedding, the chosen experts'
    share of a mixture, the whole of a tied output head, and nothing of the vision side, which runs once per image.
    A module that cannot be named gets `Role.UNKNOWN`.

    Args:
        model: the model; its parameters may be on the meta device, they are not read.
        name: model name for the table.

    Returns:
        The table; every site has the gears `(16,)`, the store fills in more.

    Raises:
        QBEError: `model` is no module or has no parameters.
    """
    if not isinstance(model, nn.Module):
        raise QBEError(f"cannot tag a {type(model).__name__}: give a loaded transformers model")
    walker = _Walker(ModelFacts(model))
    sites = tuple(walker.walk("", "", model, Scope()))
    if not sites:
        raise QBEError(
            f"{type(model).__name__} has no parameters, so it has no sites: give a loaded transformers model"
        )
    return SiteTable(sites, model_name=name, layers=walker.layers)


@dataclass
class _Walker:
    """Depth-first, parents before children, a module that is used twice only once: `named_modules` order."""

    facts: ModelFacts
    layers: int = 0

    def __post_init__(self) -> None:
        self._seen: set[int] = set()

    def walk(self, path: str, name: str, module: nn.Module, place: Scope) -> Iterator[Site]:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        place = enter(self.facts, place, name, module)
        yield from self._own_sites(path, name, module, place)
        is_layers = is_layer_list(name, module, place)
        for child_name, child in module.named_children():
            inside = place
            if is_layers:  # models with two stacks count on through the second
                inside = replace(place, layer=self.layers)
                self.layers += 1
            yield from self.walk(f"{path}.{child_name}" if path else child_name, child_name, child, inside)

    def _own_sites(self, path: str, name: str, module: nn.Module, place: Scope) -> Iterator[Site]:
        """Sites for the parameters that `module` owns itself."""
        parameters = {n: p for n, p in module._parameters.items() if p is not None}
        if not parameters:
            return
        if place.region is Region.EXPERTS and not parameters.keys() <= {"weight", "bias"}:
            yield from _one_each(path, parameters, Role.MOE_EXPERT, place)
        elif place.region is Region.MIXER and parameters.keys() & STATE_PARAMETERS:
            yield from _recurrence(path, parameters, module, place)
        else:
            if place.region is Region.PLAIN and place.layer is None and is_learned_input(parameters):
                place = replace(place, region=Region.PROJECTOR)
            role = self._role(name, module, place)
            main = parameters["weight"] if "weight" in parameters else max(parameters.values(), key=torch.Tensor.numel)
            linear = type(module) is nn.Linear and type(main) is nn.Parameter and main.ndim == 2
            yield Site(
                name=path or next(iter(parameters)),
                role=role,
                layer=place.layer,
                shape=tuple(main.shape),
                is_linear=linear,
                bytes_at={FULL_BITS: _bytes_per_token(list(parameters.values()), role, place)},
                use=_use(role, place),
            )

    def _role(self, name: str, module: nn.Module, place: Scope) -> Role:
        if place.region in ENCODER_SIDE:
            return _REGION_ROLES[place.region]
        if module is self.facts.output_head or (self.facts.output_head is None and name == "lm_head"):
            return Role.OUTPUT_HEAD
        if module is self.facts.input_embedding or isinstance(module, nn.Embedding):
            return Role.EMBEDDING
        if place.region is Region.MIXER:
            return mixer_role(name, module)
        if is_norm(module):
            return Role.NORM
        if place.region is Region.EXPERTS:
            return Role.MOE_EXPERT
        if place.region is Region.ROUTER or _is_expert_bias(module, place):
            return Role.MOE_ROUTER
        if "sinks" in module._parameters:  # gpt-oss: one more term in the normaliser of the softmax
            return Role.NORM
        # Only direct children of a block have the names of its matrices; what lies deeper is something added to it.
        if place.block is None or place.block._modules.get(name) is not module:
            return Role.UNKNOWN
        if place.region is Region.ATTENTION:
            return attention_role(name)
        if place.region is Region.FFN:
            return ffn_role(name, module, place.block)
        return Role.UNKNOWN


def _is_expert_bias(module: nn.Module, place: Scope) -> bool:
    """A correction of the routing scores, one number for each expert, kept beside the router."""
    if place.region is not Region.MOE or place.experts is None:
        return False
    return all(p is None or p.numel() == place.experts.count for p in module._parameters.values())


def _recurrence(path: str, parameters: dict[str, nn.Parameter], module: nn.Module, place: Scope) -> Iterator[Site]:
    """The site `<mixer>.state`, and one SSM gate site for each projection stored as a bare parameter (Zamba)."""
    state = [p for key, p in parameters.items() if key in STATE_PARAMETERS]
    yield Site(
        name=f"{path}.state",
        role=Role.SSM_STATE,
        layer=place.layer,
        shape=state_shape(place.block, module),
        bytes_at={FULL_BITS: _bytes_per_token(state, Role.SSM_STATE, place)},
    )
    yield from _one_each(path, {k: p for k, p in parameters.items() if k not in STATE_PARAMETERS}, Role.SSM_GATE, place)


def _one_each(path: str, parameters: dict[str, nn.Parameter], role: Role, place: Scope) -> Iterator[Site]:
    """One site per parameter tensor; a bias `x_bias` belongs to the site of `x` or `x_weight`."""
    groups: dict[str, list[nn.Parameter]] = {}
    for key, tensor in parameters.items():
        stem = key.removesuffix("_bias")
        owner = next((k for k in (stem, f"{stem}_weight") if k != key and k in parameters), key)
        groups.setdefault(owner, []).append(tensor)
    for key, tensors in groups.items():
        size = _bytes_per_token(tensors, role, place)
        yield Site(
            f"{path}.{key}", role, place.layer, tuple(parameters[key].shape), bytes_at={FULL_BITS: size},
            use=_use(role, place),
        )  # fmt: skip


def _use(role: Role, place: Scope) -> float:
    """Share of the decoded tokens that read the site, as far as the configuration says."""
    if place.region in ENCODER_SIDE:
        return 0.0
    if role is Role.MOE_EXPERT and place.experts is not None:
        return place.experts.active / place.experts.count
    return 1.0


def _bytes_per_token(tensors: list[nn.Parameter], role: Role, place: Scope) -> int:
    """Bytes of `tensors` that decoding one token reads."""
    if place.region in ENCODER_SIDE:
        return 0
    if role is Role.EMBEDDING:
        return sum(p.shape[-1] * p.element_size() for p in tensors)
    total = sum(p.numel() * p.element_size() for p in tensors)
    if role is Role.MOE_EXPERT and place.experts is not None:
        return total * place.experts.active // place.experts.count
    return total
