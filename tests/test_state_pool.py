"""The pool of recurrent states, who has which slot, and how a step's rows get to a recurrent layer."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from engine_models import NO_SITES, build, prompts, request, run
from qbe.engine.core import Core
from qbe.engine.execution import state_update
from qbe.engine.execution.mixers import Group, StepPart
from qbe.kvcache.probe import probe
from qbe.kvcache.state_pool import StateLayout, StatePool, StateShape
from qbe.kvcache.state_slots import StateSlot, StateSlots

CPU = torch.device("cpu")
SHAPES = [
    StateShape(0, False, 0, (6, 4), torch.bfloat16),
    StateShape(0, True, 0, (2, 3, 5), torch.float32),
    StateShape(3, True, 1, (7,), torch.float32),
]


def test_states_have_places_of_their_own_in_a_slot() -> None:
    pool = StatePool(SHAPES, 3, CPU)
    assert StateLayout(SHAPES).offsets == [0, 64, 192]
    assert (pool.memory.shape, pool.nbytes, pool.trial) == ((4 * 256,), 3 * 256, StateSlot(3 * 256, 256))
    two = [StateSlot(256, 256), StateSlot(512, 256)]
    for i, shape in enumerate(SHAPES):
        states = pool.read(i, two)
        assert states.shape == (2, *shape.size)
        assert states.dtype is shape.dtype
        states.fill_(i + 1)
    assert [float(pool.read(i, two).float().mean()) for i in range(3)] == [1, 2, 3]
    assert not pool.memory[:256].any()
    assert not pool.memory[768:].any()
    assert [pool.of_layer(layer) for layer in (0, 1, 3)] == [[0, 1], [], [2]]


def test_a_slot_of_fewer_bits_is_smaller_and_holds_its_states() -> None:
    pool = StatePool(SHAPES, 3, CPU)
    bits = (8, 32, 32, 16)
    assert pool.layout(bits).bits == [32, 8, 16]  # a convolution's inputs are the model's
    assert pool.slot_bytes(bits) == 64 + 128 + 64
    slots = StateSlots(pool.nbytes, pool.slot_bytes)
    mixed = [slots.take(bits), slots.take(None), slots.take(bits)]
    draw = torch.Generator().manual_seed(0)
    for i, shape in enumerate(SHAPES):
        numbers = torch.randn(3, *shape.size, generator=draw).to(shape.dtype)
        pool.write(i, mixed, numbers, [4, 5, 6])
        found = pool.read(i, mixed)
        assert found.dtype is shape.dtype
        assert torch.equal(found[1], numbers[1])
        assert torch.allclose(found.float(), numbers.float(), atol=0.03)
        assert torch.equal(found[0], numbers[0]) != shape.recurrent
        assert torch.equal(pool.read(i, mixed[2:]), found[2:])


def test_the_first_gap_that_is_wide_enough_is_given() -> None:
    slots = StateSlots(300, lambda bits: 100 if bits is None else 60)
    first, second, third = (slots.take() for _ in range(3))
    assert [s.at for s in (first, second, third)] == [0, 100, 200]
    assert slots.free == 0
    assert not slots.fits((8,))
    with pytest.raises(IndexError):
        slots.take()
    slots.give(third)
    slots.give(first)
    small = slots.take((8,))
    assert (small.at, small.nbytes, slots.free) == (0, 60, 1)
    assert slots.take().at == 200
    assert not slots.fits((8,))  # 40 are left beside the small one
    slots.give(second)
    assert [slots.take((8,)).at, slots.take((8,)).at] == [60, 120]


@pytest.mark.parametrize(
    ("name", "mixers", "kinds"),
    [("mamba2", [0, 1, 2], {False, True}), ("lfm2", [0, 2], {False}), ("falcon-h1", [0, 1, 2, 3], {False, True})],
)
def test_a_model_says_what_it_keeps_and_where(name: str, mixers: list[int], kinds: set[bool]) -> None:
    kept = probe(build(name))
    assert [m.layer for m in kept.mixers] == mixers
    assert all(m.width == 64 for m in kept.mixers)
    assert kept.packs
    assert {s.layer for s in kept.states} == set(mixers)
    assert {s.recurrent for s in kept.states} == kinds
    assert [s is not None for s in kept.kv] == {
        "mamba2": [False] * 3,
        "lfm2": [False, True] * 2,
        "falcon-h1": [True] * 4,
    }[name]


def test_a_model_without_states_has_no_pool() -> None:
    core = Core(build("llama"), NO_SITES)
    assert core.states is None is core.scheduler.slots
    assert core.runner.mixers is None


def test_rows_are_grouped_by_what_they_are() -> None:
    """New tokens of several sequences in the order of their slots, prompts by themselves, no row twice."""
    core = Core(build("mamba2"), NO_SITES, max_sequences=6)
    mixers = core.runner.mixers
    assert mixers is not None
    slots = [StateSlot(256 * i, 256) for i in range(5)]
    parts = [
        StepPart(slots[4], 0, 9, 1),
        StepPart(slots[2], 1, 30, 1),
        StepPart(slots[3], 2, 5, 1),
        StepPart(slots[0], 3, 0, 1),
        StepPart(slots[1], 4, 8, 3),
    ]
    with mixers.step(parts):
        found = [(list(g.rows), [slots.index(s) for s in g.slots], g.begins, g.ends) for g in mixers.groups]
        together = mixers.groups[0]
        assert together.row_index is not None
        assert together.row_index.tolist() == [1, 2, 0]
    single = ([1, 2, 0], [2, 3, 4], False, [30, 5, 9])
    assert found == [single, ([3], [0], True, [0]), ([4, 5, 6], [1], False, [10])]
    assert mixers.groups == []
    words = torch.arange(8, dtype=torch.int32)
    assert together.words(words).tolist() == [1, 2, 0]
    prompt = Group.of([StepPart(slots[0], 5, 0, 3)], CPU)
    assert prompt.words(words).tolist() == [5, 6, 7]
    assert prompt.words(words).data_ptr() % 16 == 0


def test_outside_of_a_step_the_model_is_its_own() -> None:
    model = build("granite-moe-hybrid")
    Core(model, NO_SITES)
    mixer = model.model.layers[0].mamba
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(mixer(x), type(mixer).forward(mixer, x))


@pytest.mark.parametrize(
    ("name", "goes_on"), [("mamba", False), ("mamba2", True), ("qwen3-next", True), ("lfm2", True)]
)
def test_it_is_tried_whether_a_layer_goes_on_from_a_state(name: str, goes_on: bool, monkeypatch: Any) -> None:
    """Mamba-1's scan in transformers does not; its later tokens run one by one, and say the same."""
    from qbe.engine.execution.mixers import _Patched

    seen: list[bool] = []
    plain = _Patched._goes_on
    monkeypatch.setattr(_Patched, "_goes_on", lambda *a: seen.append(plain(*a)) or seen[-1])
    (text,) = prompts(23)
    whole, cut = (
        run(Core(build(name), NO_SITES, max_batch_tokens=n, max_sequences=2), request("r", text, max_tokens=9))
        for n in (64, 7)
    )
    assert seen == [goes_on, goes_on]
    assert whole == cut


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["mamba2", "granitemoehybrid", "bamba", "falcon_h1", "nemotron_h", "zamba2"])
def test_states_are_updated_with_the_bits_of_transformers(family: str, dtype: torch.dtype) -> None:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    plain = module.mamba2_selective_state_update
    refused: list[int] = []
    ours = state_update._serving(lambda *a, **k: refused.append(1) or plain(*a, **k))
    draw = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=draw)

    sequences, heads, head_dim, groups, size = 3, 12, 20, 2, 24
    pool = random(sequences, 2, heads, head_dim, size)
    bias, d = (random(heads).to(dtype)[:, None].expand(-1, head_dim) for _ in range(2))
    given = (
        random(sequences, heads, head_dim).to(dtype), random(sequences, heads, 1).to(dtype).expand(-1, -1, head_dim),
        (-random(heads).exp())[:, None, None].expand(-1, head_dim, size), random(sequences, groups, size).to(dtype),
        random(sequences, groups, size).to(dtype), d,
    )  # fmt: skip
    with torch.inference_mode():
        before, mine = pool[:, 0].clone(), pool.clone()[:, 0]  # ours lie apart, as in the pool
        assert torch.equal(
            plain(before, *given, z=None, dt_bias=bias, dt_softplus=True),
            ours(mine, *given, z=None, dt_bias=bias, dt_softplus=True),
        )
        assert torch.equal(before, mine)
        assert not refused
        ours(mine, *given, z=given[0], dt_bias=bias, dt_softplus=True)
        assert refused
    assert state_update._same(plain, dtype) is not None
