"""8-bit activations in the Triton kernels against the reference (see `test_triton_kernel`).

In float16 the kernels' own errors are a tenth of what rounding to 8 bits changes, so that a kernel that ignored a row's
activation bits, or took a neighbour's, could not pass.
"""

from __future__ import annotations

import pytest
import torch

from covering import FULL, covering
from qbe.kernels.reference.activations import eight_bits, precision_word
from test_triton_kernel import CUDA, INTERPRET, TOLERANCE, Case, close, on_device, on_gpu, run_in_interpreter
from test_triton_tiled import tiled

if CUDA or INTERPRET:
    from qbe.kernels.triton.linear.merged import nested_linears
    from qbe.kernels.triton.linear.round_rows import round_rows

GEARS = [(w, a) for a in (8, 16) for w in (4, 6, 8, 16)]
WORDS = [precision_word(*gear) for gear in GEARS]


@pytest.mark.skipif(CUDA or INTERPRET, reason="the tests below run here directly")
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def mixed(case: Case, shift: int = 0) -> torch.Tensor:
    """Every pair of gears in turn."""
    return case.bits([WORDS[(i * 3 + shift) % len(WORDS)] for i in range(case.x.shape[0])])


def test_words() -> None:
    assert [(w & 255, w >> 8) for w in WORDS] == [(w, a % 16) for w, a in GEARS]


@on_device
@pytest.mark.parametrize(
    ("m", "group", "layout"),
    [(m, group, layout) for m, group in ((1, 64), (8, 64), (13, 128), (20, 64), (70, 128), (260, 64))
     for layout in ("tiled", "plain")] if CUDA or FULL
    else [(1, 64, "tiled"), (8, 64, "plain"), (13, 128, "tiled"), (20, 64, "tiled"), (70, 128, "plain"),
          (260, 64, "tiled")],
)  # fmt: skip
def test_words_of_every_kind_in_one_call(m: int, group: int, layout: str) -> None:
    case = Case(m, 40, 330 if m < 260 or CUDA or FULL else 130, group=group, dtype=torch.float16)
    precision_words = mixed(case)
    expected = case.expect(precision_words)
    ignored = case.expect(precision_words & 255)
    eight = precision_words >> 8 == 8
    difference = (expected - ignored).norm(dim=-1) / ignored.norm(dim=-1)
    assert difference[eight].min() > 3 * TOLERANCE[torch.float16]
    close((tiled(case) if layout == "tiled" else case).run(precision_words), expected)


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("m", [5, 20])
def test_other_dtypes(dtype: torch.dtype, m: int) -> None:
    case = Case(m, 40, 200, dtype=dtype)
    precision_words = mixed(case)
    expected = case.expect(precision_words)
    # Rounding x on its way to the dtype is all that bfloat16 adds; in the interpreter it cuts.
    for y in (case.run(precision_words), tiled(case).run(precision_words)):
        close(y, expected)


@on_device
def test_a_group_size_that_is_no_power_of_two() -> None:
    case = Case(9, 20, 500, group=192, dtype=torch.float16)
    close(case.run(mixed(case)), case.expect(mixed(case)))


@on_device
@pytest.mark.parametrize(
    ("m", "layout"),
    covering(2, [8, 16, 40], ["tiled", "plain"]) if CUDA or FULL else [(8, "tiled"), (16, "plain"), (40, "tiled")],
)
def test_a_row_is_the_same_alone_and_in_a_mixed_batch(m: int, layout: str) -> None:
    case = Case(m, 40, 300)
    case = tiled(case) if layout == "tiled" else case
    precision_words = mixed(case)
    y = case.run(precision_words)
    for w in WORDS:
        alone = case.run(case.bits([w] * m))
        assert torch.equal(y[precision_words == w], alone[precision_words == w])


@on_device
@pytest.mark.parametrize("m", [3, 8, 16])
def test_weights_of_one_launch_have_words_of_their_own(m: int) -> None:
    made = [tiled(Case(m, n, 300, dtype=torch.float16)) for n in (70, 33, 64)]
    for case in made:
        case.x = made[0].x
    precision_words = [mixed(case, shift) for shift, case in enumerate(made)]
    y = nested_linears(
        made[0].x, [c.packed for c in made], [c.meta for c in made], precision_words, [c.original for c in made],
        [c.bias for c in made], (4, 2, 2), [c.exponent for c in made],
    )  # fmt: skip
    for part, case, w in zip(y.split([70, 33, 64], -1), made, precision_words, strict=True):
        plain = Case(m, case.weight.shape[0], 300, dtype=torch.float16)
        plain.x = case.x
        close(part, plain.expect(w))
        torch.testing.assert_close(part, case.run(w), rtol=2**-9, atol=2**-9 * float(part.abs().max()))


@on_device
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("m", [8, 20])
def test_what_is_not_finite_stays_in_its_row(m: int, value: float) -> None:
    case = tiled(Case(m, 20, 100))
    precision_words = mixed(case)
    before = case.run(precision_words)
    for row in (i for i, w in enumerate(precision_words.tolist()) if w >> 8 == 8):
        case.x[row, 3] = value
    after = case.run(precision_words)
    eight = precision_words >> 8 == 8
    assert not torch.isfinite(after[eight]).any()
    assert torch.equal(before[~eight], after[~eight])


@on_device
@pytest.mark.parametrize(("k", "group"), [(64, 64), (330, 64), (1100, 128), (500, 192)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rounded_rows_are_those_of_the_reference(k: int, group: int, dtype: torch.dtype) -> None:
    torch.manual_seed(k)
    x = torch.randn(9, k, device="cuda" if CUDA else "cpu").to(dtype)
    x[2] = 0
    x[3, :64] *= 1e-4
    x[4, 5] = 900
    precision_words = torch.tensor(
        [
            precision_word(4, 8),
            4,
            precision_word(16, 8),
            precision_word(6, 8),
            precision_word(8, 8),
            16,
            6,
            8,
            precision_word(4, 8),
        ],
        device=x.device,
    )
    rounded = round_rows(x, precision_words.int(), group)
    assert torch.equal(rounded[precision_words >> 8 == 0], x[precision_words >> 8 == 0])
    eight = precision_words >> 8 == 8
    want = eight_bits(x[eight], group).to(dtype)
    torch.testing.assert_close(rounded[eight], want, rtol=2**-10 if dtype == torch.float16 else 1e-6, atol=0)
    assert (rounded[eight][:, 0] != x[eight][:, 0]).any()


@pytest.mark.cuda
@on_gpu
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (1536, 576)])
@pytest.mark.parametrize("m", [1, 8, 16, 100, 300])
def test_model_shapes(m: int, n: int, k: int) -> None:
    case = Case(m, n, k, group=128 if k == 4096 else 64, dtype=torch.float16)
    tests = [mixed(case), case.bits([precision_word(4, 8)] * m), case.bits([precision_word(16, 8)] * m)]
    expected = [case.expect(precision_words) for precision_words in tests]
    case = tiled(case)
    for precision_words, want in zip(tests, expected, strict=True):
        close(case.run(precision_words), want)


@pytest.mark.cuda
@on_gpu
@pytest.mark.parametrize("m", [8, 40, 300])
def test_one_graph_serves_every_word(m: int) -> None:
    case = Case(m, 512, 2048, dtype=torch.float16)
    tests = [[w] * m for w in WORDS] + [mixed(case).tolist()]
    expected = [case.expect(case.bits(values)) for values in tests]
    case = tiled(case)
    bits = case.bits([4] * m)
    case.run(bits)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = case.run(bits)
    for values, want in zip(tests, expected, strict=True):
        bits.copy_(case.bits(values))
        y.fill_(float("nan"))
        graph.replay()
        close(y, want)
