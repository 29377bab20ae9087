"""The CPU kernel of `qbe::nested_linear` against the PyTorch reference, on every path that this machine has."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import qbe
from conftest import choose
from qbe.format.codes import quantise
from qbe.format.layout import SliceLayout
from qbe.format.packing import pack
from qbe.kernels.cpu import build, dispatch
from qbe.kernels.cpu.linear import nested as cpu
from qbe.kernels.cpu.linear.merged import nested_linears
from qbe.kernels.ops import nested_linear as ops
from qbe.kernels.reference import nested_linear as reference
from qbe.kernels.reference.activations import EIGHT, eight_bits, has_eight, precision_word, weight_bits

LAYOUTS = [(4, 2, 2), (3, 1, 1, 1, 2), (1,) * 8, (8,), (4, 4), (2, 4, 2), (5,), (2, 1)]
COMPILED = build.library() is not None


@pytest.fixture(autouse=True)
def _fresh_choice() -> Iterator[None]:
    yield
    build.backend.cache_clear()
    build.number.cache_clear()


@functools.cache
def stored(n: int, k: int, group: int, slices: tuple[int, ...], seed: int) -> tuple[torch.Tensor, ...]:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    codes, meta, exponent = quantise(weight, SliceLayout(slices), group)
    return weight, pack(codes, SliceLayout(slices)), meta, torch.tensor(exponent)


def problem(
    n: int, k: int, group: int, slices: tuple[int, ...], rows: int, dtype: torch.dtype, seed: int, bias: bool = True
) -> dict[str, Any]:
    """Arguments of the op for a random weight, rows at random bits (also widths that the store lacks)."""
    g = torch.Generator().manual_seed(seed)
    weight, packed, meta, exponent = stored(n, k, group, slices, seed)
    return {
        "x": torch.randn(rows, k, generator=g).to(dtype),
        "packed": packed,
        "meta": meta,
        "bits": torch.randint(0, 18, (rows,), generator=g, dtype=torch.int32),
        "original": weight.to(dtype),
        "bias": torch.randn(n, generator=g).to(dtype) if bias else None,
        "slices": slices,
        "exponent": int(exponent),
    }


def allowed(a: dict[str, Any], exact: torch.Tensor, through_torch: torch.Tensor | bool) -> torch.Tensor:
    """By how much each element may differ, float32 [rows, n].

    4e-6 of the largest that its sum could be, one step of x's dtype for the result, and what comes to each term of the
    sum at worst: where torch multiplies in that dtype half a step for the weight and for x each, and with AVX-512 half
    a step of the 16-bit fixed point that x becomes, group by group.
    """
    x = a["x"].float()
    largest = x.abs().sum(-1, keepdim=True) * float(a["original"].float().abs().max())
    step = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[a["x"].dtype]
    group = a["packed"].shape[1] * 8 // a["meta"].shape[1] // a["meta"].shape[2]
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % group)).unflatten(1, (-1, group)).abs()
    half = 1.02 * 2.0**-15  # of a unit: 2^-14 of a power of two that is hardly above the group's largest
    fixed = (half * padded.amax(2, keepdim=True)).expand_as(padded).flatten(1)[:, : x.shape[1]]
    if build.backend() not in ("avx512", "amx"):
        fixed = torch.zeros_like(fixed)
    x = torch.where(has_eight(a["bits"])[:, None], eight_bits(x, group), x)
    worst, eye = torch.zeros_like(exact), torch.eye(x.shape[1])
    rounded = fixed + step * torch.as_tensor(through_torch).view(-1, 1) * x.abs()
    for bits in weight_bits(a["bits"]).unique().tolist():
        precision_words = torch.full((len(eye),), bits, dtype=torch.int32)
        weight = reference.nested_linear(**{**a, "x": eye, "bits": precision_words, "bias": None})  # [k, n]
        at = weight_bits(a["bits"]) == bits
        worst[at] = rounded[at] @ weight.abs()
    return 4e-6 * largest + step * exact.abs() + worst


# Of a result in float32, as a norm: of float32 sums, and of x as AVX-512 reads it, in 16 bits with a scale a group.
FLOAT32_ERROR = {False: 3e-6, True: 1e-4}


def check(a: dict[str, Any], call: Callable[..., torch.Tensor] = cpu.nested_linear) -> None:
    """The result is float32's, rounded once to x's dtype.

    What goes through torch's matrix product in 16 bits (MANY_ROWS, and without the compiled kernel rows at 16) is off
    by the rounding of the weight too (`allowed`).
    """
    y, x = call(**a), a["x"]
    exact = reference.nested_linear(**{**a, "x": x.float()})
    assert y.shape == exact.shape
    assert y.dtype == x.dtype
    through_torch = (a["bits"] >= 16) & (build.backend() == "torch") | (x.shape[0] >= min(dispatch.MANY_ROWS.values()))
    assert ((y.float() - exact).abs() <= allowed(a, exact, through_torch)).all()
    if y.numel() > 64 and x.dtype == torch.float32:
        assert (y - exact).norm() <= FLOAT32_ERROR[build.backend() in ("avx512", "amx")] * exact.norm()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(1, 70),
    k=st.integers(1, 300),
    group=st.sampled_from([64, 128]),
    slices=st.sampled_from(LAYOUTS),
    rows=st.integers(1, 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_equals_reference(
    path: str, n: int, k: int, group: int, slices: tuple[int, ...], rows: int, dtype: torch.dtype, seed: int
) -> None:
    check(problem(n, k, group, slices, rows, dtype, seed))


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 257])
@pytest.mark.parametrize(("n", "k", "group"), [(1804, 576, 64), (192, 1536, 128)])
def test_equals_reference_at_real_sizes(path: str, n: int, k: int, group: int, rows: int) -> None:
    if path == "scalar" and rows > 64:
        pytest.skip("same code as with 64 rows, slowly")
    check(problem(n, k, group, (4, 2, 2), rows, torch.bfloat16, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 17, 100])
def test_wide_results_are_float32_and_not_rounded(path: str, rows: int, dtype: torch.dtype) -> None:
    a = problem(100, 320, 64, (4, 2, 2), rows, dtype, 5)
    assert (a["bits"] >= 16).any() or rows < 17
    found, exact = cpu.nested_linear(**a, float32_output=True), reference.nested_linear(**{**a, "x": a["x"].float()})
    assert found.dtype == torch.float32
    through_torch = (a["bits"] >= 16) & (dtype is torch.float32)
    rounding = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[dtype] * exact.abs()
    assert ((found - exact).abs() <= allowed(a, exact, through_torch) - rounding + 2.0**-23 * exact.abs()).all()
    if dtype is not torch.float32:
        assert not torch.equal(found, found.to(dtype).float())
    alone = cpu.nested_linear(**{**a, "x": a["x"][:1], "bits": a["bits"][:1]}, float32_output=True)
    torch.testing.assert_close(alone, found[:1], rtol=1e-5, atol=1e-4)
    if rows < 12 and path != "torch" and dtype is not torch.float16:
        assert torch.equal(found.to(dtype), cpu.nested_linear(**a))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_does_not_depend_on_its_batch(path: str, dtype: torch.dtype) -> None:
    """Bit for bit below MANY_ROWS, whatever the neighbours' bits (without the compiled kernel: within rounding)."""
    rows = 11
    a = problem(100, 320, 64, (4, 2, 2), rows, dtype, 2)
    a["bits"] = torch.tensor([4, 6, 8, 16, 4, 4, 4, 8, 6, 4, 16], dtype=torch.int32)
    together = cpu.nested_linear(**a)
    for r in range(rows):
        alone = cpu.nested_linear(**{**a, "x": a["x"][r : r + 1], "bits": a["bits"][r : r + 1]})
        if path == "torch":
            torch.testing.assert_close(alone[0], together[r], rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-3)
        else:
            assert torch.equal(alone[0], together[r])


@pytest.mark.parametrize("slices", [(4, 2, 2), (3, 1, 1, 1, 2), (4, 4), (2, 4, 2)])
@pytest.mark.parametrize(("n", "k", "group"), [(40, 576, 64), (23, 100, 64), (16, 320, 320)])
def test_few_rows_that_share_codes_are_each_as_alone(
    path: str, n: int, k: int, group: int, slices: tuple[int, ...]
) -> None:
    """Rows of all precisions and both widths of activations, as many as share unpacked codes and some more."""
    if path == "torch":
        pytest.skip("the compiled kernel's")
    draw = torch.Generator().manual_seed(n)
    precision_words = torch.tensor(
        [precision_word(b, x) for b in (*SliceLayout(slices).precisions, 16) for x in (EIGHT, 16)]
    )
    for rows in (2, 3, 8, 11):
        a = problem(n, k, group, slices, rows, torch.bfloat16, rows)
        a["bits"] = precision_words[torch.randint(0, len(precision_words), (rows,), generator=draw)].int()
        together = cpu.nested_linear(**a)
        for r in range(rows):
            alone = cpu.nested_linear(**{**a, "x": a["x"][r : r + 1], "bits": a["bits"][r : r + 1]})
            assert torch.equal(alone[0], together[r])


@pytest.mark.parametrize("rows", [1, 4, 5, 60])
def test_a_row_of_float16_does_not_depend_on_its_batch(path: str, rows: int) -> None:
    """Nor on the layers that share its call. AVX-512 reads it as it is; the other paths as float32."""
    a = problem(100, 320, 64, (4, 2, 2), rows, torch.float16, 2)
    a["bits"] = torch.tensor([4, 6, 8, precision_word(4, EIGHT)], dtype=torch.int32).repeat(rows // 4 + 1)[:rows]
    together = cpu.nested_linear(**a)
    pairs = ([a[name]] * 2 for name in ("packed", "meta", "bits"))
    twice = nested_linears(a["x"], *pairs, [], [a["bias"]] * 2, a["slices"], [a["exponent"]] * 2)
    if path == "torch":
        return
    assert dispatch.many_rows(torch.float16) == (sys.maxsize if path in ("avx512", "amx") else 0)
    assert torch.equal(twice, torch.cat([together, together], 1))
    for r in range(0, rows, 7):
        alone = cpu.nested_linear(**{**a, "x": a["x"][r : r + 1], "bits": a["bits"][r : r + 1]})
        assert torch.equal(alone[0], together[r])


def test_many_full_rows_are_the_plain_layer_exactly(path: str) -> None:
    a = problem(96, 192, 64, (4, 2, 2), 40, torch.bfloat16, 3)
    a["bits"].fill_(16)
    assert torch.equal(cpu.nested_linear(**a), torch.nn.functional.linear(a["x"], a["original"], a["bias"]))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("k", [1, 31, 64, 100, 192, 333])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_few_full_rows_are_the_exact_product_rounded_once(path: str, rows: int, k: int, dtype: torch.dtype) -> None:
    """As near as the unquantised layer itself comes; the original is read as it is."""
    a = problem(37, k, 64, (4, 2, 2), rows, dtype, 3)
    a["bits"].fill_(16)
    a["packed"] = torch.full_like(a["packed"], 255)
    x, weight, bias = a["x"].double(), a["original"].double(), a["bias"].double()
    exact = x @ weight.T + bias
    step = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    allowed = step * 1.01 * exact.abs() + 2e-7 * (x.abs() @ weight.abs().T + bias.abs())
    found = cpu.nested_linear(**a)
    assert found.dtype is dtype
    assert ((found.double() - exact).abs() <= allowed).all()


def test_low_bits_read_no_higher_slice(path: str) -> None:
    """Slices and scales of other precisions can be overwritten without changing a 4-bit read."""
    a = problem(40, 256, 64, (4, 2, 2), 3, torch.float32, 4)
    a["bits"].fill_(4)
    before = cpu.nested_linear(**a)
    a["packed"], a["meta"] = a["packed"].clone(), a["meta"].clone()
    a["packed"][4:], a["meta"][4:] = 255, 255  # planes 0..3: the shared scale and zero, ratio and offset of 4 bits
    assert torch.equal(cpu.nested_linear(**a), before)
    a["bits"].fill_(6)
    assert not torch.equal(cpu.nested_linear(**a), before)


def test_outliers_of_x_cost_no_accuracy(path: str) -> None:
    a = problem(64, 256, 64, (4, 2, 2), 4, torch.float32, 5)
    a["bits"] = torch.tensor([4, 6, 8, 4], dtype=torch.int32)
    a["x"][:, 17] = 3000.0
    y, exact = cpu.nested_linear(**a), reference.nested_linear(**a)
    assert (y - exact).norm() <= (1e-4 if path in ("avx512", "amx") else 1e-5) * exact.norm()


def test_float32_is_read_as_16_bits_and_better_than_as_bfloat16(path: str) -> None:
    """With AVX-512 a group's numbers are multiples of 2^-14 of the largest one's power of two, rounded once."""
    k = 192
    a = problem(k, k, 64, (8,), 9, torch.float32, 3, bias=False)
    a["bits"] = torch.full((9,), 8, dtype=torch.int32)
    weight = reference.nested_linear(**{**a, "x": torch.eye(k), "bits": a["bits"][:1].expand(k)}).double()
    x = a["x"].double()
    if path in ("avx512", "amx"):
        largest = x.unflatten(1, (-1, 64)).abs().amax(2)
        unit = torch.exp2(torch.floor(torch.log2(largest)) - 14).repeat_interleave(64, 1)
        x = (x / unit).round() * unit
    y, through_bfloat16 = cpu.nested_linear(**a).double(), a["x"].bfloat16().double() @ weight
    exact = a["x"].double() @ weight
    torch.testing.assert_close(y, x @ weight, rtol=1e-5, atol=1e-5)
    assert (y - exact).norm() <= (through_bfloat16 - exact).norm() / 16


def test_shapes_and_strides(path: str) -> None:
    a = problem(33, 100, 64, (4, 2, 2), 6, torch.float32, 6)
    plain = cpu.nested_linear(**a)
    assert torch.equal(cpu.nested_linear(**{**a, "x": a["x"].view(2, 3, 100)}), plain.view(2, 3, 33))
    assert torch.equal(cpu.nested_linear(**{**a, "x": a["x"].T.contiguous().T}), plain)
    spread = a["bits"].repeat_interleave(2)[::2]
    assert torch.equal(cpu.nested_linear(**{**a, "bits": spread}), plain)
    empty = {**a, "x": a["x"][:0].view(0, 3, 100), "bits": a["bits"][:0]}
    assert cpu.nested_linear(**empty).shape == (0, 3, 33)


def test_threads_do_not_change_the_result(path: str) -> None:
    """The same result with one thread as with several."""
    a = problem(300, 640, 64, (4, 2, 2), 4, torch.bfloat16, 7)
    several = cpu.nested_linear(**a)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = cpu.nested_linear(**a)
    finally:
        torch.set_num_threads(before)
    if path != "torch":
        assert torch.equal(several, single)


@pytest.mark.skipif(not COMPILED, reason="needs the compiled kernel")
def test_threads_of_openmp_do_not_change_the_result() -> None:
    """Those of torch are taken, none are made; and the own ones again."""
    a = problem(515, 200, 64, (4, 2, 2), 7, torch.bfloat16, seed=10)
    before, own = torch.get_num_threads(), cpu.nested_linear(**a)
    try:
        torch.set_num_threads(2)
        assert build.use_openmp() or sys.platform != "linux"
        torch.ones(1 << 20).sum()  # starts torch's
        started = threads()
        shared = cpu.nested_linear(**a)
        assert threads() <= started  # of those that other tests left some may have ended
    finally:
        torch.set_num_threads(before)
        assert not build.use_openmp(False)
    assert torch.equal(shared, own)


def threads() -> int:
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0


@pytest.mark.skipif(not COMPILED, reason="no compiled kernel")
def test_callers_on_several_threads() -> None:
    """The pool serves one caller; the others, meanwhile, work alone. All get their own result."""
    problems = [problem(512, 256, 64, (4, 2, 2), 3, torch.float32, seed, bias=False) for seed in range(4)]
    alone = [cpu.nested_linear(**a) for a in problems]

    def many(i: int) -> bool:
        return all(torch.equal(cpu.nested_linear(**problems[i]), alone[i]) for _ in range(100))

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(many, range(4), timeout=60)) == [True] * 4


@pytest.mark.parametrize("rows", [2, 40])
def test_missing_original_is_refused(path: str, rows: int) -> None:
    a = problem(8, 64, 64, (4, 2, 2), rows, torch.float32, 8)
    a["bits"][-1] = 16
    with pytest.raises(RuntimeError, match="without its 16-bit original"):
        cpu.nested_linear(**{**a, "original": None})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x", torch.zeros(3, 65)),
        ("packed", torch.zeros(8, 63, dtype=torch.uint8)),
        ("meta", torch.zeros(6, 8, 2, dtype=torch.uint8)),
        ("bits", torch.full((3,), 4)),
        ("bits", torch.full((2,), 4, dtype=torch.int32)),
        ("bias", torch.zeros(7)),
        ("original", torch.zeros(8, 63)),
        ("slices", (4, 4)),
        ("exponent", 300),
    ],
)
def test_what_does_not_belong_together_is_refused(path: str, name: str, value: Any) -> None:
    a = problem(8, 64, 64, (4, 2, 2), 3, torch.float32, 9)
    with pytest.raises(RuntimeError):
        cpu.nested_linear(**{**a, name: value})


def test_dequantised_weight_is_the_references(path: str) -> None:
    """Many identity rows read the weight itself: at float32 not one bit differs."""
    a = problem(50, 192, 64, (3, 1, 1, 1, 2), 192, torch.float32, 10, bias=False)
    a["x"] = torch.eye(192)
    for bits in (3, 4, 5, 6, 8):
        a["bits"].fill_(bits)
        weight = reference.dequantise(a["packed"], a["meta"], a["exponent"], a["slices"], 192, bits)
        assert torch.equal(cpu.nested_linear(**a), weight.T)


@pytest.mark.parametrize("k", [64, 100, 192, 320])
@pytest.mark.parametrize("slices", LAYOUTS)
def test_dequantised_weight_in_bfloat16_is_the_references(path: str, slices: tuple[int, ...], k: int) -> None:
    """Rounded once, wherever it is done: products with identity rows read one number of it each."""
    a = problem(37, k, 64, slices, k, torch.bfloat16, 10, bias=False)
    a["x"] = torch.eye(k, dtype=torch.bfloat16)
    for bits in SliceLayout(slices).precisions:
        a["bits"].fill_(bits)
        weight = reference.dequantise(a["packed"], a["meta"], a["exponent"], slices, k, bits)
        assert torch.equal(cpu.nested_linear(**a), weight.T.bfloat16())


@pytest.mark.parametrize(("many", "invariant"), [(96, True), (40, False)])
@pytest.mark.parametrize("eight", [False, True])
def test_with_tiles_many_rows_of_a_precision_meet_a_rounded_weight(
    path: str, many: int, invariant: bool, eight: bool
) -> None:
    """Differences of two weights show whether these were rounded first; rows of 8-bit activations count half."""
    if path != "amx":
        pytest.skip("the others have no use for tiles")
    n, k, rows = 37, 192, many * (1 + eight)
    a = problem(n, k, 64, (4, 2, 2), rows, torch.bfloat16, 5, bias=False)
    a["x"] = torch.zeros(rows, k, dtype=torch.bfloat16)
    places = torch.arange(rows) % (k - 1)
    a["x"][torch.arange(rows), places], a["x"][torch.arange(rows), places + 1] = 1.0, -1.0
    a["bits"].fill_(precision_word(6, EIGHT) if eight else 6)
    weight = reference.dequantise(a["packed"], a["meta"], a["exponent"], (4, 2, 2), k, 6)
    exact, rounded = (w[:, places] - w[:, places + 1] for w in (weight, weight.bfloat16().float()))
    assert not torch.equal(exact.bfloat16(), rounded.bfloat16())
    assert torch.equal(cpu.nested_linear(**a, batch_invariant=invariant), rounded.T.bfloat16())
    a["bits"][-1] = 4  # one row too few
    found = cpu.nested_linear(**a, batch_invariant=invariant)[:-1]
    assert torch.equal(found, exact.T.bfloat16()[:-1])
    found = cpu.nested_linear(**a, batch_invariant=invariant, float32_output=True)[:-1]
    assert torch.allclose(found, exact.T[:-1], rtol=1e-6, atol=0)


@pytest.mark.parametrize(("n", "k", "group"), [(37, 100, 64), (48, 576, 64), (16, 1000, 320), (65, 2048, 128)])
@pytest.mark.parametrize("rows", [40, 57, 97, 600])
def test_rows_in_tiles_are_the_same_in_any_place(path: str, rows: int, n: int, k: int, group: int) -> None:
    """Of mixed precisions and activations, one of them at 16 bits; close to the reference."""
    if path != "amx":
        pytest.skip("the others have no use for tiles")
    a = problem(n, k, group, (4, 2, 2), rows, torch.bfloat16, rows)
    words = torch.tensor([4, precision_word(4, EIGHT), 8, precision_word(8, EIGHT)], dtype=torch.int32)
    a["bits"] = words[torch.arange(rows) % (1 if rows < 97 else 4)]
    a["bits"][3] = 16
    check(a)
    first = cpu.nested_linear(**a, batch_invariant=False)
    order = torch.randperm(rows)
    again = cpu.nested_linear(**{**a, "x": a["x"][order], "bits": a["bits"][order]}, batch_invariant=False)
    assert torch.equal(again, first[order])


@pytest.mark.parametrize("rows", [40, 128])
@pytest.mark.parametrize("k", [100, 127, 200, 333, 576])
def test_what_is_no_number_stays_in_its_row_of_many(path: str, k: int, rows: int) -> None:
    """Nor does what lies beside a view of x reach the result."""
    if path not in ("amx", "avx512"):
        pytest.skip("torch multiplies so many rows, and its bfloat16 lets it out where inputs are no multiple of 32")
    a = problem(31, k, 64, (4, 2, 2), rows, torch.bfloat16, 1)
    a["bits"].fill_(4)
    clean, x = cpu.nested_linear(**a), a["x"].clone()
    x[5] = torch.nan
    found = cpu.nested_linear(**{**a, "x": x})
    others = torch.arange(rows) != 5
    assert found[5].isnan().all()
    beside_nan = torch.cat([a["x"], torch.full_like(a["x"], torch.nan)], 1)[:, :k]
    assert torch.equal(found[others], clean[others])
    assert torch.equal(cpu.nested_linear(**{**a, "x": beside_nan}), clean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("k", "group"), [(576, 64), (100, 64), (1000, 320)])
def test_tiles_make_the_same_bits(k: int, group: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row what AVX-512 makes alone, whatever part of a register the rows fill."""
    found = {}
    for name in ("amx", "avx512"):
        choose(name, monkeypatch)
        try:
            build.backend()
        except qbe.QBEError as error:
            pytest.skip(str(error))
        for rows in (4, 5, 16, 17, 35):
            a = problem(37, k, group, (4, 2, 2), rows, dtype, rows)
            for precision_words in (6, precision_word(4, EIGHT), precision_word(8, EIGHT)):
                a["bits"].fill_(precision_words)
                found.setdefault((rows, precision_words), []).append(cpu.nested_linear(**a))
    build.backend.cache_clear()
    build.number.cache_clear()
    assert all(torch.equal(*both) for both in found.values())


@pytest.mark.parametrize("rows", [3, 40])
def test_custom_op(rows: int) -> None:
    a = problem(24, 128, 64, (4, 2, 2), rows, torch.float32, 11)
    args = tuple(a[k] for k in ("x", "packed", "meta", "bits", "original", "bias", "slices", "exponent"))
    torch.library.opcheck(torch.ops.qbe.nested_linear.default, args)
    check(a, ops.nested_linear)
