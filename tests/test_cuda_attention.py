"""The kernel of `qbe.kernels.cuda` against the reference, on a GPU or played on a CPU.

There its source is compiled with a header that has a warp's instructions as functions, so that what it computes, and
which of its copies it waits for, is tested everywhere; what a GPU does differently (rounding, real races) is not.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from covering import FULL, covering
from kv_samples import Memory
from qbe.kernels.cpu.build import compiled
from qbe.kernels.cuda import decode_attention
from qbe.kernels.reference.paged_attention import paged_attention as reference
from test_paged_attention import MIXED, case, copied, on_cpu, on_gpu_order, same, with_sinks
from test_triton_kernel import CUDA, DEVICE

HERE = Path(__file__).parent
POINTERS = ("query", "key", "value", "memory", "head_offsets", "slots", "block_tables", "lengths", "cuts", "means",
            "sums", "spans", "sinks", "out", "entropy")  # fmt: skip
NUMBERS = ("parts", "start", "least", "batch", "kv_heads", "repeat", "window", "count")


class Arguments(ctypes.Structure):
    """As in emulated_attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        ("strides", ctypes.c_int * 11),
        ("scaling", ctypes.c_double),
        ("softcap", ctypes.c_double),
        *((name, ctypes.c_int) for name in NUMBERS),
    )


@cache
def emulation() -> ctypes.CDLL:
    if not any(shutil.which(name) for name in ("g++", "c++", "clang++")):
        pytest.skip("no C++ compiler")
    files = [HERE / "emulated_gpu.h", HERE / "emulated_attention.cpp"]
    text = decode_attention.source() + "".join(path.read_text() for path in files)
    name = f"emulated-attention-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    flags = ["-O1", "-std=c++17", "-w", "-shared", "-fPIC", str(files[1])]
    path = compiled(name, ("CXX", "g++", "c++", "clang++"), flags, "it is not tested")
    assert path is not None, "the kernel does not compile"
    return ctypes.CDLL(str(path))


@dataclass(frozen=True)
class Cut:
    """How the emulated kernel shares out pages: by cost over so many blocks, or each key head into so many parts.

    ahead: found by a kernel of its own.
    """

    head_offsets: int = 5
    start: int = 7
    least: int = 20
    parts: int = 0
    ahead: bool = False


def kernel_of(cut: Cut, late: bool) -> Any:
    """`qbe::paged_attention` with the emulated kernels."""

    def kernel(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, memory: torch.Tensor, head_offsets: torch.Tensor,
        slots: torch.Tensor, block_tables: torch.Tensor, lengths: torch.Tensor, entropy: torch.Tensor, scaling: float,
        window: int, softcap: float, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        batch, heads, dim = query.shape
        pairs, repeat = batch * key.shape[1], heads // key.shape[1]
        count = pairs * cut.parts or cut.head_offsets
        aligned = torch.empty(len(memory) + 256, dtype=torch.uint8)
        aligned = aligned[-aligned.data_ptr() % 256 :][: len(memory)].copy_(memory)
        means = torch.full((count + pairs, repeat, dim), math.nan)
        sums = torch.full((count + pairs, 3, repeat), math.nan)
        spans = torch.full((pairs, 2), -(2**31), dtype=torch.int32)
        out = torch.full((batch, heads, dim), math.nan, dtype=query.dtype)
        cuts = torch.full((count + 1, 2), -(2**31), dtype=torch.int32) if cut.ahead else None
        assert entropy.stride() == (heads, 1)
        tensors = (
            query,
            key,
            value,
            aligned,
            head_offsets,
            slots,
            block_tables,
            lengths,
            cuts,
            means,
            sums,
            spans,
            sinks,
            out,
            entropy,
        )
        strides = (*query.stride(), *key.stride(), *value.stride(), block_tables.stride(0), block_tables.shape[1])
        given = Arguments(
            *(None if t is None else t.data_ptr() for t in tensors), (ctypes.c_int * 11)(*strides), scaling, softcap,
            cut.parts, cut.start, cut.least, batch, key.shape[1], repeat, window, count,
        )  # fmt: skip
        emulation().run(ctypes.byref(given), dim, query.dtype == torch.float16, count, late)
        memory.copy_(aligned)
        assert ((spans[:, 0] >= 0) & (spans[:, 0] <= spans[:, 1]) & (spans[:, 1] <= count + pairs)).all()
        return out

    return kernel


def kernel() -> Any:
    """The real one, or the emulated one."""
    from qbe.kernels.cuda.dispatch import paged_attention

    return paged_attention if CUDA else kernel_of(Cut(), False)


def check(arguments: dict[str, Any], dtype: torch.dtype, cut: Cut | None = None) -> None:
    """On a GPU the kernel itself, on all its processors."""
    if CUDA:
        assert decode_attention.serves(*(arguments[name] for name in ("query", "key", "value", "softcap")))
        same(arguments, dtype)
        return
    for late in (False, True):
        same(on_cpu(arguments), dtype, kernel_of(cut or Cut(), late), gpu_order=True)


@pytest.mark.parametrize("formats", [MIXED[:1], MIXED], ids=["full", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", ["smollm", "llama", "no sharing", "five queries", "eight queries"])
def test_it_is_the_reference(shape: str, dtype: torch.dtype, formats: list[object]) -> None:
    check(case(shape, [1, 2, 17, 64, 65, 300], dtype, formats), dtype)


@pytest.mark.parametrize("bits", [16, 8, 4, 2, 68, 66])
@pytest.mark.parametrize("shape", ["smollm", "llama"])
def test_every_precision_alone(shape: str, bits: int) -> None:
    check(case(shape, [400, 65], torch.float16, [16, bits]), torch.float16)


@pytest.mark.parametrize("window", [0, 1, 7, 64, 100])
@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_windows_and_soft_caps(window: int, softcap: float) -> None:
    arguments = case("smollm", [1, 63, 64, 65, 66, 399], torch.float16, MIXED)
    check(arguments | {"window": window, "softcap": softcap}, torch.float16)


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("shape", ["smollm", "eight queries"])
def test_sinks(shape: str, window: int) -> None:
    arguments = with_sinks(case(shape, [1, 63, 64, 65, 66, 399], torch.float16, MIXED))
    check(arguments | {"window": window}, torch.float16)


@pytest.mark.parametrize("formats", [[16, 4, 2, 8, 68, 66, 4, 4], [16, 8, 4], [16]], ids=str)
@pytest.mark.parametrize("parts", [1, 2, 40])
def test_runs_of_every_length(formats: list[int], parts: int) -> None:
    """More pages of a kind than a warp has slots, more pages than a list has places, more parts than pages."""
    length = 9000 if parts == 2 else 17000 if parts == 1 else 1000
    check(case("two heads", [length], torch.float16, formats, room=length), torch.float16, Cut(parts=parts))


def test_a_list_of_full_pages_after_one_of_sealed_ones() -> None:
    """What quantised pages left in the sums is turned back for the last page, whose list has no other."""
    length = 64 * 256 + 10
    check(case("two heads", [length], torch.float16, [16, 4], room=length), torch.float16, Cut(parts=1))


BY_HEAD = [16, (16, 2, 4), (2, 16, 8), 8, 4]
LENGTHS = {  # of batches, and formats of their pages
    "one is long": ([1000, 1, 65, 70, 3, 64, 129], [16, 4]),
    "a page or none": ([1, 65, 1, 1, 129, 65, 1, 2], [16, 8, 4, 2]),
    "none has a page": ([1, 1, 1], [16]),
    "precision by head": ([700, 900, 800], BY_HEAD[:2]),
    "precision by head and page": ([700, 65, 900], BY_HEAD),
    "all alike": ([449] * 6, [16, 4]),
    "one": ([1500], BY_HEAD),
    "many": ([1 + 37 * i % 331 for i in range(12)], [16, 2, 8]),
}


CUTS = [Cut(1), Cut(7), Cut(132, 250, 80), Cut(23, 0, 1), Cut(7, ahead=True)]


@pytest.mark.parametrize(
    ("name", "cut"),
    covering(2, list(LENGTHS), CUTS) if CUDA or FULL
    else dict.fromkeys([*covering(1, list(LENGTHS), CUTS), *((name, CUTS[1]) for name in LENGTHS)]),
    ids=str,
)  # fmt: skip
def test_pages_are_shared_out_by_cost(name: str, cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts begin and end within pairs and pages of every kind, blocks have several pairs, some have none."""
    lengths, formats = LENGTHS[name]
    arguments = case("smollm", lengths, torch.float16, formats, room=max(lengths))
    if CUDA:
        monkeypatch.setattr("qbe.kernels.triton.attention.paged.processors", lambda device: cut.head_offsets)
        monkeypatch.setattr(decode_attention, "START", cut.start)
        monkeypatch.setattr(decode_attention, "LEAST", cut.least)
        monkeypatch.setattr(decode_attention, "parts_for", lambda *_: 0)
    check(arguments, torch.float16, cut)


def pieces(lengths: list[int], bits: list[list[int]], thread_blocks: int, window: int = 0) -> torch.Tensor:
    """Of each block what the pages cost that it reads, and how often it begins: what `plan.cuh` makes of a batch.

    bits: of the pages of each sequence, for all key heads (two) alike.
    """
    kinds = sorted({b for row in bits for b in row} | {16})
    head_offsets = torch.tensor([[b | 256, b | 256] for b in kinds], dtype=torch.int32)
    width = max(map(len, bits))
    block_tables = torch.tensor([[kinds.index(b) for b in row] + [2**50] * (width - len(row)) for row in bits])
    found = torch.full((thread_blocks, 4), -1, dtype=torch.int32)
    tensors = head_offsets, block_tables, torch.tensor(lengths), found
    emulation().pieces(
        *(ctypes.c_void_p(t.data_ptr()) for t in tensors), width, 2, window,
        len(lengths), thread_blocks, decode_attention.START, decode_attention.LEAST,
    )  # fmt: skip
    return found


COSTS = {16: 27, 8: 15, 4: 10, 2: 9}  # `cost_of`


def spent(lengths: list[int], bits: list[list[int]], thread_blocks: int) -> tuple[list[int], int]:
    """What each block spends, beginnings included, and all pages together; every page is read once."""
    read = {(i, head): [0] * len(row) for i, row in enumerate(bits) for head in range(2)}
    times = []
    for pair, page, last_pair, last_page in pieces(lengths, bits, thread_blocks).tolist():
        own = 0
        for p in range(pair, min(last_pair + (last_page > 0), 2 * len(lengths))):
            row = bits[p // 2]
            pages = range(page if p == pair else 0, last_page if p == last_pair else len(row))
            own += sum(COSTS[row[i]] for i in pages) + decode_attention.START * (len(pages) > 0)
            for i in pages:
                read[p // 2, p % 2][i] += 1
        times.append(own)
    assert all(n == 1 for row in read.values() for n in row)
    return times, sum(2 * COSTS[b] for row in bits for b in row)


@pytest.mark.parametrize("seed", range(6))
def test_blocks_end_at_the_same_time(seed: int) -> None:
    """Sequences of very different lengths, of pages of one precision after the other."""
    random = Random(seed)
    counts = [random.choice([1, 3, 10, 40, 300]) for _ in range(random.choice([3, 12, 40]))] + [500]
    bits = [sorted(random.choices([16, 8, 4, 2], k=n)) for n in counts]
    times, total = spent([64 * n + 1 for n in counts], bits, 29)
    share = (total + 2 * len(counts) * decode_attention.START) / 29
    assert max(times) <= 1.15 * share + decode_attention.START


def test_equal_pairs_are_not_begun_twice() -> None:
    times, total = spent([64 * 500 + 1] * 8, [[4] * 500] * 8, 33)
    assert sorted(set(times)) == [0, total // 32 + decode_attention.START]
    assert max(spent([64 * 500 + 1] * 8, [[16] * 500] * 8, 33)[0]) < 500 // 2 * COSTS[16] + decode_attention.START
    times, total = spent([64 * 50 + 1] * 32, [[4] * 50] * 32, 33)
    assert sorted(set(times)) == [0, 2 * (500 + decode_attention.START)]


@pytest.mark.parametrize(
    ("pairs", "pages", "parts"),
    [
        (64, 512, 0),
        (8, 512, 16),
        (8, 600, 0),
        (8, 8, 1),
        (8, 64, 8),
        (64, 16, 2),
        (2048, 16, 0),
        (20000, 16, 1),
        (1, 40, 5),
    ],
)
def test_few_pages_are_cut_into_as_many_parts_of_each_pair(pairs: int, pages: int, parts: int) -> None:
    assert decode_attention.parts_for(pairs, pages, 132) == parts


def test_results_are_the_same_each_time() -> None:
    """To the last bit, whatever a block does first."""
    arguments = case("llama", [2000, 3, 700, 65], torch.bfloat16, BY_HEAD, room=2000)
    if not CUDA:
        arguments = on_cpu(arguments)
    found = []
    for late in (False, True, False):
        run = kernel() if CUDA else kernel_of(Cut(7), late)
        given = copied(arguments) | {"memory": on_gpu_order(copied(arguments))}
        found.append((run(**given), given["entropy"]))
    for out, entropy in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(entropy, found[0][1])


@pytest.mark.parametrize(
    ("kv_heads", "pages", "parts"), [(8, 5, 1), (8, 128, 8), (8, 512, 16), (3, 512, 32), (200, 99, 1)]
)
def test_batch_invariant_parts_fill_a_device_and_are_not_short(kv_heads: int, pages: int, parts: int) -> None:
    assert decode_attention.batch_invariant_splits(kv_heads, pages, 132) == parts


@pytest.mark.parametrize("shape", ["llama", "smollm"])
def test_a_row_is_the_same_whatever_rows_are_beside_it(shape: str) -> None:
    """Bit for bit, as `batch_invariant_attention` cuts pages."""
    arguments = case(shape, [2000, 3, 700, 65], torch.bfloat16, BY_HEAD, room=2000)
    if not CUDA:
        arguments = on_cpu(arguments)
    parts = decode_attention.batch_invariant_splits(arguments["key"].shape[1], arguments["block_tables"].shape[1], 132)
    assert parts > 1

    def run(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        given = copied(arguments) | {"memory": on_gpu_order(copied(arguments))}
        given |= {n: given[n][rows] for n in ("query", "key", "value", "slots", "block_tables", "lengths", "entropy")}
        out = kernel()(**given, batch_invariant=True) if CUDA else kernel_of(Cut(parts=parts), False)(**given)
        return out, given["entropy"]

    together = run(slice(0, 4))
    for rows in (slice(0, 1), slice(1, 3), slice(2, 3), slice(3, 4)):
        for found, expected in zip(run(rows), together, strict=True):
            assert torch.equal(found, expected[rows])


@pytest.mark.parametrize("sharp", [1e-3, 0.3, 60.0])
def test_scores_of_every_size(sharp: float) -> None:
    """From nearly uniform weights to a single one."""
    arguments = case("llama", [3, 300], torch.float16, MIXED[:4])
    check(arguments | {"scaling": sharp}, torch.float16)


def test_numbers_may_lie_apart() -> None:
    arguments: dict[str, Any] = case("five queries", [70, 200], torch.float16, MIXED)
    for name in ("query", "key", "value"):
        x = arguments[name]
        wide = torch.zeros(x.shape[0] + 1, x.shape[1] + 2, x.shape[2], 3, dtype=x.dtype, device=x.device)
        arguments[name] = wide[1:, 2:, :, 1].copy_(x)
        assert arguments[name].stride(2) == 3
    check(arguments, torch.float16)


@pytest.mark.parametrize("bits", [4, 2])
def test_large_values_stay_finite_in_float16(bits: int) -> None:
    """Quantised tokens whose weights are 2^7.5 times the first one's, times the scales of values of some thousands."""
    arguments: dict[str, Any] = case("two heads", [70], torch.float16, [16, bits])
    memory = Memory([(16,), (bits,)], (1, 64, 64), torch.float16, 4)
    query = arguments["query"][:, :1].cpu().float()
    keys = (query / query.norm() ** 2 * 7.5 * math.log(2) / arguments["scaling"]).expand(69, 1, 64)
    values = (500 if bits == 2 else 2500) * torch.randn(69, 1, 64, generator=torch.Generator().manual_seed(0))
    block_ids = [memory.filled(1, keys[:64], values[:64]), memory.filled(0, keys[64:], values[64:])]
    arguments |= {
        "memory": memory.data.to(DEVICE), "head_offsets": memory.head_offsets.to(DEVICE),
        "block_tables": torch.tensor([block_ids], device=DEVICE),
        "slots": torch.tensor([block_ids[1] + 5], device=DEVICE), "key": torch.zeros_like(arguments["key"]),
    }  # fmt: skip
    expected = reference(**copied(arguments))
    found = kernel()(**arguments | {"memory": on_gpu_order(arguments)})
    assert expected.isfinite().all()
    assert (found - expected).abs().max() <= 2e-3 * values.abs().max()


def test_what_is_not_a_number_is_seen() -> None:
    for name, bad in (("key", math.inf), ("value", math.nan)):
        arguments: dict[str, Any] = case("smollm", [70, 70], torch.float16)
        arguments[name] = arguments[name].clone()
        arguments[name][1, 2, 5] = bad
        out = kernel()(**arguments)
        assert out[1, 6:].isnan().any(1).all()
        assert not out[0].isnan().any()
        assert not out[1, :6].isnan().any()
        assert arguments["entropy"][1, 6:].isnan().all() == (name == "key")


@pytest.mark.parametrize("dim", decode_attention.DIMS)
def test_a_block_fits_into_shared_memory(dim: int) -> None:
    """227 KiB of compute capability 9.0, and what is launched is what the kernel uses."""
    assert emulation().room_bytes(dim) == decode_attention.shared_bytes(dim) <= 227 << 10


def test_a_damaged_binary_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qbe.kernels.cuda import nvrtc

    made: list[str] = []

    def compile_kernel(source: str, name: str, arch: str) -> tuple[bytes, str]:
        made.append(name)
        return b"\x7fELF\n\x00 code\n of " + name.encode(), "_Z1" + name

    monkeypatch.setenv("QBE_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "compile_kernel", compile_kernel)
    first = nvrtc.compiled_kernel("source", "k", "90")
    assert nvrtc.compiled_kernel("source", "k", "90") == first
    assert made == ["k"]
    (file,) = (tmp_path / "kernels").iterdir()
    whole = file.read_bytes()
    for damaged in (b"", b"\xff\xfe\n", whole[:-3], whole.replace(b"code", b"cede")):
        file.write_bytes(damaged)
        made.clear()
        assert nvrtc.compiled_kernel("source", "k", "90") == first
        assert made == ["k"]
        assert file.read_bytes() == whole
    assert nvrtc.compiled_kernel("source", "other", "90") != first


def test_a_binary_that_cannot_be_kept_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from qbe.kernels.cuda import nvrtc

    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("QBE_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(nvrtc, "compile_kernel", lambda *_: (b"code", "k"))
    assert nvrtc.compiled_kernel("source", "k", "90") == (b"code", "k")
    assert "cannot be kept" in caplog.text
