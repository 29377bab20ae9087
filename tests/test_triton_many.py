"""Several weights of one launch against a launch for each (see `test_triton_tiled`)."""

from __future__ import annotations

import pytest
import torch

from test_triton_kernel import CUDA, INTERPRET, Case, close, on_device, run_in_interpreter
from test_triton_tiled import tiled


@pytest.mark.skipif(CUDA or INTERPRET, reason="the tests below run here directly")
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def cases(m: int, outputs: tuple[int, ...], k: int, bias: bool, original: bool, dtype: torch.dtype) -> list[Case]:
    made = [tiled(Case(m, n, k, dtype=dtype, bias=bias)) for n in outputs]
    for case in made:
        case.x = made[0].x
        if not original:
            case.original = None
    return made


@on_device
@pytest.mark.parametrize(
    ("m", "outputs", "k", "bias", "original", "dtype"),
    [
        (1, (70, 33, 64), 200, True, True, torch.bfloat16),
        (3, (64, 200), 576, False, True, torch.bfloat16),
        (9, (33, 70), 300, True, False, torch.float16),
        (16, (130, 20, 20), 1024, False, True, torch.float16),
        (17, (40, 30), 100, True, True, torch.bfloat16),  # more rows than the kernel takes: one by one
        (2, (40, 30), 100, True, True, torch.float32),
        (2, (20, 30, 40, 50), 100, True, True, torch.bfloat16),
        (2, (40,), 100, False, False, torch.bfloat16),
    ],
    ids=str,
)
def test_each_weight_keeps_its_own_bits(
    m: int, outputs: tuple[int, ...], k: int, bias: bool, original: bool, dtype: torch.dtype
) -> None:
    from qbe.kernels.triton.linear.merged import nested_linears

    made = cases(m, outputs, k, bias, original, dtype)
    widths = [4, 6, 8, 16] if original else [4, 6, 8]
    bits = [c.bits([widths[(i + j) % len(widths)] for i in range(m)]) for j, c in enumerate(made)]
    y = nested_linears(
        made[0].x, [c.packed for c in made], [c.meta for c in made], bits,
        [c.original for c in made] if original else [], [c.bias for c in made] if bias else [], (4, 2, 2),
        [c.exponent for c in made],
    )  # fmt: skip
    assert y.shape == (m, sum(outputs))
    assert y.dtype == dtype
    for part, case, b in zip(y.split(list(outputs), -1), made, bits, strict=True):
        expected = Case(m, case.weight.shape[0], k, dtype=dtype, bias=bias)
        expected.x, expected.original = case.x, case.original
        close(part, expected.expect(b))
        torch.testing.assert_close(part, case.run(b), rtol=2**-7, atol=2**-7 * float(part.abs().max()))
