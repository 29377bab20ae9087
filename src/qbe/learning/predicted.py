"""Trains the predictor of a query's sensitivities: gradients say what they are, the prompt's prefill what can be known.

A site's sensitivity to one query is its divergence there over that of all queries. What is fitted is the logarithm of
that ratio, less the query's mean over the sites, which changes no allocation under a given average: ridge regression
from the few directions in which the signals (`qbe.policies.predicted.features`) differ most between queries, and from
the sentence encoder's vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import polygamma

from qbe.analysis.encoder import default_encoder
from qbe.analysis.profile import PromptSignals
from qbe.datasets.items import Item, encode
from qbe.datasets.results import Results, digest
from qbe.errors import QBEError
from qbe.learning.sensitivities import estimate
from qbe.policies.learned import Learned
from qbe.policies.predicted import VECTOR, features
from qbe.sites import Role
from qbe.store.prepare import PreparedModel
from qbe.store.sensitivity import full_bits

PROMPT, ANSWER = 128, 96  # tokens: the last ones of a prompt, the first ones of its answer
DRAWS = 8  # backward passes for each query
TOGETHER = 4  # queries of a pass
DIRECTIONS = 4
STRENGTHS = (1.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 1e9)  # of the regression's penalty; the last one predicts nothing
FOLDS = 6
HELD_OUT = 0.25

Numbers = npt.NDArray[np.float64]


def train(
    prepared: PreparedModel, items: Sequence[Item], results: Results, tick: Callable[[], None] = lambda: None
) -> Learned:
    """Measures the items, which goes on where an interrupted run was, and fits the predictor.

    Args:
        prepared: not yet served by an engine.
        tick: called after each item.

    Raises:
        QBEError: too few queries, or a model without its 16-bit weights.
    """
    table = prepared.table
    errors = _errors(prepared)
    rows = _measured(prepared, items, results, errors, tick)
    if len(rows) < 8:
        raise QBEError(f"{len(rows)} queries are too few to train on; give a higher --limit")
    kl, x, v = (np.array([r[k] for r in rows]) for k in ("kl", "features", "vector"))
    tokens = np.array([r["tokens"] for r in rows], np.float64)
    per_token = np.maximum(kl, 1e-30) / tokens[:, None]
    order = np.random.default_rng(0).permutation(len(rows))
    held, kept = order[: round(len(rows) * HELD_OUT)], order[round(len(rows) * HELD_OUT) :]
    model, strength = _fit(x[kept], v[kept], _pattern(per_token[kept], per_token[kept]))
    report = _report(model, x[held], v[held], _pattern(per_token[held], per_token[kept]))
    lowest = kl[kept].sum(0) / tokens[kept].sum()
    base = [
        [value * site.sensitivity[g] / max(site.sensitivity[site.gears[0]], 1e-30) for g in site.gears]
        for site, value in zip(table.nested, lowest, strict=True)
    ]
    tensors: dict[str, npt.NDArray[Any]] = {
        **model, "base": np.array(base), "errors": np.concatenate(errors), "inputs": np.array([len(e) for e in errors]),
    }  # fmt: skip
    about = {"queries": len(rows), "draws": DRAWS, "held_out": len(held), "strength": strength, **report}
    return Learned(tensors, about)


def _errors(prepared: PreparedModel) -> list[npt.NDArray[np.float32]]:
    """For every site the squared error of the columns of its weight at the lowest gear."""
    with torch.inference_mode(), full_bits(prepared.model, prepared.table) as weights:
        return [
            (weights[s.name].dequantise(s.gears[0]).float() - weights[s.name].dequantise().float())
            .square().sum(0).cpu().numpy()
            for s in prepared.table.nested
        ]  # fmt: skip


def _measured(
    prepared: PreparedModel, items: Sequence[Item], results: Results, errors: list[npt.NDArray[np.float32]],
    tick: Callable[[], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """For each item `kl` [sites], nats summed over the answer, `features` and `vector` of its prompt, and `tokens`."""
    table, known, missing = prepared.table, dict[int, dict[str, Any]](), list[tuple[int, list[int], list[int], str]]()
    texts: list[str] = []
    for i, item in enumerate(items):
        e = encode(item, prepared.tokenizer)
        texts.append(e.prompt if isinstance(e.prompt, str) else e.prompt[-1]["content"])
        prompt, answer = e.prompt_ids[-PROMPT:], e.reference_ids[:ANSWER]
        key = digest([prompt, answer])
        sensitivity = results.get("sensitivity", key, f"gear {table.gears()[0]}, {DRAWS} draws")
        if sensitivity is not None:
            known[i] = sensitivity
            tick()
        elif prompt and answer:
            missing.append((i, prompt, answer, key))
        else:
            tick()
    missing.sort(key=lambda m: len(m[1]) + len(m[2]))  # those of about the same length share a pass
    for begin in range(0, len(missing), TOGETHER):
        some = missing[begin : begin + TOGETHER]
        tokens = torch.zeros(len(some), max(len(p) + len(a) for _, p, a, _ in some), dtype=torch.int64)
        counted = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, (_, prompt, answer, _) in enumerate(some):
            ids = prompt + answer
            tokens[row, : len(ids)] = torch.tensor(ids)
            counted[row, len(prompt) - 1 : len(ids) - 1] = True
        kl, activation_stats, entropy = estimate(
            prepared.model, table, tokens, counted, table.gears()[0], DRAWS, seed=begin
        )
        for row, (i, _, answer, key) in enumerate(some):
            inputs = tuple(
                None if site.role is Role.OUTPUT_HEAD else means[row].numpy()
                for site, means in zip(table.nested, activation_stats, strict=True)
            )
            x = features(PromptSignals(inputs, float(entropy[row])), errors)
            known[i] = {"kl": kl[row].tolist(), "features": x.tolist(), "tokens": len(answer)}
            results.put("sensitivity", key, f"gear {table.gears()[0]}, {DRAWS} draws", known[i])
            tick()
    return [known[i] | {"vector": default_encoder().encode(texts[i])} for i in sorted(known)]


def _pattern(per_token: Numbers, trained_on: Numbers) -> Numbers:
    """Logarithms [queries, sites] of sensitivities over the mean of training's, less each query's mean."""
    ratio = np.log(per_token) - np.log(trained_on).mean(0)
    return ratio - ratio.mean(1, keepdims=True)


def _fit(x: Numbers, v: Numbers, y: Numbers) -> tuple[dict[str, npt.NDArray[Any]], float]:
    """The tensors of `qbe.policies.predicted.Predictor` that tell ratios y [queries, sites] from features x and
    vectors v, and the penalty with which queries were predicted best by the others.
    """
    mean, scale = x.mean(0), np.maximum(x.std(0), 1e-3)
    z = (x - mean) / scale
    _, lengths, across = np.linalg.svd(z, full_matrices=False)
    kept = min(DIRECTIONS, int((lengths > 1e-6 * lengths[0]).sum()))
    directions = across[:kept].T / (lengths[:kept] / np.sqrt(len(z)))
    centre = v.mean(0)
    d = np.concatenate([z @ directions, VECTOR * (v - centre)], 1)
    folds = np.array_split(np.random.default_rng(0).permutation(len(d)), FOLDS)

    def loss(strength: float) -> float:
        total = 0.0
        for out in folds:
            rest = np.setdiff1d(np.arange(len(d)), out)
            middle, level = d[rest].mean(0), y[rest].mean(0)
            said = (d[out] - middle) @ _ridge(d[rest] - middle, y[rest] - level, strength)
            total += float(((y[out] - level - said) ** 2).sum())
        return total

    strength = min(STRENGTHS, key=loss)
    weights = _ridge(d, y, strength)
    return {"mean": mean, "scale": scale, "directions": directions, "centre": centre, "weights": weights}, strength


def _ridge(inputs: Numbers, outputs: Numbers, strength: float) -> Numbers:
    penalty = strength * np.eye(inputs.shape[1])
    return np.asarray(np.linalg.solve(inputs.T @ inputs + penalty, inputs.T @ outputs), np.float64)


def _report(fitted: dict[str, npt.NDArray[Any]], x: Numbers, v: Numbers, y: Numbers) -> dict[str, float]:
    """How much of held-out queries' patterns the predictor explains, and how much of them is the estimate's noise."""
    shown = ((x - fitted["mean"]) / fitted["scale"]) @ fitted["directions"]
    said = np.concatenate([shown, VECTOR * (v - fitted["centre"])], 1) @ fitted["weights"]
    noise = float(polygamma(1, DRAWS / 2))  # variance of the logarithm of a mean of so many squares
    explained, pattern = float((y**2).mean() - ((y - said) ** 2).mean()), max(1e-9, float((y**2).mean()) - noise)
    return {
        "pattern_deviation": float(np.sqrt(pattern)),
        "noise_deviation": float(np.sqrt(noise)),
        "predicted_deviation": float(said.std()),
        "explained_of_pattern": explained / pattern,
    }
