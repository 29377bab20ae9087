"""Learns the cascade's table: at which layers the entropy of attention tells what later layers need.

The model writes answers at 16 bits; the entropy of every layer's attention is taken from the very steps that write
them. The same tokens then run under a blueprint of the usual average, and for each candidate layer under the two that
have every later layer one gear up, or down. What these two differ by in divergence from 16 bits is what later layers
are worth to a token. Its rank correlation with the entropy gives a point's sign; which points there are, and which part
of the tokens they move, is what makes the divergence least at an unchanged average on one half of the answers. The
other half tells what that is worth, beside the same moves given to tokens at random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import spearmanr

from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.engine.core import Core
from qbe.engine.engine import Engine
from qbe.engine.result import Request
from qbe.engine.sampling_params import SamplingParams
from qbe.engine.scoring import Scored, score
from qbe.errors import QBEError
from qbe.eval.intervals import interval
from qbe.eval.items import Item, encode
from qbe.kernels.kv_blocks import PAGE_SIZE
from qbe.sites import FULL_BITS
from qbe.store.cascade_table import CascadeTable, Point, steering, step
from qbe.store.sensitivity import divergence_of_rows

BITS = 5.0  # average of the blueprint that is moved
TOKENS = 192  # of an answer
TEMPERATURE = 0.8  # of its tokens: greedy answers of small models repeat themselves
TOGETHER = 8  # answers that are written at once
CANDIDATES = 5  # layers, spread over the model
POINTS = 3
SHARES = (0.1, 0.2, 0.4)
QUANTILES = 33
LEAST = 4  # answers

Numbers = npt.NDArray[np.float64]


@dataclass
class Answer:
    """What was measured of one answer; row i tells of the step that read its i-th token and gave the next one.

    Attributes:
        entropy: float64 [tokens, layers], a part of the most there can be.
        kl: float64 [1 + 2 * candidates, tokens], nats: under the blueprint, then one gear up and down behind each.
    """

    entropy: Numbers
    kl: Numbers


class Recorder:
    """Stands where the cascade would: takes every row's entropy, and moves nothing."""

    def __init__(self) -> None:
        self.layers: dict[int, torch.Tensor] = {}  # of the step that ran last: mean entropy of each row

    def observe(
        self, layer: int, attended: torch.Tensor, entropy: torch.Tensor, lengths: torch.Tensor,
        rows: torch.Tensor | None, window: int,
    ) -> torch.Tensor:  # fmt: skip
        """`qbe.kvcache.attention.Observe`."""
        most = lengths.clamp(2, window if window > 2 else None).log()
        self.layers[layer] = entropy.float().mean(1) / most
        return attended


def train(engine: Engine, items: Sequence[Item], tick: Callable[[], None] = lambda: None) -> CascadeTable:
    """Measures and fits.

    Args:
        engine: serves nobody else; its policy has measured sensitivities.
        tick: called after each item.

    Raises:
        QBEError: too few answers, or a model that the cascade cannot run.
    """
    core, sites = engine.core, engine.table
    attention = sorted({s.layer for s in sites.kv})
    if not core.runner.packed or len(attention) < 2:
        raise QBEError(f"{engine.name} has no layers of attention that share a step: the cascade cannot run it")
    candidates = sorted({attention[i * (len(attention) - 1) // (CANDIDATES + 1)] for i in range(1, CANDIDATES + 1)})
    found: list[Answer] = []
    base: Blueprint | None = None
    for at in range(0, len(items), TOGETHER):
        part = [encode(item, engine.tokenizer).prompt_ids for item in items[at : at + TOGETHER]]
        if base is None:
            base = engine.explain(part[0], budget=Budget(bits=BITS), policy="static").blueprint
        blueprints = [base, *(behind(base, sites, layer, up) for layer in candidates for up in (True, False))]
        for prompt, (answer, entropy) in zip(part, write(engine, part), strict=True):
            if len(answer) > 32:
                kl = divergences(core, prompt, answer, blueprints)
                found.append(Answer(entropy, kl[:, 1 : len(entropy) + 1]))
            tick()
    if len(found) < LEAST or base is None:
        raise QBEError(f"{len(found)} answers of more than 32 tokens are too few to learn from; give a higher --limit")
    return fit(found, candidates, base, engine)


def write(engine: Engine, prompts: Sequence[list[int]]) -> list[tuple[list[int], Numbers]]:
    """Answers at 16 bits, drawn with a seed, and the entropies [tokens - 1, layers] of the steps that read them."""
    core, recorder = engine.core, Recorder()
    before = core.runner.observe, core.runner.decode
    params = SamplingParams(max_tokens=TOKENS, temperature=TEMPERATURE, seed=0)
    layers = len(core.pool.shapes)
    rows: dict[str, list[list[float]]] = {}
    ids: list[str] = []
    try:
        core.runner.observe, core.runner.decode = recorder.observe, None  # captured steps are watched by nobody
        ids = [engine.submit(Request(p, params, Budget(bits=FULL_BITS), "uniform")) for p in prompts]
        running = [engine.sequence(i) for i in ids]
        while not all(map(engine.finished, ids)):
            recorder.layers.clear()
            engine.step()
            singles = [w for w in core.scheduler.last if w.count == 1]
            steps = torch.stack([recorder.layers.get(i, torch.zeros(len(singles))).cpu() for i in range(layers)], 1)
            for w, row in zip(singles, steps.tolist(), strict=True):
                if w.start >= len(w.sequence.prompt_ids):
                    rows.setdefault(w.sequence.request_id, []).append(row)
    finally:
        core.runner.observe, core.runner.decode = before
        for i in ids:
            engine.cancel(i)
            engine.take_result(i)
    return [(s.output_ids, np.array(rows.get(s.request_id, []), np.float64).reshape(-1, layers)) for s in running]


def behind(blueprint: Blueprint, sites: Any, layer: int, up: bool) -> Blueprint:
    """The blueprint with every layer behind this one a gear up, or down."""
    bits = [
        step(s, b, up) if s.layer is not None and s.layer > layer else b
        for s, b in zip(sites.nested, blueprint.weight_bits, strict=True)
    ]
    return replace(blueprint, weight_bits=tuple(bits))


def divergences(core: Core, prompt: list[int], answer: list[int], blueprints: Sequence[Blueprint]) -> Numbers:
    """Divergence from the 16-bit model, nats, float64 [blueprints, tokens]: of each answer token's distribution."""
    start, n = len(prompt) - 1, len(answer)
    full = replace(blueprints[0], weight_bits=(FULL_BITS,) * len(blueprints[0].weight_bits))
    teacher = torch.empty(n, core.vocabulary, device=core.device)
    kl = torch.zeros(len(blueprints), n, device=core.device)

    def keep(position: int, rows: torch.Tensor) -> None:
        teacher[position - start : position - start + len(rows)] = rows

    def compare(number: int) -> Callable[[int, torch.Tensor], None]:
        def add(position: int, rows: torch.Tensor) -> None:
            for i in range(0, len(rows), 32):  # so that temporaries stay in cache
                at = slice(position - start + i, position - start + min(i + 32, len(rows)))
                kl[number, at] = divergence_of_rows(teacher[at], teacher[at].softmax(-1), rows[i : i + 32])

        return add

    text = (prompt + answer)[:-1]
    score(core, [Scored(text, full, start, keep)])
    for number, blueprint in enumerate(blueprints):
        score(core, [Scored(text, blueprint, start, compare(number))])
    found: Numbers = kl.double().clamp_min(0).cpu().numpy()
    return found


def fit(found: Sequence[Answer], candidates: Sequence[int], base: Blueprint, engine: Engine) -> CascadeTable:
    """The table that makes the divergence of every other answer least, and what it does to the rest."""
    learned, held = found[::2], found[1::2]
    entropy = np.concatenate([a.entropy for a in learned])
    correlations, points = {}, []
    for i, layer in enumerate(candidates):
        # Within answers: what is balanced is an answer's average.
        each = [spearmanr(a.entropy[:, layer], a.kl[2 + 2 * i] - a.kl[1 + 2 * i]).statistic for a in learned]
        correlations[layer] = rho = float(np.mean(np.nan_to_num(each)))
        quantiles = np.quantile(entropy[:, layer], np.linspace(0, 1, QUANTILES))
        points.append(Point(layer, 1 if rho >= 0 else -1, tuple(np.round(quantiles, 5).tolist())))
    choices = [
        CascadeTable(chosen, share, 1)
        for n in range(1, POINTS + 1) for chosen in combinations(points, n) for share in SHARES
    ]  # fmt: skip
    best = min(choices, key=lambda t: sum(moved(t, a, candidates, base, engine)[0].sum() for a in learned))
    about = {
        "answers": len(found), "tokens": sum(len(a.entropy) for a in found),
        "bits": base.average_weight_bits(engine.table),
        "correlations": {str(k): round(v, 4) for k, v in correlations.items()},
        "learned": _told(best, learned, candidates, base, engine),
        "held_out": _told(best, held, candidates, base, engine),
    }  # fmt: skip
    return replace(best, about=about)


def moved(
    table: CascadeTable, answer: Answer, candidates: Sequence[int], base: Blueprint, engine: Engine,
    order: npt.NDArray[np.int64] | None = None,
) -> tuple[Numbers, Numbers]:  # fmt: skip
    """Divergence and average bits of each token, [tokens], when the first point that asks moves it (`most` is 1) and
    levels follow page by page, as `qbe.engine.cascade` has them.

    Args:
        order: gives each token the moves of another.
    """
    sites, own = engine.table, base.average_weight_bits(engine.table)
    behinds = [behind(base, sites, layer, up) for layer in candidates for up in (True, False)]
    bits = np.array([own, *(b.average_weight_bits(sites) for b in behinds)])
    row, excess = np.zeros(len(answer.entropy), np.int64), 0.0
    for first in range(0, len(row), PAGE_SIZE):
        page = slice(first, first + PAGE_SIZE)
        level = steering(table, sites, base.weight_bits, excess).level
        for point in table.points:
            low, high = table.thresholds(point, level)
            asked, at = point.sign * answer.entropy[page, point.layer], candidates.index(point.layer)
            move = np.where(asked > high, 1 + 2 * at, np.where(asked < low, 2 + 2 * at, 0))
            row[page] = np.where(row[page] == 0, move, row[page])
        excess += float((bits[row[page]] - own).sum())
    row = row if order is None else row[order]
    return answer.kl[row, np.arange(len(row))], bits[row]


def _told(
    table: CascadeTable, answers: Sequence[Answer], candidates: Sequence[int], base: Blueprint, engine: Engine
) -> dict[str, Any]:
    """Divergence over that of the blueprint left alone, with its interval, and of the same moves at random tokens."""
    rng = np.random.default_rng(0)
    own = [moved(table, a, candidates, base, engine) for a in answers]
    other = [moved(table, a, candidates, base, engine, rng.permutation(len(a.entropy))) for a in answers]
    fixed = np.array([a.kl[0].sum() for a in answers])
    kl, chance = (np.array([k.sum() for k, _ in found]) for found in (own, other))
    between = interval(kl, fixed)
    return {
        "ratio": round(float(kl.sum() / fixed.sum()), 4),
        "interval": None if between is None else [round(float(x), 4) for x in between],
        "at_random": round(float(chance.sum() / fixed.sum()), 4),
        "bits": round(float(np.concatenate([b for _, b in own]).mean()), 4),
    }
