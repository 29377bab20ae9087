"""Pages quantised and read: the format's error bound, the reference by hand, the kernels against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covering import covering
from kv_samples import PAGE_SIZE, Memory
from qbe.format.kv_blocks import KV_BITS, head_layout
from qbe.kernels.reference import kv_pages as reference
from qbe.kernels.reference.bounded_attention import number_error
from qbe.kernels.reference.rotation import rotate
from test_triton_kernel import CUDA, DEVICE, INTERPRET, on_device, run_in_interpreter

SHAPES = {
    "llama": (2, 128, 128),
    "odd": (3, 24, 40),
    "narrow": (2, 8, 6),
    "smollm": (3, 64, 64),
    "phi": (2, 80, 80),
    "ragged": (2, 5, 3),
}
LOW_BITS = [2, 4, 8]


@settings(deadline=None, max_examples=150)
@given(
    bits=st.sampled_from(LOW_BITS),
    rows=st.integers(1, 5),
    columns=st.integers(1, 70),
    size=st.floats(-9, 4.5),
    shift=st.floats(-9, 4.5),
    flat=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_a_number_comes_back_within_its_bound(bits, rows, columns, size, shift, flat, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * (0 if flat else 10**size)
    x = (x + 10**shift * torch.randn(rows, 1, generator=generator)).clamp(-65504, 65504)
    codes, scale, low = reference.quantise(x, bits)
    assert int(codes.max()) < 2**bits
    assert torch.equal(reference.unpack(reference.pack(codes, bits), bits, columns), codes)
    back = codes.double() * scale.double()[:, None] + low.double()[:, None]
    assert ((x.double() - back).abs() <= reference.error_bound(scale, low, bits)[:, None]).all()


@settings(deadline=None, max_examples=150)
@given(
    bits=st.sampled_from(LOW_BITS), near=st.floats(-6, 0), range_=st.floats(-3, 5.2), over=st.booleans(),
    seed=st.integers(0, 2**20),
)  # fmt: skip
def test_a_number_that_was_cut_has_no_bound(bits, near, range_, over, seed) -> None:
    """Or one that holds for it, where what is beyond float16's range is less than that."""
    generator = torch.Generator().manual_seed(seed)
    sign = -1.0 if seed % 2 else 1.0
    largest = sign * 65504 * (1 + (1 if over else -1) * 10**near)
    x = torch.cat([torch.tensor([largest]), largest - sign * torch.rand(20, generator=generator) * 10**range_])[None]
    codes, scale, low = reference.quantise(x, bits)
    back = codes.double() * scale.double()[:, None] + low.double()[:, None]
    assert ((x.double() - back).abs() <= number_error(scale, low, bits)[:, None]).all()


def test_a_page_is_what_the_format_says() -> None:
    """Keys a channel at a time, values a token at a time, decoded here by hand; odd sizes are their own rotation."""
    memory = Memory([(16, 16), (2, 4)], (2, 3, 5), torch.float32, 3)
    keys, values = torch.randn(PAGE_SIZE, 2, 3), torch.randn(PAGE_SIZE, 2, 5)
    block_id = memory.filled(1, keys, values)
    assert block_id % 256 == 1
    at = block_id - 1 + head_layout(2, 3, 5, 4).nbytes  # head 1, behind that of 2 bits
    raw = memory.data[at : at + head_layout(4, 3, 5, 4).nbytes].numpy()
    values_at = 64 * 2  # keys leave room for rows of tokens, as they lie on a GPU
    scales = raw[values_at + 64 * 3 :].view("float16").astype("float64")
    for channel in range(3):
        for token in range(PAGE_SIZE):
            code = raw[channel * 32 + token // 2] >> (4 * (token % 2)) & 15
            found = code * scales[channel] + scales[3 + channel]
            assert abs(found - float(keys[token, 1, channel])) <= 0.51 * scales[channel] + 0.01
    for token in range(PAGE_SIZE):
        for d in range(5):
            code = raw[values_at + token * 3 + d // 2] >> (4 * (d % 2)) & 15
            found = code * scales[6 + token] + scales[6 + PAGE_SIZE + token]
            assert abs(found - float(values[token, 1, d])) <= 0.51 * scales[6 + token] + 0.01


def test_pages_take_the_room_of_their_bits() -> None:
    full = head_layout(16, 128, 128, 2).nbytes
    ratios = {bits: full / head_layout(bits, 128, 128, 2).nbytes for bits in KV_BITS}
    assert ratios[16] == 1
    assert ratios[8] > 1.9
    assert ratios[4] > 3.65
    assert ratios[2] > 6.7


def case(shape: str, dtype: torch.dtype, seed: int = 0) -> tuple[Memory, list[int], list[int]]:
    """Six full pages of 16 bits and room for them in other formats, heads of mixed bits among them."""
    heads = SHAPES[shape][0]
    formats = [(b,) * heads for b in (16, 8, 4, 2, 68, 66)] + [(2, 16, 68)[:heads]]
    memory = Memory(formats, SHAPES[shape], dtype, 11)
    generator = torch.Generator().manual_seed(seed)
    sources = []
    for _ in range(6):
        numbers = [torch.randn(PAGE_SIZE, heads, d, generator=generator) + 1 for d in SHAPES[shape][1:]]
        numbers[0][:, :, 0] *= 30  # an outlier channel
        sources.append(memory.filled(0, *numbers))
    return memory, sources, [memory.page(n) for n in range(1, 7)]


def check(
    shape: str, dtype: torch.dtype, quantise: Callable[..., None], read: Callable[..., object], device: str, gpu: bool
) -> None:
    memory, sources, targets = case(shape, dtype)
    arguments = memory.head_offsets[None], torch.tensor(sources), torch.tensor(targets), memory.shape, dtype
    expected, found = memory.data.clone(), memory.data.clone().to(device)
    reference.quantise_pages(expected, *arguments)
    quantise(found, *(a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments))
    found = found.cpu()
    rearranged = memory.head_offsets, torch.tensor(targets), memory.shape, dtype.itemsize
    if gpu:
        found = reference.rearrange(found, *rearranged, back=True)
    # A code may differ by one where a number lies half way between two: what is read must not. Where channels fill no
    # whole bytes, what is left over of a block on a GPU is not what is on a CPU.
    if not gpu or SHAPES[shape][1] % 4 == 0:
        assert (expected.int() - found.int()).abs().sum(dtype=torch.int64) <= 0.001 * len(found) * 64
    block_ids = torch.tensor([*targets, sources[0]])
    before = reference.read_pages(found, memory.head_offsets, torch.tensor(sources), memory.shape, dtype, torch.float64)
    after = reference.read_pages(found, memory.head_offsets, block_ids[:6], memory.shape, dtype, torch.float64)
    wanted = reference.read_pages(expected, memory.head_offsets, block_ids[:6], memory.shape, dtype, torch.float64)
    for b, a, w in zip(before, after, wanted, strict=True):
        largest = (b - w).abs().amax()
        assert float((b - a).abs().amax()) <= float(largest) * 1.001
    expected_read = reference.read_pages(found, memory.head_offsets, block_ids, memory.shape, dtype)
    if gpu:
        found = reference.rearrange(found, *rearranged)
    found_read = read(found.to(device), memory.head_offsets.to(device), block_ids.to(device), memory.shape, dtype)
    for e, f in zip(expected_read, found_read, strict=True):
        # Rotated sums of numbers up to 90: what is left of them may be small.
        torch.testing.assert_close(f.cpu(), e, rtol=2**-7 if dtype == torch.bfloat16 else 2e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_cpu_kernels_are_the_reference(path: str, shape: str, dtype: torch.dtype) -> None:
    from qbe.kernels.cpu.kv_cache.pages import quantise_pages, read_pages

    check(shape, dtype, quantise_pages, read_pages, "cpu", gpu=False)


def written(write: Callable[..., None], shape: str, dtype: torch.dtype, device: str) -> None:
    """Tokens into two pages, from tensors as layers leave them: the bytes that `Memory.write` puts there."""
    heads, *dims = SHAPES[shape]
    memory = Memory([(16,) * heads, (4,) * heads], SHAPES[shape], dtype, 3)
    pages = [memory.page(), memory.page()]
    places = [(pages[1], 3), (pages[0], 63), (pages[1], 4), (pages[0], 0)]
    numbers = [torch.randn(4, heads, d, generator=torch.Generator().manual_seed(d)).to(dtype) for d in dims]
    numbers[0][2, 0, 1] = torch.inf
    numbers[1][3, 0, 0] = -torch.inf
    found = memory.data.clone().to(device)
    given = [numbers[0].to(device), numbers[1].transpose(0, 1).contiguous().transpose(0, 1).to(device)]
    write(
        *given,
        found,
        memory.head_offsets.to(device),
        torch.tensor([block_id | at for block_id, at in places], device=device),
    )
    keys, values = reference.read_pages(found.cpu(), memory.head_offsets, torch.tensor(pages), memory.shape, dtype)
    numbers[0][2, 0, 1] = torch.nan  # in a key infinity becomes this
    for read, new in ((keys, numbers[0]), (values, numbers[1])):
        rows = [pages.index(block_id) * PAGE_SIZE + at for block_id, at in places]
        torch.testing.assert_close(read[:, rows].transpose(0, 1), new, rtol=0, atol=0, equal_nan=True)
        others = [i for i in range(2 * PAGE_SIZE) if i not in rows]
        assert read[:, others].isnan().all(), "nothing else was written"
    assert (found.cpu()[sum(memory.sizes[:1]) * 2 :] == 255).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_written_where_their_slots_are(path: str, shape: str, dtype: torch.dtype) -> None:
    from qbe.kernels.cpu.kv_cache.pages import write_rows

    written(write_rows, shape, dtype, "cpu")


@on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_so_they_are_by_the_kernel(shape: str, dtype: torch.dtype) -> None:
    if INTERPRET and dtype == torch.bfloat16:
        pytest.skip("the interpreter cuts bfloat16, which makes infinity of a NaN")
    from qbe.kernels.triton.kv_cache.write_rows import write_rows

    written(write_rows, shape, dtype, DEVICE)


def test_a_slot_outside_of_the_memory(path: str) -> None:
    from qbe.kernels.cpu.kv_cache.pages import write_rows

    if path == "torch":
        pytest.skip("the reference does not look")
    memory = Memory([(16, 16)], (2, 8, 6), torch.float32, 2)
    key, value = torch.randn(2, 2, 8), torch.randn(2, 2, 6)
    before = memory.data.clone()
    for slot in (len(memory.data), -256, memory.sizes[0] + PAGE_SIZE):
        with pytest.raises(RuntimeError, match="outside of the KV cache's memory"):
            write_rows(key, value, memory.data, memory.head_offsets, torch.tensor([3, slot]))
        assert torch.equal(memory.data, before)
    with pytest.raises(RuntimeError, match="do not belong together"):
        write_rows(key, value[:1], memory.data, memory.head_offsets, torch.tensor([3, 4]))


@pytest.mark.skipif(CUDA or INTERPRET, reason="the tests below run here directly")
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@on_device
@pytest.mark.parametrize(
    ("shape", "dtype"),  # the interpreter cuts bfloat16 instead of rounding it
    covering(2, ["llama", "odd"], [torch.float32, torch.float16, torch.bfloat16]) if CUDA
    else covering(1, list(SHAPES), [torch.float32, torch.float16]),
)  # fmt: skip
def test_the_kernels_are_the_reference(shape: str, dtype: torch.dtype) -> None:
    from qbe.kernels.triton.kv_cache.pages import quantise_pages, read_pages

    check(shape, dtype, quantise_pages, read_pages, DEVICE, gpu=True)


def poisoned(quantise: Callable[..., None], bad: float, device: str, kind: int, gpu: bool) -> None:
    memory = Memory([(16,), (kind,)], (1, 16, 16), torch.float32, 3)
    keys, values = torch.randn(PAGE_SIZE, 1, 16), torch.randn(PAGE_SIZE, 1, 16)
    keys[5, 0, 3] = values[7, 0, 2] = bad
    source, target = memory.filled(0, keys, values), memory.page(1)
    data = memory.data.to(device)
    ids = torch.tensor([source], device=device), torch.tensor([target], device=device)
    quantise(data, memory.head_offsets[None].to(device), *ids, memory.shape, torch.float32)
    data = data.cpu()
    if gpu:
        data = reference.rearrange(data, memory.head_offsets, torch.tensor([target]), memory.shape, 4, back=True)
    read = reference.read_pages(data, memory.head_offsets, torch.tensor([target]), memory.shape, torch.float32)
    assert read[0].isnan().all(), "a key's rotation has it in every channel"
    assert read[1][0, 7].isnan().all()
    assert int(read[1].isnan().sum()) == 16, "the other tokens keep their values"


@pytest.mark.parametrize("kind", [8, 4, 2, 68, 66])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_a_number_is_not_lost(path: str, bad: float, kind: int) -> None:
    from qbe.kernels.cpu.kv_cache.pages import quantise_pages

    poisoned(quantise_pages, bad, "cpu", kind, gpu=False)


@on_device
@pytest.mark.parametrize(
    ("kind", "bad"), covering(1, [8, 4, 2, 68, 66], [float("nan"), float("inf"), float("-inf")], full=CUDA)
)
def test_what_is_not_a_number_is_not_lost_by_the_kernel(kind: int, bad: float) -> None:
    from qbe.kernels.triton.kv_cache.pages import quantise_pages

    poisoned(quantise_pages, bad, DEVICE, kind, gpu=True)


@pytest.mark.parametrize("kind", [2, 4, 8, 68, 66])
@pytest.mark.parametrize("dims", [(8, 8), (5, 3), (40, 6)])
def test_the_order_on_a_gpu_is_another_order_of_the_same_codes(kind: int, dims: tuple[int, int]) -> None:
    memory = Memory([(16, 16), (kind, kind)], (2, *dims), torch.float16, 3)
    block_id = memory.filled(1, torch.randn(PAGE_SIZE, 2, dims[0]), torch.randn(PAGE_SIZE, 2, dims[1]))
    arguments = memory.head_offsets, torch.tensor([block_id]), memory.shape, 2
    there = reference.rearrange(memory.data, *arguments)
    assert not torch.equal(there, memory.data)
    back = reference.rearrange(there, *arguments, back=True)
    for a, b in zip(
        *(reference.read_pages(m, *arguments[:3], torch.float16) for m in (memory.data, back)), strict=True
    ):
        assert torch.equal(a, b)
    if kind > 16:
        return
    # by hand: channel 1 of token 7 of head 1, rotated
    bits = kind
    at = block_id - 1 + head_layout(bits, *dims, 2).nbytes
    row = -(-dims[0] * bits // 8)
    code = int(there[at + 7 * row + 1 % row]) >> (bits * (1 // row)) & (2**bits - 1)
    keys, _ = reference.read_pages(memory.data, *arguments[:3], torch.float16, torch.float64)
    scale, low = there[at + head_layout(bits, *dims, 2).key_scales :][4:8].view(torch.float16).double()
    assert code * scale + low == pytest.approx(float(rotate(keys[1, 7])[1]), abs=1e-6)
