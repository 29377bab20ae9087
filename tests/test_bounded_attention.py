"""`qbe::bounded_attention`: the bound is never exceeded, and the kernels read again what the reference does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covering import FULL, covering
from kv_samples import PAGE_SIZE
from qbe.format.kv_blocks import FULL_BITS, NO_ORIGINAL, head_layout
from qbe.kernels.ops import bounded_attention as bounded_ops
from qbe.kernels.reference.bounded_attention import bounded_attention as reference
from qbe.kernels.reference.bounded_attention import number_error, page_bounds, pages_to_raise
from qbe.kernels.reference.kv_pages import quantise
from qbe.kernels.reference.paged_attention import paged_attention as plain
from test_paged_attention import PLAIN, SHAPES, TOLERANCE, case, copied, on_gpu_order, with_sinks
from test_triton_kernel import CUDA, DEVICE, INTERPRET, on_device, run_in_interpreter

if INTERPRET:
    from triton_bounds import reached

BY_ROW = ("query", "key", "value", "slots", "block_tables", "lengths", "entropy", "originals", "limits", "counts")


def bounded_case(
    shape: str,
    lengths: list[int],
    limits: list[float],
    dtype: torch.dtype = torch.float32,
    flat: float = 0.05,
    **more: Any,
) -> tuple[dict[str, Any], torch.Tensor]:
    """Arguments with the quantised pages' originals in host memory, and that memory; queries are scaled by `flat`,
    which makes bounds small enough that some pages pass."""
    arguments, memory = case(shape, lengths, dtype, more.pop("formats", PLAIN), with_memory=True, **more)
    arguments["query"] = arguments["query"] * flat
    size, sources = memory.sizes[0], sorted(memory.sources.values())
    host = torch.empty(size * len(sources) + 256, dtype=torch.uint8, pin_memory=CUDA)
    host = host[(arguments["memory"].data_ptr() - host.data_ptr()) % 256 :]
    if INTERPRET:
        reached(host)
    originals = torch.full_like(arguments["block_tables"], NO_ORIGINAL)
    for i, source in enumerate(sources):
        host[i * size : (i + 1) * size] = memory.data[source : source + size]
    for target, source in memory.sources.items():
        at = host.data_ptr() - arguments["memory"].data_ptr() + sources.index(source) * size
        originals[arguments["block_tables"] == target] = at
    arguments |= {
        "originals": originals, "limits": torch.tensor(limits, device=DEVICE),
        "counts": torch.zeros(len(lengths), 3, dtype=torch.long, device=DEVICE),
    }  # fmt: skip
    return {name: arguments[name] for name in _ORDER}, host


_ORDER = ("query", "key", "value", "memory", "head_offsets", "slots", "block_tables", "lengths", "entropy", "originals",
          "limits", "counts", "scaling", "window", "softcap")  # fmt: skip


on_cpu = pytest.mark.skipif(
    CUDA, reason="the samples are on the GPU, where the kernels' tests compare with the reference"
)


def at_16_bits(arguments: dict[str, Any]) -> dict[str, Any]:
    """What `paged_attention` takes, with every page that has an original read from it."""
    own = {k: v for k, v in copied(arguments).items() if k not in ("originals", "limits", "counts")}
    own["memory"] = arguments["memory"]  # addresses count from it
    own["block_tables"] = torch.where(
        arguments["originals"] == NO_ORIGINAL, own["block_tables"], arguments["originals"]
    )
    return own


@settings(max_examples=150, deadline=None)
@given(
    bits=st.lists(st.sampled_from([2, 4, 8, 16]), min_size=1, max_size=5),
    sharp=st.floats(0.01, 30),
    size=st.sampled_from([1e-6, 0.3, 1.0, 40.0, 3e4]),
    offset=st.sampled_from([0.0, 1.0, -300.0]),
    softcap=st.sampled_from([0.0, 2.0]),
    sink=st.sampled_from([-math.inf, -5.0, 0.0, 8.0]),
    seed=st.integers(0, 2**20),
)
def test_the_true_error_never_exceeds_the_bound(bits, sharp, size, offset, softcap, sink, seed) -> None:
    """In float64, for any pages read again, of one query head."""
    g = torch.Generator().manual_seed(seed)
    dims, scaling = (8, 5), sharp / 8**0.5
    q = torch.randn(dims[0], generator=g, dtype=torch.float64)
    true, read, errors = ([], []), ([], []), ([], [])
    for b in bits:
        for i, dim in enumerate(dims):
            x = torch.randn(PAGE_SIZE, dim, generator=g) * (size if i else 1.0) + offset * (size if i else 0.01)
            x[:, 0] *= 1 + 8 * (seed % 3)
            true[i].append(x.double())
            rows = x if i else x.T
            if b == FULL_BITS:
                read[i].append(x.double())
                errors[i].append(torch.zeros(len(rows), dtype=torch.float64))
                continue
            codes, scale, low = quantise(rows, b)
            back = codes.double() * scale.double()[:, None] + low.double()[:, None]
            read[i].append(back if i else back.T)
            errors[i].append(number_error(scale, low, b))

    def attend(keys: list[torch.Tensor], values: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.cat(keys) @ q * scaling
        scores = torch.tanh(scores / softcap) * softcap if softcap else scores
        weights = torch.cat([scores, torch.tensor([sink], dtype=torch.float64)]).softmax(0)
        return weights, weights[:-1] @ torch.cat(values)

    _, wanted = attend(*true)
    weights, _ = attend(*read)
    pages = torch.arange(len(bits)).repeat_interleave(PAGE_SIZE)
    bounds = page_bounds(
        q[None], weights[None, :-1], torch.cat(read[1])[None], torch.stack(errors[0])[None], torch.cat(errors[1])[None],
        pages, scaling, weights[-1:],
    )[0]  # fmt: skip
    for chosen in (0, 2 ** len(bits) - 1, seed % 2 ** len(bits)):
        again = [bool(chosen >> p & 1) for p in range(len(bits))]
        mixed = [[t if a else r for t, r, a in zip(true[i], read[i], again, strict=True)] for i in (0, 1)]
        rest = bounds[~torch.tensor(again)].sum()
        error = (attend(*mixed)[1] - wanted).norm()
        assert not error > rest + 1e-12 * wanted.norm(), (float(error), float(rest))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=40), st.floats(0, 200))
def test_what_is_not_read_again_adds_up_to_less_than_allowed(found: list[float], allowed: float) -> None:
    bounds = torch.tensor(found, dtype=torch.float64)
    raised = pages_to_raise(bounds, allowed)
    assert float(bounds[~raised].sum()) <= allowed
    assert not raised.any() or float(bounds[raised].min()) >= float(bounds[~raised].max() if (~raised).any() else 0)
    if float(bounds.sum()) <= allowed:
        assert not raised.any()


@on_cpu
@pytest.mark.parametrize(("window", "softcap", "sinks"), [(0, 0.0, False), (130, 0.0, False), (0, 3.0, False),
                                                          (0, 0.0, True)])  # fmt: skip
def test_limits_are_kept(window: int, softcap: float, sinks: bool) -> None:
    """From nothing read again to everything, and the error of each head is within its limit."""
    limits = [float("inf"), 1e20, 0.5, 0.05, 0.0]
    arguments, _host = bounded_case("llama", [400] * 5, limits, flat=0.05, formats=[16, 8, 4, (8, 16)])
    for name in ("query", "key", "value"):
        arguments[name] = arguments[name][2:3].expand(5, -1, -1).clone()
    for name in ("block_tables", "originals"):
        arguments[name] = arguments[name][2:3].repeat(5, 1)
    arguments["slots"] = arguments["slots"][2:3].repeat(5)
    arguments |= {"window": window, "softcap": softcap}
    if sinks:
        arguments["sinks"] = torch.linspace(-2, 6, 8, device=DEVICE)
    wanted = plain(**at_16_bits(arguments))
    lowest = plain(**{k: v for k, v in copied(arguments).items() if k not in ("originals", "limits", "counts")})
    found = reference(**arguments)
    checked, raised, moved = arguments["counts"].T.tolist()
    full = head_layout(FULL_BITS, 128, 128, 4).nbytes
    assert checked[0] == 0
    assert len(set(checked[1:])) == 1
    assert raised[1] == 0 < raised[2] < raised[3] <= raised[4] == checked[4]
    assert moved == [n * full for n in raised]
    torch.testing.assert_close(found[:2], lowest[:2])
    torch.testing.assert_close(found[4], wanted[4], rtol=1e-5, atol=1e-6)
    error = (found - wanted).norm(dim=2) / lowest.norm(dim=2)
    for row in (2, 3):
        assert float(error[row].max()) <= limits[row]
    assert float(error[0].max()) > 0.01


@on_cpu
def test_pages_without_an_original_are_left_alone() -> None:
    arguments, _host = bounded_case("smollm", [300], [0.0])
    arguments["originals"].fill_(NO_ORIGINAL)
    found = reference(**copied(arguments) | {"counts": arguments["counts"]})
    torch.testing.assert_close(found, plain(**at_16_bits(arguments)))
    assert arguments["counts"].sum() == 0


LENGTHS, LIMITS = [1, 64, 65, 300, 399, 300], [0.1, 0.0, 0.0, 3.0, 0.5, float("inf")]
if INTERPRET and not FULL:  # whose time goes with the pages
    LENGTHS = [1, 64, 65, 180, 250, 130]


def same(
    arguments: dict[str, Any], dtype: torch.dtype, kernel: Callable[..., torch.Tensor] | None = None
) -> list[list[int]]:
    """The kernel (else the Triton ones) gives what the reference gives, pages read again included; their counts."""
    expected_in, found_in = copied(arguments), copied(arguments)
    for own in (expected_in, found_in):  # addresses count from it
        own["memory"] = arguments["memory"]
    expected, before = reference(**expected_in), arguments["memory"].clone()
    if kernel is None:
        kernel = bounded_ops.bounded_attention if CUDA else _launch
        arguments["memory"].copy_(on_gpu_order(arguments))
    found = kernel(**found_in)
    arguments["memory"].copy_(before)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found_in["entropy"], expected_in["entropy"], rtol=max(tolerance, 2e-5),
                               atol=max(tolerance, 2e-5))  # fmt: skip
    assert found_in["counts"].tolist() == expected_in["counts"].tolist()
    return expected_in["counts"].tolist()


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_cpu_kernel_is_the_reference(path: str, shape: str, dtype: torch.dtype) -> None:
    from qbe.kernels.cpu.attention.paged import bounded_attention

    arguments, _host = bounded_case(shape, LENGTHS, LIMITS, dtype)
    counts = same(arguments, dtype, bounded_attention)
    assert 0 < sum(raised for _, raised, _ in counts) < sum(checked for checked, _, _ in counts)
    same(arguments | {"window": 100, "softcap": 2.0}, dtype, bounded_attention)
    same(with_sinks(arguments), dtype, bounded_attention)


@on_cpu
def test_pages_with_turbo_keys_are_all_read_again(path: str) -> None:
    from qbe.kernels.cpu.attention.paged import bounded_attention

    arguments, _host = bounded_case("smollm", LENGTHS, [1e-3] * len(LENGTHS), torch.float32, formats=[16, 68, 66])
    counts = same(arguments, torch.float32, bounded_attention)
    assert sum(checked for checked, _, _ in counts) > 0
    assert all(raised == checked for checked, raised, _ in counts)


@on_cpu
@pytest.mark.parametrize("name", ["originals", "limits", "counts"])
def test_what_does_not_belong_together_is_refused(name: str) -> None:
    from qbe.kernels.cpu import build
    from qbe.kernels.cpu.attention.paged import bounded_attention

    if build.backend() == "torch":
        pytest.skip("no compiled kernel")
    arguments, _host = bounded_case("smollm", [100, 200], [0.0, 0.0])
    with pytest.raises(RuntimeError, match="do not belong"):
        bounded_attention(**arguments | {name: torch.zeros(3)})


@on_cpu
def test_the_op_is_well_formed() -> None:
    arguments, _host = bounded_case("smollm", [3, 200], [0.0, 0.1])
    arguments["originals"].fill_(NO_ORIGINAL)  # opcheck copies the memory
    torch.library.opcheck(torch.ops.qbe.bounded_attention.default, tuple(arguments.values()))


@pytest.mark.skipif(CUDA or INTERPRET, reason="the tests below run here directly")
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__, "-k", "the_triton_kernels")


@on_device
@pytest.mark.parametrize(
    ("shape", "dtype"),
    covering(2, ["smollm", "llama"], [torch.float32, torch.bfloat16]) if CUDA
    else covering(1, list(SHAPES), [torch.float32, torch.float16]),
)  # fmt: skip
def test_the_triton_kernels_are_the_reference(shape: str, dtype: torch.dtype) -> None:
    arguments, _host = bounded_case(shape, LENGTHS, LIMITS, dtype)
    same(arguments, dtype)


@on_device
def test_the_triton_kernels_with_windows_and_soft_caps() -> None:
    arguments, _host = bounded_case("smollm", LENGTHS, LIMITS)
    same(arguments | {"window": 100, "softcap": 2.0}, torch.float32)


@on_device
def test_the_triton_kernels_with_sinks() -> None:
    arguments, _host = bounded_case("ragged", LENGTHS, LIMITS)
    same(with_sinks(arguments), torch.float32)


@on_device
def test_the_triton_kernels_over_many_parts() -> None:
    arguments, _host = bounded_case("multi-query", [5000], [0.3], formats=[16, 4, 8, 4], room=5000, flat=0.02)
    same(arguments, torch.float32)


def _launch(*args: Any, **arguments: Any) -> torch.Tensor:
    from qbe.kernels.triton.attention.bounded import bounded_attention

    return bounded_attention(*args, **arguments)
