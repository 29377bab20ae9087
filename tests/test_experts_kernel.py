"""`qbe::nested_experts` on a CPU against its reference, on every path that this machine has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expert_samples import SLICES, in_pages, layer, lowered, tokens
from qbe.errors import QBEError
from qbe.kernels.cpu import build, dispatch
from qbe.kernels.cpu.experts import nested as cpu
from qbe.kernels.ops.experts.nested import ACTIVATIONS, ExpertMatrices, nested_experts
from qbe.kernels.reference.experts.nested import nested_experts as reference
from qbe.kernels.reference.nested_linear import dequantise

EXPERTS = 5
# Of the result's norm, for two linear layers one after the other and the gate between them: float32 sums, and x as
# AVX-512 reads it (test_cpu_kernel.py); half a step of 16-bit dtypes for the result and for the input of down.
ERROR = {torch.float32: (1e-5, 3e-4), torch.bfloat16: (2**-8, 2**-8), torch.float16: (2**-10, 2**-10)}


def check(given_: dict[str, Any], made: dict[str, Any], **gate: Any) -> torch.Tensor:
    found, expected = nested_experts(**given_, **made, **gate), reference(**given_, **made, **gate)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    allowed = ERROR[found.dtype][build.backend() in ("avx512", "amx")] * expected.float().norm()
    assert (found.float() - expected.float()).norm() <= allowed
    return found


def _plain(one: ExpertMatrices, inputs: int, bits: int) -> torch.Tensor:
    """Every expert's matrix at these bits, [E, N, K]."""
    if bits == 16:
        assert one.original is not None
        return one.original
    parts = zip(one.packed, one.meta, one.exponents.tolist(), strict=True)
    return torch.stack([dequantise(packed, meta, e, SLICES, inputs, bits) for packed, meta, e in parts])


@pytest.mark.parametrize("bits", [4, 6, 8, 16])
def test_the_reference_is_a_mixture_of_experts(bits: int) -> None:
    """At one precision it is the plain layer of the weights that are read: einsums over all experts."""
    hidden, inner = 96, 72
    given_, made = tokens(7, hidden, EXPERTS, 3), layer(EXPERTS, hidden, inner)
    for one in (made["gate_up"], made["down"]):
        one.precision.fill_(bits)
    gate, up = torch.einsum("th,enh->etn", given_["x"], _plain(made["gate_up"], hidden, bits)).chunk(2, -1)
    each = torch.einsum("eti,ehi->eth", torch.nn.functional.silu(gate) * up, _plain(made["down"], inner, bits))
    share = torch.zeros(7, EXPERTS).scatter_(1, given_["topk_ids"], given_["topk_weights"])
    expected = torch.einsum("ts,sth->th", share, each)
    torch.testing.assert_close(reference(**given_, **made), expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(1, 9),
    top=st.integers(1, EXPERTS),
    hidden=st.integers(1, 150),
    inner=st.integers(1, 90),
    group=st.sampled_from([64, 128]),
    slices=st.sampled_from([(4, 2, 2), (3, 1, 1, 1, 2), (2, 4, 2)]),
    dtype=st.sampled_from(list(ERROR)),
    activation=st.sampled_from(ACTIVATIONS),
    interleaved=st.booleans(),
    limit=st.sampled_from([0.0, 0.7]),
    biased=st.booleans(),
    eight=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_reference(
    path: str, count: int, top: int, hidden: int, inner: int, group: int, slices: tuple[int, ...], dtype: torch.dtype,
    activation: str, interleaved: bool, limit: float, biased: bool, eight: bool, seed: int,
) -> None:  # fmt: skip
    """Gears mixed by row and expert, also widths that the store lacks."""
    made = layer(
        EXPERTS, hidden, inner, dtype=dtype, bits=(1, 4, 6, 7, 8, 16, 19), biased=biased, slices=slices,
        activation_bits=(16, 8) if eight else (16,), group_size=group, seed=seed,
    )  # fmt: skip
    given_ = tokens(count, hidden, EXPERTS, top, dtype=dtype, seed=seed)
    check(given_, made, activation=activation, interleaved=interleaved, alpha=1.702, limit=limit)


def test_down_reads_eight_bits(path: str) -> None:
    """What it gives is far nearer to the reference with 8-bit activations than to that with 16."""
    made, given_ = layer(EXPERTS, 64, 64, bits=(8,), down_activation_bits=(8,)), tokens(6, 64, EXPERTS, 2)
    full = {**made, "down": made["down"]._replace(precision=made["down"].precision & 127)}
    found = nested_experts(**given_, **made)
    near, far = ((found - reference(**given_, **m)).norm() for m in (made, full))
    assert near < far / 3


@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize("biased", [False, True])
def test_prompts(path: str, dtype: torch.dtype, biased: bool) -> None:
    """Experts with so many rows that torch multiplies some of them, beside experts with one row and with none."""
    made = layer(EXPERTS, 128, 64, dtype=dtype, biased=biased)
    given_ = tokens(90, 128, EXPERTS, 2, dtype=dtype)
    given_["topk_ids"] = torch.tensor([0, 1]).repeat(90, 1)
    given_["topk_ids"][7, 1] = 3  # the only row of this expert; those of 2 and 4 are none
    given_["topk_ids"][70:, 0] = 1  # twice the same one, too
    check(given_, made)


def test_prompts_longer_than_a_part(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, given_ = layer(EXPERTS, 64, 64), tokens(40, 64, EXPERTS, 2)
    monkeypatch.setattr(cpu, "PAIRS", 7)
    check(given_, made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_those_beside_them(
    path: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, whatever the experts' other rows read, and on however many threads."""
    if path == "torch":
        pytest.skip("torch's product adds in another order for other numbers of rows")
    made = layer(
        EXPERTS, 192, 80, plan_rows=5, dtype=dtype, activation_bits=(16, 8), down_activation_bits=(16, 8), biased=True
    )
    given_ = tokens(11, 192, EXPERTS, 2, plan_rows=5, dtype=dtype)  # too few for torch's product
    together = nested_experts(**given_, **made)
    monkeypatch.setattr(cpu, "_threads", lambda: 3)
    assert torch.equal(nested_experts(**given_, **made), together)
    for some in ([0], [3, 7], [10, 9, 8, 7, 6]):
        alone = nested_experts(**{name: tensor[some] for name, tensor in given_.items()}, **made)
        assert torch.equal(alone, together[some])


def test_the_order_of_experts_does_not_change_the_rows_that_they_read() -> None:
    made, given_ = layer(EXPERTS, 64, 64), tokens(4, 64, EXPERTS, 3)
    turned = {**given_, "topk_ids": given_["topk_ids"].flip(1), "topk_weights": given_["topk_weights"].flip(1)}
    torch.testing.assert_close(nested_experts(**turned, **made), nested_experts(**given_, **made), rtol=1e-5, atol=1e-5)


def test_a_number_of_no_expert_adds_nothing(path: str) -> None:
    """-1 and E, as expert parallelism has them for the experts of other machines."""
    made, given_ = layer(EXPERTS, 64, 64), tokens(30, 64, EXPERTS, 2)
    given_["topk_ids"][3], given_["topk_ids"][5, 1] = EXPERTS, -1
    found = check(given_, made)
    assert found[3].eq(0).all()
    given_["topk_ids"].fill_(EXPERTS)
    assert check(given_, made).eq(0).all()


def test_no_token(path: str) -> None:
    made, given_ = layer(EXPERTS, 64, 64), tokens(2, 64, EXPERTS, 2)
    assert nested_experts(**{name: tensor[:0] for name, tensor in given_.items()}, **made).shape == (0, 64)


def test_numbers_and_weights_of_other_dtypes_and_a_plan_of_strided_rows(path: str) -> None:
    made, given_ = layer(EXPERTS, 64, 64, plan_rows=3), tokens(6, 64, EXPERTS, 2, plan_rows=3)
    expected = nested_experts(**given_, **made)
    plan = torch.stack([made["gate_up"].precision, made["down"].precision], dim=1)  # [rows, 2, E], as an engine has it
    made["gate_up"] = made["gate_up"]._replace(precision=plan[:, 0])
    made["down"] = made["down"]._replace(precision=plan[:, 1])
    given_["topk_ids"] = given_["topk_ids"].to(torch.int32)
    given_["topk_weights"] = given_["topk_weights"].double()
    assert torch.equal(nested_experts(**given_, **made), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_originals_of_another_dtype(path: str, dtype: torch.dtype) -> None:
    """Rows at 16 bits beside others, where the compiled kernel cannot read the original."""
    made, given_ = layer(EXPERTS, 64, 64, dtype=dtype), tokens(6, 64, EXPERTS, 2, dtype=dtype)
    for name in ("gate_up", "down"):
        made[name] = made[name]._replace(original=made[name].original.double())
    check(given_, made)


def test_a_missing_original_is_said(path: str) -> None:
    made, given_ = layer(EXPERTS, 64, 64, bits=(4, 8)), tokens(6, 64, EXPERTS, 2)
    made["down"].precision[given_["rows"][0], given_["topk_ids"][0, 0]] = 16
    with pytest.raises(RuntimeError, match="a row asks for 16 bits"):
        nested_experts(**given_, **made)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 65)}, "take and give rows of 64"),
        ({"topk_ids": torch.zeros(2, 3, dtype=torch.int64)}, "as many rows of experts and of weights"),
        ({"topk_ids": torch.zeros(2, 2)}, "int32 or int64"),
        ({"rows": torch.zeros(2, dtype=torch.int64)}, "rows must be int32"),
        ({"rows": torch.tensor([0, 4], dtype=torch.int32)}, "not among the 4 of the plan"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        nested_experts(**{**tokens(2, 64, EXPERTS, 2), **change}, **layer(EXPERTS, 64, 64))


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("packed", lambda t: t[:4], "must be contiguous torch.uint8 of"),
        ("meta", lambda t: t.float(), "meta must be contiguous"),
        ("meta", lambda t: t[:, :, :60].contiguous(), "outputs|original must be|rows of 60"),
        ("exponents", lambda t: t.long(), "exponents must be contiguous"),
        ("precision", lambda t: t.int(), "precision must be uint8"),
        ("precision", lambda t: t[:3], "precision must be uint8"),
        ("precision", lambda t: t.T.contiguous().T, "contiguous in its last dimension"),
        ("original", lambda t: t[:, 1:], "original must be"),
        ("bias", lambda t: t[1:], "bias must be"),
    ],
)
@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_matrices_that_do_not_fit_are_refused(name: str, part: str, change: Any, message: str) -> None:
    made = layer(EXPERTS, 64, 64, biased=True)
    made[name] = made[name]._replace(**{part: change(getattr(made[name], part))})
    with pytest.raises(RuntimeError, match=message):
        nested_experts(**tokens(2, 64, EXPERTS, 2), **made)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(QBEError, match="no activation 'tanh'"):
        nested_experts(**tokens(2, 64, 4, 2), **layer(4, 64, 64), activation="tanh")


@pytest.mark.parametrize("page_bytes", [512, 192])  # that hold whole parts, and pieces of them with some room left
def test_pages_anywhere_in_memory_are_the_same_codes(page_bytes: int) -> None:
    """And where slices are missing, rows read the nearest precision that is there."""
    made, given_ = layer(EXPERTS, 150, 40, bits=(4, 6, 8)), tokens(9, 150, EXPERTS, 2)
    levels = {"gate_up": [3, 1, 2, 3, 1], "down": [2, 1, 3, 3, 3]}
    pool, found = in_pages(made, levels, page_bytes)
    y = nested_experts(**given_, **found, page_bytes=page_bytes)
    torch.testing.assert_close(y, reference(**given_, **lowered(made, levels)), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(y, reference(**given_, **made), atol=1e-3)
    del pool


def test_addresses_that_are_none_are_refused() -> None:
    made = layer(EXPERTS, 64, 64)
    _, found = in_pages(made, {"gate_up": [3] * EXPERTS, "down": [3] * EXPERTS}, 512)
    found["down"] = found["down"]._replace(addresses=found["down"].addresses.int())
    with pytest.raises(RuntimeError, match=r"down's addresses must be contiguous torch\.int64"):
        nested_experts(**tokens(2, 64, EXPERTS, 2), **found, page_bytes=512)


def test_a_gradient_is_refused() -> None:
    given_, made = tokens(2, 64, 4, 2), layer(4, 64, 64)
    y = nested_experts(**{**given_, "x": given_["x"].requires_grad_()}, **made)
    with pytest.raises(QBEError, match="no gradient"):
        y.sum().backward()


def test_custom_op() -> None:
    given_, made = tokens(3, 64, 4, 2), layer(4, 64, 64)
    args = (*given_.values(), *made["gate_up"], *made["down"], list(SLICES), "silu", False, 1.0, 0.0, 0)
    torch.library.opcheck(torch.ops.qbe.nested_experts.default, args)


def test_experts_with_many_rows_are_multiplied_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those alone that have them: each of the others keeps its place in the call of all."""
    if build.backend() == "torch":
        pytest.skip("there is no compiled kernel")
    monkeypatch.setattr(dispatch, "many_rows", lambda _: 12)
    monkeypatch.setattr(dispatch, "many_full", lambda _: 12)
    given_, made = tokens(20, 64, EXPERTS, 1), layer(EXPERTS, 64, 64)
    given_["topk_ids"] = torch.tensor([2] * 12 + [0, 1, 1, 1, 3, 3, 4, 4])[:, None]
    called, expert = [], cpu._Layer._expert
    monkeypatch.setattr(cpu._Layer, "_expert", lambda *a: called.append((a[2], len(a[3]))) or expert(*a))
    check(given_, made)
    assert called == [(2, 12)]
