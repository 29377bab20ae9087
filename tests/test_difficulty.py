"""How hard tokens are to predict: the reference by hand and against float64, the kernels against the reference."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qbe.analysis.difficulty import difficulty
from qbe.engine.sampling.sampler import likeliest
from qbe.kernels.cpu.rows.difficulty import difficulty as on_cpu
from qbe.kernels.reference.difficulty import difficulty as reference
from test_triton_kernel import CUDA, DEVICE, INTERPRET, on_device, run_in_interpreter

SIZES = [1, 2, 7, 1023, 1024, 1025, 3000, 4096]  # of a vocabulary, around the kernel's parts


@pytest.mark.skipif(CUDA or INTERPRET, reason="the tests below run here directly")
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__, "-k", "the_kernel")


def rows(seed: int, n: int, vocabulary: int, spread: float) -> torch.Tensor:
    """Random logits; a third of the rows has a third of its numbers at -inf, a third two likeliest tokens."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, vocabulary, generator=g) * spread + 5
    logits[::3] = logits[::3].masked_fill(torch.rand(len(logits[::3]), vocabulary, generator=g) < 0.3, -torch.inf)
    logits[::3, 0] = 5.0
    tied = logits[1::3]
    tied.scatter_(-1, torch.randint(0, vocabulary, (len(tied), 1), generator=g), tied.amax(-1, keepdim=True))
    return logits


def kernel(logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    from qbe.kernels.triton.rows.difficulty import difficulty

    before = logits.clone()
    found = difficulty(logits, best)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    assert (found.dtype, found.shape) == (torch.float64, (3, len(best)))
    return found.cpu()


def close(found: torch.Tensor, expected: torch.Tensor, spread: float = 1.0) -> None:
    """Tokens and margins are exact; an entropy is a difference of sums as large as the logits are far apart."""
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[2].nan_to_num(-7), expected[2].nan_to_num(-7))
    torch.testing.assert_close(found[1], expected[1], rtol=2e-6, atol=1e-6 * max(1.0, spread), equal_nan=True)


def no_numbers() -> torch.Tensor:
    """Rows whose likeliest token is none."""
    logits = torch.randn(6, 1500, generator=torch.Generator().manual_seed(0))
    logits[0] = torch.nan
    logits[1] = -torch.inf
    logits[2, 1400] = torch.nan
    logits[3, 0] = torch.inf
    logits[4, 7] = torch.inf
    logits[5] = -torch.inf
    logits[5, 1200] = torch.inf
    return logits


def test_the_reference_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3), -torch.inf], [2.0, 2.0, 2.0], [9.0, -torch.inf, -torch.inf]])
    token, entropy, margin = reference(logits, likeliest(logits)).tolist()
    assert token == [1, 0, 0]
    assert entropy == pytest.approx([math.log(4) - 0.75 * math.log(3), math.log(3), 0.0], abs=1e-6)
    assert margin == pytest.approx([math.log(3), 0.0, 1e4])
    assert reference(torch.tensor([[3.0]]), torch.tensor([0])).tolist() == [[0.0], [0.0], [math.inf]]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6), n=st.integers(1, 9), vocabulary=st.sampled_from(SIZES[1:]),
    spread=st.sampled_from([0.0, 0.1, 3.0, 40.0]),
)  # fmt: skip
def test_the_reference_is_entropy_and_margin(seed, n, vocabulary, spread) -> None:
    logits = rows(seed, n, vocabulary, spread)
    token, entropy, margin = reference(logits, likeliest(logits))
    p = logits.double().softmax(-1)
    torch.testing.assert_close(entropy, -torch.special.xlogy(p, p).sum(-1), rtol=2e-5, atol=2e-6 * max(1.0, spread))
    first, second = logits.topk(2).values.T
    assert torch.equal(margin, (first - second).clamp_max(1e4).double())
    assert torch.equal(token.long(), likeliest(logits))


def test_every_path_of_the_cpu_is_the_reference(path: str) -> None:
    for seed, (vocabulary, spread) in enumerate(product((*SIZES, 15, 16, 17, 49152), (0.0, 0.1, 3.0, 40.0))):
        logits = rows(seed, 1 + seed % 5, vocabulary, spread)
        best = likeliest(logits)
        before = logits.clone()
        close(on_cpu(logits, best), reference(logits, best), spread)
        assert torch.equal(logits, before)
    apart = torch.full((8, 1600), torch.nan)
    apart[::2, 3:1303] = rows(1, 4, 1300, 3.0)
    for logits in (apart[::2, 3:1303], apart[::2, 3:1303].T.contiguous().T, no_numbers(), apart[::2, 3:1303].half()):
        best = likeliest(logits)
        close(on_cpu(logits, best), reference(logits, best), 3.0)


def test_without_numbers_there_is_no_difficulty(device: torch.device) -> None:
    logits = no_numbers().to(device)
    best = likeliest(logits)
    found = difficulty(logits, best).cpu()
    assert best.tolist() == [-1] * 6
    assert found[0].tolist() == [-1.0] * 6
    assert found[1:].isnan().all()


@on_device
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6), n=st.integers(1, 7), vocabulary=st.sampled_from(SIZES),
    spread=st.sampled_from([0.0, 0.1, 3.0, 40.0]),
)  # fmt: skip
def test_the_kernel_is_the_reference(seed, n, vocabulary, spread) -> None:
    logits = rows(seed, n, vocabulary, spread)
    best = likeliest(logits)
    close(kernel(logits.to(DEVICE), best.to(DEVICE)), reference(logits, best), spread)


@on_device
@pytest.mark.parametrize("n", [16, 64])
def test_the_kernel_takes_full_batches(n: int) -> None:
    logits = rows(n, n, 2500, 3.0)
    best = likeliest(logits)
    close(kernel(logits.to(DEVICE), best.to(DEVICE)), reference(logits, best), 3.0)


@on_device
def test_the_kernel_takes_rows_that_lie_apart() -> None:
    """Every second row and the vocabulary's first part of a larger tensor, and a tensor that lies the other way round.

    What is beside the rows is no number, so that a kernel that reads it is found out.
    """
    apart = torch.full((8, 1600), torch.nan, device=DEVICE)
    apart[::2, 3:1303] = rows(1, 4, 1300, 3.0).to(DEVICE)
    for logits in (apart[::2, 3:1303], apart[::2, 3:1303].T.contiguous().T):
        best = likeliest(logits)
        assert min(best.tolist()) >= 0
        close(kernel(logits, best), reference(logits.cpu(), best.cpu()), 3.0)


@on_device
def test_the_kernel_says_when_there_are_no_numbers() -> None:
    logits = no_numbers()
    for best in (likeliest(logits), logits.argmax(-1)):  # the second is what vLLM's runner takes
        close(kernel(logits.to(DEVICE), best.to(DEVICE)), reference(logits, best))
        assert kernel(logits.to(DEVICE), best.to(DEVICE))[1].isnan().all()


@on_device
def test_the_kernel_launches_twice_for_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from qbe.kernels.triton.rows import difficulty as room

    launched = []

    class Counting:
        def __init__(self, made) -> None:
            self._made = made

        def __getitem__(self, grid):
            launched.append(grid)
            return self._made[grid]

    for name in ("parts_kernel", "add_parts_kernel"):
        monkeypatch.setattr(room, name, Counting(getattr(room, name)))
    for n in (1, 3, 16):
        kernel(torch.zeros(n, 1030, device=DEVICE), torch.zeros(n, dtype=torch.long, device=DEVICE))
    assert launched == [(1, 2), (1,), (3, 2), (3,), (16, 2), (16,)]
