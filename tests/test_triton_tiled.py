"""The tiled layout and its kernels against the canonical layout and the reference (see `test_triton_kernel`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from covering import FULL, covering
from qbe.errors import QBEError
from qbe.format.layout import SliceLayout
from qbe.kernels.ops import nested_linear as ops
from qbe.kernels.reference.activations import precision_word
from qbe.kernels.triton.linear.merged import nested_linears
from qbe.kernels.triton.linear.nested import nested_linear
from qbe.kernels.triton.linear.tiled.layout import from_device_layout, group_size_of, to_device_layout
from test_triton_kernel import CUDA, INTERPRET, LAYOUTS, TOLERANCE, Case, close, on_device, on_gpu, run_in_interpreter


@pytest.mark.skipif(CUDA or INTERPRET, reason="the tests below run here directly")
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def tiled(case: Case) -> Case:
    """The case with its weight in the tiled layout."""
    buffer = to_device_layout(case.packed, case.meta, case.layout, case.x.shape[-1], case.exponent)
    assert buffer is not None
    case.packed = buffer
    return case


WEIGHTS = [  # n, k, group, slices
    (40, 700, 64, (4, 2, 2)), (40, 700, 128, (4, 2, 2)), (70 if CUDA or FULL else 20, 2048, 64, (4, 2, 2)),
    (33, 512, 64, (3, 1, 1, 1, 2)),
]  # fmt: skip
ASKED = [[4], [6], [8], [16], [4, 6], [8, 16, 4, 6]]


def check(case: Case, bits: torch.Tensor) -> None:
    """The kernel on the tiled layout against the reference on the canonical one."""
    expected = case.expect(bits)
    close(tiled(case).run(bits), expected)


@pytest.mark.parametrize("slices", [*LAYOUTS, (4,), (2, 2), (6, 2), (2, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (70, 200), (64, 576)])
def test_layout_round_trip(slices: tuple[int, ...], group: int, n: int, k: int) -> None:
    case = Case(1, n, k, slices, group)
    buffer = to_device_layout(case.packed, case.meta, case.layout, k, case.exponent)
    assert buffer is not None
    assert buffer.dim() == 1
    assert group_size_of(buffer, n, k, case.layout) == group
    assert torch.equal(from_device_layout(buffer, case.meta, case.layout, k), case.packed)


def test_layout_refuses_what_it_is_not_made_for() -> None:
    case = Case(1, 20, 330, group=192)
    assert to_device_layout(case.packed, case.meta, case.layout, 330, case.exponent) is None
    with pytest.raises(QBEError, match="does not hold"):
        group_size_of(torch.zeros(10, dtype=torch.uint8), 20, 330, SliceLayout())


@on_device
@pytest.mark.parametrize(
    ("slices", "dtype", "m"),
    covering(2, [*LAYOUTS, (4, 4), (6, 2), (2, 2)], list(TOLERANCE), [10, 20], full=CUDA),
    ids=str,
)
def test_mixed_bits(slices: tuple[int, ...], dtype: torch.dtype, m: int) -> None:
    case = Case(m, 70, 200, slices, dtype=dtype)
    check(case, case.mixed())


@on_device
@pytest.mark.parametrize(
    ("m", "in_tiles"),
    covering(2, [1, 12, 40, 260], [False, True]) if CUDA or FULL
    else [(1, False), (1, True), (12, False), (12, True), (40, True), (260, False)],
)  # fmt: skip
def test_wide_results_are_float32_and_not_rounded(m: int, in_tiles: bool) -> None:
    case = Case(m, 70, 512)
    mixed = case.mixed()
    expected = case.expect(mixed)
    narrow = (tiled(case) if in_tiles else case).run(mixed)
    found = nested_linear(*case.args(mixed), float32_output=True)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, narrow.float(), rtol=2.0**-7, atol=1e-6)  # the interpreter's cast cuts off
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert not (mixed >= 16).any() or error[mixed >= 16].max() < 1e-5
    assert error.max() < (4e-3 if m >= 40 else 5e-4)  # many rows: each weight is rounded
    assert not torch.equal(found, found.bfloat16().float())


@on_device
@pytest.mark.parametrize(
    ("m", "n", "k", "group", "slices", "dtype"),
    [
        (1, 33, 64, 64, (4, 2, 2), torch.bfloat16),
        (2, 64, 1100, 128, (3, 1, 1, 1, 2), torch.float16),
        (3, 33, 2100, 64, (4, 2, 2), torch.bfloat16),
        (5, 5, 256, 128, (4, 2, 2), torch.float32),
        (16, 190, 512, 128, (4, 2, 2), torch.float16),
        (40, 130 if CUDA or FULL else 70, 512, 64, (4, 2, 2), torch.bfloat16),
        (65, 40, 72, 64, (3, 1, 1, 1, 2), torch.float16),
        (257, 70, 200, 128, (4, 2, 2), torch.bfloat16),
        (260, 30, 256, 64, (8,), torch.float16),
    ],
)
def test_ragged_shapes(m: int, n: int, k: int, group: int, slices: tuple[int, ...], dtype: torch.dtype) -> None:
    case = Case(m, n, k, slices, group, dtype, bias=m % 2 == 0)
    check(case, case.mixed())


@on_device
@pytest.mark.parametrize("m", [4, 12, 67, 258] if CUDA or FULL else [4, 12, 37, 258])
def test_a_row_is_the_same_alone_and_in_a_mixed_batch(m: int) -> None:
    case = tiled(Case(m, 40, 300) if m < 258 or CUDA or FULL else Case(m, 20, 100))
    mixed = case.mixed()
    y = case.run(mixed)
    for b in (4, 6, 8, 16):
        alone = case.run(case.bits([b] * m))
        assert torch.equal(y[mixed == b], alone[mixed == b])


@on_device
@pytest.mark.parametrize(
    ("shape", "asked"),
    covering(2, WEIGHTS, ASKED) if CUDA or FULL
    else [*covering(1, WEIGHTS, ASKED[:-1]), *((shape, ASKED[-1]) for shape in WEIGHTS)],
    ids=str,
)  # fmt: skip
def test_a_row_is_the_same_however_many_there_are(shape: tuple[Any, ...], asked: list[int]) -> None:
    """Bit for bit, with 16-bit activations and with 8-bit ones: a step that checks draft tokens relies on it."""
    n, k, group, slices = shape
    case = tiled(Case(16, n, k, slices, group))
    precision_words = [a | (8 if i // len(asked) % 2 else 0) << 8 for i, a in enumerate((asked * 16)[:16])]
    x, y = case.x, case.run(case.bits(precision_words))
    for m in (1, 2, 3, 4, 5, 9):
        for at in (0, 16 - m) if CUDA or FULL or m in (1, 9) else (16 - m,):
            case.x = x[at : at + m]
            assert torch.equal(case.run(case.bits(precision_words[at : at + m])), y[at : at + m]), (m, at)


@on_device
@pytest.mark.parametrize("m", [6, 20, 270])
def test_widths_the_store_lacks_and_a_dropped_original(m: int) -> None:
    asked, served = [1, 3, 5, 7, 12, 17], [4, 4, 4, 6, 8, 16]
    times = m // 6 + 1
    case = Case(m, 20, 100, dtype=torch.float16)
    expected = case.expect(case.bits((served * times)[:m]))
    close(tiled(case).run(case.bits((asked * times)[:m])), expected)
    case = Case(m, 20, 100, dtype=torch.float16)
    case.original = None
    expected = case.expect(case.bits([*served[:5], 8] * times)[:m])
    close(tiled(case).run(case.bits((asked * times)[:m])), expected)


@on_device
@pytest.mark.parametrize(
    ("m", "value"), covering(1, [4, 20, 260], [float("inf"), float("-inf"), float("nan")], full=CUDA)
)
def test_what_is_not_finite_stays_in_its_row(m: int, value: float) -> None:
    case = tiled(Case(m, 20, 100))
    bits = case.mixed()
    before = case.run(bits)
    case.x[1, 3] = value
    after = case.run(bits)
    others = [r for r in range(m) if r != 1]
    assert not torch.isfinite(after[1]).any()
    assert torch.equal(before[others], after[others])


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_of_any_magnitude(dtype: torch.dtype) -> None:
    """Zeros, small and large rows, and one input a thousand times the others of its group."""
    case = Case(8, 40, 300, dtype=dtype, bias=False)
    case.x[0] = 0
    case.x[1] *= 1e-15 if dtype == torch.bfloat16 else 1e-3
    case.x[2] *= 1e15 if dtype == torch.bfloat16 else 1e3
    case.x[5, 70] = 1000
    case.x[4, :128] = 0
    bits = case.mixed()
    expected = case.expect(bits)
    y = tiled(case).run(bits)
    assert (y[0] == 0).all()
    close(y[1:], expected[1:])


@on_device
def test_no_rows() -> None:
    case = tiled(Case(2, 20, 128))
    case.x = case.x[:0]
    assert case.run(case.bits([])).shape == (0, 20)


@pytest.mark.cuda
@on_gpu
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (28672, 4096), (1804, 1536), (1536, 576)])
@pytest.mark.parametrize("m", [1, 8, 16, 33, 64, 100, 300])
def test_model_shapes(m: int, n: int, k: int) -> None:
    case = tiled(Case(m, n, k, group=64 if m % 2 else 128))
    expected = Case(m, n, k, group=64 if m % 2 else 128)
    for bits in (case.mixed(), case.bits([4] * m), case.bits([6] * m), case.bits([8] * m)):
        close(case.run(bits), expected.expect(bits))


@pytest.mark.cuda
@on_gpu
@pytest.mark.parametrize("m", [4, 40, 300])
def test_one_graph_serves_every_bits_and_nothing_waits(m: int) -> None:
    case = Case(m, 512, 2048)
    expected = {v: case.expect(case.bits([v] * m)) for v in (4, 6, 8, 16)}
    mixed = case.expect(case.mixed())
    case = tiled(case)
    bits = case.bits([4] * m)
    case.run(bits)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = case.run(bits)
    for values, want in [*(([v] * m, expected[v]) for v in (8, 16, 6, 4)), (case.mixed().tolist(), mixed)]:
        bits.copy_(case.bits(values))
        y.fill_(float("nan"))
        graph.replay()
        close(y, want)
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.run(bits)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@on_gpu
def test_launches_in_a_row_wait_for_each_other() -> None:
    """Each output is the next input; a launch that began too early would read an unfinished one."""
    case = tiled(Case(3, 1024, 1024, bias=False))
    bits = case.mixed()
    first = case.x
    results = []
    for synchronize in (True, False):
        case.x = first
        for _ in range(40):
            case.x = ops.nested_linear(*case.args(bits)[:6], list(case.layout.slices), case.exponent)
            if synchronize:
                torch.cuda.synchronize()
        results.append(case.x)
    assert torch.equal(*results)


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_few_rows_that_may_differ_by_their_company_take_the_batch_kernel(dtype: torch.dtype) -> None:
    case = Case(6, 40, 700, dtype=dtype)
    words = case.bits([precision_word(b, a) for b, a in ((4, 16), (8, 8), (6, 16), (16, 8), (4, 8), (16, 16))])
    expected = case.expect(words)
    y = nested_linear(*tiled(case).args(words), batch_invariant=False)
    close(y, expected)
    assert not torch.equal(y, case.run(words))  # of the decode kernel


@on_device
@torch.inference_mode()
def test_several_weights_of_one_launch_are_each_its_own() -> None:
    cases = [tiled(Case(6, n, 700)) for n in (70, 40, 33)]
    words = [
        case.bits([precision_word((4, 6, 8, 16)[(i + r) % 4], (16, 8)[r % 2]) for r in range(6)])
        for i, case in enumerate(cases)
    ]
    for count in (2, 3):
        some, x = cases[:count], cases[0].x
        y = nested_linears(
            x, [c.packed for c in some], [c.meta for c in some], words[:count], [c.original for c in some],
            [c.bias for c in some], (4, 2, 2), [c.exponent for c in some], batch_invariant=False,
        )  # fmt: skip
        for case, bits, part in zip(some, words, y.split([c.meta.shape[1] for c in some], -1), strict=False):
            _, *weight = case.args(bits)
            near = nested_linear(x, *weight, batch_invariant=False).float()
            torch.testing.assert_close(part.float(), near, rtol=2**-6, atol=2**-6)  # the sum is split otherwise
