"""Models of mixed experts with random weights, nested on the device as they are made.

Every expert of a layer is a copy of one matrix, and layers of a kind are copies of each other: each lies in memory of
its own, and that is all a cache can see. Rounding 12 288 different matrices would take longer than what is measured.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from qbe.bench.expert_layers import QWEN3_30B, ExpertShape
from qbe.sites import SiteTable
from qbe.store.experts import expert_layers, install
from qbe.store.nest_experts import assembled
from qbe.store.nested_experts import NestedExperts, hollow
from qbe.store.nested_linears import NestedWeightConfig, set_weight
from qbe.store.nested_tensor import NestedTensor
from qbe.store.nesting import nestable, with_store
from qbe.store.placement import place
from qbe.tagger import tag

HOT_EXPERTS, HOT_CHOICES = 0.1, 0.8  # the share of the experts that takes this share of the choices


@dataclass(frozen=True)
class MixtureShape:
    """A decoder of Qwen3-MoE's kind.

    Attributes:
        experts: of each layer.
        layers, heads, kv_heads, head, vocabulary: of the rest.
    """

    experts: ExpertShape
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int

    def config(self) -> Any:
        """Of transformers. No token ends its answers."""
        from transformers import Qwen3MoeConfig

        e = self.experts
        beside: dict[str, Any] = {"head_dim": self.head}  # which transformers' type does not know
        return Qwen3MoeConfig(
            hidden_size=e.hidden, moe_intermediate_size=e.inner, num_experts=e.experts, num_experts_per_tok=e.top,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            **beside, vocab_size=self.vocabulary, intermediate_size=e.inner, norm_topk_prob=True,
            max_position_embeddings=4096, mlp_only_layers=[], bos_token_id=None, eos_token_id=None, dtype="bfloat16",
        )  # fmt: skip


QWEN3_30B_A3B = MixtureShape(QWEN3_30B, 48, 32, 4, 128, 8192)  # with a smaller vocabulary than its 151 936


def random_mixture(
    shape: MixtureShape, device: torch.device, config: NestedWeightConfig, paged: bool = False
) -> tuple[nn.Module, SiteTable]:
    """The nested model and its sites, in bfloat16.

    Args:
        config: with originals these are on the device, too.
        paged: leave out the codes of experts, which residency brings.
    """
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(0)
    keep = config.keep_original
    with torch.device("meta"):
        model: Any = Qwen3MoeForCausalLM._from_config(shape.config(), dtype=torch.bfloat16).eval().requires_grad_(False)
    table = tag(model, name="random")
    dense, known = set(nestable(table)), dict[tuple[int, ...], NestedTensor]()
    for name, module in list(model.named_modules()):
        for own, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 3 or (name in dense and own == "weight"):
                continue  # nested below
            made = torch.randn(parameter.shape, device=device) * 0.02 if parameter.dim() > 1 else torch.ones(
                parameter.shape, device=device)  # fmt: skip
            setattr(module, own, nn.Parameter(made.to(torch.bfloat16), requires_grad=False))
        if name in dense:
            one = _matrix(known, tuple(module.weight.shape), config, device)
            original = None if one.original is None else one.original.clone()
            set_weight(module, NestedTensor(
                one.packed.clone(), one.meta.clone(), one.bits.clone(), one.slices, one.group_size, one.exponent,
                one.in_features, torch.bfloat16, original,
            ))  # fmt: skip
    for layer in expert_layers(model):
        for parameter in layer.parameters:
            count, n, k = getattr(layer.module, parameter).shape
            one = _matrix(known, (n, k), config, device)
            weight = (
                one.original
                if one.original is not None
                else torch.empty(1, dtype=torch.bfloat16, device=device).expand(n, k)
            )
            plain = weight.expand(count, n, k)
            setattr(layer.module, parameter, nn.Parameter(plain.contiguous() if keep else plain, requires_grad=False))
            if paged:
                install(layer, parameter, _hollow(one, count))
            else:
                install(layer, parameter, assembled(layer, parameter, config, lambda _, one=one: one))  # type: ignore[misc]
    with device:  # what depends on the configuration is made by the model's own code
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    place(model, device, "device" if keep else "none", paged=paged)
    return model, with_store(table, model)


def _matrix(
    known: dict[tuple[int, ...], NestedTensor], shape: tuple[int, ...], config: NestedWeightConfig, device: torch.device
) -> NestedTensor:
    """The matrix of this shape, rounded once."""
    if shape not in known:
        weight = (torch.randn(shape, device=device) / shape[1] ** 0.5).bfloat16()
        known[shape] = NestedTensor.from_weight(weight, config.slices, config.group_size, config.keep_original)
    return known[shape]


def _hollow(one: NestedTensor, count: int) -> NestedExperts:
    """So many experts with this matrix, whose codes are not there."""
    shape, device = (count, *one.packed.shape), one.packed.device
    exponents = torch.full((count,), one.exponent, dtype=torch.int32, device=device)
    meta = one.meta.expand(count, *one.meta.shape).contiguous()
    return NestedExperts(
        hollow(shape, device), meta, exponents, one.slices, one.group_size, one.in_features, one.logical_dtype
    )


def skew(model: nn.Module, shape: MixtureShape) -> None:
    """Lets a tenth of each layer's experts, others in each layer, get four fifths of the choices: their routers' logits
    are raised by as much as that takes. Routers go on choosing by what they read."""
    count, top = shape.experts.experts, shape.experts.top
    hot, draw = max(1, round(HOT_EXPERTS * count)), torch.Generator().manual_seed(1)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and type(module).__name__.endswith("TopKRouter"):
            spread = float(weight.float().std()) * shape.experts.hidden**0.5
            raised = torch.zeros(count)
            raised[torch.randperm(count, generator=draw)[:hot]] = _rise(count, hot, top, spread)
            module.register_buffer("raised", raised.to(weight.device), persistent=False)
            module.forward = types.MethodType(_raised_forward, module)


def _rise(count: int, hot: int, top: int, spread: float) -> float:
    """By how much the logits of `hot` experts must be above those of the others, which are normal with this spread."""
    logits = torch.randn(4096, count, generator=torch.Generator().manual_seed(0)) * spread
    wanted, low, high = min(HOT_CHOICES, 0.99 * hot / top), 0.0, 20.0 * spread
    for _ in range(30):
        middle = (low + high) / 2
        raised = logits.clone()
        raised[:, :hot] += middle
        share = float((raised.topk(top).indices < hot).float().mean())
        low, high = (middle, high) if share < wanted else (low, middle)
    return high


def _raised_forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = linear(hidden_states.reshape(-1, self.hidden_dim), self.weight) + self.raised
    values, indices = torch.topk(torch.softmax(logits.float(), dim=-1), self.top_k, dim=-1)
    return logits, (values / values.sum(dim=-1, keepdim=True)).to(hidden_states.dtype), indices
