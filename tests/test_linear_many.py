"""Products of more rows than a few on Hopper, against the reference; test_row_order has what a CPU can check."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qbe.format import scales
from qbe.format.codes import quantise
from qbe.format.layout import SliceLayout
from qbe.format.packing import pack
from qbe.kernels.cuda.fragments import to_fragments
from qbe.kernels.cuda.linear_many import linear_many, serves
from qbe.kernels.reference.eight_bit_rows import linear as eight_bit_linear
from qbe.kernels.reference.nested_linear import dequantise, nested_linear

LAYOUT = SliceLayout()
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not serves(torch.device("cuda"), torch.bfloat16), reason="needs a Hopper GPU"
    ),
]
SHAPES = [
    (256, 128, 33),
    (70, 200, 100),
    (1000, 328, 65),
    (2048, 1024, 128),
    (300, 1096, 600),
    (1344, 2048, 256),
    (130, 90, 40),
]
ERROR = {torch.bfloat16: 5e-3, torch.float16: 8e-4}  # relative: both sides and y are rounded to the type


class Case:
    """A weight and what multiplies it."""

    def __init__(self, n: int, k: int, m: int, dtype: torch.dtype, group: int) -> None:
        generator = torch.Generator().manual_seed(n * k + m)
        weight = torch.randn(n, k, generator=generator) * torch.rand(n, 1, generator=generator).add(0.05)
        codes, self.meta, self.exponent = quantise(weight, LAYOUT, group)
        self.packed = pack(codes, LAYOUT)
        fragments = to_fragments(self.packed, self.meta, LAYOUT, k)
        assert fragments is not None
        self.n, self.fragments = n, fragments.cuda()
        self.x = torch.randn(m, k, generator=generator).to(dtype).cuda()
        self.bias = torch.randn(n, generator=generator).to(dtype).cuda()
        self.original = weight.to(dtype).cuda()
        self.mixed = torch.tensor([4, 6, 8], dtype=torch.int32)[torch.randint(3, (m,), generator=generator)].cuda()

    def multiply(self, words: torch.Tensor, dtype: torch.dtype, **options: Any) -> torch.Tensor:
        original, bias = options.pop("original", None), options.pop("bias", self.bias)
        return linear_many(self.x, self.fragments, words, original, bias, self.n, self.exponent, dtype, **options)

    def reference(self, words: torch.Tensor, original: torch.Tensor | None = None) -> torch.Tensor:
        kept = None if original is None else original.cpu().float()
        return nested_linear(
            self.x.cpu().float(),
            self.packed,
            self.meta,
            words.cpu(),
            kept,
            self.bias.cpu(),
            LAYOUT.slices,
            self.exponent,
        )


def close(y: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    assert torch.isfinite(y).all()
    assert (y.cpu().float() - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k", "m"), SHAPES)
def test_shared_rows_are_read_at_the_highest_precision_of_any(
    n: int, k: int, m: int, dtype: torch.dtype, group: int
) -> None:
    case = Case(n, k, m, dtype, group)
    for bits in (4, 6, 8):
        words = torch.full((m,), 4, dtype=torch.int32, device="cuda")
        words[m // 2] = bits
        for wide in (dtype, torch.float32):
            for _ in range(2):  # arrivals are counted anew
                y = case.multiply(words, wide, shared=True)
            assert y.dtype == wide
            close(y, case.reference(torch.full_like(words, bits)), ERROR[dtype])


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k", "m"), SHAPES)
def test_exact_rows_are_read_at_their_own_precision(n: int, k: int, m: int, dtype: torch.dtype, group: int) -> None:
    case = Case(n, k, m, dtype, group)
    for words in (case.mixed, torch.full_like(case.mixed, 6), torch.arange(m, dtype=torch.int32, device="cuda") % 9):
        y, expected = case.multiply(words, dtype), case.reference(words)
        for row in range(m):
            close(y[row], expected[row], 3 * ERROR[dtype])


@pytest.mark.parametrize("shared", [False, True])
def test_rows_at_16_bits_are_multiplied_by_the_original(shared: bool) -> None:
    case = Case(320, 384, 70, torch.bfloat16, 128)
    words = torch.where(torch.arange(70, device="cuda") % 3 == 0, 16, 8).to(torch.int32)
    y = case.multiply(words, torch.bfloat16, original=case.original, shared=shared)
    close(y, case.reference(words, case.original), ERROR[torch.bfloat16])
    close(case.multiply(words, torch.bfloat16), case.reference(torch.full_like(words, 8)), ERROR[torch.bfloat16])


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize(("n", "k", "m"), SHAPES)
def test_int8_on_both_sides(n: int, k: int, m: int, group: int) -> None:
    case = Case(n, k, m, torch.bfloat16, group)
    for bits in (4, 6, 8):
        words = torch.full((m,), bits | 8 << 8, dtype=torch.int32, device="cuda")
        weight = dequantise(case.packed, case.meta, case.exponent, LAYOUT.slices, k, bits)
        largest = scales.largest_of_rows(case.meta, case.exponent, LAYOUT, bits)
        expected = eight_bit_linear(case.x.cpu(), weight, torch.int8, largest) + case.bias.cpu().float()
        close(case.multiply(words, torch.float32, shared=True, eight=True), expected, 5e-3)


@pytest.mark.parametrize("eight", [False, True])
def test_a_row_is_the_same_in_any_batch(eight: bool) -> None:
    case = Case(1344, 2048, 256, torch.bfloat16, 128)
    words = torch.full((256,), 6, dtype=torch.int32, device="cuda")
    some = case.x
    for sizes in ((33, 64, 100, 128), (129, 200, 256)):  # of the same tiles of outputs
        found = []
        for m in sizes:
            case.x = some[:m]
            found.append(case.multiply(words[:m], torch.bfloat16, shared=True, eight=eight)[:33])
        assert all(torch.equal(found[0], other) for other in found)
