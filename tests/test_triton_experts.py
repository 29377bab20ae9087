"""The Triton kernels of `qbe::nested_experts` against the reference (see `test_triton_kernel`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from covering import covering
from expert_samples import in_pages, layer, lowered, tokens
from qbe.kernels.ops.experts.nested import ACTIVATIONS, ExpertMatrices
from qbe.kernels.reference.experts.nested import nested_experts as reference
from test_triton_kernel import CUDA, DEVICE, INTERPRET, on_device, on_gpu, run_in_interpreter
from triton_bounds import reached

if CUDA or INTERPRET:
    from qbe.kernels.triton.experts import nested as triton_experts
    from qbe.kernels.triton.experts.order import order_pairs

EXPERTS = 5
# Two linear layers one after the other; the first one's results are rounded (the interpreter cuts bfloat16).
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2 if INTERPRET else 1e-2}


def moved(given: dict[str, Any]) -> dict[str, Any]:
    def one(value: Any) -> Any:
        if isinstance(value, ExpertMatrices):
            return ExpertMatrices(*(None if t is None else t.to(DEVICE) for t in value))
        return value.to(DEVICE) if isinstance(value, torch.Tensor) else value

    return {name: one(value) for name, value in given.items()}


def run(given: dict[str, Any], made: dict[str, Any], *gate: Any, page_bytes: int = 0) -> torch.Tensor:
    return triton_experts.nested_experts(
        *given.values(), *made["gate_up"], *made["down"], made["slices"], *(gate or ("silu", False, 1.0, 0.0)),
        page_bytes,
    )  # fmt: skip


def check(given: dict[str, Any], made: dict[str, Any], *gate: Any) -> torch.Tensor:
    given, made = moved(given), moved(made)
    found, expected = run(given, made, *gate), reference(**given, **made, **_named(*gate))
    assert found.dtype == expected.dtype
    assert (found.float() - expected.float()).norm() <= TOLERANCE[found.dtype] * expected.float().norm()
    return found


def _named(*gate: Any) -> dict[str, Any]:
    return dict(zip(("activation", "interleaved", "alpha", "limit"), gate, strict=False))


@pytest.mark.skipif(CUDA or INTERPRET, reason="the tests below run here directly")
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@on_device
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_activations(activation: str, interleaved: bool) -> None:
    made = layer(3, 70, 20, biased=True, activation_bits=(16, 8))
    check(tokens(3, 70, 3, 2), made, activation, interleaved, 1.702, 0.7 if interleaved else 0.0)


@on_device
@pytest.mark.parametrize(
    ("size", "dtype"), covering(1, [(1, 64), (5, 128), (20, 64)], list(TOLERANCE), full=CUDA), ids=str
)
def test_equals_reference(size: tuple[int, int], dtype: torch.dtype) -> None:
    count, group = size
    made = layer(EXPERTS, 150, 40, dtype=dtype, bits=(1, 4, 6, 7, 8, 16), activation_bits=(16, 8), group_size=group)
    check(tokens(count, 150, EXPERTS, 2, dtype=dtype), made)


@on_device
def test_down_reads_eight_bits() -> None:
    """What it gives is far nearer to the reference with 8-bit activations than to that with 16."""
    made, given_ = layer(EXPERTS, 64, 64, bits=(8,), down_activation_bits=(8,)), tokens(6, 64, EXPERTS, 2)
    full = {**made, "down": made["down"]._replace(precision=made["down"].precision & 127)}
    found = run(moved(given_), moved(made)).cpu()
    near, far = ((found - reference(**given_, **m)).norm() for m in (made, full))
    assert near < far / 3


@on_device
def test_other_slices() -> None:
    check(tokens(3, 64, 2, 1), layer(2, 64, 16, slices=(3, 1, 1, 1, 2), bits=(3, 4, 5, 8, 16)))


@on_device
def test_prompts_by_dequantised_weights() -> None:
    """Enough rows for the largest tiles; one expert has one row, and one none."""
    made, given = layer(4, 64, 32, dtype=torch.float16), tokens(140, 64, 4, 2, dtype=torch.float16)
    given["topk_ids"] = torch.tensor([0, 1]).repeat(140, 1)
    given["topk_ids"][7, 1] = 3
    assert triton_experts.tile_rows(140, 2, 4) == triton_experts.MOST_ROWS
    check(given, made)


@on_device
def test_numbers_of_no_expert_add_nothing() -> None:
    made, given = layer(EXPERTS, 64, 64), tokens(6, 64, EXPERTS, 2)
    given["topk_ids"][3], given["topk_ids"][5, 1] = EXPERTS, -1
    assert check(given, made)[3].eq(0).all()
    given["topk_ids"].fill_(EXPERTS)
    assert check(given, made).eq(0).all()


@on_device
def test_without_originals_the_widest_slice_serves() -> None:
    made, given = layer(EXPERTS, 64, 64, bits=(4, 8)), tokens(6, 64, EXPERTS, 2)
    asked = {**made, **{n: made[n]._replace(precision=made[n].precision.clamp(max=4)) for n in ("gate_up", "down")}}
    for name in ("gate_up", "down"):
        asked[name].precision.fill_(16)
        made[name].precision.fill_(8)
    given, made, asked = moved(given), moved(made), moved(asked)
    assert torch.equal(run(given, asked), run(given, made))


@on_device
def test_rows_do_not_depend_on_others() -> None:
    made = moved(layer(EXPERTS, 130, 48, dtype=torch.bfloat16, activation_bits=(16, 8), down_activation_bits=(16, 8)))
    given = moved(tokens(12, 130, EXPERTS, 2, dtype=torch.bfloat16))
    together = run(given, made)
    for some in ([0], [3, 7], [10, 9, 8, 7, 6]):
        assert torch.equal(run({n: t[some] for n, t in given.items()}, made), together[some])


@on_device
@pytest.mark.parametrize(
    ("count", "top", "experts", "tile"), [(1, 1, 1, 16), (7, 3, 5, 2), (40, 4, 37, 4), (600, 2, 3, 16)]
)
def test_every_pair_is_in_one_tile_of_its_expert(count: int, top: int, experts: int, tile: int) -> None:
    made = torch.Generator().manual_seed(count)
    ids = torch.randint(-1, experts + 1, (count, top), generator=made, dtype=torch.int32)
    precision = torch.randint(256, (2, experts), generator=made, dtype=torch.uint8)
    rows = torch.randint(2, (count,), generator=made, dtype=torch.int32)
    order = order_pairs(*(t.to(DEVICE) for t in (ids, rows, precision, precision)), tile)
    found: dict[int, list[int]] = {}
    for expert, first in zip(order.tile_expert.tolist(), order.tile_first.tolist(), strict=True):
        if expert >= 0:
            end = int(order.first[expert + 1])
            assert first < end
            found.setdefault(expert, []).extend(order.order[first : min(first + tile, end)].tolist())
    flat = ids.flatten()
    assert found == {e: pairs for e in range(experts) if (pairs := (flat == e).nonzero().flatten().tolist())}
    for pair, expert in enumerate(flat.tolist()):
        if 0 <= expert < experts:
            byte = int(precision[rows[pair // top], expert])
            assert int(order.down_words[pair]) == int(order.gate_up_words[pair]) == byte % 128 + (byte > 127) * 0x800


@on_device
@pytest.mark.parametrize("slices", [(4, 2, 2), (3, 1, 1, 1, 2)], ids=str)
@pytest.mark.parametrize("page_bytes", [512, 192])  # that hold whole parts, and pieces of them with some room left
def test_pages_anywhere_in_memory_are_the_same_codes(page_bytes: int, slices: tuple[int, ...]) -> None:
    """And where slices are missing, rows read the nearest precision that is there."""
    made, given = layer(EXPERTS, 150, 40, bits=(4, 6, 8), slices=slices), moved(tokens(9, 150, EXPERTS, 2))
    most = len(slices)
    levels = {"gate_up": [most, 1, 2, most, 1], "down": [2, 1, most, most, most]}
    pool, found = in_pages(made, levels, page_bytes, DEVICE)
    if INTERPRET:
        reached(pool)
    y, there = run(given, moved(found), page_bytes=page_bytes), moved(lowered(made, levels))
    assert torch.equal(y, run(given, there))


@on_gpu
def test_one_graph_follows_what_is_resident() -> None:
    """Its addresses are data: a slice that comes or goes needs no other graph. Pages may be the host's."""
    made, given = layer(EXPERTS, 128, 64, bits=(8,)), moved(tokens(8, 128, EXPERTS, 2))
    every = {name: [3] * EXPERTS for name in ("gate_up", "down")}
    pool, here = in_pages(made, every, 4096, DEVICE)
    host, there = in_pages(made, every, 4096, "cpu", pinned=True)
    there, found = moved(there), moved(in_pages(made, every, 4096, DEVICE)[1])
    run(given, found, page_bytes=4096)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(given, found, page_bytes=4096)
    for levels in (every, {"gate_up": [1, 2, 3, 1, 1], "down": [3, 1, 2, 1, 2]}):
        for name in ("gate_up", "down"):
            table = torch.where(
                torch.arange(EXPERTS)[:, None] % 2 == 0, here[name].addresses, there[name].addresses.cpu()
            )
            gone = in_pages(made, levels, 4096)[1][name].addresses == 0
            found[name].addresses.copy_(table.masked_fill(gone, 0))
        graph.replay()
        assert torch.equal(out, run(given, moved(lowered(made, levels))))
    del pool, host


@on_gpu
def test_one_graph_serves_every_choice() -> None:
    made, given = moved(layer(EXPERTS, 128, 64)), moved(tokens(8, 128, EXPERTS, 2))
    run(given, made)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(given, made)
    for seed in (2, 3):
        for name, tensor in moved(tokens(8, 128, EXPERTS, 2, seed=seed)).items():
            given[name].copy_(tensor)
        made["down"].precision.copy_(made["down"].precision.flip(0))
        graph.replay()
        assert torch.equal(out, run(given, made))
