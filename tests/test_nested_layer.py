"""A nested linear layer as its user meets it: bad input gets one clear line, and no gradient is lost silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from qbe.errors import QBEError
from qbe.format.layout import SliceLayout
from qbe.kernels.cpu.linear import nested as cpu
from qbe.kernels.ops import merged_linear as merged_ops
from qbe.kernels.ops import nested_linear as ops
from qbe.store.nested_linears import NestedWeightConfig, quantize_
from qbe.store.nested_tensor import NestedTensor


@pytest.fixture
def layer(device: torch.device) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 32)).to(device)
    quantize_(model, NestedWeightConfig())
    return model[0]


def refused(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(QBEError, match=says) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_gradient_through_it_is_refused(layer: nn.Linear, device: torch.device) -> None:
    w, x = layer.weight, torch.randn(3, 100, device=device)
    bits, wants = w.bits.expand(3), x.clone().requires_grad_(True)
    many = ([w.packed], [w.meta], [bits], [w.original], [], w.slices, [w.exponent])

    def one(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return ops.nested_linear(x, w.packed, w.meta, bits, w.original, bias, w.slices, w.exponent)

    for call in (layer, lambda x: linear(x, w), one, lambda x: merged_ops.nested_linears(x, *many)):
        plain = call(x)
        assert not plain.requires_grad
        assert torch.equal(call(wants), plain)
        refused(call(wants).sum().backward, "no gradient.*train the 16-bit model")
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert not call(wants).requires_grad
    bias = torch.zeros(32, device=device, requires_grad=True)
    for with_bias in (lambda: one(x, bias), lambda: linear(x, w, bias)):
        refused(with_bias().sum().backward, "no gradient")
    assert wants.grad is bias.grad is None


def test_a_nested_layer_is_frozen_until_somebody_asks_for_gradients(layer: nn.Linear) -> None:
    assert not any(p.requires_grad for p in layer.parameters())
    x = torch.randn(1, 100, device=layer.weight.device)
    assert not layer(x).requires_grad
    layer.requires_grad_(True)
    refused(layer(x).sum().backward, "no gradient")


def test_a_prompt_on_a_gpu_does_not_lose_one_either(layer: nn.Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts of one precision take a way of their own."""
    x = torch.randn(300, 100, device=layer.weight.device, requires_grad=True)
    layer.weight.uniform = 4
    refused(layer(x).sum().backward, "no gradient")


@pytest.mark.parametrize("guard", [torch.enable_grad, torch.no_grad])
def test_a_compiled_model_runs_with_and_without_no_grad(guard: Callable[[], Any]) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    quantize_(model, NestedWeightConfig())
    compiled, x = torch.compile(model, backend="qbe"), torch.randn(2, 64)
    with guard():
        for bits in (4, 6, 8, 16):
            for i in (0, 2):
                model[i].weight.set_bits(bits)
            torch.testing.assert_close(compiled(x), model(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["recompiles"]


@pytest.mark.parametrize("backend", ["qbe", "inductor"])
def test_compiled_too_a_gradient_through_it_is_refused(backend: str) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    quantize_(model, NestedWeightConfig())
    compiled, x = torch.compile(model, backend=backend), torch.randn(2, 64, requires_grad=True)
    y = compiled(x)
    torch.testing.assert_close(y, model(x))
    with pytest.raises(QBEError, match="no gradient"):
        y.sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


def test_a_model_with_trainable_embeddings_runs_compiled_and_not() -> None:
    """As transformers gives it: only the nested layers are frozen."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Embedding(10, 64), nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 8)).eval()
    quantize_(model, NestedWeightConfig())
    compiled, ids = torch.compile(model, backend="qbe"), torch.tensor([[1, 2, 3]])
    for bits in (4, 8):
        model[1].weight.set_bits(bits)
        torch.testing.assert_close(compiled(ids), model(ids))
    refused(model(ids).sum().backward, "no gradient")


def test_bits_are_set_for_all_rows_or_for_each(layer: nn.Linear, device: torch.device) -> None:
    x, place = torch.randn(3, 100, device=device), layer.weight.bits
    alone = {}
    for bits in layer.weight.gears:
        layer.weight.set_bits(bits)
        assert layer.weight.bits is place  # what a graph reads
        alone[bits] = layer(x)
    layer.weight.set_bits([16, 4, 8])
    assert layer.weight.bits.device == place.device
    for row, bits in enumerate((16, 4, 8)):
        torch.testing.assert_close(layer(x)[row], alone[bits][row])
    layer.weight.set_bits(6)
    assert layer.weight.bits.tolist() == [6, 6, 6]
    layer.weight.set_bits([6])
    assert torch.equal(layer(x), alone[6])


@pytest.mark.parametrize("bits", [0, 1, 3, 5, 7, 9, 99, -1, 4.0, True, "4", [4, 5], [[4]], [None]], ids=str)
def test_bits_that_are_no_gear_are_refused(layer: nn.Linear, bits: Any) -> None:
    before = layer.weight.bits.tolist()
    refused(lambda: layer.weight.set_bits(bits), r"bits are not in this store \(it has 4, 6, 8, 16\)")
    assert layer.weight.bits.tolist() == before
    if not isinstance(bits, list):
        refused(lambda: layer.weight.dequantise(bits), "bits are not in this store")


def test_torchaos_dequantize_has_a_dtype_and_no_bits(layer: nn.Linear) -> None:
    weight = layer.weight
    assert torch.equal(weight.dequantize(), weight.dequantise(16))
    assert weight.dequantize(torch.float16).dtype is torch.float16
    assert torch.equal(weight.dequantize(output_dtype=torch.bfloat16), weight.dequantise(16).bfloat16())
    for argument in (6, 6.0, "float16"):
        refused(lambda argument=argument: weight.dequantize(argument), "output_dtype is a torch.dtype, not .*6")


@pytest.mark.parametrize("width", [0, 64, 99, 101, 128, 300])
def test_an_input_of_another_width_is_named(layer: nn.Linear, width: int) -> None:
    x = torch.randn(2, 3, width, device=layer.weight.device)
    refused(lambda: layer(x), f"input has {width} numbers a row, but this layer takes 100")
    if x.device.type == "cpu" and width != 99:
        w = layer.weight
        with pytest.raises(RuntimeError, match=f"x has {width} inputs a row"):
            cpu.nested_linear(x, w.packed, w.meta, w.bits.expand(6), w.original, None, w.slices, w.exponent)


def test_an_input_of_another_dtype_is_refused_as_by_a_plain_layer(layer: nn.Linear, device: torch.device) -> None:
    x = torch.randn(3, 100, device=device)
    plain = nn.Linear(100, 32, device=device)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        with pytest.raises(RuntimeError, match="dtype"):
            plain(x.to(dtype))
        refused(lambda dtype=dtype: layer(x.to(dtype)), f"input is {str(dtype)[6:]}, .* nested in float32")
    half = nn.Sequential(nn.Linear(100, 32, device=device)).half()
    quantize_(half, NestedWeightConfig())
    assert half(x.half()).dtype is torch.float16
    refused(lambda: half(x), "input is float32, .* nested in float16")


def test_under_autocast_other_dtypes_are_taken(layer: nn.Linear, device: torch.device) -> None:
    x = torch.randn(3, 100, device=device)
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
        assert nn.Linear(100, 32, device=device)(x.bfloat16()).dtype is torch.bfloat16
        assert layer(x.bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("slices", ["422", "4,2,2", (4.0, 2), (4, "2"), 4, None, (4, None), [4.5]])
def test_slices_are_whole_numbers(slices: Any) -> None:
    for make in (lambda: NestedWeightConfig(slices=slices), lambda: SliceLayout.of(slices),
                 lambda: NestedTensor.from_weight(torch.randn(8, 64), slices)):  # fmt: skip
        refused(make, "not a tuple of whole numbers; give")


@pytest.mark.parametrize("size", [64.0, "64", None, 0, 65, 2048])
def test_a_group_size_is_a_multiple_of_64(size: Any) -> None:
    refused(lambda: NestedWeightConfig(group_size=size), "group size .* is not supported")
