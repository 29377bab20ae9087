"""The Triton kernel of `qbe::nested_linear` against the PyTorch reference.

With a GPU the tests run there. Without one they run on CPU tensors in Triton's interpreter, in a process of their own:
Triton decides at import whether it interprets, and other test files must not be affected.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import forked
from covering import FULL
from qbe.errors import QBEError
from qbe.format.codes import quantise
from qbe.format.layout import SliceLayout
from qbe.format.packing import pack
from qbe.kernels.reference import nested_linear as reference

CUDA = torch.cuda.is_available()
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if CUDA else "cpu"
LAYOUTS = [(4, 2, 2), (3, 1, 1, 1, 2), (1,) * 8, (8,)]
# Worst row, |y - reference| / |reference|. 16-bit: the output's own rounding (at most 2**-9 of an element in bfloat16,
# 2**-12 in float16), and with many rows the weight's rounding to the same dtype. float32: the order of the sums.
# The interpreter cuts bfloat16 instead of rounding it.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 6e-4, torch.bfloat16: 8e-3 if INTERPRET else 4e-3}

pytest.importorskip("triton", reason="Triton is not installed")
on_device = pytest.mark.skipif(not (CUDA or INTERPRET), reason="needs a GPU or TRITON_INTERPRET=1")
on_gpu = pytest.mark.skipif(not CUDA or INTERPRET, reason="needs a GPU")

if CUDA or INTERPRET:
    from qbe.kernels.triton.linear.nested import launch_config, nested_linear

if INTERPRET:
    import numpy as np
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain_dot = InterpreterBuilder.create_dot

    def _dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        """The interpreter keeps bfloat16 as its bits and multiplies those; give it the values."""

        def values(t: Any) -> Any:
            if t.dtype.scalar != bfloat16:
                return t
            return TensorHandle((t.data.astype(np.uint32) << 16).view(np.float32), float32)

        return plain_dot(self, values(a), values(b), *rest)

    InterpreterBuilder.create_dot = _dot


def run_in_interpreter(file: str, *arguments: str) -> None:
    """Runs a test file in Triton's interpreter, in a process of its own: Triton decides at import whether it does."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore", str(Path(file).resolve())]
    limit_s = 3600 if FULL else 600
    done = forked.run([*command, *arguments], env=env, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.skipif(CUDA or INTERPRET, reason="the tests below run here directly")
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


class Case:
    """Random inputs of one shape; `run` is the kernel, `expect` the reference in float32."""

    def __init__(
        self,
        m: int,
        n: int,
        k: int,
        slices: tuple[int, ...] = (4, 2, 2),
        group: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        bias: bool = True,
    ) -> None:
        torch.manual_seed(m + 7 * n + 31 * k)
        self.layout = SliceLayout(slices)
        self.x = torch.randn(m, k, device=DEVICE).to(dtype)
        self.weight = (torch.randn(n, k, device=DEVICE) * 0.05).to(dtype)
        self.bias = torch.randn(n, device=DEVICE).to(dtype) if bias else None
        codes, self.meta, self.exponent = quantise(self.weight, self.layout, group)
        self.packed = pack(codes, self.layout)
        self.original: torch.Tensor | None = self.weight

    def mixed(self) -> torch.Tensor:
        """Every precision of the store and 16, in turn."""
        widths = [*self.layout.precisions, 16]
        return self.bits([widths[i % len(widths)] for i in range(self.x.shape[0])])

    def bits(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    def args(self, bits: torch.Tensor) -> tuple[Any, ...]:
        return self.x, self.packed, self.meta, bits, self.original, self.bias, self.layout.slices, self.exponent

    def run(self, bits: torch.Tensor) -> torch.Tensor:
        return nested_linear(*self.args(bits))

    def expect(self, bits: torch.Tensor) -> torch.Tensor:
        x, packed, meta, bits, original, bias, slices, exponent = self.args(bits)
        original = original.float() if original is not None else None
        bias = bias.float() if bias is not None else None
        return reference.nested_linear(x.float(), packed, meta, bits, original, bias, slices, exponent)


def close(y: torch.Tensor, expected: torch.Tensor) -> None:
    assert y.shape == expected.shape
    assert torch.isfinite(y).all()
    error = (y.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max().item() < TOLERANCE[y.dtype], error


@on_device
@pytest.mark.parametrize("slices", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mixed_bits_match_the_reference(slices: tuple[int, ...], dtype: torch.dtype) -> None:
    case = Case(10, 70, 200, slices, dtype=dtype)
    close(case.run(case.mixed()), case.expect(case.mixed()))


@on_device
@pytest.mark.parametrize(
    ("m", "n", "k", "group", "slices", "dtype"),
    [
        (1, 33, 64, 64, (4, 2, 2), torch.bfloat16),
        (2, 64, 130, 128, (3, 1, 1, 1, 2), torch.float16),
        (5, 5, 256, 128, (4, 2, 2), torch.float32),
        (17, 70, 330, 192, (4, 2, 2), torch.bfloat16),
        (64, 65, 100, 64, (8,), torch.bfloat16),
        (65, 40, 200, 64, (4, 2, 2), torch.bfloat16),
        (65, 40, 72, 64, (3, 1, 1, 1, 2), torch.float16),
        (130, 150, 200, 128, (4, 2, 2), torch.float16),
        (66, 33, 72, 64, (4, 2, 2), torch.float32),
    ],
)
def test_ragged_shapes(m: int, n: int, k: int, group: int, slices: tuple[int, ...], dtype: torch.dtype) -> None:
    case = Case(m, n, k, slices, group, dtype, bias=m % 2 == 0)
    close(case.run(case.mixed()), case.expect(case.mixed()))


@on_device
@pytest.mark.parametrize("m", [4, 67])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_row_is_the_same_alone_and_in_a_mixed_batch(m: int, dtype: torch.dtype) -> None:
    case = Case(m, 40, 136, dtype=dtype)
    mixed = case.mixed()
    y = case.run(mixed)
    for b in (4, 6, 8, 16):
        uniform = case.bits([b] * m)
        alone = case.run(uniform)
        assert torch.equal(y[mixed == b], alone[mixed == b])


@on_device
def test_split_sum() -> None:
    case = Case(3, 33, 1210)
    config = launch_config(3, 33, 19, 1, 3, torch.bfloat16, case.x.device)
    assert config["SPLITS"] > 1
    close(case.run(case.mixed()), case.expect(case.mixed()))


@on_device
def test_widths_the_store_lacks() -> None:
    case = Case(6, 20, 100, dtype=torch.float32)
    close(case.run(case.bits([1, 3, 5, 7, 12, 17])), case.expect(case.bits([4, 4, 4, 6, 8, 16])))


@on_device
def test_without_the_original_16_bits_means_the_widest_slice() -> None:
    case = Case(4, 20, 100, dtype=torch.float32)
    case.original = None
    close(case.run(case.bits([16, 4, 16, 8])), case.expect(case.bits([8, 4, 8, 8])))


@on_device
def test_an_infinite_row_stays_in_its_row() -> None:
    case = Case(4, 20, 100)
    bits = case.bits([4, 8, 6, 16])
    before = case.run(bits)
    case.x[1, 3] = float("inf")
    after = case.run(bits)
    assert not torch.isfinite(after[1]).all()
    assert torch.equal(before[[0, 2, 3]], after[[0, 2, 3]])


@on_device
def test_shapes_of_x() -> None:
    case = Case(6, 20, 128, dtype=torch.float32)
    bits = case.mixed()
    flat = case.run(bits)
    case.x = case.x.view(2, 3, 128)
    assert torch.equal(case.run(bits), flat.view(2, 3, 20))
    case.x = case.x.transpose(1, 2).contiguous().transpose(1, 2)
    assert not case.x.is_contiguous()
    assert torch.equal(case.run(bits), flat.view(2, 3, 20))
    strided = torch.stack([bits, bits * 0], dim=1)[:, 0]
    assert torch.equal(nested_linear(*case.args(strided)), flat.view(2, 3, 20))
    case.x = case.x.reshape(6, 128)[:0]
    assert case.run(case.bits([])).shape == (0, 20)


@on_device
def test_refuses_other_dtypes() -> None:
    case = Case(1, 5, 64)
    case.x = case.x.double()
    with pytest.raises(QBEError, match="float64"):
        case.run(case.bits([4]))


@pytest.mark.cuda
@on_gpu
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1536, 576), (4096, 14336)])
@pytest.mark.parametrize("m", [1, 8, 33, 64, 300])
@pytest.mark.parametrize("group", [64, 128])
def test_model_shapes(m: int, n: int, k: int, group: int) -> None:
    case = Case(m, n, k, group=group)
    close(case.run(case.mixed()), case.expect(case.mixed()))
    low = case.bits([4] * m)
    close(case.run(low), case.expect(low))


@pytest.mark.cuda
@on_gpu
def test_original_in_pinned_host_memory() -> None:
    case = Case(5, 200, 576)
    expected = case.expect(case.mixed())
    case.original = case.weight.cpu()
    with pytest.raises(QBEError, match="pin"):
        case.run(case.mixed())
    case.original = case.original.pin_memory()
    close(case.run(case.mixed()), expected)


@pytest.mark.cuda
@on_gpu
@pytest.mark.parametrize("m", [4, 100])
def test_one_graph_serves_every_bits_and_nothing_waits(m: int) -> None:
    case = Case(m, 512, 2048)
    bits = case.bits([4] * m)
    case.run(bits)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = case.run(bits)
    for values in ([8] * m, [16] * m, case.mixed().tolist(), [4] * m):
        bits.copy_(case.bits(values))
        y.fill_(float("nan"))
        graph.replay()
        close(y, case.expect(bits))
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.run(bits)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@on_gpu
@pytest.mark.parametrize("m", [3, 70])
def test_opcheck(m: int) -> None:
    from qbe.kernels.ops import nested_linear as ops  # noqa: F401 - registers the op

    case = Case(m, 64, 200)
    x, packed, meta, bits, original, bias, slices, exponent = case.args(case.mixed())
    args = (x, packed, meta, bits, original, bias, list(slices), exponent)
    torch.library.opcheck(torch.ops.qbe.nested_linear.default, args)
    close(torch.ops.qbe.nested_linear(*args), case.expect(case.mixed()))
