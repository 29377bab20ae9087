"""Coordinate descent over nested codes: C against the reference, and what it promises."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qbe.format.codes import quantise
from qbe.format.layout import SliceLayout
from qbe.kernels.reference import descent as reference
from qbe.store import descent

SLICES = [(3, 1, 1, 1, 2), (4, 2, 2), (8,), (2, 1), (5, 3), (1,) * 8]


def problem(seed: int, n: int, k: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [n, k] with some outliers and the second moments [k, k] of correlated inputs."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=g) * (1 + 4 * (torch.rand(n, k, generator=g) < 0.03))
    x = torch.randn(rank or 4 * k, k, generator=g) @ (torch.eye(k) + torch.randn(k, k, generator=g) / k**0.5)
    return weight, x.T @ x / len(x)


def weighed(errors: torch.Tensor, layout: SliceLayout) -> torch.Tensor:
    """What the descent lowers, [N]."""
    pairs = zip(errors, layout.precisions, descent.importance(layout), strict=True)
    return torch.stack([v * 4.0 ** (b - layout.total_bits) * e for e, b, v in pairs]).sum(0)


needs_compiler = pytest.mark.skipif(descent.library() is None, reason="needs a C compiler")


@needs_compiler
@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize(("n", "k", "group"), [(5, 128, 64), (3, 100, 64), (33, 64, 64), (2, 130, 128)])
def test_c_equals_the_reference(slices: tuple[int, ...], n: int, k: int, group: int) -> None:
    layout = SliceLayout(slices)
    weight, hessian = problem(n, n, k)
    start = quantise(weight, layout, group)
    slow = reference.descend(weight, hessian, *start, layout, descent.importance(layout), (1, 2))
    fast = descent.descend(weight, hessian, *start, layout, (1, 2))
    assert torch.equal(fast[0], slow[0])
    assert torch.equal(fast[1], slow[1])
    if len(slices) > 1:
        assert not torch.equal(fast[0], start[0])


@pytest.mark.parametrize("k", [1, 2, 7, 70])
def test_later_columns_make_up_for_earlier_ones_as_far_as_real_numbers_could(k: int) -> None:
    _, hessian = problem(k, 1, k)
    hessian = hessian.double()
    found = reference.succession(hessian)
    assert found is not None
    order, factor = found
    assert (hessian.diagonal()[order].diff() <= 0).all()
    sorted_ = hessian[order][:, order]
    off = torch.randn(k, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
    for at in range(1, k):  # the best real numbers from this column on, those before being off as they are
        best = torch.linalg.solve(sorted_[at:, at:], -sorted_[at:, :at] @ off[:at])
        torch.testing.assert_close(-(off[:at] @ factor[:at, at]), best[0])


def test_without_a_positive_definite_hessian_plain_rounding_is_where_it_begins() -> None:
    weight, hessian = problem(3, 2, 70, rank=5)
    hessian[:, 9] = hessian[9] = 0
    assert reference.succession(hessian) is None
    codes, meta, exponent = quantise(weight, SliceLayout((4, 2, 2)), 64)
    found, _ = descent.descend(weight, hessian, codes, meta, exponent, SliceLayout((4, 2, 2)))
    assert torch.equal(found[:, 9], codes[:, 9])


def test_codes_in_succession_are_the_better_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = SliceLayout((3, 1, 1, 1, 2))
    weight, hessian = problem(5, 64, 192)
    start = quantise(weight, layout, 64)
    ways = [descent.descend(weight, hessian, *start, layout)]
    monkeypatch.setattr(reference, "succession", lambda _: None)
    ways.append(descent.descend(weight, hessian, *start, layout))
    new, plain = (reference.objective(weight, hessian, *way, start[2], layout).sum(-1) for way in ways)
    assert (new[2:4] < 0.99 * plain[2:4]).all()  # 5 and 6 bits, which have least freedom


@settings(max_examples=40, deadline=None)
@given(
    slices=st.sampled_from(SLICES),
    n=st.integers(1, 5),
    k=st.integers(1, 150),
    rank=st.integers(1, 40) | st.none(),
    dead=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_the_weighted_error_of_no_row_grows(
    slices: tuple[int, ...], n: int, k: int, rank: int | None, dead: bool, seed: int
) -> None:
    layout = SliceLayout(slices)
    weight, hessian = problem(seed, n, k, rank)
    if dead:
        hessian[k // 2 :] = hessian[:, k // 2 :] = 0
    codes, meta, exponent = quantise(weight, layout, 64)
    before = weighed(reference.objective(weight, hessian, codes, meta, exponent, layout), layout)
    codes, meta = descent.descend(weight, hessian, codes, meta, exponent, layout)
    after = weighed(reference.objective(weight, hessian, codes, meta, exponent, layout), layout)
    assert (after <= before * (1 + 1e-4) + 1e-6 * weight.square().sum(-1) * hessian.diagonal().amax()).all()


@settings(max_examples=25, deadline=None)
@given(slices=st.sampled_from(SLICES), n=st.integers(1, 5), k=st.integers(1, 150), seed=st.integers(0, 2**20))
def test_refitted_scales_make_no_precision_worse(slices: tuple[int, ...], n: int, k: int, seed: int) -> None:
    layout = SliceLayout(slices)
    weight, hessian = problem(seed, n, k)
    codes, meta, exponent = quantise(weight, layout, 64)
    before = reference.objective(weight, hessian, codes, meta, exponent, layout)
    same, meta = descent.descend(weight, hessian, codes, meta, exponent, layout, (0,))
    after = reference.objective(weight, hessian, codes, meta, exponent, layout)
    assert torch.equal(same, codes)
    assert (after <= before * (1 + 1e-4) + 1e-6 * weight.square().sum(-1) * hessian.diagonal().amax()).all()


def test_every_low_precision_gains_on_correlated_inputs() -> None:
    layout = SliceLayout((3, 1, 1, 1, 2))
    weight, hessian = problem(1, 64, 128)
    codes, meta, exponent = quantise(weight, layout, 64)
    before = reference.objective(weight, hessian, codes, meta, exponent, layout).sum(-1)
    codes, meta = descent.descend(weight, hessian, codes, meta, exponent, layout)
    after = reference.objective(weight, hessian, codes, meta, exponent, layout).sum(-1)
    assert (after[:4] < 0.9 * before[:4]).all()


def test_without_a_compiler_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = SliceLayout((4, 2, 2))
    weight, hessian = problem(2, 3, 70)
    start = quantise(weight, layout, 64)
    monkeypatch.setattr(descent, "library", lambda: None)
    slow = descent.descend(weight, hessian, *start, layout, (1,))
    wanted = reference.descend(weight, hessian, *start, layout, descent.importance(layout), (1,))
    assert all(torch.equal(a, b) for a, b in zip(slow, wanted, strict=True))
