"""Profiles from faked capabilities, the real ones of this machine, and the tiers on each."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
import torch
from rich.console import Console

from qbe import QBEError
from qbe.cli.info import hardware, render
from qbe.cli.main import main
from qbe.hardware import Family, HardwareProfile, detect, extensions_of
from qbe.store.checked import AllocationCheck, CheckedAverage
from qbe.store.native_formats import availability
from qbe.tier_formats import USUAL_FORMATS, PrecisionTier, tier_formats

CPUINFO = Path("/proc/cpuinfo")


AVX512 = ("avx2", "avx512", "vnni", "bf16")


def gpu(major: int, minor: int) -> HardwareProfile:
    return HardwareProfile("cuda:0", f"Faked GPU {major}.{minor}", 80 << 30, 132, (major, minor))


def cpu(*extensions: str) -> HardwareProfile:
    return HardwareProfile("cpu", "Faked CPU", 16 << 30, 8, extensions=extensions)


def case(profile: HardwareProfile, family: str, formats: str, eight: str | None) -> tuple[object, ...]:
    return profile, family, tuple(formats.split()), eight


EVERY_FAMILY = [
    case(gpu(10, 0), "blackwell", "bf16 fp16 int8 fp8_e4m3 mxfp8 mxfp6 mxfp4 nvfp4", "fp8_e4m3"),
    case(gpu(10, 3), "blackwell", "bf16 fp16 int8 fp8_e4m3 mxfp8 mxfp6 mxfp4 nvfp4", "fp8_e4m3"),
    case(gpu(12, 0), "blackwell", "bf16 fp16 int8 fp8_e4m3 mxfp8 mxfp6 mxfp4 nvfp4", "fp8_e4m3"),
    case(gpu(9, 0), "hopper", "bf16 fp16 int8 fp8_e4m3", "fp8_e4m3"),
    case(gpu(8, 9), "ada", "bf16 fp16 int8 fp8_e4m3", "fp8_e4m3"),
    case(gpu(8, 0), "ampere", "bf16 fp16 int8", "int8"),
    case(gpu(8, 6), "ampere", "bf16 fp16 int8", "int8"),
    case(gpu(7, 5), "older-cuda", "fp16 int8", "int8"),
    case(gpu(7, 0), "older-cuda", "fp16", None),
    case(gpu(6, 1), "older-cuda", "", None),
    case(cpu(*AVX512), "cpu", "bf16 int8", "int8"),
    case(cpu(*AVX512, "fp16", "amx"), "cpu", "bf16 fp16 int8", "int8"),
    case(cpu("avx2", "avx512", "vnni"), "cpu", "int8", "int8"),
    case(cpu("avx2"), "cpu", "int8", "int8"),
    case(cpu(), "cpu", "", None),
]


@pytest.mark.parametrize(("profile", "family", "formats", "eight"), EVERY_FAMILY)
def test_formats_of_every_family(
    profile: HardwareProfile, family: str, formats: tuple[str, ...], eight: str | None
) -> None:
    assert profile.family == family
    assert profile.formats == formats
    assert profile.activation_formats == ({8: eight} if eight else {}) | {16: "original"}
    described = json.loads(json.dumps(profile.describe()))
    assert described["formats"] == list(formats)
    assert described["activation_formats"].get("8") == eight


def test_every_family_is_covered() -> None:
    assert {str(family) for _, family, _, _ in EVERY_FAMILY} == {str(f) for f in Family}


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("fma3 avx2 avx512_f avx512_bw avx512_vnni avx512_bf16", AVX512),  # Zen 4
        (
            "f16c avx2 avx_vnni avx512_f avx512_bw avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_int8 amx_bf16",
            (*AVX512, "fp16", "amx"),
        ),  # Sapphire Rapids
        ("fma3 avx2 avx_vnni", ("avx2", "vnni")),  # Alder Lake
        ("avx2 avx512_f avx512_cd", ("avx2",)),  # Knights Landing: no byte instructions in AVX-512
        ("sse4_2 avx", ()),
        ("neon dot bf16 i8mm", ()),  # Arm
    ],
)
def test_extensions_of_known_cpus(flags: str, names: tuple[str, ...]) -> None:
    assert extensions_of(flags.split()) == names


@pytest.mark.skipif(not CPUINFO.exists() or "flags" not in CPUINFO.read_text(), reason="needs Linux on x86")
def test_this_cpu_against_what_the_kernel_says() -> None:
    found, text = detect("cpu"), CPUINFO.read_text()
    flags = set(next(line for line in text.splitlines() if line.startswith("flags")).split())
    assert found.family is Family.CPU
    assert ("avx2" in found.extensions) == ("avx2" in flags)
    assert ("avx512" in found.extensions) == ("avx512bw" in flags)
    assert ("vnni" in found.extensions) == bool(flags & {"avx512_vnni", "avx_vnni"})
    assert ("bf16" in found.extensions) == bool(flags & {"avx512_bf16", "amx_bf16"})
    assert ("fp16" in found.extensions) == bool(flags & {"avx512_fp16", "amx_fp16"})
    assert ("amx" in found.extensions) == ("amx_tile" in flags)
    assert found.processors == os.cpu_count()
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert found.memory_bytes == pytest.approx(total, rel=0.01)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_this_gpu() -> None:
    found = detect("cuda")
    assert found == detect(torch.device("cuda", torch.cuda.current_device()))
    assert found.capability == torch.cuda.get_device_capability()
    assert found.name == torch.cuda.get_device_name()
    assert found.memory_bytes == torch.cuda.mem_get_info()[1]
    assert found.processors == torch.cuda.get_device_properties(0).multi_processor_count


@pytest.mark.parametrize("name", ["meta", "cuda:99", "toaster"])
def test_devices_that_are_not_there(name: str) -> None:
    with pytest.raises(QBEError, match=name) as refused:
        detect(name)
    assert "\n" not in str(refused.value)


def shown(profile: HardwareProfile, gears: tuple[int, ...] = (4, 6, 8, 16)) -> list[str]:
    """Each tier as 'weights / activations'."""
    return [
        f"{f.weight_format} {f.weight_bits} / {f.activation_format} {f.activation_bits}"
        for f in tier_formats(profile, gears).values()
    ]


HIGH = "original 16 / original 16"


NESTED_FP8 = ["nested 4 / fp8_e4m3 8", "nested 6 / fp8_e4m3 8", "nested 8 / fp8_e4m3 8", HIGH]


NESTED_INT8 = ["nested 4 / int8 8", "nested 6 / int8 8", "nested 8 / int8 8", HIGH]


NESTED_ONLY = ["nested 4 / original 16", "nested 6 / original 16", "nested 8 / original 16", HIGH]


@pytest.mark.parametrize(
    ("profile", "tiers"),
    [
        (gpu(10, 0), ["nvfp4 4 / nvfp4 4", *NESTED_FP8[1:]]),
        (gpu(12, 0), ["nvfp4 4 / nvfp4 4", *NESTED_FP8[1:]]),
        (gpu(9, 0), NESTED_FP8),
        (gpu(8, 9), NESTED_FP8),
        (gpu(8, 0), NESTED_INT8),
        (gpu(7, 5), NESTED_INT8),
        (gpu(7, 0), NESTED_ONLY),
        (cpu(*AVX512), NESTED_INT8),
        (cpu("avx2"), NESTED_INT8),
        (cpu(), NESTED_ONLY),
    ],
)
def test_tiers_of_every_family(profile: HardwareProfile, tiers: list[str]) -> None:
    assert shown(profile) == tiers


def test_tiers_read_the_gears_that_a_store_has() -> None:
    assert [row.split(" /")[0] for row in shown(gpu(9, 0), (3, 5, 8, 16))] == [
        "nested 3", "nested 5", "nested 8", "original 16",
    ]  # fmt: skip
    assert [row.split(" /")[0] for row in shown(gpu(9, 0), (8, 16))][:2] == ["nested 8", "nested 8"]
    without_original = tier_formats(gpu(9, 0), (4, 6, 8))[PrecisionTier.HIGH]
    assert (without_original.weight_format, without_original.weight_bits) == ("nested", 8)
    assert "no 16 bits" in without_original.why


@pytest.mark.parametrize(("profile", "family", "formats", "eight"), EVERY_FAMILY)
def test_a_tier_asks_for_nothing_that_the_device_does_not_run(
    profile: HardwareProfile, family: str, formats: tuple[str, ...], eight: str | None
) -> None:
    for tier, form in tier_formats(profile).items():
        assert form.weight_format in ("nested", "original", *formats)
        assert form.activation_format in ("original", *formats)
        assert form.why
        assert "\n" not in form.why
        assert form.specification == USUAL_FORMATS[tier].get(profile.family)


def test_the_usual_formats() -> None:
    assert [list(row.values()) for row in USUAL_FORMATS.values()] == [
        ["NVFP4", "INT4 (tinygemm)", "INT4 (tinygemm)"],
        ["FP6", "INT4 (CUTLASS)", "INT4 (CUTLASS)"],
        ["FP8 E4M3", "FP8 E4M3", "INT8"],
        ["FP16", "FP16", "FP16"],
    ]
    assert all(list(row) == [Family.BLACKWELL, Family.HOPPER, Family.AMPERE] for row in USUAL_FORMATS.values())


def test_info_shows_the_profile_and_the_tiers(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QBE_CACHE", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["info", "--model", str(tiny_folder), "--json"])
    assert ended.value.code == 0
    machine = json.loads(capsys.readouterr().out)["hardware"]
    profile = machine["profile"]
    assert {"device", "name", "family", "capability", "memory_bytes", "processors", "extensions", "formats"} <= set(
        profile
    )
    assert profile["family"] in set(Family)
    assert list(machine["tiers"]) == ["ultra-low", "low", "medium", "high"]
    for form in machine["tiers"].values():
        assert set(form) == {
            "weight_format", "weight_bits", "activation_format", "activation_bits", "why", "specification",
        }  # fmt: skip
    assert set(machine["native_formats"]) == {"fp8_e4m3", "mxfp8", "mxfp4", "nvfp4", "mxfp6"}
    assert machine["native_formats"]["mxfp6"]


@pytest.mark.parametrize("profile", [gpu(10, 0), gpu(9, 0), cpu(*AVX512), cpu()], ids=lambda p: p.name)
def test_the_terminal_fits_80_columns(profile: HardwareProfile) -> None:
    machine = hardware() | {
        "profile": profile.describe(),
        "tiers": {str(t): f.describe() for t, f in tier_formats(profile).items()},
        "native_formats": availability(profile),
    }
    row = CheckedAverage(4.5, 0.012345, 0.0123, 0.0178, 0.693, 0.644, 0.741, 0.731)
    store = {
        "allocation_check": AllocationCheck(16, 64, {4: 0.0, 6: 0.3, 8: 1.0}, (row, row)).describe(),
        "slices": [4, 2, 2], "group_size": 64, "nested_sites": 1, "nested_bytes": 1, "bits_per_weight": 8.75,
        "folder": "folder", "sensitivity_measured": True, "kv_sensitivity_measured": False,
    }  # fmt: skip
    model = {"model": "m", "type": "llama", "parameters": 1, "layers": 1, "dtype": "bfloat16", "roles": [],
             "pictures": None}  # fmt: skip
    screen = Console(file=io.StringIO(), width=80)
    screen.print(render(model | {"unknown": [], "store": store, "hardware": machine, "provenance": None}))
    lines = screen.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    for word in (profile.name, str(profile.family), *profile.formats, *profile.extensions, "ultra-low", "original 16"):
        assert word in text
    eight = {Family.CPU: "" if profile.extensions else " (rounded to, not multiplied in)"}
    long = eight.get(profile.family, "; long prompts fp8_e4m3, a scale per row, at sites that bear it")
    assert f"activation gears: 16 (original), 8 (int8, a scale per group{long})" in text
