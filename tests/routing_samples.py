"""Random routers for the tiny model, and what they make of a text, computed token by token with dequantised weights."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import linear

from conftest import tiny_llama
from qbe.blueprint import Blueprint, DynamicPrecision
from qbe.policies import cascade
from qbe.policies.learned import Learned, write
from qbe.policies.per_token import LEVELS, TokenRouters
from qbe.policies.routers import Network, blocks_of, gear_bits, named
from qbe.sites import SiteTable
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.nesting import nest_model


def random_routers(table: SiteTable, seed: int = 0, inputs: int = 128) -> TokenRouters:
    """Whose tokens and sites differ, with thresholds from what few slices reach to what most do."""
    rng = np.random.default_rng(seed)
    blocks, slices = blocks_of(table, head=True), len(gear_bits(table)) - 1

    def matrix(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    networks = []
    for block in blocks:
        scores = len(block.sites) * slices
        networks.append(Network(matrix(inputs, 8) / 10, matrix(8), matrix(8, scores), matrix(scores)))
    thresholds = np.linspace(6, -6, LEVELS, dtype=np.float32)
    return TokenRouters(blocks, tuple(networks), gear_bits(table), thresholds, f"random {seed}")


def random_cascade(table: SiteTable, seed: int = 0, heads: int = 4) -> TokenRouters:
    """The same of what attention shows, at every point."""
    rng = np.random.default_rng(seed)
    blocks, slices = cascade.blocks_of(table), len(gear_bits(table)) - 1

    def matrix(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    networks = []
    for point, block in enumerate(blocks):
        scores = len(block.sites) * slices
        inner = matrix((point + 1) * heads, 8) * 3
        networks.append(Network(inner, -inner.sum(0) / 2, matrix(8, scores) * 3, matrix(scores)))
    thresholds = np.linspace(6, -6, LEVELS, dtype=np.float32)
    return TokenRouters(blocks, tuple(networks), gear_bits(table), thresholds, f"random cascade {seed}")


def keep_cascade(table: SiteTable, seed: int = 0) -> Path:
    """Puts such a cascade where an engine of this table's model finds it."""
    made = random_cascade(table, seed)
    tensors = {**named(made.networks), "widths": np.array(made.widths), "thresholds": made.thresholds}
    return write("cascade", table, Learned(tensors, {}))


def routed_blueprint(table: SiteTable, level: int | None, gear: int = 6, seed: int = 0) -> Blueprint:
    """Every site at a gear; at a level of the routers of that seed, if there is one."""
    found = Blueprint.of("mobi", table, (gear,) * len(table.nested))
    return (
        found
        if level is None
        else replace(found, dynamic_precision=DynamicPrecision("routers", level, f"random {seed}"))
    )


class Reference:
    """The tiny model, which reads each token's weights by itself."""

    def __init__(self, routers: TokenRouters) -> None:
        self.routers, self.model = routers, tiny_llama()
        self.table = nest_model(self.model, "tiny", NestedWeightConfig(), progress=False)
        self.gears: list[list[int]] = []  # for each site, by token
        self._blueprint = routed_blueprint(self.table, None)
        for number, block in enumerate(routers.blocks):
            module = self.model.get_submodule(block.name)
            module.register_forward_pre_hook(self._router(number), with_kwargs=True)
        for at, site in enumerate(self.table.nested):
            module = self.model.get_submodule(site.name)
            module.forward = self._linear(at, module.weight)

    def _router(self, number: int):  # type: ignore[no-untyped-def]
        block, network, widths = self.routers.blocks[number], self.routers.networks[number], self.routers.widths

        def hook(_module, args, kwargs) -> None:  # type: ignore[no-untyped-def]
            x = (args[0] if args else kwargs["hidden_states"])[0]
            if self._blueprint.dynamic_precision is None:
                return
            threshold = self.routers.thresholds[self._blueprint.dynamic_precision.level]
            for token, row in enumerate(x.numpy()):
                scores = network.scores(row).reshape(len(block.sites), -1)
                for site, (worth, *falls) in zip(block.sites, scores, strict=True):
                    slices = [worth]
                    for fall in falls:
                        slices.append(slices[-1] - np.log1p(np.exp(fall)))
                    self.gears[site][token] = widths[sum(np.float32(s) > threshold for s in slices)]

        return hook

    def _linear(self, at: int, weight):  # type: ignore[no-untyped-def]
        read = functools.cache(weight.dequantise)

        def forward(x: torch.Tensor) -> torch.Tensor:
            rows = x[0]
            gears = self.gears[at][-len(rows) :]
            return torch.stack([linear(r, read(g)) for r, g in zip(rows, gears, strict=True)])[None]

        return forward

    @torch.inference_mode()
    def logits(self, ids: list[int], blueprint: Blueprint) -> torch.Tensor:
        """[tokens, vocabulary]; leaves the gears in `gears`."""
        self._blueprint = blueprint
        self.gears = [[bits] * len(ids) for bits in blueprint.weight_bits]
        return self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]

    def greedy(self, ids: list[int], blueprint: Blueprint, tokens: int) -> list[int]:
        written: list[int] = []
        for _ in range(tokens):
            written.append(int(self.logits(ids + written, blueprint)[-1].argmax()))
        return written

    def average(self, first: int = 0) -> float:
        """Bits over the weights and tokens of the last text; of the output head, over tokens from the first one on."""
        sizes, heads = [s.parameters for s in self.table.nested], {b.sites[0] for b in self.routers.blocks if b.head}
        means = [np.mean(gears[first if site in heads else 0 :]) for site, gears in enumerate(self.gears)]
        return float(np.dot(means, sizes) / sum(sizes))
