"""Bits for each query from what its own prompt says and shows: predicted sensitivities, allocated exactly."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from qbe.analysis.profile import PromptSignals, QueryProfile
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.errors import QBEError
from qbe.policies import learned
from qbe.policies.allocate import TOLERANCE, solve
from qbe.policies.base import Policy
from qbe.policies.kv import allocate_kv
from qbe.sites import FULL_BITS, SiteTable

VECTOR = 3.0  # what the encoder's vector is multiplied with beside the signals' directions, which have a deviation of 1
MOST = 1.5  # of a logarithm of a predicted ratio, up or down: what training saw little of is not believed
Numbers = npt.NDArray[np.float64]


class FixedPolicy(Policy):
    """What `predicted` begins with, for every query: the best fixed assignment by the sensitivities of training's
    queries. Without it nobody knows which part of what `predicted` gains comes from the query.
    """

    name = "fixed"
    reads_score = False
    needs_sensitivity = True

    def prepare(self, table: SiteTable) -> None:
        """Raises QBEError where no predictor was trained for this model."""
        _predictor(table)

    def blueprint(self, profile: QueryProfile, budget: Budget, table: SiteTable) -> Blueprint:
        """Raises QBEError without a trained predictor, or for a budget below the store's lowest average."""
        return _of(self.name, table, _for_all(table, budget.bits_for(0.5, profile.least_bits)), budget)


class PredictedPolicy(Policy):
    """The prompt runs at the best assignment for all of training's queries (`qbe train predicted`); what its prefill
    shows of every site's inputs, and the sentence encoder's vector, predict how this query's sensitivities differ from
    theirs, and the answer is written at the exact allocation for these. The average is the budget's, else the middle
    of its tier; the KV cache has the budget's bits, else 16.
    """

    name = "predicted"
    reads_score = False
    needs_sensitivity = True
    analysis_tier = 3
    reads_prompt = True

    def prepare(self, table: SiteTable) -> None:
        """Raises QBEError where no predictor was trained for this model."""
        _predictor(table)

    def blueprint(self, profile: QueryProfile, budget: Budget, table: SiteTable) -> Blueprint:
        """Raises QBEError without a trained predictor, or for a budget below the store's lowest average."""
        predictor, bits = _predictor(table), budget.bits_for(0.5, profile.least_bits)
        if profile.signals is None or profile.vector is None:
            gears = _for_all(table, bits)
        else:
            ratios = predictor.ratios(profile.signals, profile.vector)
            gears = _allocation(table, predictor.base * np.exp(ratios)[:, None], bits)
        return _of(self.name, table, gears, budget)


class Predictor:
    """A linear map of a prompt's signals and vector. See `qbe.learning.predicted`.

    Attributes:
        base: sensitivities of training's queries, nats per token, float64 [sites, gears].
    """

    def __init__(self, tensors: dict[str, learned.Array]) -> None:
        self.base: Numbers = tensors["base"].astype(np.float64)
        self._mean, self._scale = tensors["mean"], tensors["scale"]
        self._directions, self._centre, self._weights = tensors["directions"], tensors["centre"], tensors["weights"]
        ends = np.cumsum(tensors["inputs"])
        self._errors = np.split(tensors["errors"], ends[:-1])

    def ratios(self, signals: PromptSignals, vector: npt.NDArray[np.float32]) -> Numbers:
        """Logarithms of this query's sensitivities over `base`, float64 [sites]."""
        x = (features(signals, self._errors) - self._mean) / self._scale
        inputs = np.concatenate([x @ self._directions, VECTOR * (vector - self._centre)])
        return np.clip(inputs @ self._weights, -MOST, MOST)


def features(signals: PromptSignals, errors: list[learned.Array]) -> Numbers:
    """Of every site the logarithm of the squared error that its lowest gear is expected to make at these inputs, then
    of the share of it that the largest channels have; and the entropy that the prompt ended in. float64 [2 sites + 1].

    Args:
        errors: for each site the squared error of its weight's columns at that gear, float32 [inputs]; the channels'
            errors add up, as far as channels are not correlated.

    A site whose inputs were not seen, like an output head, has zeros.
    """
    size, share = np.zeros(len(errors)), np.zeros(len(errors))
    for site, (squares, error) in enumerate(zip(signals.inputs, errors, strict=True)):
        if squares is not None:
            by_channel = squares.astype(np.float64) * error
            total = max(float(by_channel.sum()), 1e-30)
            size[site], share[site] = (
                np.log(total),
                np.log(max(float(by_channel @ by_channel), 1e-60)) - 2 * np.log(total),
            )
    return np.concatenate([size, share, [signals.entropy]])


def _of(policy: str, table: SiteTable, gears: tuple[int, ...], budget: Budget) -> Blueprint:
    kv_bits = FULL_BITS if budget.kv_bits is None else float(budget.kv_bits)
    return Blueprint.of(policy, table, gears, table.activations(budget.activation_bits), allocate_kv(table, kv_bits))


@lru_cache(maxsize=8)
def _predictor(table: SiteTable) -> Predictor:
    return Predictor(dict(learned.read("predicted", table).tensors))


@lru_cache(maxsize=256)
def _for_all(table: SiteTable, bits: float) -> tuple[int, ...]:
    return _allocation(table, _predictor(table).base, bits)


def _allocation(table: SiteTable, costs: Numbers, bits: float) -> tuple[int, ...]:
    """The exact allocation of costs [sites, gears] at an average of `bits`."""
    rows = [dict(zip(s.gears, row, strict=True)) for s, row in zip(table.nested, costs, strict=True)]
    sizes, most = table.reads.sizes.tolist(), table.reads.of_nested(bits)
    gears = solve(rows, sizes, most, most - TOLERANCE) or solve(rows, sizes, most)
    if gears is None:
        raise QBEError(f"no assignment was found for a budget of {bits:g} bits; try a higher one")
    return gears
