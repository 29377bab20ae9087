"""The layer tagger on tiny random models of many architectures, built from configurations alone."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from qbe.errors import QBEError
from qbe.sites import NESTABLE_ROLES, Role, Site
from qbe.tagger import tag
from tagger_architectures import ALSO, BASE, REQUIRED

SHARED = Path(os.environ.get("QBE_SHARED", Path(__file__).parents[2] / "shared"))
EVERY = REQUIRED | ALSO


def build(config: Any, device: str = "meta", dtype: torch.dtype = torch.float32) -> nn.Module:
    auto = tf.AutoModelForImageTextToText if hasattr(config, "vision_config") else tf.AutoModelForCausalLM
    with torch.device(device):
        return auto.from_config(config).to(dtype)


def counts(text: str) -> dict[Role, int]:
    words = text.split()
    return {Role(role): int(n) for role, n in zip(words[::2], words[1::2], strict=True)}


def owned(model: nn.Module, site: Site) -> list[str]:
    """Names of the parameters that belong to a site, from its name alone."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if site.name.endswith(".state"):
        mixer = site.name.removesuffix(".state")
        return [n for n in (f"{mixer}.{p}" for p in ("A_log", "D", "dt_bias")) if n in parameters]
    if site.name in parameters:
        return [n for n in (site.name, f"{site.name}_bias") if n in parameters]
    return [f"{site.name}.{n}" for n, _ in model.get_submodule(site.name).named_parameters(recurse=False)]


@pytest.mark.parametrize("name", EVERY)
def test_roles_ownership_and_layers(name: str) -> None:
    make, expected = EVERY[name]
    config = make()
    model = build(config)
    table = tag(model, name=name)

    assert Counter(s.role for s in table) == counts(expected)
    assert not table.unknown
    assert table.model_name == name
    assert all(s.gears == (16,) for s in table)

    owners = Counter(p for s in table for p in owned(model, s))
    assert set(owners) == {n for n, _ in model.named_parameters(remove_duplicate=False)}
    assert set(owners.values()) == {1}

    layers = config.get_text_config().num_hidden_layers
    assert table.layers == layers
    assert {s.layer for s in table} == {None, *range(layers)}
    for site in table:
        beside = site.role in (Role.VISION_ENCODER, Role.PROJECTOR)
        index = None if beside else re.search(r"\.(?:layers|h)\.(\d+)\.", site.name)
        assert site.layer == (int(index[1]) if index else None), site.name


@pytest.mark.parametrize("name", EVERY)
def test_shapes_and_linears(name: str) -> None:
    model = build(EVERY[name][0]())
    modules = dict(model.named_modules())
    table = tag(model)
    for site in table:
        module = modules.get(site.name)
        assert site.is_linear == (type(module) is nn.Linear), site.name
        if isinstance(module, nn.Linear):
            assert site.shape == (module.out_features, module.in_features)
    position = {n: i for i, (n, _) in enumerate(model.named_modules())}
    order = [
        position[s.name] if s.name in position else position[s.name.rpartition(".")[0]]  # a tensor stands at its owner
        for s in table
    ]
    assert order == sorted(order)
    assert any(s.is_linear and s.role in NESTABLE_ROLES for s in table) or name == "gpt2"


@pytest.mark.parametrize("name", ["mamba2", "jamba", "bamba", "granitemoehybrid", "qwen3_next"])
def test_state_shape_is_that_of_the_cache(name: str) -> None:
    torch.manual_seed(0)
    model = build(EVERY[name][0](), device="cpu").eval()
    with torch.no_grad():
        out = model(torch.arange(3, 9)[None], use_cache=True)
    cache = getattr(out, "past_key_values", None) or out.cache_params
    states = [s for s in tag(model) if s.role is Role.SSM_STATE]
    assert states
    for site in states:
        layer = cache.layers[site.layer]
        if not hasattr(layer, "recurrent_states"):
            pytest.skip("this transformers keeps the recurrent state elsewhere")
        assert site.shape == tuple(layer.recurrent_states[0].shape[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_a_dense_model(dtype: torch.dtype) -> None:
    model = build(tf.LlamaConfig(**BASE, tie_word_embeddings=True, attention_bias=True), dtype=dtype)
    table = tag(model)
    size = dtype.itemsize
    unique = sum(p.numel() for p in model.parameters())  # the tied table once: as the head
    assert sum(s.bytes_at[16] for s in table) == size * (unique + BASE["hidden_size"])
    head = next(s for s in table if s.role is Role.OUTPUT_HEAD)
    assert (head.shape, head.is_linear, head.bytes_at[16]) == ((64, 32), True, 64 * 32 * size)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "jamba", "granitemoehybrid", "gpt_oss", "deepseek_v3"])
def test_bytes_of_experts_are_the_chosen_share(name: str) -> None:
    model = build(EVERY[name][0]())
    parameters = dict(model.named_parameters())
    experts = [s for s in tag(model) if s.role is Role.MOE_EXPERT]
    for site in experts:
        stored = sum(parameters[n].numel() * 4 for n in owned(model, site))
        assert site.bytes_at[16] * 4 == stored * 2  # two of four


def test_vision_side_costs_a_decoded_token_nothing() -> None:
    table = tag(build(REQUIRED["gemma3"][0]()))
    beside = [s for s in table if s.role in (Role.VISION_ENCODER, Role.PROJECTOR)]
    assert all(s.bytes_at[16] == 0 for s in beside)
    assert all(s.bytes_at[16] > 0 for s in table if s not in beside)


def test_experts_stored_as_modules() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(32, 4, bias=False)
            self.experts = nn.ModuleList(
                nn.ModuleDict({"w1": nn.Linear(32, 8), "w2": nn.Linear(8, 32)}) for _ in range(4)
            )
            self.top_k = 1

    model = build(tf.LlamaConfig(**BASE))
    model.model.layers[1].mlp = Experts()
    sites = [s for s in tag(model) if ".layers.1.mlp" in s.name]
    assert Counter(s.role for s in sites) == {Role.MOE_ROUTER: 1, Role.MOE_EXPERT: 8}
    w1 = next(s for s in sites if s.name.endswith("experts.2.w1"))
    assert w1.is_linear
    assert w1.bytes_at[16] == (32 * 8 + 8) * 4 // 4


class Mystery(nn.Module):
    """A block no tagger has seen; one of its parts has a name that means something elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.o_proj = nn.Linear(32, 5)
        self.beta = nn.Bilinear(5, 5, 5)


@pytest.mark.parametrize("where", ["", "model", "model.layers.1", "model.layers.1.self_attn", "model.layers.1.mlp"])
def test_what_cannot_be_named_is_unknown(where: str) -> None:
    model = build(tf.LlamaConfig(**BASE))
    model.get_submodule(where).add_module("mystery", Mystery())
    table = tag(model)
    prefix = f"{where}.mystery".lstrip(".")
    assert [s.name for s in table.unknown] == [prefix, f"{prefix}.o_proj", f"{prefix}.beta"]
    assert {s.layer for s in table.unknown} == {1 if "layers" in where else None}
    assert Counter(s.role for s in table if s not in table.unknown) == counts(REQUIRED["llama"][1])


def test_a_subclass_of_linear_is_not_linear() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = build(tf.LlamaConfig(**BASE))
    model.model.layers[0].mlp.up_proj = Scaled(32, 48)
    site = next(s for s in tag(model) if s.name == "model.layers.0.mlp.up_proj")
    assert (site.role, site.is_linear) == (Role.FFN_UP, False)


@pytest.mark.parametrize("bad", [None, "llama", nn.Module(), nn.Sequential(nn.ReLU())])
def test_bad_input(bad: Any) -> None:
    with pytest.raises(QBEError, match="loaded transformers model"):
        tag(bad)


@settings(max_examples=15, deadline=None)
@given(
    layers=st.integers(1, 5),
    heads=st.sampled_from([(4, 4), (4, 1), (8, 2)]),
    hidden=st.sampled_from([16, 24, 40]),
    inner=st.integers(1, 90),
    tied=st.booleans(),
    bias=st.booleans(),
)
def test_any_llama(layers: int, heads: tuple[int, int], hidden: int, inner: int, tied: bool, bias: bool) -> None:
    config = tf.LlamaConfig(
        **BASE
        | {
            "num_hidden_layers": layers,
            "num_attention_heads": heads[0],
            "num_key_value_heads": heads[1],
            "hidden_size": hidden,
            "intermediate_size": inner,
        },
        head_dim=8,
        tie_word_embeddings=tied,
        attention_bias=bias,
        mlp_bias=bias,
    )
    table = tag(build(config))
    assert len(table) == 9 * layers + 3
    assert table.layers == layers
    assert not table.unknown
    in_layers = [s for s in table if s.is_linear and s.layer is not None]
    q, kv = 8 * heads[0], 8 * heads[1]
    assert sum(s.parameters for s in in_layers) == layers * (2 * hidden * q + 2 * hidden * kv + 3 * hidden * inner)


@pytest.mark.parametrize(
    ("folder", "layers", "expected"),
    [
        (
            "dense-tiny",
            12,
            "embedding 1 attention_q 12 attention_k 12 attention_v 12 attention_o 12 ffn_gate 12 ffn_up 12 "
            "ffn_down 12 norm 25 output_head 1",
        ),
        (
            "hybrid-moe-tiny",
            10,
            "embedding 1 attention_q 3 attention_k 3 attention_v 3 attention_o 3 ffn_gate_up 10 ffn_down 10 "
            "moe_router 10 moe_expert 20 ssm_state 7 ssm_conv 7 ssm_in 7 ssm_gate 7 ssm_out 7 norm 21 output_head 1",
        ),
    ],
)
def test_zoo(folder: str, layers: int, expected: str) -> None:
    path = SHARED / "zoo" / folder
    if not (path / "config.json").is_file():
        pytest.skip("the model zoo is not here (set QBE_SHARED)")
    model = tf.AutoModelForCausalLM.from_pretrained(path)
    table = tag(model)
    assert table.layers == layers
    assert Counter(s.role for s in table) == counts(expected)
    assert table.sites == tag(build(model.config, dtype=model.dtype)).sites
