"""Kernels that the interpreter runs may access nothing outside of the tensors they are given (`triton_bounds`)."""

from __future__ import annotations

import pytest
import torch

from test_triton_kernel import CUDA, INTERPRET, run_in_interpreter

triton = pytest.importorskip("triton", reason="Triton is not installed")
in_the_interpreter = pytest.mark.skipif(not INTERPRET, reason="needs TRITON_INTERPRET=1")

if INTERPRET:
    import triton.language as tl

    from triton_bounds import reached

    @triton.jit
    def copy(source, target, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, SIZE)
        tl.store(target + at, tl.load(source + at, mask=at < count, other=0.0), mask=at < count)

    @triton.jit
    def copy_away(base, target, away, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, SIZE)
        tl.store(target + at, tl.load(base + away + at))

    @triton.jit
    def add(target, by: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.atomic_add(target + by, 1.0)


@pytest.mark.skipif(CUDA or INTERPRET, reason="the tests below run in the interpreter")
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@in_the_interpreter
def test_what_lies_inside_is_copied() -> None:
    source, target = torch.randn(8), torch.zeros(8)
    copy[1,](source, target[1:], 7, SIZE=16)
    assert torch.equal(target[1:], source[:7])


@in_the_interpreter
@pytest.mark.parametrize(("inputs", "outputs"), [(7, 8), (8, 7)])
def test_an_element_too_many_is_refused(inputs: int, outputs: int) -> None:
    with pytest.raises(Exception, match=r"accesses of 4 bytes .* the first 0 bytes behind the end of one of 28 bytes"):
        copy[1,](torch.zeros(inputs), torch.zeros(outputs), 8, SIZE=8)


@in_the_interpreter
def test_an_atomic_before_the_first_element_is_refused() -> None:
    target = torch.zeros(4)
    add[1,](target, by=3)
    assert target.tolist() == [0, 0, 0, 1]
    with pytest.raises(Exception, match="4 bytes before"):
        add[1,](target, by=-1)


@in_the_interpreter
def test_memory_that_is_reached_by_address() -> None:
    source, target, beside = torch.zeros(4), torch.zeros(4), torch.ones(4)
    away = (beside.data_ptr() - source.data_ptr()) // 4
    with pytest.raises(Exception, match="outside of every tensor"):
        copy_away[1,](source, target, away, SIZE=4)
    reached(beside)
    copy_away[1,](source, target, away, SIZE=4)
    assert torch.equal(target, beside)
