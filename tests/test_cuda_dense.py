"""Fragments back to rows of numbers, on a GPU or played on a CPU."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from emulated_linear import emulation
from qbe.format import scales
from qbe.format.codes import quantise
from qbe.format.layout import SliceLayout
from qbe.format.packing import pack
from qbe.kernels.cuda import dense, fragments
from qbe.kernels.reference import eight_bit_rows
from qbe.kernels.reference import nested_linear as reference
from test_triton_kernel import CUDA, DEVICE

LAYOUT = SliceLayout()
KINDS = list(dense.KINDS)


def play(device: torch.device, name: str, blocks: int, given: dense.Arguments) -> None:
    kind = -1 if name == "bounds" else [f"dequantise<{k}>" for k in dense.KINDS.values()].index(name)
    emulation().run_dense(ctypes.byref(given), kind, blocks)


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    if not CUDA:
        monkeypatch.setattr(dense, "_launch", play)


def made(n: int, k: int, group: int) -> tuple[Any, ...]:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n))
    codes, meta, exponent = quantise(weight, LAYOUT, group)
    packed = pack(codes, LAYOUT)
    found = fragments.to_fragments(packed, meta, LAYOUT, k)
    assert found is not None
    return found.to(DEVICE), packed, meta, exponent


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "k", "group"), [(128, 256, 128), (70, 200, 64), (1, 72, 64)])
@pytest.mark.parametrize("precision", [0, 1, 2])
def test_it_is_the_reference(n: int, k: int, group: int, precision: int, dtype: torch.dtype) -> None:
    found, packed, meta, exponent = made(n, k, group)
    expected = reference.dequantise(packed, meta, exponent, (4, 2, 2), k, (4, 6, 8)[precision]).to(dtype)
    weight, none = dense.dequantise(found, n, k, exponent, precision, dtype)
    assert none is None
    assert torch.equal(weight[:n, :k].cpu(), expected)
    assert weight.shape == fragments.padded_shape(n, k, group)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("precision", [0, 2])
def test_eight_bits_with_a_scale_for_each_output(precision: int, dtype: torch.dtype) -> None:
    n, k, bits = 130, 256, (4, 6, 8)[precision]
    found, packed, meta, exponent = made(n, k, 64)
    plain = reference.dequantise(packed, meta, exponent, (4, 2, 2), k, bits)
    largest = scales.largest_of_rows(meta, exponent, LAYOUT, bits)
    expected, scale = eight_bit_rows.eight_bit_rows(plain, dtype, largest)
    weight, own = dense.dequantise(found, n, k, exponent, precision, dtype)
    assert own is not None
    torch.testing.assert_close(own[:n].cpu(), scale[:, 0], rtol=1e-6, atol=0)
    far = (weight[:n, :k].cpu().float() - expected.float()).abs()
    assert (far == 0).float().mean() > 0.999
    assert far.max() <= (1 if dtype == torch.int8 else 32)


def test_some_outputs_and_none() -> None:
    found, packed, meta, exponent = made(192, 128, 128)
    expected = reference.dequantise(packed, meta, exponent, (4, 2, 2), 128, 6)
    weight, _ = dense.dequantise(found, 192, 128, exponent, 1, torch.float32, first=64, count=64)
    assert torch.equal(weight.cpu(), expected[64:128])
    words = torch.tensor([4, 4, 8], dtype=torch.int32, device=DEVICE)
    out = torch.full((192, 128), 7.0, device=DEVICE)
    dense.dequantise(found, 192, 128, exponent, 1, torch.float32, wanted=(words, 6, 8), out=out)
    assert (out == 7).all()
    dense.dequantise(found, 192, 128, exponent, 1, torch.float32, wanted=(words, 8, 16), out=out)
    assert torch.equal(out.cpu(), expected)
