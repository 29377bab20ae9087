"""`qbe::nested_linears` and the CPU ops that torch calls without Python: the results of one call for each weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qbe.kernels.cpu import build, native
from qbe.kernels.cpu.linear import merged as cpu
from qbe.kernels.cpu.linear import nested as single
from qbe.kernels.ops import merged_linear as merged_ops
from qbe.kernels.ops import nested_linear as ops
from qbe.kernels.ops import paged_attention as attention_ops
from qbe.kernels.reference.activations import precision_word
from test_cpu_build import run_python
from test_cpu_kernel import problem
from test_paged_attention import MIXED, case, copied, on_cpu

SIZES = [(70, 200, 64), (33, 200, 64), (12, 200, 128)]  # n, k, group: the last has other groups


def problems(
    rows: int, dtype: torch.dtype, bias: bool, slices: tuple[int, ...] = (4, 2, 2), full: bool = True
) -> dict[str, Any]:
    parts = [problem(n, k, group, slices, rows, dtype, 7 + i, bias) for i, (n, k, group) in enumerate(SIZES)]
    if not full:
        for p in parts:
            p["bits"].clamp_(max=8)
    return {
        "x": parts[0]["x"], "packed": [p["packed"] for p in parts], "meta": [p["meta"] for p in parts],
        "bits": [p["bits"] for p in parts], "originals": [p["original"] for p in parts],
        "biases": [p["bias"] for p in parts] if bias else [], "slices": slices,
        "exponents": [p["exponent"] for p in parts],
    }  # fmt: skip


def one_by_one(a: dict[str, Any]) -> torch.Tensor:
    parts = [
        single.nested_linear(a["x"], p, m, b, o, bias, a["slices"], e)
        for p, m, b, o, bias, e in zip(a["packed"], a["meta"], a["bits"], a["originals"],
                                       a["biases"] or [None] * 3, a["exponents"], strict=True)
    ]  # fmt: skip
    return torch.cat(parts, dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("slices", [(4, 2, 2), (3, 1, 1, 1, 2)])
def test_is_one_call_for_each(path: str, rows: int, dtype: torch.dtype, slices: tuple[int, ...]) -> None:
    for bias in (False, True):
        for full in (False, True):
            a = problems(rows, dtype, bias, slices, full)
            found, expected = cpu.nested_linears(**a), one_by_one(a)
            if path == "torch" or rows == 40:  # torch's product: within its rounding
                torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
            else:
                assert torch.equal(found, expected)


@pytest.mark.parametrize("activations", [8, 16])
@pytest.mark.parametrize("rows", [2, 12])
def test_weights_of_other_precisions_read_the_same_rows(path: str, rows: int, activations: int) -> None:
    if path == "torch":
        pytest.skip("the compiled kernel's")
    a = problems(rows, torch.bfloat16, bias=False)
    a["bits"] = [torch.full((rows,), precision_word(b, activations), dtype=torch.int32) for b in (4, 8, 6)]
    assert torch.equal(cpu.nested_linears(**a), one_by_one(a))
    a["bits"][1] = torch.full(
        (rows,), precision_word(8, 24 - activations), dtype=torch.int32
    )  # which x is not laid out for
    assert torch.equal(cpu.nested_linears(**a), one_by_one(a))


def test_shapes_and_refusals() -> None:
    a = problems(6, torch.float32, True)
    assert cpu.nested_linears(**a | {"x": a["x"].view(2, 3, 200)}).shape == (2, 3, 115)
    for wrong in ({"meta": a["meta"][:2]}, {"biases": a["biases"][:1]}, {"exponents": [300] * 3}, {"originals": []}):
        changed = {**a, **wrong}
        changed["bits"] = [torch.full_like(b, 16) for b in a["bits"]]
        with pytest.raises(RuntimeError):
            cpu.nested_linears(**changed)


def test_the_op_is_well_formed() -> None:
    a = problems(3, torch.float32, True)
    torch.library.opcheck(torch.ops.qbe.nested_linears.default, tuple(a.values()))


@pytest.fixture
def compiled_ops() -> None:
    if not native.load():
        pytest.skip("no C++ compiler, or no compiled kernel")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_ops_without_python_are_those_in_python(compiled_ops: None, rows: int, dtype: torch.dtype) -> None:
    """What C++ serves, and what it hands to Python: many rows, float16."""
    for bias in (False, True):
        for full in (False, True):
            a = problems(rows, dtype, bias, full=full)
            assert torch.equal(merged_ops.nested_linears(**a), cpu.nested_linears(**a))
            first = [a["packed"][0], a["meta"][0], a["bits"][0], a["originals"][0],
                     a["biases"][0] if bias else None, a["slices"], a["exponents"][0]]  # fmt: skip
            for float32_output in (False, True):
                found, expected = (m.nested_linear(a["x"], *first, float32_output) for m in (ops, single))
                assert found.dtype == expected.dtype
                assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_without_python_is_that_in_python(compiled_ops: None, dtype: torch.dtype) -> None:
    from qbe.kernels.cpu.attention.paged import paged_attention as kernel

    arguments = on_cpu(case("smollm", [1, 17, 64, 300], dtype, MIXED))
    for changed in ({}, {"window": 7}, {"softcap": 3.0}):
        first, second = copied(arguments | changed), copied(arguments | changed)
        assert torch.equal(attention_ops.paged_attention(**first), kernel(**second))
        assert torch.equal(first["memory"], second["memory"])
        assert torch.equal(first["entropy"], second["entropy"])


def test_what_is_wrong_is_still_refused(compiled_ops: None) -> None:
    a = problems(3, torch.float32, False, full=False)
    first = dict(packed=a["packed"][0], meta=a["meta"][0], bits=a["bits"][0], original=a["originals"][0], bias=None,
                 slices=(4, 2, 2), exponent=a["exponents"][0])  # fmt: skip
    for wrong in (
        {"slices": (4, 4)}, {"slices": (4, 2, 2, 1)}, {"exponent": 300}, {"bits": first["bits"].long()},
        {"bits": first["bits"][:2]}, {"packed": first["packed"][:, :-1]}, {"bias": torch.zeros(3)},
    ):  # fmt: skip
        with pytest.raises(RuntimeError):
            ops.nested_linear(a["x"], **first | wrong)
    arguments = on_cpu(case("smollm", [3, 20], torch.float32))
    for name, value in (("slots", torch.tensor([0, 2**40])), ("lengths", torch.tensor([0, 3]))):
        with pytest.raises(RuntimeError):
            attention_ops.paged_attention(**arguments | {name: value})


def test_the_ops_are_well_formed_without_python(compiled_ops: None) -> None:
    a = problem(24, 128, 64, (4, 2, 2), 3, torch.float32, 11)
    args = tuple(a[k] for k in ("x", "packed", "meta", "bits", "original", "bias", "slices", "exponent"))
    torch.library.opcheck(torch.ops.qbe.nested_linear.default, args)
    torch.library.opcheck(torch.ops.qbe.nested_linear.default, (args[0].bfloat16(), *args[1:], True))


@pytest.mark.skipif(build.library() is None, reason="no compiled kernel")
def test_without_a_cpp_compiler_python_serves(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_merged_linears import native, problems, merged_ops, torch
print(native.load(), merged_ops.nested_linears(**problems(2, torch.float32, True)).shape[1])
"""
    found = run_python(code, tmp_path, CXX="false")
    assert found.splitlines()[-1] == "False 115"
