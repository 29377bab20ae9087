"""`qbe::paged_attention`: the reference against attention written out over whole tensors, the kernels against it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from covering import covering
from kv_samples import ALIGN, PAGE_SIZE, Memory
from qbe.kernels.cpu import build
from qbe.kernels.cpu.attention.paged import paged_attention as cpu_kernel
from qbe.kernels.ops import paged_attention as attention_ops
from qbe.kernels.reference.kv_pages import read_pages, rearrange
from qbe.kernels.reference.paged_attention import paged_attention as reference
from test_triton_kernel import CUDA, DEVICE, INTERPRET, on_device, on_gpu, run_in_interpreter

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SHAPES = {  # heads, kv_heads, key_dim, value_dim
    "smollm": (9, 3, 64, 64),
    "llama": (8, 2, 128, 128),
    "multi-query": (16, 1, 32, 32),
    "no groups": (3, 3, 24, 40),
    "phi": (2, 2, 80, 80),
    "wide": (2, 1, 256, 256),
    "ragged": (4, 2, 6, 10),
    "no sharing": (2, 2, 64, 64),
    "eight queries": (8, 1, 128, 128),
    "two heads": (2, 1, 64, 64),
    "five queries": (10, 2, 64, 64),
}
MANY = {"many key heads": (64, 64, 64, 64)}  # for few tests
PLAIN = [16, 8, 4, 2, (2, 16, 4), (8, 2, 16)]  # formats, the same bits for all heads or bits by head
MIXED = [*PLAIN, 68, 66, (2, 16, 68)]  # with turbo keys


def case(
    shape: str,
    lengths: list[int],
    dtype: torch.dtype,
    formats: list[object] = MIXED[:1],
    room: int = 400,
    seed: int = 0,
    with_memory: bool = False,
) -> Any:
    """Random arguments; the pages of a sequence have one format after the other and lie in random order, memory that
    nobody owns holds NaN, and table entries past a length lead out of memory."""
    heads, kv_heads, key_dim, value_dim = (SHAPES | MANY)[shape]
    g = torch.Generator().manual_seed(seed)
    batch, per = len(lengths), -(-room // PAGE_SIZE)
    bits = [(f * 3)[:kv_heads] if isinstance(f, tuple) else (f,) * kv_heads for f in formats]
    memory = Memory(bits, (kv_heads, key_dim, value_dim), dtype, 2 * sum(-(-n // PAGE_SIZE) for n in lengths) + 2)
    block_tables = torch.full((batch, per), 2**50, dtype=torch.long)
    slots = torch.zeros(batch, dtype=torch.long)
    where = [(i, p) for i, n in enumerate(lengths) for p in range(-(-n // PAGE_SIZE))]
    for at in torch.randperm(len(where), generator=g).tolist():
        i, p = where[at]
        last = (p + 1) * PAGE_SIZE >= lengths[i]
        count = min(PAGE_SIZE, lengths[i] - 1 - p * PAGE_SIZE)
        numbers = [torch.randn(count, kv_heads, d, generator=g) for d in (key_dim, value_dim)]
        block_tables[i, p] = memory.filled(0 if last else (p + i) % len(formats), *numbers)
        if last:
            slots[i] = block_tables[i, p] + count
    # as transformers hands them over: [1, heads, T, dim] seen as [T, heads, dim]
    new = [torch.randn(h, batch, d, generator=g).transpose(0, 1) for h, d in
           ((heads, key_dim), (kv_heads, key_dim), (kv_heads, value_dim))]  # fmt: skip
    q, k, v = (t.to(DEVICE, dtype) for t in new)
    arguments = {
        "query": q, "key": k, "value": v, "memory": memory.data.to(DEVICE),
        "head_offsets": memory.head_offsets.to(DEVICE), "slots": slots.to(DEVICE),
        "block_tables": block_tables.to(DEVICE), "lengths": torch.tensor(lengths, device=DEVICE),
        "entropy": torch.full((batch, heads), -1.0, device=DEVICE), "scaling": key_dim**-0.5, "window": 0,
        "softcap": 0.0,
    }  # fmt: skip
    return (arguments, memory) if with_memory else arguments


def with_sinks(arguments: dict[str, object]) -> dict[str, object]:
    """The same with a sink for most heads: of every weight, and one above all scores."""
    query = arguments["query"]
    sinks = torch.linspace(-4, 4, query.shape[1], device=query.device)
    sinks[0], sinks[-1] = float("-inf"), 60.0
    return arguments | {"sinks": sinks}


def copied(arguments: dict[str, object]) -> dict[str, object]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (5, 0.0), (0, 3.0), (40, 3.0)])
def test_the_reference_is_attention_over_the_whole_sequence(window: int, softcap: float, sinks: bool) -> None:
    arguments = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in
                 case("smollm", [1, 64, 65, 33, 200], torch.float32, MIXED).items()}  # fmt: skip
    arguments |= {"window": window, "softcap": softcap}
    arguments = with_sinks(arguments) if sinks else arguments
    out = reference(**arguments)
    for i, n in enumerate(arguments["lengths"].tolist()):
        block_ids = arguments["block_tables"][i, : -(-n // PAGE_SIZE)]
        k, v = read_pages(arguments["memory"], arguments["head_offsets"], block_ids, (3, 64, 64), torch.float32)
        for head in range(9):
            scores = k[head // 3, :n] @ arguments["query"][i, head] / 8
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            seen = torch.arange(n) >= n - (window or n)
            scores = scores.masked_fill(~seen, float("-inf"))
            weights = torch.cat([scores, arguments["sinks"][head, None]] if sinks else [scores]).softmax(0)
            torch.testing.assert_close(out[i, head], weights[:n] @ v[head // 3, :n])
            entropy = torch.distributions.Categorical(probs=weights).entropy()
            torch.testing.assert_close(arguments["entropy"][i, head], entropy, rtol=1e-4, atol=1e-5)
    for row in (0, 3):  # the new tokens are in their pages
        k, v = read_pages(
            arguments["memory"],
            arguments["head_offsets"],
            arguments["block_tables"][row, :1],
            (3, 64, 64),
            torch.float32,
        )
        assert torch.equal(k[:, int(arguments["slots"][row]) % ALIGN], arguments["key"][row])
        assert torch.equal(v[:, int(arguments["slots"][row]) % ALIGN], arguments["value"][row])


def on_cpu(arguments: dict[str, object]) -> dict[str, object]:
    return {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


@pytest.mark.parametrize("formats", [MIXED[:1], MIXED], ids=["full", "mixed"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_cpu_kernel_is_the_reference(path: str, shape: str, dtype: torch.dtype, formats: list[object]) -> None:
    same(on_cpu(case(shape, [1, 2, 17, 64, 65, 300], dtype, formats)), dtype, cpu_kernel)


@pytest.mark.parametrize("window", [0, 1, 7, 64, 100])
@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_windows_and_soft_caps_on_the_cpu(path: str, window: int, softcap: float) -> None:
    arguments = on_cpu(case("smollm", [1, 63, 64, 65, 66, 399], torch.float32, MIXED))
    same(arguments | {"window": window, "softcap": softcap}, torch.float32, cpu_kernel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (70, 4.0)])
def test_sinks_on_the_cpu(path: str, dtype: torch.dtype, window: int, softcap: float) -> None:
    for shape in ("smollm", "eight queries", "no groups"):
        arguments = with_sinks(on_cpu(case(shape, [1, 63, 64, 65, 399], dtype, MIXED)))
        same(arguments | {"window": window, "softcap": softcap}, dtype, cpu_kernel)


@pytest.mark.parametrize("sharp", [1e-3, 1.0, 60.0])
def test_scores_of_every_size_on_the_cpu(path: str, sharp: float) -> None:
    """From nearly uniform weights to a single one."""
    arguments = on_cpu(case("llama", [3, 100], torch.float32))
    same(arguments | {"scaling": sharp}, torch.float32, cpu_kernel, 2e-5 if sharp > 1 else 2e-6)


def test_a_sequence_does_not_depend_on_its_batch_on_the_cpu(path: str) -> None:
    """Nor on the threads, bit for bit."""
    arguments = on_cpu(case("smollm", [40, 7, 300, 129], torch.bfloat16, MIXED))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = []
        for i in range(4):
            of_row = ("query", "key", "value", "slots", "block_tables", "lengths", "entropy")
            own = {k: v[i : i + 1] if k in of_row else v for k, v in copied(arguments).items()}
            alone.append(cpu_kernel(**own))
        torch.set_num_threads(3)
        assert torch.equal(cpu_kernel(**arguments), torch.cat(alone))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slots", torch.tensor([0, 2**40])),
        ("slots", torch.tensor([0, PAGE_SIZE])),
        ("slots", torch.tensor([0, -1])),
        ("lengths", torch.tensor([3, 449])),
        ("lengths", torch.tensor([0, 20])),
        ("block_tables", torch.full((2, 25), 2**50)),
        ("block_tables", torch.full((2, 25), -256)),
        ("block_tables", torch.full((2, 25), 255)),
        ("block_tables", torch.zeros(2, 25)),
        ("head_offsets", torch.full((ALIGN, 3), 3, dtype=torch.int32)),
        ("head_offsets", torch.full((ALIGN, 3), 2**30 | 4, dtype=torch.int32)),
        ("head_offsets", torch.zeros(ALIGN, 4, dtype=torch.int32)),
        ("entropy", torch.zeros(2, 8)),
        ("slots", torch.zeros(3, dtype=torch.long)),
        ("query", torch.zeros(2, 10, 64)),
        ("query", torch.zeros(2, 9, 32)),
        ("value", torch.zeros(2, 2, 64)),
        ("sinks", torch.zeros(8)),
        ("sinks", torch.zeros(9, dtype=torch.bfloat16)),
    ],
)
def test_what_does_not_belong_together_is_refused(name: str, value: torch.Tensor) -> None:
    if build.backend() == "torch":
        pytest.skip("no compiled kernel")
    with pytest.raises(RuntimeError):
        cpu_kernel(**on_cpu(case("smollm", [3, 20], torch.float32)) | {name: value})


def test_the_op_is_well_formed() -> None:
    arguments = case("smollm", [3, 20], torch.float32)
    schema = torch.ops.qbe.paged_attention.default
    for given in (arguments, with_sinks(arguments)):
        torch.library.opcheck(schema, tuple(t.cpu() if isinstance(t, torch.Tensor) else t for t in given.values()))


@pytest.mark.skipif(CUDA or INTERPRET, reason="the tests below run here directly")
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def on_gpu_order(arguments: dict[str, object]) -> torch.Tensor:
    """The memory with quantised blocks as they lie on a GPU."""
    memory, block_tables = arguments["memory"], arguments["block_tables"]
    shape = (arguments["key"].shape[1], arguments["key"].shape[2], arguments["value"].shape[2])
    block_ids = block_tables[block_tables < len(memory)].cpu()
    return rearrange(memory.cpu(), arguments["head_offsets"].cpu(), block_ids, shape, arguments["key"].itemsize).to(
        DEVICE
    )


def same(
    arguments: dict[str, object],
    dtype: torch.dtype,
    kernel: Callable[..., torch.Tensor] | None = None,
    tolerance: float | None = None,
    gpu_order: bool = False,
) -> None:
    """gpu_order: quantised blocks lie as on a GPU; so they do for the kernel in Triton, which None stands for."""
    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
    expected_in, found_in = copied(arguments), copied(arguments)
    if kernel is None:
        from qbe.kernels.cuda.dispatch import paged_attention as kernel

        gpu_order = True
    if gpu_order:
        found_in["memory"] = on_gpu_order(found_in)
    expected, found = reference(**expected_in), kernel(**found_in)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)
    loose = max(tolerance, 2e-5)
    torch.testing.assert_close(found_in["entropy"], expected_in["entropy"], rtol=loose, atol=loose)
    assert torch.equal(found_in["memory"], on_gpu_order(expected_in) if gpu_order else expected_in["memory"]), (
        "the new tokens are in their pages, nothing else changed"
    )


@on_device
@pytest.mark.parametrize(
    ("shape", "dtype", "formats"),  # the interpreter cuts bfloat16 instead of rounding it
    covering(
        2, list(SHAPES), list(TOLERANCE) if CUDA else [torch.float32, torch.float16], [MIXED[:1], MIXED], full=CUDA
    ),
)
def test_the_kernel_is_the_reference(shape: str, dtype: torch.dtype, formats: list[object]) -> None:
    same(case(shape, [1, 2, 17, 64, 65, 300], dtype, formats), dtype)


@on_device
@pytest.mark.parametrize("bits", [16, 8, 4, 2, 68, 66])
def test_every_precision_alone(bits: int) -> None:
    same(case("llama", [400, 65], torch.float16, [16, bits]), torch.float16)


@on_device
@pytest.mark.parametrize("window", [0, 3])
def test_rows_of_one_sequence_see_those_before_them(window: int) -> None:
    """Three rows at the end of the last sequence, the others alone: the keys of all are written before any attends."""
    from qbe.kernels.cuda.dispatch import paged_attention
    from qbe.kernels.triton.kv_cache.write_rows import write_rows

    def kernel(**given: Any) -> torch.Tensor:
        write_rows(*(given[name] for name in ("key", "value", "memory", "head_offsets", "slots")))
        return paged_attention(**given)

    arguments = case("smollm", [20, 90, 200, 200, 200], torch.float32)
    for row in (3, 4):
        arguments["block_tables"][row] = arguments["block_tables"][2]
        arguments["slots"][row] = arguments["slots"][2] + row - 2
        arguments["lengths"][row] += row - 2
    same(arguments | {"window": window}, torch.float32, kernel)


@on_device
@pytest.mark.parametrize(("window", "softcap"), covering(1, [1, 7, 64, 100], [0.0, 4.0], full=CUDA))
def test_windows_and_soft_caps(window: int, softcap: float) -> None:
    arguments = case("smollm", [1, 63, 64, 65, 66, 399], torch.float32, MIXED)
    same(arguments | {"window": window, "softcap": softcap}, torch.float32)


@on_device
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (70, 4.0)])
def test_sinks(window: int, softcap: float) -> None:
    for shape in ("smollm", "no groups"):
        arguments = with_sinks(case(shape, [1, 63, 64, 65, 399], torch.float32, MIXED))
        same(arguments | {"window": window, "softcap": softcap}, torch.float32)


@on_device
@pytest.mark.parametrize("room", [64, 130, 1000, 9000])
def test_one_part_and_many(room: int) -> None:
    """Runs longer than the kernel looks ahead among them."""
    lengths = [1, 16, min(room, 130)] if room < 9000 else [9000]
    same(case("multi-query", lengths, torch.float32, [16, 4, 4, 4], room=room), torch.float32)


@on_gpu
@pytest.mark.cuda
def test_a_graph_follows_lengths_and_tables() -> None:
    first, second = (case("llama", n, torch.bfloat16, MIXED, seed=s) for n, s in (([129, 40], 0), ([7, 170], 1)))
    there = [a | {"memory": on_gpu_order(a)} for a in (first, second)]
    held = copied(there[0])
    attention_ops.paged_attention(**held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_ops.paged_attention(**held)
    for arguments, moved in zip((first, second, first), (*there, there[0]), strict=True):
        for name, tensor in moved.items():
            if isinstance(tensor, torch.Tensor):
                held[name].copy_(tensor)
        graph.replay()
        torch.testing.assert_close(out, reference(**copied(arguments)), rtol=1.6e-2, atol=1.6e-2)
