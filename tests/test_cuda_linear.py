"""The linear kernel of `qbe.kernels.cuda` against the reference, on a GPU or played on a CPU."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from emulated_linear import emulation
from qbe.format.codes import quantise
from qbe.format.layout import SliceLayout
from qbe.format.packing import pack
from qbe.kernels.cuda import dense, fragments, linear
from qbe.kernels.reference.activations import precision_word
from qbe.kernels.reference.nested_linear import nested_linear as reference
from test_triton_kernel import CUDA, DEVICE

LAYOUT = SliceLayout()
BF16, F16 = torch.bfloat16, torch.float16


class Case:
    """Up to three nested weights [N, K] with one x."""

    def __init__(
        self, outputs: tuple[int, ...], inputs: int, group: int, dtype: torch.dtype, bias: bool = False,
        original: bool = False, precisions: tuple[int, ...] = (4, 6, 8),
    ) -> None:  # fmt: skip
        random = torch.Generator().manual_seed(inputs + sum(outputs))
        self.outputs, self.inputs, self.group, self.dtype, self.precisions = outputs, inputs, group, dtype, precisions
        self.weights = [(torch.randn(n, inputs, generator=random) / math.sqrt(inputs)).to(dtype) for n in outputs]
        made = [quantise(w, LAYOUT, group) for w in self.weights]
        self.packed = [pack(codes, LAYOUT) for codes, _, _ in made]
        self.meta, self.exponents = [m for _, m, _ in made], [e for _, _, e in made]
        self.originals = self.weights if original else [None] * len(outputs)
        self.biases = [torch.randn(n, generator=random).to(dtype) if bias else None for n in outputs]
        self.fragments = []
        for packed, meta in zip(self.packed, self.meta, strict=True):
            found = fragments.to_fragments(packed, meta, LAYOUT, inputs, precisions)
            assert found is not None
            storage = torch.empty(found.numel() + 128, dtype=torch.uint8)
            storage = storage[-storage.data_ptr() % 128 :][: found.numel()].copy_(found.view(-1))
            self.fragments.append(storage.view(1, 1, -1) if not CUDA else found.to(DEVICE))

    def x(self, rows: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(rows)
        return torch.randn(rows, self.inputs, generator=random).to(self.dtype) + 0.25

    def expected(self, x: torch.Tensor, words: list[list[int]]) -> torch.Tensor:
        """The reference in float32; without originals, 16 bits are served by the widest precision."""
        parts = []
        for i, rows in enumerate(words):
            original, bias = self.originals[i], self.biases[i]
            if original is None:
                rows = [precision_word(8, b >> 8 or 16) if b & 255 >= 16 else b for b in rows]
            y = reference(
                x.float(), self.packed[i], self.meta[i], torch.tensor(rows, dtype=torch.int32),
                None if original is None else original.float(), None if bias is None else bias.float(), (4, 2, 2),
                self.exponents[i],
            )  # fmt: skip
            parts.append(y)
        return torch.cat(parts, 1)

    def run(
        self, x: torch.Tensor, words: list[list[int]], blocks: int = 5, late: bool = False, wide: bool = True
    ) -> torch.Tensor:
        y = torch.full((x.shape[0], sum(self.outputs)), math.nan, dtype=torch.float32 if wide else self.dtype)
        tensors = [torch.tensor(rows, dtype=torch.int32) for rows in words]
        if CUDA:
            y = y.to(DEVICE)
            linear.linears(
                x.to(DEVICE), self.fragments, [t.to(DEVICE) for t in tensors],
                [None if w is None else w.to(DEVICE) for w in self.originals],
                [None if b is None else b.to(DEVICE) for b in self.biases], self.outputs, self.exponents, y,
                self.precisions,
            )  # fmt: skip
            y = y.cpu()
        else:
            self._play(x, tensors, y, blocks, late)
        for buffer, n in zip(self.fragments, self.outputs, strict=True):
            assert not buffer.view(-1)[fragments.regions(n, self.inputs, self.group, self.precisions).counts :].any()
        return y

    def _play(self, x: torch.Tensor, words: list[torch.Tensor], y: torch.Tensor, blocks: int, late: bool) -> None:
        shape = linear.shape_of(x.shape[0], self.outputs, self.inputs, self.group, blocks)
        sums = linear.sums_of(shape, torch.device("cpu")).fill_(math.nan)
        rows = linear.aligned_rows(x)
        storage = torch.full((rows.numel() + 8,), math.nan, dtype=x.dtype)
        rows = storage[-storage.data_ptr() // 2 % 8 :][: rows.numel()].view(rows.shape).copy_(rows)
        given = linear.arguments_of(
            rows, self.fragments, words, self.originals, self.biases, self.outputs, self.exponents, y, sums, shape,
            self.group, self.inputs, self.precisions,
        )  # fmt: skip
        emulation().run_linear(
            ctypes.byref(given), shape.tiles, self.group, self.dtype == F16, shape.blocks, shape.shared, late
        )


def check(case: Case, words: list[list[int]], blocks: int = 5) -> None:
    x = case.x(len(words[0]))
    expected = case.expected(x, words)
    for late in (False, True)[: 1 if CUDA else 2]:
        y = case.run(x, words, blocks, late)
        assert y.isfinite().all()
        error = (y - expected).norm(dim=1) / expected.norm(dim=1)
        assert error.max() < 1e-4, error
    rounded = case.run(x, words, blocks, wide=False)
    assert torch.equal(rounded, y.to(case.dtype))


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_it_is_the_reference(bits: int, dtype: torch.dtype, group: int) -> None:
    check(Case((320,), 640, group, dtype), [[bits] * 3])


@pytest.mark.parametrize(("n", "k"), [(64, 128), (1, 64), (70, 200), (300, 72), (256, 1000), (100, 77)])
def test_ragged_shapes(n: int, k: int) -> None:
    check(Case((n,), k, 64, BF16, bias=True), [[4, 8]])
    check(Case((n,), k, 128, BF16), [[6]])


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 17, 32])
def test_rows_of_every_precision(rows: int) -> None:
    check(Case((128,), 512, 128, BF16), [[(4, 6, 8)[i % 3] for i in range(rows)]])


@pytest.mark.parametrize("words", [[16] * 3, [4, 16, 8], [99, -1, 6], [2, 5, 7]], ids=str)
def test_rows_at_16_bits(words: list[int]) -> None:
    check(Case((128,), 384, 128, BF16, original=True), [words])
    check(Case((70,), 77, 64, F16, original=True), [words])
    check(Case((128,), 384, 128, BF16), [words])


@pytest.mark.parametrize("rows", [2, 12, 20])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_activations_of_8_bits(dtype: torch.dtype, rows: int) -> None:
    words = [(4, precision_word(4, 8), precision_word(8, 8), 6, precision_word(16, 8), 16)[i % 6] for i in range(rows)]
    check(Case((128,), 384, 128, dtype, original=True), [words])
    check(Case((128,), 200, 64, dtype), [[precision_word(4, 8)] * rows])


def test_several_weights_of_one_launch() -> None:
    case = Case((256, 64, 70), 512, 128, BF16, bias=True, original=True)
    check(case, [[4, 4], [8, 6], [16, 4]], blocks=4)
    check(case, [[16, 16], [4, 4], [6, 6]], blocks=7)


@pytest.mark.parametrize("blocks", [1, 2, 3, 8, 50])
def test_sums_are_cut_anywhere(blocks: int) -> None:
    check(Case((600,), 1280, 128, BF16), [[4, 8]], blocks)


@pytest.mark.parametrize("precisions", [(4,), (4, 6)])
def test_weights_without_their_lowest_planes(precisions: tuple[int, ...]) -> None:
    case = Case((128,), 256, 64, BF16, precisions=precisions)
    x, most = case.x(3), precisions[-1]
    expected = case.expected(x, [[4, min(6, most), most]])
    y = case.run(x, [[4, 6, 8]])
    assert ((y - expected).norm(dim=1) / expected.norm(dim=1)).max() < 1e-4


@pytest.mark.parametrize("eight", [False, True])
def test_a_row_is_the_same_whatever_rows_are_beside_it(eight: bool) -> None:
    """Bit for bit, alone at its precision and in batches of every size and mix."""
    case = Case((320,), 640, 128, BF16, original=True)
    x = case.x(32)
    words = [(4, 6, 8, 16, 4)[i % 5] for i in range(32)]
    if eight:
        words[3::4] = [precision_word(b & 255, 8) for b in words[3::4]]
    alone = torch.cat([case.run(x[i : i + 1], [[b]], blocks=3) for i, b in enumerate(words)])
    for first, last in ((0, 2), (3, 11), (5, 20), (0, 32), (4, 32)):
        assert torch.equal(case.run(x[first:last], [words[first:last]], blocks=3), alone[first:last])


def test_what_is_not_a_number_stays_in_its_row() -> None:
    case = Case((128,), 256, 128, BF16)
    for words in ([4, 4, 4], [4, 6, 8], [precision_word(4, 8)] * 3):
        x = case.x(3)
        x[1, 5] = math.inf
        y = case.run(x, [words])
        assert y[[0, 2]].isfinite().all()
        assert not y[1].isfinite().any()


def test_shapes_depend_on_weights_alone() -> None:
    shapes = [linear.shape_of(rows, (6144,), 4096, 128, 132) for rows in range(1, 33)]
    assert len({(s.blocks, s.units) for s in shapes}) == 1
    assert all(s.ring >= 2 * 4480 + 512 for s in shapes)
    assert all(s.shared <= linear.HALF_SHARED for s in shapes[:8])


def test_structures_are_the_kernels() -> None:
    assert emulation().sizes(0) == ctypes.sizeof(linear._Weight)
    assert emulation().sizes(1) == ctypes.sizeof(linear.Arguments)
    assert emulation().sizes(2) == ctypes.sizeof(dense.Arguments)
