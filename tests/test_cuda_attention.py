"""The kernel of `qbe.kernels.cuda` against the reference, on a GPU or played on a CPU.

There its source is compiled with a header that has a warp's instructions as functions, so that what it computes, and
which of its copies it waits for, is tested everywhere; what a GPU does differently (rounding, real races) is not.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_samples import Memory
from qbe.kernels.cpu.build import compiled
from qbe.kernels.cuda import decode_attention
from qbe.kernels.reference.paged_attention import paged_attention as reference
from qbe.kernels.reference.rotation import rotate
from test_paged_attention import MIXED, case, copied, on_cpu, on_gpu_order, same
from test_triton_kernel import CUDA, DEVICE

HERE = Path(__file__).parent
POINTERS = ("query", "key", "value", "memory", "blocks", "slots", "tables", "lengths", "means", "sums")


class Arguments(ctypes.Structure):
    """As in emulated_attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        ("strides", ctypes.c_int * 10),
        ("scaling", ctypes.c_double),
        ("softcap", ctypes.c_double),
        *((name, ctypes.c_int) for name in ("parts", "kv_heads", "repeat", "window")),
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


def kernel_of(parts: int, late: bool) -> Any:
    """`qbe::paged_attention` with the emulated kernel, a sum over its parts in PyTorch."""

    def kernel(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, memory: torch.Tensor, blocks: torch.Tensor,
        slots: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor, entropy: torch.Tensor, scaling: float,
        window: int, softcap: float,
    ) -> torch.Tensor:  # fmt: skip
        batch, heads, dim = query.shape
        kv_heads = key.shape[1]
        aligned = torch.empty(len(memory) + 256, dtype=torch.uint8)
        aligned = aligned[-aligned.data_ptr() % 256 :][: len(memory)].copy_(memory)
        means = torch.full((batch, parts, heads, dim), math.nan)
        sums = torch.full((batch, parts, 3, heads), math.nan)
        tensors = (query, key, value, aligned, blocks, slots, tables, lengths, means, sums)
        strides = (*query.stride(), *key.stride(), *value.stride(), tables.stride(0))
        given = Arguments(
            *(t.data_ptr() for t in tensors), (ctypes.c_int * 10)(*strides), scaling, softcap, parts, kv_heads,
            heads // kv_heads, window,
        )  # fmt: skip
        emulation().run(ctypes.byref(given), dim, query.dtype == torch.float16, batch, late)
        memory.copy_(aligned)
        logarithm, score, rotated = sums.unbind(2)
        top = logarithm.amax(1, keepdim=True)
        weights = torch.exp2(logarithm - top)
        total = weights.sum(1)
        plain = torch.where(rotated[..., None] > 0, rotate(means), means)
        nats = (top[:, 0] + total.log2() - (weights * score).sum(1) / total) * math.log(2)
        entropy.copy_(nats)
        return ((plain * weights[..., None]).sum(1) / total[..., None]).to(query.dtype)

    return kernel


def kernel(parts: int) -> Any:
    """The real one, or the emulated one with so many parts."""
    from qbe.kernels.triton.paged_attention import paged_attention

    return paged_attention if CUDA else kernel_of(parts, False)


def check(arguments: dict[str, Any], dtype: torch.dtype, parts: int = 3) -> None:
    """On a GPU the kernel itself, with parts of its own choice."""
    if CUDA:
        assert decode_attention.serves(*(arguments[name] for name in ("query", "key", "value", "softcap")))
        same(arguments, dtype)
        return
    for late in (False, True):
        same(on_cpu(arguments), dtype, kernel_of(parts, late), gpu_order=True)


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


@pytest.mark.parametrize("formats", [[16, 4, 2, 8, 68, 66, 4, 4], [16, 8, 4], [16]], ids=str)
@pytest.mark.parametrize("parts", [1, 2, 40])
def test_runs_of_every_length(formats: list[int], parts: int) -> None:
    """More pages of a kind than a warp has slots, more pages than a list has places, more parts than pages."""
    length = 9000 if parts == 2 else 17000 if parts == 1 else 1000
    check(case("two heads", [length], torch.float16, formats, room=length), torch.float16, parts)


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
    """Sealed tokens whose weights are 2^7.5 times the first one's, times the scales of values of some thousands."""
    arguments: dict[str, Any] = case("two heads", [70], torch.float16, [16, bits])
    memory = Memory([(16,), (bits,)], (1, 64, 64), torch.float16, 4)
    query = arguments["query"][:, :1].cpu().float()
    keys = (query / query.norm() ** 2 * 7.5 * math.log(2) / arguments["scaling"]).expand(69, 1, 64)
    values = (500 if bits == 2 else 2500) * torch.randn(69, 1, 64, generator=torch.Generator().manual_seed(0))
    entries = [memory.filled(1, keys[:64], values[:64]), memory.filled(0, keys[64:], values[64:])]
    arguments |= {
        "memory": memory.data.to(DEVICE), "blocks": memory.words.to(DEVICE),
        "tables": torch.tensor([entries], device=DEVICE), "slots": torch.tensor([entries[1] + 5], device=DEVICE),
        "key": torch.zeros_like(arguments["key"]),
    }  # fmt: skip
    expected = reference(**copied(arguments))
    found = kernel(1)(**arguments | {"memory": on_gpu_order(arguments)})
    assert expected.isfinite().all()
    assert (found - expected).abs().max() <= 2e-3 * values.abs().max()


def test_what_is_not_a_number_is_seen() -> None:
    for name, bad in (("key", math.inf), ("value", math.nan)):
        arguments: dict[str, Any] = case("smollm", [70, 70], torch.float16)
        arguments[name] = arguments[name].clone()
        arguments[name][1, 2, 5] = bad
        out = kernel(2)(**arguments)
        assert out[1, 6:].isnan().any(1).all()
        assert not out[0].isnan().any()
        assert not out[1, :6].isnan().any()
        assert arguments["entropy"][1, 6:].isnan().all() == (name == "key")


@pytest.mark.parametrize(
    ("heads", "pages", "parts"), [(64, 512, 2), (8, 512, 16), (72, 512, 7), (3, 1, 1), (200, 8, 1), (1, 40, 40)]
)
def test_parts_keep_all_processors_busy(heads: int, pages: int, parts: int) -> None:
    assert decode_attention.parts_for(heads, pages, 132) == parts


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
