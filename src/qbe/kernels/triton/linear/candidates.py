"""Launch configurations worth a trial on the machine, beside the generic ones; pure functions of the shape.

A compilation takes 3 to 20 s, a trial milliseconds. How a sum is split is no constant of the decode and the batch
kernel, so that their candidates of all shapes share a dozen compilations; those of the plain one have to be few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from qbe.format.layout import SliceLayout
from qbe.kernels.triton.linear.tiled.layout import TILE, padded_shape, unit
from qbe.kernels.tuning.tunable import Config, Problem, processors

MOST_SPLITS = 8
PROGRAMS = 2  # a processor: the splits nearest to that many programs are tried


def decode(problem: Problem, generic: Config, device: torch.device) -> list[Config]:
    """Of `tiled.decode_kernel`: tile and warps, then the pipeline. How the sum is split is the generic one's to say, so
    that a row comes out the same whatever rows are beside it."""
    wide = ((128, 4),) if problem.rows <= 8 and even_tiles(problem.outputs) else ()
    configs: list[Config] = [
        {**generic, "BN": block_n, "num_warps": warps} for block_n, warps in (*wide, (64, 2), (64, 4), (32, 2))
    ]
    configs += [{**generic, "STAGES": stages} for stages in (2, 3, 4) if abs(stages - generic["STAGES"]) == 1]
    if generic["SPLIT_UNITS"] >= 2:
        configs.append({**generic, "AHEAD": 3 - generic["AHEAD"]})  # 1 or 2
    return _others(problem, generic, configs)


def batch(problem: Problem, generic: Config, device: torch.device) -> list[Config]:
    """Of `tiled.batch_kernel`: tile and warps with the two likeliest splits each, then the pipeline."""
    units = generic["SPLITS"] * generic["SPLIT_UNITS"]
    configs: list[Config] = []
    for block_n, warps in ((64, 4), (128, 4), (128, 8)):
        tiles = sum(-(-n // block_n) for n in problem.outputs) * -(-problem.rows // generic["BM"])
        for splits in _likeliest(units, tiles, processors(device)):
            configs.append(
                {**generic, "BN": block_n, "num_warps": warps, "SPLITS": splits, "SPLIT_UNITS": units // splits}
            )
    if generic["STAGES"] > 1:
        configs.append({**generic, "STAGES": generic["STAGES"] - 1})
    return _others(problem, generic, configs)


def plain(problem: Problem, generic: Config, device: torch.device) -> list[Config]:
    """Of `nested_kernel` on the canonical layout, for few rows: it serves small matrices only."""
    if generic["DEQUANTISE"] or problem.dtype == torch.float32:
        return []
    configs: list[Config] = [
        {**generic, "BLOCK_N": 96 - generic["BLOCK_N"]},  # 32 or 64
        {**generic, "STAGES": 5 - generic["STAGES"]},
        {**generic, "num_warps": 2},
    ]
    if generic["SPLITS"] > 1:
        configs.append({**generic, "SPLITS": 1, "SPLIT_BLOCKS": generic["SPLITS"] * generic["SPLIT_BLOCKS"]})
    return _others(problem, generic, configs)


def valid_decode(problem: Problem, config: Config) -> bool:
    """Whether the parts of the sum add up, and what is fetched ahead and counted lies within the weight."""
    layout = SliceLayout.of(problem.slices)
    units = padded_shape(problem.outputs[0], problem.inputs, layout)[1] // unit(layout)
    return (
        _sane(config, ("BM", "BN"))
        and config["SPLITS"] * config["SPLIT_UNITS"] == units
        and config["AHEAD"] in (1, 2)
        and config["AHEAD"] <= config["SPLIT_UNITS"]
        and config["BM"] == (8 if problem.rows <= 8 else 16)
        and (config["BN"] <= TILE or even_tiles(problem.outputs))
        and _counted(problem, config, 1)
    )


def valid_batch(problem: Problem, config: Config) -> bool:
    """The same of the batch kernel, whose tiles of rows share the counters of a tile of outputs."""
    layout = SliceLayout.of(problem.slices)
    units = padded_shape(problem.outputs[0], problem.inputs, layout)[1] // unit(layout)
    return (
        _sane(config, ("BM", "BN"))
        and min(config["BM"], config["BN"]) >= 16
        and config["SPLITS"] * config["SPLIT_UNITS"] == units
        and _counted(problem, config, -(-problem.rows // config["BM"]))
    )


def valid_plain(problem: Problem, config: Config) -> bool:
    """Whether the splits cover the inputs."""
    return (
        _sane(config, ("BLOCK_M", "BLOCK_N"))
        and config["SPLITS"] * config["SPLIT_BLOCKS"] * 64 >= problem.inputs
        and config["STEP_BLOCKS"] in (1, 2)
        and config["SPLIT_BLOCKS"] % config["STEP_BLOCKS"] == 0
    )


def even_tiles(outputs: Sequence[int]) -> bool:
    """Whether a tile of 128 outputs lies within each weight, whose outputs are padded to a multiple of 64."""
    return all(-(-n // TILE) % 2 == 0 for n in outputs)


def _likeliest(units: int, tiles: int, processors: int) -> list[int]:
    """The two divisors of `units`, up to 8, that come nearest to `PROGRAMS` programs a processor."""
    divisors = [s for s in range(1, MOST_SPLITS + 1) if units % s == 0]
    return sorted(divisors, key=lambda s: abs(math.log(tiles * s / (PROGRAMS * processors))))[:2]


def _others(problem: Problem, generic: Config, configs: list[Config]) -> list[Config]:
    """Each once, without the generic one and those whose parts could not be counted."""
    out: list[Config] = []
    for config in configs:
        tiles_of_rows = -(-problem.rows // config["BM"]) if "BM" in config else 1
        if config != generic and config not in out and ("BN" not in config or _counted(problem, config, tiles_of_rows)):
            out.append(config)
    return out


def _counted(problem: Problem, config: Config, tiles_of_rows: int) -> bool:
    """Whether each weight has a counter for every tile of a split sum: it has one for 16 outputs (`tiled.layout`)."""
    return config["SPLITS"] == 1 or all(
        -(-n // config["BN"]) * tiles_of_rows <= -(-n // TILE) * TILE // 16 for n in problem.outputs
    )


def _sane(config: Config, tiles: tuple[str, str]) -> bool:
    return (
        all(config[t] in (8, 16, 32, 64, 128, 256) for t in tiles)
        and config["num_warps"] in (1, 2, 4, 8)
        and 1 <= config["STAGES"] <= 5
        and 1 <= config["SPLITS"] <= MOST_SPLITS
    )
