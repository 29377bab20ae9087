"""`qbe::numbered_linear`: a layer called by its number."""

from __future__ import annotations

import pytest
import torch

from qbe.kernels.cpu import native
from qbe.kernels.ops import merged_linear as merged_ops  # noqa: F401  (they define the custom ops)
from qbe.kernels.ops import numbered_linear as numbered_ops
from qbe.store.nested_tensor import NestedTensor

SIZES, K, MOST = (48, 16, 24), 100, 32


class Layer:
    """Three weights with words for MOST rows; `called` counts the calls that reach its own function."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        nested = [NestedTensor.from_weight(torch.randn(n, K), (4, 2, 2), 64, False) for n in SIZES]
        self.packed, self.meta = [t.packed for t in nested], [t.meta for t in nested]
        self.exponents = [t.exponent for t in nested]
        self.precision_words = [torch.full((MOST,), 4, dtype=torch.int32) for _ in SIZES]
        self.called = 0
        self.number = numbered_ops.number(
            self.run, self.packed, self.meta, self.precision_words, [4, 2, 2], self.exponents
        )

    def run(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.called += 1
        rows = x.reshape(-1, K)
        precision_words = [torch.where((w & 255) > 8, 8, w)[: len(rows)] for w in self.precision_words]
        biases = [] if bias is None else list(bias.split(SIZES))
        y = torch.ops.qbe.nested_linears(
            rows, self.packed, self.meta, precision_words, [], biases, [4, 2, 2], self.exponents
        )
        return y.view(*x.shape[:-1], sum(SIZES))

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.ops.qbe.numbered_linear(x, bias, sum(SIZES), self.number)


@pytest.fixture
def compiled() -> bool:
    return native.load()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3), (0,)])
@pytest.mark.parametrize("biased", [False, True])
def test_is_the_layers_own_product(compiled: bool, dtype: torch.dtype, shape: tuple[int, ...], biased: bool) -> None:
    layer = Layer()
    x = torch.randn(*shape, K).to(dtype)
    bias = torch.randn(sum(SIZES)).to(dtype) if biased else None
    for precision_words, bits in zip(layer.precision_words, (4, 6, 8 | 8 << 8), strict=True):
        precision_words.fill_(bits)
    found, direct = layer(x, bias), layer.called == 0
    assert direct == (compiled and x.numel() > 0)
    assert torch.equal(found, layer.run(x, bias))


def test_words_count_as_they_are_when_it_is_called(compiled: bool) -> None:
    layer, x = Layer(), torch.randn(5, K)
    low = layer(x)
    layer.precision_words[0][3] = 8
    high = layer(x)
    assert torch.equal(low[[0, 1, 2, 4]], high[[0, 1, 2, 4]])
    assert not torch.equal(low[3], high[3])


def test_a_row_at_16_bits_goes_to_the_layers_own_function(compiled: bool) -> None:
    layer, x = Layer(), torch.randn(5, K)
    layer.precision_words[1][5] = 16  # of no row of x
    layer(x)
    before = layer.called
    layer.precision_words[1][4] = 16
    layer(x)
    assert layer.called == before + 1
    assert before == (0 if compiled else 1)


def test_what_does_not_fit_is_said_by_the_layers_own_function(compiled: bool) -> None:
    layer = Layer()
    with pytest.raises(RuntimeError):
        layer(torch.randn(3, K + 64))
    with pytest.raises(RuntimeError):
        layer(torch.randn(3, K), torch.randn(5))
    with pytest.raises(RuntimeError):
        layer(torch.randn(MOST + 1, K))
