"""Means whose order of sums their length alone decides (see `test_triton_kernel` for where this runs)."""

from __future__ import annotations

import pytest
import torch

from test_triton_kernel import CUDA, DEVICE, INTERPRET, on_device, run_in_interpreter

if CUDA or INTERPRET:
    from qbe.kernels.triton.rows.means import LARGEST, RowMeans


@pytest.mark.skipif(CUDA or INTERPRET, reason="the tests below run here directly")
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@on_device
@pytest.mark.parametrize("k", [1, 70, 576, 4096])
def test_a_mean_is_that_of_torch_and_the_same_for_any_number_of_rows(k: int) -> None:
    x = torch.randn(13, k, device=DEVICE)
    with RowMeans(torch.device(DEVICE)):
        found = x.mean(-1, keepdim=True)
        assert found.shape == (13, 1)
        assert torch.equal(x.mean(1), found[:, 0])
        for rows in (1, 2, 5, 8):
            assert torch.equal(x[:rows].mean(-1, keepdim=True), found[:rows])
            assert torch.equal(x[None, :rows].mean(-1), found[None, :rows, 0])
    torch.testing.assert_close(found, x.double().mean(-1, keepdim=True).float(), rtol=1e-5, atol=1e-6)


@on_device
def test_what_it_does_not_take_is_torchs() -> None:
    x = torch.randn(6, 4, 8, device=DEVICE)
    too_long = torch.randn(2, LARGEST + 1, device=DEVICE)
    cases = [
        (x, 1, torch.float32), (x, (0, 2), torch.float32), (x.transpose(1, 2), -1, torch.float32),
        (x.double(), -1, torch.float64), (too_long, -1, torch.float32),
    ]  # fmt: skip
    expected = [t.mean(dim) for t, dim, _ in cases]
    with RowMeans(torch.device(DEVICE)):
        for (t, dim, dtype), e in zip(cases, expected, strict=True):
            assert torch.equal(t.mean(dim), e)
            assert t.mean(dim).dtype == dtype
        assert x.mean(-1, dtype=torch.float64).dtype == torch.float64
        assert x[:0].mean(-1).shape == (0, 4)
