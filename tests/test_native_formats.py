"""Formats that the hardware multiplies itself, by torchao: what is refused where, and layers beside nested ones."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

from conftest import byte_tokenizer, tiny_llama
from qbe import Budget, Engine, QBEError, Request, SamplingParams, native_config
from qbe.hardware import HardwareProfile, detect
from qbe.store.native_formats import availability
from test_hardware import AVX512, cpu, gpu

BLOCK_SCALED = ("mxfp8", "mxfp6", "mxfp4", "nvfp4")


def refusal(format: str, profile: HardwareProfile) -> str:
    with pytest.raises(QBEError) as refused:
        native_config(format, profile)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_torchaos_configs_on_blackwell() -> None:
    """Their construction only: multiplying needs the device."""
    names = {f: type(native_config(f, gpu(10, 0))).__name__ for f in ("nvfp4", "mxfp8", "mxfp4", "fp8_e4m3")}
    assert names == {
        "nvfp4": "NVFP4DynamicActivationNVFP4WeightConfig",
        "mxfp8": "MXDynamicActivationMXWeightConfig",
        "mxfp4": "MXDynamicActivationMXWeightConfig",
        "fp8_e4m3": "Float8DynamicActivationFloat8WeightConfig",
    }
    assert native_config("mxfp4", gpu(10, 0)).weight_dtype == torch.float4_e2m1fn_x2


@pytest.mark.parametrize("profile", [gpu(9, 0), gpu(8, 9), gpu(8, 0), gpu(7, 5), cpu(*AVX512)], ids=lambda p: p.name)
def test_block_scaled_formats_are_refused_below_blackwell(profile: HardwareProfile) -> None:
    for format in BLOCK_SCALED:
        said = refusal(format, profile)
        assert format in said
        assert profile.name in said
        assert "use the nested store at" in said
    assert ("fp8_e4m3" in refusal("nvfp4", profile)) == ("fp8_e4m3" in profile.formats)
    assert availability(profile)["fp8_e4m3"] == (
        None if "fp8_e4m3" in profile.formats else refusal("fp8_e4m3", profile)
    )


def test_what_torchao_does_not_have_is_refused_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for profile in (gpu(10, 0), gpu(9, 0), cpu(*AVX512)):
        assert "no FP6 product" in refusal("mxfp6", profile)
        assert "above 16 rows" in refusal("int8", profile)
        assert "leave the layer as it is" in refusal("bf16", profile)
        assert "choose one of" in refusal("fp5", profile)
    monkeypatch.setitem(sys.modules, "torchao.prototype.mx_formats", None)
    assert "is not in torchao" in refusal("nvfp4", gpu(10, 0))


def test_torchao_stops_before_any_fp6_product() -> None:
    """The reason of the refusal: MX layers reach a matrix product with E4M3 elements and never with FP6 ones."""
    from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig

    for element in ("fp6_e2m3", "fp6_e3m2"):
        layer = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
        quantize_(layer, MXDynamicActivationMXWeightConfig(activation_dtype=element, weight_dtype=element))
        assert layer.weight.qdata.numel() == 64 * 32  # a byte a weight
        with pytest.raises(AssertionError):
            layer(torch.ones(1, 64, dtype=torch.bfloat16))


def test_native_layers_run_beside_nested_ones(device: torch.device) -> None:
    if device.type == "cpu":  # torchao's int8 runs here, though not natively: the same structure
        config, what = Int8DynamicActivationInt8WeightConfig(), "Int8Tensor"
    else:
        profile = detect(device)
        if "fp8_e4m3" not in profile.formats:
            pytest.skip(f"{profile.name} has no FP8")
        config, what = native_config("fp8_e4m3", profile), "Float8Tensor"
    model, plain = tiny_llama().bfloat16().to(device), tiny_llama().bfloat16().to(device)
    quantize_(model, config, filter_fn=lambda m, name: isinstance(m, nn.Linear) and "mlp" in name)
    prompts = [Request("a b c", SamplingParams(max_tokens=8, temperature=0.0), Budget(bits=b)) for b in (4, 16)]
    options = {"tokenizer": byte_tokenizer(), "policy": "uniform", "device": device.type, "records": False}
    with Engine(model, **options) as engine, Engine(plain, **options) as reference:
        assert type(engine.model.model.layers[0].mlp.up_proj.weight).__name__ == what
        assert all(len(result.token_ids) == 8 for result in engine.generate_batch(prompts))
        assert engine.table.nested
        for site, whole in zip(engine.table, reference.table, strict=True):
            if "mlp" in site.name:
                assert site.gears == (16,)
                assert site.parameters < site.bytes_at[16] < whole.bytes_at[16] * 0.6
            else:
                assert site.gears == whole.gears
    untouched, x = tiny_llama().bfloat16().to(device), torch.randn(5, 128, dtype=torch.bfloat16, device=device)
    want, got = (m.model.layers[0].mlp.up_proj(x).float() for m in (untouched, engine.model))
    # E4M3's 3 bits of mantissa round by up to 1/16, about 0.026 in the mean square, on both sides of the product.
    assert (got - want).norm() / want.norm() < 0.05
    quantize_(untouched, config)
    with pytest.raises(QBEError, match="no linear layer that can be nested"):
        Engine(untouched, **options)
