"""`qbe::cascade`: the reference by hand, the kernels against the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covering import FULL
from qbe.blueprint import DynamicPrecision
from qbe.kernels.cpu import native
from qbe.kernels.ops.cascade import cascade as op
from qbe.kernels.ops.routing import worths_of
from qbe.kernels.reference.cascade import cascade as reference
from qbe.policies.per_token import LEVELS
from test_triton_kernel import CUDA, DEVICE, INTERPRET, on_device, run_in_interpreter

GEARS = (4, 6, 8)
EIGHT = 8 << 8  # of the activations, in a word
NEAR = 1e-4  # worths so near a threshold may come out on either side in another order of sums


@pytest.mark.skipif(CUDA or INTERPRET, reason="the test below runs here directly")
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__, "-k", "the_triton_kernel")


def case(seed: int, n: int, sites: int, heads: int, points: int, with_rows: bool, hidden: int = 32) -> dict[str, Any]:
    """Random arguments; a third of the rows is moved by others or nobody, and one row in ten has no number."""
    g = torch.Generator().manual_seed(seed)
    max_rows = n + 5
    dynamic_precision = torch.tensor(
        [
            0,
            DynamicPrecision("routers", 7).code,
            *(DynamicPrecision("cascade", v).code for v in (0, 110, 140, 255)),
        ]
    )
    entropy = torch.rand(points, n, heads, generator=g) * 4
    entropy[0, torch.rand(n, generator=g) < 0.1, 0] = torch.nan
    entropy[-1, torch.rand(n, generator=g) < 0.1, 0] = torch.inf

    def network(point: int) -> list[torch.Tensor]:
        scores = sites * (len(GEARS) - 1)
        shapes = ((point + 1) * heads, hidden), (hidden,), (hidden, scores), (scores,)
        return [torch.randn(shape, generator=g) for shape in shapes]

    return {
        "entropy": entropy, "lengths": torch.randint(1, 300, (n,), generator=g),
        "rows": torch.randperm(max_rows, generator=g)[:n] if with_rows else None,
        "seen": torch.full((max_rows, points * heads), -1.0), "networks": [network(p) for p in range(points)],
        "thresholds": torch.linspace(300, -300, LEVELS), "gears": torch.tensor(GEARS, dtype=torch.int32),
        "dynamic_precision": dynamic_precision[torch.randint(0, 6, (max_rows,), generator=g)].int(),
        "precision_words": torch.full((points * sites, max_rows), 16, dtype=torch.int32) | EIGHT,
    }  # fmt: skip


def run(kernel: Any, arguments: dict[str, Any], device: str) -> list[torch.Tensor]:
    """Words and what was seen after all points, one after the other."""
    own = {k: v.clone().to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    points, sites = len(own["networks"]), len(own["precision_words"]) // len(own["networks"])
    rows = None if own["rows"] is None else own["rows"].to(device)
    attended = torch.randn(own["entropy"].shape[1], 3, 100, device=device)
    for point in range(points):
        network = [t.to(device) for t in own["networks"][point]]
        out = kernel(
            attended, own["entropy"][point], own["lengths"], rows, own["seen"], *network, own["thresholds"],
            own["gears"], own["dynamic_precision"], own["precision_words"][point * sites : (point + 1) * sites], point,
        )  # fmt: skip
        assert torch.equal(out, attended)
        assert out.data_ptr() != attended.data_ptr()
    return [own[k].cpu() for k in ("precision_words", "seen")]


def served(*arguments: Any) -> torch.Tensor:
    """The op as the engine calls it."""
    *first, inner, inner_bias, outer, outer_bias, thresholds, gears, dynamic_precision, precision_words, point = (
        arguments
    )
    return op(
        *first, (inner, inner_bias, outer, outer_bias), thresholds, gears, dynamic_precision, precision_words, point
    )


def same(found: list[torch.Tensor], expected: list[torch.Tensor], arguments: dict[str, Any]) -> None:
    """Equal words, but for worths next to a threshold."""
    assert torch.allclose(found[1], expected[1], rtol=1e-5, equal_nan=True)
    for row, site in zip(*(found[0] != expected[0]).T.nonzero(as_tuple=True), strict=True):
        sites = len(found[0]) // len(arguments["networks"])
        inner, inner_bias, outer, outer_bias = (t.double() for t in arguments["networks"][int(site) // sites])
        units = (expected[1][row, : len(inner)].double() @ inner + inner_bias).relu()
        worth = worths_of((units @ outer + outer_bias).view(sites, -1))[int(site) % sites]
        threshold = arguments["thresholds"][int(arguments["dynamic_precision"][row]) & 255]
        assert float((worth - threshold).abs().min()) < NEAR


def test_the_reference_by_hand() -> None:
    """One head and unit, two sites of three widths; rows with much and little entropy, and one that is nobody's."""
    precision_words = torch.full((2, 4), 16 | EIGHT, dtype=torch.int32)
    seen = torch.zeros(4, 2)
    seen[:, 0] = torch.tensor([0.5, 0.5, math.nan, 0.5])
    reference(
        torch.zeros(4, 1, 1), torch.tensor([[2.0], [0.4], [2.0], [2.0]]), torch.tensor([20, 40, 20, 20]), None, seen,
        torch.tensor([[1.0], [2.0]]), torch.tensor([-1.0]),  # the unit is 2 share - 0.5
        torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.tensor([0.0, -30.0, 0.7, 0.0]), torch.linspace(1, 0, LEVELS),
        torch.tensor(GEARS, dtype=torch.int32),
        torch.tensor([DynamicPrecision("cascade", 127).code] * 3 + [0]).int(), precision_words, 1,
    )  # fmt: skip
    assert seen[:2, 1].tolist() == pytest.approx([2 / math.log(20), 0.4 / math.log(40)])
    assert 2 * 2 / math.log(20) - 0.5 > 128 / 255 > 2 * 0.4 / math.log(40) - 0.5
    # The second slice of the first site is worth the unit, and so is its third; of the second site 0.7 and 0.7 - ln 2.
    assert (precision_words & 255).tolist() == [[8, 4, 16, 16], [6, 6, 16, 16]]
    assert bool((precision_words >> 8 == 8).all())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6), n=st.integers(1, 9), sites=st.sampled_from([1, 7, 100]), heads=st.integers(1, 17),
    hidden=st.sampled_from([8, 32]), with_rows=st.booleans(),
)  # fmt: skip
def test_the_compiled_op_is_the_reference(seed, n, sites, heads, hidden, with_rows) -> None:
    if not native.load():
        pytest.skip("no compiled CPU ops")
    arguments = case(seed, n, sites, heads, 3, with_rows, hidden)
    same(run(served, arguments, "cpu"), run(reference, arguments, "cpu"), arguments)


def test_what_the_compiled_op_does_not_serve_goes_to_the_reference() -> None:
    arguments = case(1, 5, 7, 9, 2, True, hidden=5)
    same(run(served, arguments, "cpu"), run(reference, arguments, "cpu"), arguments)


@on_device
@pytest.mark.parametrize("seed", range(4) if CUDA or FULL else range(2))
@pytest.mark.parametrize(("sites", "heads", "hidden"), [(7, 9, 32), (100, 3, 5)])
def test_the_triton_kernel_is_the_reference(seed: int, sites: int, heads: int, hidden: int) -> None:
    from qbe.kernels.triton.rows.cascade import cascade as kernel

    arguments = case(seed, 9, sites, heads, 12 if sites == 7 else 2, bool(seed % 2), hidden)
    expected = run(reference, arguments, "cpu")
    same(run(kernel, arguments, DEVICE), expected, arguments)
    assert len((expected[0] & 255).unique()) > 1
