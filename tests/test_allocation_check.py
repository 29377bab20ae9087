"""What `qbe quantize` does about sensitivities that do not add up: it measures assignments, corrects, and says so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cli_process import qbe
from conftest import byte_tokenizer, tiny_llama
from moe_models import tiny_moe
from qbe.allocation.knapsack import allocate
from qbe.sites import Role, Site, SiteTable
from qbe.store import mixtures, sensitivity_table
from qbe.store.allocation_check import EVEN, averages_of, checked, interval, search
from qbe.store.calibration_text import CalibrationText, built_in
from qbe.store.checked import AllocationCheck
from qbe.store.correction import Fit, convex, fit
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.nesting import nest_model
from qbe.store.sensitivity import Sensitivity

CPU = torch.device("cpu")
GEARS, FALL = (4, 6, 8), {4: 1.0, 6: 0.06, 8: 0.004, 16: 0.0}
ROLES = (Role.ATTENTION_Q, Role.ATTENTION_O, Role.FFN_UP, Role.FFN_DOWN)
Numbers = np.ndarray


class Model:
    """A model that is a formula: sites of different damage, which add up but for `together`, the same for all pairs."""

    def __init__(self, seed: int = 0, layers: int = 12, together: float = 0.0, head: float = 1.0) -> None:
        draw = np.random.default_rng(seed)
        sites = [
            Site(f"layers.{i}.{role}", role, i, (64, 64), True, (*GEARS, 16)) for i in range(layers) for role in ROLES
        ]
        sites.append(Site("lm_head", Role.OUTPUT_HEAD, None, (64 * layers * 2, 64), True, (*GEARS, 16)))
        self.table, self.together = SiteTable(tuple(sites), "formula", layers), together
        self.damage = 1e-3 * 10 ** draw.normal(0, 0.4, len(sites))
        self.damage[-1] = head * self.damage[:-1].sum()
        self.passages = 10 ** draw.normal(0, 0.1, (16, len(sites)))

    def measure(self, assignments: Sequence[Sequence[int]]) -> Numbers:
        lowered = np.array([[FALL[g] for g in gears] for gears in assignments]) * self.damage
        roots = np.sqrt(lowered).sum(1)
        pairs = self.together * (roots**2 - lowered.sum(1)) / len(self.damage)
        return lowered @ self.passages.T + pairs[:, None]

    def known(self, wrong: Numbers | float = 1.0) -> SiteTable:
        told = self.damage * wrong
        return self.table.with_sensitivity(
            {s.name: {g: d * f for g, f in FALL.items()} for s, d in zip(self.table.nested, told.tolist(), strict=True)}
        )

    def ratios(self, table: SiteTable) -> list[float]:
        """Of the assignments to uniform bits, at 4.5, 5, 5.5, 6, 6.5, 7 and 8."""
        at = np.array([self.measure([[g] * len(self.damage)]).mean() for g in (*GEARS, 16)])
        found = [allocate(table, bits, {}) for bits in averages_of(table)]
        uniform = [np.interp(table.reads.average_bits(a), (*GEARS, 16), at) for a in found]
        return (self.measure(found).mean(1) / uniform).tolist()


def test_right_sensitivities_stay_what_they_are() -> None:
    model = Model()
    found = search(model.known(), model.measure)
    assert found.fit.blend == (0.0, 0.0, 0.0)
    assert found.error < 0.1
    assert found.worst <= 1
    assert [row.uncorrected for row in found.averages] == pytest.approx(model.ratios(model.known()))
    assert max(model.ratios(found.fit.corrected())) <= EVEN


@pytest.mark.parametrize("seed", range(4))
def test_planted_wrong_sensitivities_are_corrected(seed: int) -> None:
    """Each site's number wrong by up to a hundred times either way, or by its rank: the worst looks the least."""
    model, draw = Model(seed), np.random.default_rng(seed)
    by_lot = 10 ** draw.uniform(-2, 2, len(model.damage))
    inverted = model.damage.mean() ** 2 / model.damage**2
    for wrong in (by_lot, inverted):
        before = model.ratios(model.known(wrong))
        found = search(model.known(wrong), model.measure)
        after = model.ratios(found.fit.corrected())
        assert max(before) > 1.2
        assert max(after[3], after[6]) <= EVEN  # at 6 and 8 bits uniform is an assignment
        assert max(after) <= 1.05
        assert max(found.fit.blend) > 0
        assert [row.ratio for row in found.averages] == pytest.approx(after)


def test_one_wrong_group_is_corrected_by_its_factor() -> None:
    """A head with most of the weights whose damage is told a tenth of what it is, as of a large tied vocabulary."""
    model, wrong = Model(head=2.0), np.ones(49)
    wrong[-1] = 0.1
    assert max(model.ratios(model.known(wrong))) > 1.1
    found = search(model.known(wrong), model.measure)
    after = model.ratios(found.fit.corrected())
    assert max(after[3], after[6]) <= EVEN
    assert max(after) <= 1.05
    factors = found.fit.sensitivities / Fit(found.fit.table, found.fit.uniform, found.fit.blend).sensitivities
    assert factors[-1, 0] > 1.2 * factors[:-1, 0].max()


@pytest.mark.parametrize("together", [0.2, 0.5])
def test_prediction_agrees_with_mixtures_that_the_fit_has_not_seen(together: float) -> None:
    model = Model(together=together)
    found = search(model.known(), model.measure)
    assert found.error <= 0.1
    assert found.worst <= 1


def test_all_uniform_damage_is_uniform_bits() -> None:
    model = Model()
    for known in (model.known(10 ** np.random.default_rng(1).uniform(-2, 2, 49)), model.known()):
        uniform = {g: float(model.measure([[g] * 49]).mean()) for g in GEARS}
        limit = Fit(known, uniform, (1.0,) * 3).corrected()
        for gear in GEARS:
            assert set(allocate(limit, gear, {})) == {gear}


def test_a_fit_finds_the_factors_of_groups() -> None:
    model, draw = Model(), np.random.default_rng(0)
    wrong = np.ones(49)
    wrong[-1] = 0.5
    mixtures_ = [tuple(int(g) for g in draw.choice(GEARS, 49)) for _ in range(30)]
    mixtures_ += [(g,) * 49 for g in GEARS]
    uniform = {g: float(model.measure([[g] * 49]).mean()) for g in GEARS}
    found = fit(model.known(wrong), uniform, (0.0,) * 3, mixtures_, model.measure(mixtures_).mean(1), 0.15)
    right = dict(zip((s.name for s in model.table.nested), model.damage.tolist(), strict=True))
    scale = model.passages.mean(0)
    assert found.measured()["lm_head"][4] == pytest.approx(right["lm_head"] * scale[-1], rel=0.1)


def test_the_hull_is_convex_and_nowhere_above() -> None:
    assert convex((4, 6, 8), (1.0, 0.1, 0.01)) == pytest.approx([1.0, 0.1, 0.01])
    assert convex((4, 6, 8), (1.0, 0.9, 0.1)) == pytest.approx([1.0, 0.55, 0.1])
    assert (convex((4, 6, 8), (0.1, 0.2, 0.05)) <= np.array([0.1, 0.2, 0.05]) + 1e-12).all()


def test_an_interval_has_the_ratio_inside() -> None:
    draw = np.random.default_rng(0)
    other = draw.uniform(1, 2, 16)
    low, high = interval(other * draw.uniform(0.7, 0.9, 16), other)
    assert 0.7 < low < 0.8 < high < 0.9


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_layer_by_layer_is_what_whole_passes_are(family: str, device: torch.device) -> None:
    model = tiny_llama() if family == "llama" else tiny_moe(family)
    table = nest_model(model, family, NestedWeightConfig(), progress=False)
    draw = np.random.default_rng(0)
    some = [tuple(int(g) for g in draw.choice((4, 6, 8, 16), len(table.nested))) for _ in range(3)]
    some += [(16,) * len(table.nested), some[0]]
    tokens = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(0))
    mixtures_ = mixtures.Mixtures(model, table, tokens, device)
    layers = mixtures_.divergences(some)
    whole = mixtures.as_a_whole(model, table, tokens, some)
    assert layers == pytest.approx(whole, rel=0.02, abs=1e-7)
    assert (layers[3] < 1e-7).all()
    assert (layers[4] == layers[0]).all()
    assert (mixtures_.divergences(some[1:3]) == layers[1:3]).all()


def test_passages_are_others_than_those_of_sensitivities() -> None:
    tokenizer, text = byte_tokenizer(), built_in()
    read, held = text.sensitivity(tokenizer), text.held_out(tokenizer, 16)
    assert held.shape == (16, 64)
    said = [tokenizer.decode(row) for row in read]
    used = {i for i, passage in enumerate(text.passages) for s in said if s in passage}
    assert not [t for row in held for t in [tokenizer.decode(row)] if any(t in text.passages[i] for i in used)]
    short = CalibrationText("short", ("a cat sat there. " * 6,), "", whole=True)
    assert short.held_out(tokenizer, 16).shape == (0, 64)  # nothing is left
    long = CalibrationText("long", tuple(f"{i} cats sat there. " * 200 for i in range(3)), "", whole=True)
    assert len(long.held_out(tokenizer, 16)) == 3


def test_a_text_that_leaves_nothing_leaves_sensitivities_as_they_are() -> None:
    model = tiny_llama()
    table = nest_model(model, "tiny", NestedWeightConfig(), progress=False)
    found = Sensitivity({s.name: dict(FALL) for s in table.nested})
    text = CalibrationText("short", ("a cat sat there. " * 6,), "")
    assert checked(model, byte_tokenizer(), table, found, CPU, text, progress=False) is found


def test_the_command_prints_and_keeps_the_check(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "made"
    done = qbe("quantize", str(tiny_folder), "-o", str(out), home=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    assert "divergence of assignments, 16 passages of 64 tokens" in done.stdout.decode()
    told = json.loads(qbe("info", "--model", str(out), "--json", home=tmp_path).stdout)["store"]["allocation_check"]
    kept = sensitivity_table.read(out)
    assert kept is not None
    assert kept.check is not None
    assert AllocationCheck.read(told) == kept.check
    assert [row["bits"] for row in told["averages"]] == [4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 8.0]
    assert all(row["low"] <= row["ratio"] <= row["high"] for row in told["averages"])
    assert all(row["ratio"] <= EVEN for row in told["averages"])
    shown = qbe("info", "--model", str(out), home=tmp_path).stdout.decode()
    assert "divergence of assignments" in shown
    table = json.loads((out / sensitivity_table.NAME).read_text())
    del table["check"]  # as older versions wrote it
    (out / sensitivity_table.NAME).write_text(json.dumps(table))
    older = qbe("info", "--model", str(out), "--json", "--trust", home=tmp_path)
    assert json.loads(older.stdout)["store"]["allocation_check"] is None
    (out / sensitivity_table.NAME).write_text(json.dumps({**table, "check": {"passages": 3}}))
    broken = qbe("info", "--model", str(out), "--trust", home=tmp_path)
    assert broken.returncode == 2
    assert b"is damaged" in broken.stderr


def test_planted_sensitivities_of_a_model_are_corrected() -> None:
    """Through the whole of it: a head that is said to bear anything."""
    model = tiny_llama(vocabulary=2048)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    table = nest_model(model, "tiny", NestedWeightConfig(), progress=False)
    wrong = {
        s.name: {g: (1e-9 if s.role is Role.OUTPUT_HEAD else 1.0) * f for g, f in FALL.items()} for s in table.nested
    }
    found = checked(model, byte_tokenizer(), table, Sensitivity(wrong), CPU, progress=False)
    assert found.check is not None
    assert max(row.uncorrected for row in found.check.averages) > 1.1
    assert max(row.ratio for row in found.check.averages) <= EVEN
    assert replace(found, weights=wrong, check=None) == Sensitivity(wrong)
