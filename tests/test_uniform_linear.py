"""Long products of one word: the weight made once, in 16 bits or in 8 with a scale per row (`test_triton_kernel`)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covering import FULL
from qbe.format import scales
from qbe.format.layout import SliceLayout
from qbe.hardware import HardwareProfile, detect
from qbe.kernels.reference import eight_bit_rows as reference
from qbe.kernels.reference.activations import precision_word
from test_triton_kernel import CUDA, DEVICE, INTERPRET, Case, close, on_device, on_gpu, run_in_interpreter
from test_triton_tiled import tiled

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
NATIVE = pytest.mark.parametrize("dtype", [E4M3, INT8], ids=["e4m3", "int8"])

if CUDA or INTERPRET:
    from qbe.kernels.triton.linear.eight_bit_rows import eight_bit_rows
    from qbe.kernels.triton.linear.tiled import uniform as module
    from qbe.kernels.triton.linear.tiled.dequantise import dequantise

if INTERPRET:
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain_conversion = InterpreterBuilder.create_fp_to_fp

    def _conversion(self, src, dst_type, rounding_mode):  # type: ignore[no-untyped-def]
        """The interpreter's E4M3 loses the carry of a mantissa that rounds up, and cuts subnormal values."""
        if dst_type.scalar != tl.float8e4nv:
            return plain_conversion(self, src, dst_type, rounding_mode)
        values = torch.from_numpy(np.ascontiguousarray(src.data)).clamp(-448, 448).to(E4M3)
        return TensorHandle(values.view(torch.uint8).numpy(), dst_type.scalar)

    InterpreterBuilder.create_fp_to_fp = _conversion


@pytest.mark.skipif(CUDA or INTERPRET, reason="the tests below run here directly")
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def run(case: Case, at: int, native: torch.dtype | None = None, float32_output: bool = False) -> torch.Tensor | None:
    """The product of a case in the tiled layout when every row reads this word."""
    m = case.x.shape[0]
    return module.uniform_linear(
        case.x, case.packed, case.bits([at] * m), case.original, case.bias, case.layout.slices, case.exponent,
        case.weight.shape[0], at, native, float32_output,
    )  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**30), spread=st.floats(0.1, 30))
def test_errors_of_eight_bits_are_those_stated(seed: int, spread: float) -> None:
    x = torch.randn(4, 200, generator=torch.Generator().manual_seed(seed))
    x = x.sign() * x.abs() ** spread
    for dtype in (E4M3, INT8):
        values, scale = reference.eight_bit_rows(x, dtype)
        error = (values.float() * scale - x).abs()
        allowed = 0.5 * scale if dtype == INT8 else torch.maximum(x.abs() * 2**-4, scale * 2**-10)
        # And float32's own roundings: of factor, product and half a step on the way there, of scale and product back.
        assert (error <= allowed + 5 * 2**-24 * x.abs()).all()


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**30), slices=st.sampled_from([(4, 2, 2), (3, 1, 1, 1, 2), (8,)]))
def test_the_bound_of_a_row_holds_and_is_near(seed: int, slices: tuple[int, ...]) -> None:
    from qbe.store.nested_tensor import NestedTensor

    weight = torch.randn(9, 150, generator=torch.Generator().manual_seed(seed))
    weight[3] = 0
    nested = NestedTensor.from_weight(weight, slices)
    layout = SliceLayout.of(slices)
    for bits in layout.precisions:
        largest = nested.dequantise(bits).abs().amax(-1)
        bound = scales.largest_of_rows(nested.meta, nested.exponent, layout, bits)
        assert (bound >= largest * (1 - 1e-6)).all()
        assert (bound[largest > 0] <= 1.3 * largest[largest > 0]).all()


@on_device
@NATIVE
@pytest.mark.parametrize(("k", "kp"), [(64, 256), (200, 256), (2100, 2304)])
def test_rows_are_those_of_the_reference(dtype: torch.dtype, k: int, kp: int) -> None:
    torch.manual_seed(k)
    x = torch.randn(7, k, device=DEVICE).half()
    x[1] = 0
    x[2, 3] = 3000
    values, scale = eight_bit_rows(x, kp, dtype)
    want, want_scale = reference.eight_bit_rows(x, dtype)
    torch.testing.assert_close(scale, want_scale, rtol=1e-6, atol=0)
    assert not values[:, k:].float().any()
    assert (values[:, :k].float() != want.float()).float().mean() < 1e-3  # a tie may round the other way
    torch.testing.assert_close(values[:, :k].float(), want.float(), rtol=0.13, atol=1.0 if dtype == INT8 else 2**-9)


@on_device
@NATIVE
@pytest.mark.parametrize("slices", [(4, 2, 2), (3, 1, 1, 1, 2)], ids=str)
def test_a_weight_in_eight_bits_is_the_reference(dtype: torch.dtype, slices: tuple[int, ...]) -> None:
    case = Case(1, 70, 330, slices, 128)
    expected = Case(1, 70, 330, slices, 128)
    buffer = tiled(case).packed
    for i, bits in enumerate(case.layout.precisions):
        from qbe.kernels.reference.nested_linear import dequantise as plain

        weight = plain(expected.packed, case.meta, case.exponent, slices, 330, bits)
        largest = scales.largest_of_rows(case.meta, case.exponent, case.layout, bits)
        values, scale = dequantise(buffer, case.bits([0]), 70, 330, case.layout, case.exponent, i, dtype)
        want, want_scale = reference.eight_bit_rows(weight, dtype, largest)
        torch.testing.assert_close(scale[:70], want_scale[:, 0], rtol=1e-6, atol=0)
        found = values[:70, :330].float()
        assert (found != want.float()).float().mean() < 1e-3
        torch.testing.assert_close(found, want.float(), rtol=0.13, atol=1.0 if dtype == INT8 else 2**-9)
        whole, none = dequantise(buffer, case.bits([0]), 70, 330, case.layout, case.exponent, i, torch.float32)
        assert none is None
        torch.testing.assert_close(whole[:70, :330], weight, rtol=1e-6, atol=1e-7)


@on_device
@pytest.mark.parametrize("bits", [4, 6, 8, 16, 3, 12])
def test_sixteen_bit_activations(bits: int) -> None:
    case = Case(20, 70, 200, dtype=torch.float16)
    expected = case.expect(case.bits([bits] * 20))
    y = run(tiled(case), bits)
    assert y is not None
    close(y, expected)


@on_device
@pytest.mark.parametrize("bits", [4, 16])
def test_wide_results_are_float32_and_not_rounded(bits: int) -> None:
    case = Case(20, 70, 200)
    expected = case.expect(case.bits([bits] * 20))
    y = run(tiled(case), bits, float32_output=True)
    assert y is not None
    assert y.dtype == torch.float32
    error = (y - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < (1e-5 if bits == 16 else 4e-3)  # each weight is rounded
    assert not torch.equal(y, y.bfloat16().float())


@on_device
@NATIVE
@pytest.mark.parametrize("bits", [4, 8] if CUDA or FULL else [4])
def test_eight_bit_activations_where_the_weight_bears_them(dtype: torch.dtype, bits: int) -> None:
    if CUDA and detect("cuda").prompt_format is None:
        pytest.skip("this GPU has no 8-bit products")
    case = Case(260, 70, 330)
    nested = case.expect(case.bits([bits] * 260)) - case.bias.float()
    from qbe.kernels.reference.nested_linear import dequantise as plain

    weight = plain(case.packed, case.meta, case.exponent, case.layout.slices, 330, bits)
    largest = scales.largest_of_rows(case.meta, case.exponent, case.layout, bits)
    want = reference.linear(case.x, weight, dtype, largest)
    y = run(tiled(case), precision_word(bits, 8), dtype)
    assert y is not None
    assert y.dtype == torch.bfloat16
    assert y.is_contiguous()
    # Ties that round the other way, the sums' order and bfloat16's own rounding.
    close(y, want + case.bias.float())
    # What 8 bits cost: two roundings of random numbers, each of about 2.6 % (E4M3) or 1 % (int8) of a row's norm.
    cost = (want - nested).norm(dim=-1) / nested.norm(dim=-1)
    assert cost.max() < (0.06 if dtype == E4M3 else 0.03)


@on_device
@pytest.mark.parametrize(("bits", "native"), [(6, None), (16, None), (16, INT8)], ids=str)
def test_elsewhere_they_are_not_rounded(bits: int, native: torch.dtype | None) -> None:
    """Nor is a weight at 16 bits ever narrowed. In float16 the rounding of 8 bits would be seen."""
    case = tiled(Case(20, 70, 330, dtype=torch.float16))
    y = run(case, precision_word(bits, 8), native)
    assert y is not None
    assert torch.equal(y, run(case, bits))


@on_device
def test_float32_is_not_narrowed() -> None:
    case = tiled(Case(20, 70, 330, dtype=torch.float32))
    assert torch.equal(run(case, precision_word(4, 8), INT8), run(case, 4))


@on_device
def test_an_original_elsewhere_or_dropped() -> None:
    case = tiled(Case(20, 70, 200, dtype=torch.float16))
    case.original = case.weight.float()
    assert run(case, 16) is None
    assert run(case, precision_word(16, 8)) is None
    case.original = None
    assert torch.equal(run(case, 16), run(case, 8))


@on_device
@NATIVE
def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype) -> None:
    case = tiled(Case(260, 33, 200))
    before = run(case, precision_word(4, 8), dtype)
    case.x[1, 3], case.x[2, 5] = float("inf"), float("nan")
    after = run(case, precision_word(4, 8), dtype)
    assert not torch.isfinite(after[1:3]).any()
    assert torch.equal(before[3:], after[3:])


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [((10, 0), E4M3), ((9, 0), E4M3), ((8, 9), E4M3), ((8, 6), INT8), ((7, 5), INT8), ((7, 0), None), ((0, 0), None),
     (None, None)],
)  # fmt: skip
def test_the_hardware_profile_decides(capability: tuple[int, int] | None, dtype: torch.dtype | None) -> None:
    made_up = HardwareProfile("cuda:0", "made up", 1, 1, capability, ("avx2", "vnni"))
    assert reference.DTYPES.get(made_up.prompt_format or "") == dtype


@pytest.mark.cuda
@on_gpu
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (1804, 1536)])
def test_model_shapes(n: int, k: int) -> None:
    case = Case(512, n, k, group=128, bias=False)
    form = detect(case.x.device).prompt_format
    if form is None:
        pytest.skip("this GPU has no 8-bit products")
    dtype = reference.DTYPES[form]
    from qbe.kernels.reference.nested_linear import dequantise as plain

    weight = plain(case.packed, case.meta, case.exponent, case.layout.slices, k, 4)
    want = reference.linear(case.x, weight, dtype, scales.largest_of_rows(case.meta, case.exponent, case.layout, 4))
    close(run(tiled(case), precision_word(4, 8), dtype), want)
