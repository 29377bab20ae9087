"""`qbe::cascade`: the reference by hand, the kernels against the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qbe.blueprint import Steering
from qbe.kernels.cascade_ops import DOWN, LEVELS, UP, WIDTHS
from qbe.kernels.cascade_ops import cascade as op
from qbe.kernels.cpu import build
from qbe.kernels.reference.cascade import cascade as reference
from test_triton_kernel import CUDA, DEVICE, INTERPRET, on_device, run_in_interpreter

GEARS = (4, 6, 8, 16)
EIGHT = 8 << 8  # of the activations, in a word


@pytest.mark.skipif(CUDA or INTERPRET, reason="the test below runs here directly")
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__, "-k", "the_triton_kernel")


def next_gear(bits: int, up: bool) -> int:
    low = GEARS[:-1]
    return low[min(2, max(0, low.index(bits) + (1 if up else -1)))] if bits in low else bits


def case(seed: int, n: int, sites: int, heads: int, points: int, with_rows: bool) -> dict[str, Any]:
    """Random arguments; a third of the rows is steered by others or nobody, and one head in eight has no number."""
    g = torch.Generator().manual_seed(seed)
    max_rows = n + 5
    words = torch.tensor(GEARS)[torch.randint(0, 4, (sites, max_rows), generator=g)].int() | EIGHT
    steering = torch.tensor([0, Steering("routers", 7).word, *(Steering("cascade", v).word for v in (0, 9, 128, 255))])
    entropy = torch.rand(n, heads, generator=g) * 4
    entropy[torch.rand(n, generator=g) < 0.1, 0] = torch.nan
    low = torch.rand(points, LEVELS, generator=g) - 0.5
    limits = torch.stack([low, low + torch.rand(points, LEVELS, generator=g) * 0.4], -1)
    steps = [[[next_gear(b, up) for b in range(WIDTHS)] for up in (False, True)]] * sites
    return {
        "entropy": entropy, "lengths": torch.randint(1, 300, (n,), generator=g),
        "rows": torch.randperm(max_rows, generator=g)[:n] if with_rows else None, "words": words,
        "steering": steering[torch.randint(0, 6, (max_rows,), generator=g)].int(),
        "moves": torch.zeros(max_rows, dtype=torch.int32), "thresholds": limits,
        "steps": torch.tensor(steps, dtype=torch.uint8), "layers": torch.arange(sites, dtype=torch.int32) // 3 - 1,
    }  # fmt: skip


def run(kernel: Any, arguments: dict[str, Any], points: int, window: int, most: int, device: str) -> list[torch.Tensor]:
    """Words and moves after all points, one after the other."""
    own = {k: None if v is None else v.clone().to(device) for k, v in arguments.items()}
    attended = torch.randn(len(own["entropy"]), 3, 100, device=device)
    for point in range(points):
        out = kernel(attended, *own.values(), point, 2 * point, 1 - 2 * (point % 2), window, most)
        assert torch.equal(out, attended)
        assert out.data_ptr() != attended.data_ptr()
    return [own[k].cpu() for k in ("words", "moves")]


def test_the_reference_by_hand() -> None:
    """Two sites of a layer below, two above, one that stays; rows that go up, down, stay and are nobody's."""
    words = torch.tensor([[4, 6, 8, 16]] * 4 + [[6, 6, 6, 6]]).int() | EIGHT
    up_down = torch.full((1, LEVELS, 2), 0.5)
    up_down[..., 0] = 0.25
    moves = torch.tensor([9, 9, 9, 9], dtype=torch.int32)
    reference(
        torch.zeros(4, 1, 1), torch.tensor([[3.0, 1.0], [0.4, 0.4], [1.4, 1.4], [9.0, 9.0]]),
        torch.tensor([20, 40, 40, 40]), None, words,
        torch.tensor([Steering("cascade", 3).word] * 3 + [0]).int(), moves, up_down,
        torch.tensor([[[next_gear(b, up) for b in range(WIDTHS)] for up in (False, True)]] * 5, dtype=torch.uint8),
        torch.tensor([0, 1, 2, 3, -1], dtype=torch.int32), 0, 1, 1, 0, 1,
    )  # fmt: skip
    assert 2 / math.log(20) > 0.5 > 1.4 / math.log(40) > 0.25 > 0.4 / math.log(40)
    assert moves.tolist() == [UP, DOWN, 0, 0]
    assert (words & 255).tolist() == [[4, 6, 8, 16]] * 2 + [[6, 4, 8, 16]] * 2 + [[6] * 4]
    assert bool((words >> 8 == 8).all())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6), n=st.integers(1, 9), sites=st.sampled_from([1, 7, 300]), heads=st.integers(1, 17),
    window=st.sampled_from([0, 1, 16]), most=st.integers(0, 3), with_rows=st.booleans(),
)  # fmt: skip
def test_the_compiled_kernel_is_the_reference(seed, n, sites, heads, window, most, with_rows) -> None:
    if build.backend() == "torch":
        pytest.skip("no compiled CPU kernel")
    arguments = case(seed, n, sites, heads, 3, with_rows)
    expected = run(reference, arguments, 3, window, most, "cpu")
    assert all(map(torch.equal, run(op, arguments, 3, window, most, "cpu"), expected))
    changed = expected[1].abs()
    assert int(sum((changed >> 2 * p & 3) != 0 for p in range(3)).max()) <= most  # type: ignore[union-attr]


@on_device
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sites", [7, 300])
def test_the_triton_kernel_is_the_reference(seed: int, sites: int) -> None:
    from qbe.kernels.triton.cascade import cascade as kernel

    arguments = case(seed, 9, sites, 9, 3, bool(seed % 2))
    for window, most in ((0, 2), (16, 1)):
        expected = run(reference, arguments, 3, window, most, "cpu")
        assert all(map(torch.equal, run(kernel, arguments, 3, window, most, DEVICE), expected))
        assert expected[1].any()


def test_without_the_compiled_kernel_the_reference_serves(path: str) -> None:
    arguments = case(3, 8, 30, 9, 3, True)
    assert all(map(torch.equal, run(op, arguments, 3, 0, 2, "cpu"), run(reference, arguments, 3, 0, 2, "cpu")))
