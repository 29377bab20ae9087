"""Which kernel runs when: where one takes over from another, and that everybody who asks is told the same."""

from __future__ import annotations

import sys

import pytest
import torch

from qbe.kernels.cpu import dispatch as on_cpu
from qbe.kernels.cuda import dispatch as on_gpu

HALF = torch.float16


@pytest.mark.parametrize(
    ("rows", "dtype", "tiled", "original", "kernel"),
    [
        (1, HALF, True, None, "decode"),
        (16, torch.bfloat16, True, torch.bfloat16, "decode"),
        (17, HALF, True, None, "batch"),
        (255, HALF, True, HALF, "batch"),
        (256, HALF, True, HALF, "prefill"),
        (256, HALF, True, None, "prefill"),
        (256, HALF, True, torch.bfloat16, "batch"),  # the dense kernel multiplies by the original in x's dtype only
        (1, torch.float32, True, None, "float32"),
        (300, torch.float32, True, torch.float32, "float32"),
        (1, HALF, False, None, "canonical"),
        (300, torch.float32, False, None, "canonical"),
    ],
)
def test_a_gpu_multiplies_by_the_kernel_of_the_layout_dtype_and_rows(
    rows: int, dtype: torch.dtype, tiled: bool, original: torch.dtype | None, kernel: str
) -> None:
    assert on_gpu.linear_kernel(rows, dtype, tiled, original) == kernel


def test_a_kernel_reads_its_rows_in_a_form_of_its_own() -> None:
    assert {on_gpu.input_form(rows, HALF, True, n) for rows in (1, 16) for n in (1, 2, 3)} == {"quantised"}
    assert {on_gpu.input_form(rows, HALF, True, 2) for rows in (17, 255)} == {"half"}
    assert on_gpu.input_form(4, HALF, True, 2, batch_invariant=False) == "quantised"
    assert on_gpu.input_form(5, HALF, True, 2, batch_invariant=False) == "half"
    of_none = [(0, HALF, True, 2), (256, HALF, True, 2), (1, HALF, True, 4), (1, torch.float32, True, 2)]
    assert not any(on_gpu.input_form(*case) for case in [*of_none, (1, HALF, False, 2)])


def test_up_to_three_weights_are_one_launch() -> None:
    assert all(on_gpu.merges(rows, HALF, True, n) for rows in (1, 16, 255) for n in (2, 3))
    assert not any(on_gpu.merges(rows, HALF, True, n) for rows, n in ((0, 2), (256, 2), (1, 1), (1, 4)))
    assert not on_gpu.merges(1, torch.float32, True, 2)
    assert not on_gpu.merges(1, HALF, False, 2)


@pytest.mark.parametrize(
    ("path", "bounds"),
    [
        ("torch", {torch.float32: (0, 12), torch.bfloat16: (0, 16), torch.float16: (0, 1)}),
        ("avx2", {torch.float32: (12, 12), torch.bfloat16: (16, 16), torch.float16: (0, 1)}),
        ("avx512", {torch.float32: (sys.maxsize, 12), torch.bfloat16: (sys.maxsize, 24), HALF: (sys.maxsize, 1)}),
        ("amx", {torch.float32: (sys.maxsize, 12), torch.bfloat16: (sys.maxsize, 16), HALF: (sys.maxsize, 1)}),
    ],
)
def test_a_cpu_multiplies_by_the_compiled_kernel_up_to_its_bounds(
    monkeypatch: pytest.MonkeyPatch, path: str, bounds: dict[torch.dtype, tuple[int, int]]
) -> None:
    """Of rows, and of those at 16 bits; also on paths that this machine lacks."""
    monkeypatch.setattr(on_cpu.build, "backend", lambda: path)
    monkeypatch.setattr(on_cpu, "multiplies_bfloat16", lambda: path in ("avx512", "amx"))
    for dtype, (rows, full) in bounds.items():
        assert (on_cpu.many_rows(dtype), on_cpu.many_full(dtype)) == (rows, full)
        assert on_cpu.multiplies(dtype) == (dtype is not torch.float16 or rows > 0)
        for count in {1, 11, 12, 15, 16, 23, 24, 95, 96}:
            low, high = (torch.full((count,), bits, dtype=torch.int32) for bits in (4, 16))
            assert on_cpu.few_enough(low, dtype) == (count < rows)
            assert on_cpu.few_enough(high, dtype) == (count < min(rows, full))
    assert on_cpu.any_rows_in_float32() == (path in ("avx512", "amx"))


def test_avx512_without_bfloat16_leaves_such_products_to_torch_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    """And prompts' attention altogether."""
    monkeypatch.setattr(on_cpu.build, "backend", lambda: "avx512")
    query = torch.zeros(1, 8, dtype=torch.bfloat16)
    for has, rows in ((True, 24), (False, 16)):
        monkeypatch.setattr(on_cpu, "multiplies_bfloat16", lambda has=has: has)
        assert on_cpu.many_full(torch.bfloat16) == rows
        assert on_cpu.attends_prompts(query, 0.0) == has


def test_pages_are_read_by_the_compiled_kernel_in_one_dtype_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cpu.build, "backend", lambda: "avx2")
    assert on_cpu.reads_pages(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    assert on_cpu.reads_pages(torch.float32)
    assert not on_cpu.reads_pages(torch.float16)
    assert not on_cpu.reads_pages(torch.float32, torch.float32, torch.bfloat16)
    monkeypatch.setattr(on_cpu.build, "backend", lambda: "torch")
    assert not on_cpu.reads_pages(torch.float32)
