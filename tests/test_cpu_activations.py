"""Rows of 8-bit activations in the CPU kernels, and the 16-bit fixed point of the others, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from qbe.kernels.cpu import build, dispatch
from qbe.kernels.cpu.geometry import geometry
from qbe.kernels.cpu.linear import merged
from qbe.kernels.cpu.linear import nested as cpu
from qbe.kernels.reference import nested_linear as reference
from qbe.kernels.reference.activations import EIGHT, eight_bits, has_eight, precision_word, weight_bits
from qbe.sites import FULL_BITS
from test_cpu_kernel import LAYOUTS, allowed, problem

SIZES = [(100, 576), (40, 1536), (37, 100), (17, 333), (64, 64)]  # n, k


def with_words(a: dict[str, Any], seed: int) -> dict[str, Any]:
    """About half of the rows at 8-bit activations."""
    eight = torch.rand(a["bits"].shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    a["bits"] = torch.where(eight, a["bits"] | EIGHT << 8, a["bits"]).to(torch.int32)
    return a


def check(a: dict[str, Any]) -> None:
    """As `check` of test_cpu_kernel: float32's result, rounded once to x's dtype.

    The rounding to 8 bits is the reference's bit for bit, so it needs no allowance. What goes through torch's product
    (without the compiled kernel, many rows, or float16 at 16 bits) is off by the rounding of the weight and of x to its
    dtype.
    """
    y, x = cpu.nested_linear(**a), a["x"]
    exact = reference.nested_linear(**{**a, "x": x.float()})
    assert y.dtype is x.dtype
    through_torch = build.backend() == "torch" or x.shape[0] >= min(dispatch.MANY_ROWS.values())
    by_row = through_torch | ((weight_bits(a["bits"]) >= FULL_BITS) & (x.dtype == torch.float16))
    assert ((y.float() - exact).abs() <= allowed(a, exact, by_row)).all()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(1, 70),
    k=st.integers(1, 300),
    group=st.sampled_from([64, 128, 192, 1024]),
    slices=st.sampled_from(LAYOUTS),
    rows=st.integers(1, 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
@example(n=19, k=15, group=64, slices=(4, 2, 2), rows=8, dtype=torch.float16, seed=3047)
def test_equals_reference(
    path: str, n: int, k: int, group: int, slices: tuple[int, ...], rows: int, dtype: torch.dtype, seed: int
) -> None:
    check(with_words(problem(n, k, group, slices, rows, dtype, seed), seed))


@pytest.mark.parametrize("group", [64, 256, 320, 1024])
@pytest.mark.parametrize("slices", [(4, 2, 2), (3, 1, 1, 1, 2)])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_equals_reference_at_odd_sizes(path: str, n: int, k: int, group: int, slices: tuple[int, ...]) -> None:
    """Groups whose exact sums are wider than 32 bits among them."""
    for rows in (1, 3, 9):
        check(with_words(problem(n, k, group, slices, rows, torch.bfloat16, rows), rows))


def test_the_rounding_is_the_references(path: str) -> None:
    """Identity weights read the activations themselves: not one bit differs."""
    k = 192
    a = problem(k, k, 64, (8,), 9, torch.float32, 3, bias=False)
    a["original"] = torch.eye(k)
    a["bits"] = torch.full((9,), precision_word(16, EIGHT), dtype=torch.int32)
    a["x"][4] = 0
    a["x"][5, :64] *= 1e-36
    a["x"][6, 70] = 3e4
    assert torch.equal(cpu.nested_linear(**a), eight_bits(a["x"], 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("k", "group"), [(100, 64), (576, 64), (333, 320), (64, 64)])
def test_rows_that_torch_multiplies_are_rounded_like_the_references(
    path: str, k: int, group: int, dtype: torch.dtype
) -> None:
    a = problem(8, k, group, (4, 2, 2), 40, dtype, 6)
    x, precision_words = a["x"], torch.where(torch.arange(40) % 3 == 1, 6, precision_word(6, EIGHT)).to(torch.int32)
    x[2], x[3, 5], x[5, k - 1], x[6, : min(k, 64)] = 0, float("inf"), float("nan"), 1e-36
    form = geometry(a["packed"].shape, a["meta"].shape, k, (4, 2, 2), a["exponent"])
    expected = torch.where(has_eight(precision_words)[:, None], eight_bits(x, form.group).to(dtype), x)
    for rows in (x, x.T.contiguous().T):
        torch.testing.assert_close(cpu.rounded(rows, precision_words, form), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [64, 320])
def test_row_does_not_depend_on_its_batch(path: str, dtype: torch.dtype, group: int) -> None:
    """Bit for bit, from one row to a prompt; without VNNI below MANY_ROWS, and never in plain PyTorch."""
    if path == "torch":
        pytest.skip("torch chooses its product by the number of rows")
    rows = 120 if path in ("avx512", "amx") else 11  # enough at 6 bits for each of their ways
    a = with_words(problem(100, 320, group, (4, 2, 2), rows, dtype, 2), 2)
    few = torch.arange(rows) % 16 == 5
    a["bits"] = torch.where(weight_bits(a["bits"]) >= 16, a["bits"] & ~255 | torch.where(few, 16, 6), a["bits"])
    a["bits"] = a["bits"].to(torch.int32)
    together = cpu.nested_linear(**a)
    for r in range(rows):
        for end in {r + 1, min(r + 3, rows)}:
            part = cpu.nested_linear(**{**a, "x": a["x"][r:end], "bits": a["bits"][r:end]})
            assert torch.equal(part[0], together[r])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_stays_in_its_row(path: str, dtype: torch.dtype) -> None:
    for wrong in (float("inf"), float("-inf"), float("nan")):
        a = problem(33, 200, 64, (4, 2, 2), 6, dtype, 4)
        a["bits"] = torch.tensor(
            [4, precision_word(4, EIGHT), 8, precision_word(8, EIGHT), 6, precision_word(16, EIGHT)], dtype=torch.int32
        )
        clean = cpu.nested_linear(**a)
        a["x"][1, 70] = a["x"][2, 130] = wrong
        found = cpu.nested_linear(**a)
        assert not found[1].isfinite().any()
        assert not found[2].isfinite().any()
        others = torch.tensor([0, 3, 4, 5])
        assert torch.equal(found[others], clean[others])


def test_merged_calls_have_words_of_their_own(path: str) -> None:
    if path == "torch":
        pytest.skip("it makes a call for each weight")
    parts = [with_words(problem(n, 200, 64, (4, 2, 2), 5, torch.bfloat16, 1), n) for n in (70, 33, 12)]
    one = [cpu.nested_linear(**{**p, "x": parts[0]["x"]}) for p in parts]
    found = merged.nested_linears(
        parts[0]["x"], [p["packed"] for p in parts], [p["meta"] for p in parts], [p["bits"] for p in parts],
        [p["original"] for p in parts], [p["bias"] for p in parts], (4, 2, 2), [p["exponent"] for p in parts],
    )  # fmt: skip
    assert all(has_eight(p["bits"]).any() for p in parts)
    assert torch.equal(found, torch.cat(one, dim=-1))
