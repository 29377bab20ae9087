"""`qbe::mamba2_step`: states at their precisions, the kernel against its reference, and who takes it in a model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine_models import NO_SITES, build, greedy, prompts, request, run
from qbe.engine.core import Core
from qbe.engine.execution import mixers as mixers_module
from qbe.engine.execution.mamba2 import Mamba2Step
from qbe.format.state_rows import state_bytes
from qbe.kernels.cpu import build as cpu_build
from qbe.kernels.ops.mamba2_step import GATE_ALONE, GATE_OF_NORMED, NORM_OF_GATED, mamba2_step
from qbe.kernels.reference.mamba2_step import mamba2_step as reference
from qbe.kernels.reference.state_rows import dequantise_state, quantise_state

BELOW = [16, 10, 8]
STEP = {16: 1, 10: 2, 8: 2}  # of a code by which a number may be off: stochastic rounding takes either neighbour


@pytest.fixture(params=["compiled", "scalar", "avx2", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every path that this machine has."""
    if request.param != "compiled":
        if request.param == "avx2" and cpu_build.backend() == "scalar":
            pytest.skip("no AVX2 here")
        monkeypatch.setenv(cpu_build.VARIABLE, request.param)
        cpu_build.backend.cache_clear()
        cpu_build.number.cache_clear()
    elif cpu_build.backend() == "torch":
        pytest.skip("no compiled kernel here")
    yield request.param
    monkeypatch.undo()
    cpu_build.backend.cache_clear()
    cpu_build.number.cache_clear()


@pytest.mark.parametrize("bits", BELOW)
@pytest.mark.parametrize("shape", [(3, 5, 128), (2, 7), (4, 2, 16), (3, 64), (1, 40)], ids=str)
def test_a_state_is_kept_within_a_code(shape: tuple[int, ...], bits: int) -> None:
    state = torch.randn(shape, generator=torch.Generator().manual_seed(bits)) * 3
    state[-1] = 0
    stored = quantise_state(state, bits, 5)
    assert len(stored) == state_bytes(math.prod(shape[:-1]), shape[-1], bits, 4)
    code = state.abs().amax(-1, keepdim=True) * 1.01 / (2 ** (bits - 1) - 1)
    off = (dequantise_state(stored, shape, bits) - state).abs()
    assert bool((off <= STEP[bits] / 2 * code).all())
    assert not dequantise_state(stored, shape, bits)[-1].any()


def test_eight_bits_are_the_first_of_ten() -> None:
    """The rest is the feedback slice, a quarter as long."""
    state = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    ten = quantise_state(state, 10, 0)
    codes, feedback = ten[: 6 * 64].view(torch.int8).view(6, 64).int(), ten[6 * 64 : 6 * 80].view(6, 16).int()
    scale = ten[6 * 80 :].view(torch.bfloat16).float()[:, None]
    low = torch.cat([feedback >> 2 * i & 3 for i in range(4)], 1)
    assert torch.equal((codes * 4 + low).float() * scale, dequantise_state(ten, (6, 64), 10))


@pytest.mark.parametrize("bits", [10, 8])
def test_what_rounding_adds_has_no_direction(bits: int) -> None:
    """A number that decays by a hundredth of a code: the mean of many follows it, where rounding to nearest stands."""
    state = torch.full((400, 16), 0.3)
    state[:, 0] = 1.0
    code, steps = 1 / (2 ** (bits - 1) - 1), 100
    for position in range(steps):
        state = dequantise_state(quantise_state(state, bits, position), (400, 16), bits)
        state[:, 1:] -= code / 100
        state[:, 0] = 1.0
    assert float(state[:, 1:].mean()) == pytest.approx(0.3 - steps * code / 100, abs=code / 10)


def test_what_is_no_number_stays_none() -> None:
    state = torch.ones(4, 32)
    state[1, 3], state[2, 0] = math.inf, math.nan
    for bits in BELOW:
        found = dequantise_state(quantise_state(state, bits, 0), (4, 32), bits)
        assert [bool(row.isnan().all()) for row in found] == [False, True, True, False]


def arguments(bits: list[int], size: int, dtype: torch.dtype, norm: str = "", seed: int = 0) -> dict[str, Any]:
    """Random ones of four heads of 20 in two groups, in a memory where states lie in another order than rows."""
    draw = torch.Generator().manual_seed(seed)
    heads, head_dim, groups, taps = 4, 20, 2, 4
    inner, rows = heads * head_dim, len(bits)
    channels = inner + 2 * groups * size
    window = channels * taps * dtype.itemsize
    memory, at = list[torch.Tensor](), 0
    conv_at, state_at = [0] * rows, [0] * rows
    for row in sorted(range(rows), reverse=True):
        state = torch.randn(heads, head_dim, size, generator=draw)
        stored = state.flatten().view(torch.uint8) if bits[row] == 32 else quantise_state(state, bits[row], 3)
        parts = [torch.randn(channels * taps, generator=draw).to(dtype).view(torch.uint8), stored]
        conv_at[row], state_at[row] = at, at + -(-window // 64) * 64
        for part in parts:
            memory.append(torch.cat([part, torch.zeros(-len(part) % 64, dtype=torch.uint8)]))
            at += len(memory[-1])
    gating = {"": GATE_ALONE, "gated": NORM_OF_GATED, "normed": GATE_OF_NORMED}[norm]
    return {
        "projected": torch.randn(rows, inner + channels + heads, generator=draw).to(dtype),
        "memory": torch.cat(memory), "conv_at": torch.tensor(conv_at), "state_at": torch.tensor(state_at),
        "bits": torch.tensor(bits, dtype=torch.int32), "positions": torch.arange(rows, dtype=torch.int32) + 9,
        "conv_weight": torch.randn(taps, channels, generator=draw), "conv_bias": torch.randn(channels, generator=draw),
        "dt_bias": torch.randn(heads, generator=draw), "a": -torch.rand(heads, generator=draw),
        "d": torch.randn(heads, generator=draw), "norm": torch.randn(inner, generator=draw) if norm else None,
        "eps": 1e-5, "head_dim": head_dim, "groups": groups, "norm_groups": 2 if norm else 1, "gating": gating,
    }  # fmt: skip


def states(given: dict[str, Any], row: int) -> torch.Tensor:
    heads, bits, at = len(given["a"]), int(given["bits"][row]), int(given["state_at"][row])
    inner = heads * given["head_dim"]
    shape = (heads, given["head_dim"], (given["conv_weight"].shape[1] - inner) // (2 * given["groups"]))
    stored = given["memory"][at : at + state_bytes(inner, shape[-1], bits, 4)]
    return stored.view(torch.float32).view(shape) if bits == 32 else dequantise_state(stored, shape, bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", ["", "gated", "normed"])
@pytest.mark.parametrize("size", [16, 48, 128])
def test_the_kernel_is_its_reference(path: str, size: int, norm: str, dtype: torch.dtype) -> None:
    """Of rows at every precision beside each other, twice: the second step reads what the first wrote."""
    given = arguments([32, 8, 10, 16, 32, 10], size, dtype, norm)
    expected = {**given, "memory": given["memory"].clone()}
    for _ in range(2):
        mine, theirs = mamba2_step(**given), reference(**expected)
        tolerance = 0.02 if dtype is torch.bfloat16 else 1e-4
        assert torch.allclose(mine.float(), theirs.float(), rtol=tolerance, atol=tolerance * float(theirs.abs().max()))
        for row, bits in enumerate(given["bits"].tolist()):
            a, b = states(given, row), states(expected, row)
            code = 1e-5 if bits == 32 else 1.02 * STEP[bits] / (2 ** (bits - 1) - 1)
            assert bool(((a - b).abs() <= code * b.abs().amax(-1, keepdim=True) + 1e-6).all())
        expected["memory"].copy_(given["memory"])  # a code next to it is another's start


def test_a_sequence_does_not_depend_on_those_beside_it(path: str) -> None:
    given = arguments([8, 32, 10, 16, 8], 32, torch.bfloat16, "gated")
    before = given["memory"].clone()
    together = mamba2_step(**given)
    for row in range(5):
        memory, one = before.clone(), slice(row, row + 1)
        of_rows = {k: given[k][one] for k in ("projected", "conv_at", "state_at", "bits", "positions")}
        alone = mamba2_step(**{**given, **of_rows, "memory": memory})
        assert torch.equal(alone[0], together[row])
        assert torch.equal(states({**given, "memory": memory}, row), states(given, row))


def test_threads_change_nothing() -> None:
    given = arguments([8, 32, 10, 16], 128, torch.float32, "normed")
    before, threads, found = given["memory"].clone(), torch.get_num_threads(), []
    for count in (1, 3):
        torch.set_num_threads(count)
        given["memory"].copy_(before)
        found.append((mamba2_step(**given), given["memory"].clone()))
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"state_at": torch.tensor([10**9])}, "outside of a memory"),
        ({"conv_at": torch.tensor([-64])}, "outside of a memory"),
        ({"bits": torch.tensor([9], dtype=torch.int32)}, "states have 8, 10, 16, 32 bits"),
        ({"groups": 3}, "do not belong together"),
        ({"positions": torch.tensor([1])}, "do not belong together"),
        ({"norm": torch.ones(80)}, "do not belong together"),
    ],
)
def test_wrong_arguments_are_refused(path: str, change: dict[str, Any], what: str) -> None:
    given = arguments([8], 16, torch.float32)
    with pytest.raises(RuntimeError, match=what):
        mamba2_step(**{**given, **change})


def steps_of(core: Core) -> list[Mamba2Step | None]:
    assert core.runner.mixers is not None
    patched = [
        m.forward.__self__ for m in core.model.modules() if "forward" in m.__dict__ and hasattr(m.forward, "__self__")
    ]
    return [p._step for p in patched if isinstance(p, mixers_module._Patched)]


@pytest.mark.parametrize(
    ("name", "gating"),
    [("mamba2", NORM_OF_GATED), ("bamba", NORM_OF_GATED), ("granite-moe-hybrid", NORM_OF_GATED)],
)
def test_models_take_the_op_where_it_is_their_function(name: str, gating: int) -> None:
    if cpu_build.backend() == "torch":
        pytest.skip("no compiled kernel here")
    core = Core(build(name), NO_SITES, max_sequences=2)
    steps = steps_of(core)
    assert steps
    assert all(step is not None and step.gating == gating for step in steps)


@pytest.mark.parametrize("name", ["mamba", "qwen3-next", "lfm2"])
def test_other_mixers_stay_their_own(name: str) -> None:
    assert not any(steps_of(Core(build(name), NO_SITES, max_sequences=2)))


def test_a_mixer_that_does_otherwise_stays_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constant more in its forward: the trial sees it."""
    from transformers.models.mamba2 import modeling_mamba2

    model = build("mamba2")
    plain = modeling_mamba2.mamba2_selective_state_update
    monkeypatch.setattr(modeling_mamba2, "mamba2_selective_state_update", lambda *a, **k: plain(*a, **k) + 0.05)
    monkeypatch.setattr("qbe.engine.self_check.check", lambda *_: None)  # which would see it, too
    assert steps_of(Core(model, NO_SITES, max_sequences=2)) == [None] * 3


def test_answers_of_several_requests_are_transformers_own() -> None:
    """Through the op, in float32, with slots that leave holes."""
    model, texts, counts = build("bamba"), prompts(9, 30, 14), (20, 4, 20)
    with torch.inference_mode():
        expected = [greedy(model, text, n) for text, n in zip(texts, counts, strict=True)]
    requests = [request(str(i), t, max_tokens=n) for i, (t, n) in enumerate(zip(texts, counts, strict=True))]
    assert run(Core(model, NO_SITES, max_sequences=3), *requests) == expected
