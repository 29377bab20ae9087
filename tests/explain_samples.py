"""Site tables of a dense and a hybrid model, an explanation on them, and its print."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from rich.console import Console

from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.explain import Explanation
from qbe.sites import KVBits, KVSite, Role, Site, SiteTable

GEARS = (4, 6, 8, 16)


def linear(name: str, role: Role, layer: int | None, shape: tuple[int, int], gears: tuple[int, ...] = GEARS) -> Site:
    n = shape[0] * shape[1]
    bytes_at = {g: n * g // 8 + (0 if g == 16 else n // 64) for g in gears}
    return Site(name, role, layer, shape, True, gears, bytes_at, {g: 1e-3 / g for g in gears if g < 16})


def dense(layers: int = 30) -> SiteTable:
    """A Llama of SmolLM2's shape."""
    sites = [Site("model.embed_tokens", Role.EMBEDDING, None, (49152, 576), bytes_at={16: 1152})]
    for i in range(layers):
        for name, role, shape in (
            ("self_attn.q_proj", Role.ATTENTION_Q, (576, 576)),
            ("self_attn.k_proj", Role.ATTENTION_K, (192, 576)),
            ("self_attn.v_proj", Role.ATTENTION_V, (192, 576)),
            ("self_attn.o_proj", Role.ATTENTION_O, (576, 576)),
            ("mlp.gate_proj", Role.FFN_GATE, (1536, 576)),
            ("mlp.up_proj", Role.FFN_UP, (1536, 576)),
            ("mlp.down_proj", Role.FFN_DOWN, (576, 1536)),
        ):
            sites.append(linear(f"model.layers.{i}.{name}", role, i, shape))
        sites.append(Site(f"model.layers.{i}.input_layernorm", Role.NORM, i, (576,)))
    sites.append(linear("lm_head", Role.OUTPUT_HEAD, None, (49152, 576)))
    return SiteTable(tuple(sites), "smollm2-135m-instruct", layers)


def hybrid() -> SiteTable:
    """Seven Mamba2 layers, attention in layers 2, 5 and 8; experts and routers stay at 16 bits."""
    sites = []
    for i in range(10):
        if i in (2, 5, 8):
            sites.append(linear(f"model.layers.{i}.self_attn.qkv_proj", Role.ATTENTION_QKV, i, (384, 256)))
            sites.append(linear(f"model.layers.{i}.self_attn.o_proj", Role.ATTENTION_O, i, (256, 256)))
        else:
            sites.append(linear(f"model.layers.{i}.mamba.in_proj", Role.SSM_IN, i, (1804, 256)))
            sites.append(linear(f"model.layers.{i}.mamba.out_proj", Role.SSM_OUT, i, (256, 512)))
        sites.append(Site(f"model.layers.{i}.router", Role.MOE_ROUTER, i, (8, 256), True))
        sites.append(Site(f"model.layers.{i}.experts", Role.MOE_EXPERT, i, (8, 256, 512)))
    return SiteTable(tuple(sites), "hybrid-moe-tiny", 10)


def with_kv(table: SiteTable, layers: Sequence[int], heads: int = 3) -> SiteTable:
    """The table with measured key heads in these layers."""
    costs = {2: 1e-2, 4: 1e-3, 8: 1e-5, 16: 0.0}
    return table.with_kv([KVSite(i, h, 3, 128, costs, (0.4, 0.1)) for i in layers for h in range(heads)])


def blueprint(table: SiteTable) -> Blueprint:
    """Ends of the model and the down projections higher, the middle lower, some of every gear."""
    bits = []
    for site in table.nested:
        if site.layer is None:
            bits.append(8)
        elif site.layer == 0:
            bits.append(16 if site.role is Role.FFN_DOWN else 8)
        elif site.layer >= table.layers - 2 or site.role in (Role.FFN_DOWN, Role.ATTENTION_V, Role.SSM_OUT):
            bits.append(6 if site.layer % 4 else 8)
        else:
            bits.append(6 if site.layer % 7 == 3 else 4)
    return Blueprint.of("tiered", table, tuple(bits))


FEATURES = {
    "token_count": 55.0,
    "vocabulary_diversity": 0.8364,
    "punctuation_density": 0.0513,
    "question_markers": 1.0,
    "digit_density": 0.0625,
    "code_marks": 0.0,
    "semantic_entropy": 4.2187,
    "asks_for_steps": 1.0,
}


def explanation(table: SiteTable, budget: Budget | None = None, kv_bits: Sequence[KVBits] | None = None) -> Explanation:
    b = blueprint(table) if kv_bits is None else blueprint(table).with_kv_bits(kv_bits)
    full = Blueprint.of("uniform", table, (16,) * len(table.nested))
    profile = QueryProfile(0.62, "mathematics", 2, FEATURES, context=0 if kv_bits is None else 4096)
    budget = budget or Budget()
    return Explanation(
        prompt_tokens=55,
        profile=profile,
        blueprint=b,
        table=table,
        budget=budget,
        target_bits=budget.bits_for(profile.score),
        analysis_ms=0.4213,
        policy_ms=0.0871,
        bytes_per_token=b.bytes_per_token(table),
        bytes_per_token_16bit=full.bytes_per_token(table),
    )


def printed(renderable: object, width: int = 80, **options: object) -> str:
    out = io.StringIO()
    settings = {"force_terminal": True, "color_system": "truecolor", **options}
    Console(file=out, width=width, **settings).print(renderable)
    return out.getvalue()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def digits(text: str, label: str) -> list[int]:
    """The numbers of every heat map row with this label, over all bands; -1 where the layer has no such site."""
    found = []
    for line in text.splitlines():
        if m := re.match(rf"\s+{label}\s+((?:[\d·]+\s*)+)", line):
            found += [-1 if d == "·" else int(d) for d in re.findall(r"\d+|·", m[1])]
    return found
