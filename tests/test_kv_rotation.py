"""The rotation of quantised pages and the sketch of turbo keys: their algebra, and what they are for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_samples import PAGE_SIZE, Memory
from qbe.kernels.reference.kv_pages import quantise, read_pages, turbo_keys, turbo_numbers
from qbe.kernels.reference.rotation import rotate, rotation

DIMS = [16, 40, 64, 80, 96, 128, 256]


@pytest.mark.parametrize("signs", [True, False])
@pytest.mark.parametrize("dim", [*DIMS, 3])
def test_it_is_orthonormal_and_its_own_inverse(dim: int, signs: bool) -> None:
    r = rotation(dim, signs)
    torch.testing.assert_close(r @ r.T, torch.eye(dim).double())
    assert torch.equal(r, r.T)
    n = dim & -dim
    assert torch.equal(r.abs() > 0, torch.block_diag(*[torch.ones(n, n)] * (dim // n)).bool())


@settings(deadline=None, max_examples=60)
@given(dim=st.sampled_from(DIMS), size=st.floats(-3, 3), seed=st.integers(0, 2**20))
def test_products_stay(dim: int, size: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(5, dim, generator=g).double() * 10**size for _ in range(2))
    torch.testing.assert_close(rotate(q) @ rotate(k).T, q @ k.T, atol=1e-12 * 100**size * dim, rtol=1e-9)
    torch.testing.assert_close(rotate(rotate(q)), q)


@pytest.mark.parametrize("dim", [64, 128])
def test_regular_keys_are_spread_too(dim: int) -> None:
    """A constant key, an alternating one, a single channel, a wave: no number holds much more than its share."""
    t = torch.arange(dim)
    for x in (torch.ones(dim), (-1.0) ** t, (t == 5).float(), torch.sin(t / 3.0)):
        x = x.double() / x.double().norm()
        assert float(rotate(x).abs().max()) * dim**0.5 < 3.5


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dim", [64, 128])
def test_an_outlier_does_not_set_the_grid_of_all_others(dim: int, bits: int) -> None:
    """Values with one large channel: quantised, they are closer than rounded as they are."""
    g = torch.Generator().manual_seed(dim)
    values = torch.randn(PAGE_SIZE, 1, dim, generator=g)
    values[:, :, 3] += 30
    memory = Memory([(16,), (bits,)], (1, dim, dim), torch.float32, 3)
    block_id = memory.filled(1, values, values)
    read = read_pages(memory.data, memory.head_offsets, torch.tensor([block_id]), memory.shape, torch.float32)[1][0]
    codes, scale, low = quantise(values[:, 0], bits)
    plain = codes * scale.float()[:, None] + low.float()[:, None]
    errors = [float((x - values[:, 0]).square().mean()) for x in (read, plain)]
    assert errors[0] < errors[1] / 2


@settings(deadline=None, max_examples=40)
@given(
    dim=st.sampled_from([16, 64, 80, 128]),
    bits=st.sampled_from([2, 4]),
    size=st.floats(-3, 2),
    seed=st.integers(0, 999),
)
def test_the_sketch_makes_the_remainders_own_product_exact(dim: int, bits: int, size: float, seed: int) -> None:
    """<rest, sketch> = <rest, rest>, up to float16's rounding of the scale."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randn(PAGE_SIZE, dim, generator=g) * 10**size
    codes, scale, sketch_scale, mean = turbo_keys(y, bits)
    levels = turbo_numbers(codes, scale, torch.zeros_like(sketch_scale), mean, bits)
    rest, sketch = y - levels, turbo_numbers(codes, scale, sketch_scale, mean, bits) - levels
    torch.testing.assert_close((rest * sketch).sum(1), (rest * rest).sum(1), rtol=2e-3, atol=1e-5 * 100**size)


def test_products_with_turbo_keys_are_unbiased() -> None:
    """Over many keys that lie alike to the query, levels alone shrink products; with the sketch the mean is right."""
    g = torch.Generator().manual_seed(0)
    dim, bits = 64, 2
    slopes = []
    for sketched in (True, False):
        found = wanted = 0.0
        for _ in range(40):
            y = torch.randn(PAGE_SIZE, dim, generator=g)
            codes, scale, sketch_scale, mean = turbo_keys(y, bits)
            sketch_scale = sketch_scale if sketched else torch.zeros_like(sketch_scale)
            back = turbo_numbers(codes, scale, sketch_scale, mean, bits)
            q = y + torch.randn(PAGE_SIZE, dim, generator=g)
            found, wanted = found + float((q * back).sum()), wanted + float((q * y).sum())
        slopes.append(found / wanted)
    assert abs(slopes[0] - 1) < 0.01
    assert slopes[1] < 0.7
