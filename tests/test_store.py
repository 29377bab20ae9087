"""The nested store: layouts, packing, scales and the tensor, against references written out here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from qbe.errors import QBEError
from qbe.format import scales
from qbe.format.layout import SliceLayout
from qbe.format.packing import from_blocks, pack, to_blocks, unpack
from qbe.kernels.reference.nested_linear import dequantise
from qbe.store.nested_linears import NestedWeightConfig, nest, quantize_
from qbe.store.nested_tensor import NestedTensor
from qbe.store.placement import SMALL, place, tile

LAYOUTS = [(4, 2, 2), (3, 1, 1, 1, 2), (1,) * 8, (8,), (5, 3), (4,), (2, 1), (3, 3), (7, 1)]
layouts = st.sampled_from(LAYOUTS) | st.lists(st.integers(1, 8), min_size=1, max_size=8).filter(
    lambda s: sum(s) <= 8
).map(tuple)


@settings(max_examples=60, deadline=None)
@given(slices=layouts, n=st.integers(1, 9), blocks=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_packing_is_lossless_at_every_precision(
    device: torch.device, slices: tuple[int, ...], n: int, blocks: int, seed: int
) -> None:
    layout = SliceLayout(slices)
    codes = torch.randint(
        0, 2**layout.total_bits, (n, 64 * blocks), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    ).to(device)
    packed = pack(codes, layout)
    assert packed.numel() * 8 == codes.numel() * layout.total_bits
    for bits in layout.precisions:
        read = unpack(packed, layout, n, bits)
        assert torch.equal(read, codes >> (layout.total_bits - bits))


@pytest.mark.parametrize("slices", LAYOUTS)
def test_a_read_never_touches_higher_slices(device: torch.device, slices: tuple[int, ...]) -> None:
    layout = SliceLayout(slices)
    codes = torch.randint(0, 2**layout.total_bits, (5, 128), dtype=torch.uint8, device=device)
    packed = pack(codes, layout)
    for bits in layout.precisions:
        spoiled = packed.clone()
        spoiled[bits:] = 0xA5
        assert torch.equal(unpack(spoiled, layout, 5, bits), unpack(packed, layout, 5, bits))


@pytest.mark.parametrize("slices", [(), (0, 4), (4, 4, 1), (9,)])
def test_impossible_slices_are_refused(slices: tuple[int, ...]) -> None:
    with pytest.raises(QBEError, match="slices"):
        SliceLayout(slices)


@given(code=st.integers(0, 255), exponent=st.integers(1, 239))
def test_scale_codes_survive_a_round_trip(code: int, exponent: int) -> None:
    value = scales.decode_scale(torch.tensor([code]), exponent)
    assert value.item() == 2.0 ** (exponent - 127 + (code >> 4)) * (1 + (code & 15) / 16)
    assert scales.encode_scale(value, exponent).item() == code


@given(value=st.floats(1e-20, 1e10))
def test_the_largest_scale_is_always_representable(value: float) -> None:
    exponent = scales.exponent_for(value)
    wanted = torch.tensor([value], dtype=torch.float32)
    code = scales.encode_scale(wanted, exponent)
    assert scales.decode_scale(code, exponent) >= wanted
    assert scales.decode_scale(code, exponent) <= wanted * 1.07


def decode_by_hand(
    codes: torch.Tensor, meta: torch.Tensor, exponent: int, layout: SliceLayout, bits: int, g: int
) -> torch.Tensor:
    """The reference of the reference: one weight at a time, straight from the format's description."""
    n, kp = codes.shape
    out = torch.zeros(n, kp, dtype=torch.float64)
    shift = layout.total_bits - bits
    i = layout.precisions.index(bits)
    for row in range(n):
        for k in range(kp):
            m = meta[:, row, k // g].tolist()
            scale = 2.0 ** (exponent - 127 + (m[0] >> 4)) * (1 + (m[0] & 15) / 16)
            offset = float(m[1])
            if shift:
                signed = [v - 256 if v > 127 else v for v in m]
                scale *= 2**shift * (1 + signed[2 + 2 * i] / 256)
                offset = (m[1] - (2**shift - 1) / 2) / 2**shift + signed[3 + 2 * i] / 64
            out[row, k] = scale * ((int(codes[row, k]) >> shift) - offset)
    return out


@settings(max_examples=15, deadline=None)
@given(slices=layouts, n=st.integers(1, 3), k=st.integers(1, 150), seed=st.integers(0, 2**31))
def test_every_precision_reads_what_the_format_says(
    device: torch.device, slices: tuple[int, ...], n: int, k: int, seed: int
) -> None:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).to(device)
    nested = NestedTensor.from_weight(weight, slices)
    codes = unpack(nested.packed, nested.layout, n, nested.layout.total_bits)
    for bits in nested.layout.precisions:
        by_hand = decode_by_hand(codes, nested.meta, nested.exponent, nested.layout, bits, 64)[:, :k]
        torch.testing.assert_close(nested.dequantise(bits).cpu().double(), by_hand, rtol=1e-5, atol=1e-6)


def independent_rounding(weight: torch.Tensor, bits: int, group: int = 64) -> torch.Tensor:
    g = weight.view(weight.shape[0], -1, group)
    low, high = g.amin(-1, True).clamp_max(0), g.amax(-1, True).clamp_min(0)
    s = (high - low) / (2**bits - 1)
    z = (-low / s).round()
    return ((((g / s).round() + z).clamp(0, 2**bits - 1) - z) * s).view_as(weight)


@pytest.mark.parametrize("shape", [(96, 256), (64, 1536)])
def test_low_precisions_are_refitted_not_truncated(device: torch.device, shape: tuple[int, int]) -> None:
    """Nested reads stay within a few percent of an independent quantisation at the same width, or beat it."""
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(device) * 0.02
    nested = NestedTensor.from_weight(weight)
    for bits, allowed in {4: 1.0, 6: 1.03, 8: 1.06}.items():
        ours = (nested.dequantise(bits) - weight).norm()
        assert ours <= allowed * (independent_rounding(weight, bits) - weight).norm()
    # and the refit itself matters: without it the 4-bit read is clearly worse
    plain = nested.meta.clone()
    plain[2:4] = 0
    truncated = dequantise(nested.packed, plain, nested.exponent, (4, 2, 2), shape[1], 4)
    assert (truncated - weight).norm() > 1.003 * (nested.dequantise(4) - weight).norm()


@pytest.mark.parametrize("outlier", [1e-30, 1e4, 1e36])
def test_outliers_zero_groups_and_extremes_stay_finite(device: torch.device, outlier: float) -> None:
    weight = torch.randn(4, 256, device=device) * 0.02
    weight[0, :64] = 0
    weight[1, 3] = outlier
    weight[2] = -weight[2].abs()
    nested = NestedTensor.from_weight(weight)
    for bits in (4, 6, 8):
        assert torch.isfinite(nested.dequantise(bits)).all()
    assert (nested.dequantise(8)[0, :64].abs() <= 1e-4 * max(outlier, 1)).all()
    far = torch.ones(4, 256, dtype=torch.bool, device=device)
    far[1, :64] = False
    error = (nested.dequantise(8) - weight)[far].abs().max()
    assert error < 0.02 or outlier > 1e6  # a group's outlier does not touch other groups until scales run out of range


def test_all_zero_and_single_column_matrices(device: torch.device) -> None:
    assert (NestedTensor.from_weight(torch.zeros(3, 64, device=device)).dequantise(4) == 0).all()
    column = torch.tensor([[0.5], [-2.0]], device=device)
    torch.testing.assert_close(NestedTensor.from_weight(column).dequantise(8), column, rtol=0.02, atol=0)


def test_gear_16_is_the_checkpoints_own_tensor(device: torch.device) -> None:
    layer = nn.Linear(100, 30, device=device).bfloat16()
    pointer, value = layer.weight.data_ptr(), layer.weight.detach().clone()
    quantize_(layer, NestedWeightConfig(), filter_fn=lambda m, _: isinstance(m, nn.Linear))
    assert layer.weight.original.data_ptr() == pointer
    assert torch.equal(layer.weight.dequantise(16), value)
    x = torch.randn(3, 100, device=device).bfloat16()
    if device.type == "cpu":
        assert torch.equal(layer(x), nn.functional.linear(x, value, layer.bias))
    else:  # the kernel sums in another order than cuBLAS
        exact = nn.functional.linear(x.double(), value.double(), layer.bias.double())
        torch.testing.assert_close(layer(x).double(), exact, rtol=2**-8, atol=2**-8)


def test_device_bytes_per_weight(device: torch.device) -> None:
    nested = NestedTensor.from_weight(torch.randn(64, 576, device=device))
    assert nested.nested_bytes() * 8 / (64 * 576) == 8.75
    assert nested.bytes_at()[4] * 8 / (64 * 576) == 4.5
    assert NestedTensor.from_weight(torch.randn(64, 512), group_size=128).nested_bytes() * 8 / (64 * 512) == 8.375


@pytest.mark.parametrize(
    ("n", "k", "tiled"), [(512, 4096, True), (576, 576, False), (1024, 896, False), (70, 200, True)]
)
def test_padding_never_costs_a_large_matrix_more_than_9_5_bits(n: int, k: int, tiled: bool) -> None:
    nested = NestedTensor.from_weight(torch.randn(n, k, generator=torch.Generator().manual_seed(0)), (4, 2, 2), 64)
    buffer = tile(nested.packed, nested.meta, nested.layout, k, nested.exponent)
    assert (buffer is not None) == tiled
    if buffer is not None:
        assert buffer.numel() * 8 / (n * k) <= 9.5 or buffer.numel() <= SMALL


def test_device_bytes_per_weight_once_placed(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(576, 576), nn.Linear(4096, 512)).bfloat16()
    nest(model, ["0", "1"])
    place(model, device, "host")
    for layer in model:
        assert layer.weight.nested_bytes() * 8 / layer.weight.numel() <= 9.5


@pytest.mark.parametrize("bad", ["nan", "inf", "group", "dims"])
def test_bad_weights_are_refused_in_one_line(device: torch.device, bad: str) -> None:
    weight = torch.randn(4, 64, device=device)
    group = 64
    if bad == "group":
        group = 48
    elif bad == "dims":
        weight = weight[None]
    else:
        weight[1, 1] = float(bad)
    with pytest.raises(QBEError) as error:
        NestedTensor.from_weight(weight, group_size=group)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_a_weight_are_refused(shape: tuple[int, int]) -> None:
    model = nn.Sequential(nn.Linear(shape[1], shape[0]))
    with pytest.raises(QBEError, match="no weight that could be nested") as error:
        quantize_(model, NestedWeightConfig())
    assert "\n" not in str(error.value)


def test_weights_that_are_not_there_yet_are_refused() -> None:
    with pytest.raises(QBEError, match="meta device"):
        quantize_(nn.Sequential(nn.Linear(64, 8, device="meta")), NestedWeightConfig())


def test_nesting_twice_is_refused_and_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    quantize_(model, NestedWeightConfig())
    before = [layer.weight.packed.data_ptr() for layer in model]
    with pytest.raises(QBEError, match="64 inputs and 32 outputs is nested already") as error:
        quantize_(model, NestedWeightConfig(slices=(3, 3)))
    assert "\n" not in str(error.value)
    assert [layer.weight.packed.data_ptr() for layer in model] == before


@pytest.mark.parametrize("keep", [True, False])
def test_a_nested_state_dict_is_saved_and_loaded_as_weights_only(
    device: torch.device, tmp_path: Path, keep: bool
) -> None:
    def model(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(100, 32), nn.Linear(32, 8)).to(device).bfloat16().requires_grad_(False)

    saved = model(0)
    config = NestedWeightConfig(slices=(3, 1, 2), keep_original=keep)
    quantize_(saved, config)
    saved[0].weight.bits.fill_(4)
    torch.save(saved.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    loaded = model(1)
    loaded.load_state_dict(state, assign=True)
    x = torch.randn(3, 100, device=device).bfloat16()
    assert torch.equal(loaded(x), saved(x))
    assert loaded[0].weight.gears == ((3, 4, 6, 16) if keep else (3, 4, 6))
    assert loaded[0].weight.bits.tolist() == [4]
    over = model(2)
    quantize_(over, config)
    over.load_state_dict(state)
    assert torch.equal(over(x), saved(x))


def test_nest_leaves_other_layers_alone_and_to_keeps_the_parts_together(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    done: list[str] = []
    nest(model, ["0"], on_site=done.append)
    assert done == ["0"]
    assert isinstance(model[0].weight, NestedTensor)
    assert not isinstance(model[2].weight, NestedTensor)
    moved = model.to(device)
    assert moved[0].weight.gears == (4, 6, 8, 16)
    parts = (moved[0].weight.packed, moved[0].weight.meta, moved[0].weight.bits, moved[0].weight.original)
    assert {part.device.type for part in parts} == {device.type}
    with pytest.raises(QBEError, match="not in this store"):
        moved[0].weight.dequantise(5)


def test_without_the_original_16_bits_are_not_a_gear() -> None:
    nested = NestedTensor.from_weight(torch.randn(8, 64), keep_original=False)
    assert nested.gears == (4, 6, 8)
    assert nested.bits.tolist() == [8]


def test_compiled_linear_follows_the_bits_without_recompiling(device: torch.device) -> None:
    layer = nn.Linear(64, 32, bias=False, device=device).requires_grad_(False)
    nest(nn.Sequential(layer), ["0"])
    layer.weight.bits = torch.tensor([4, 8], dtype=torch.int32, device=device)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 64, device=device)
    with torch.inference_mode():
        for bits in ([4, 8], [8, 8], [16, 6]):
            layer.weight.bits.copy_(torch.tensor(bits))
            torch.testing.assert_close(compiled(x), layer(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@given(st.sampled_from([(4, 2, 2), (3, 1, 1, 1, 2), (5, 3)]), st.integers(1, 5), st.integers(1, 4), st.randoms())
def test_rows_and_columns_can_be_cut_out_of_packed_codes(slices, rows, blocks, random):
    layout = SliceLayout.of(slices)
    generator = torch.Generator().manual_seed(random.getrandbits(32))
    codes = torch.randint(0, 2**layout.total_bits, (rows, 64 * blocks), dtype=torch.uint8, generator=generator)
    cut = to_blocks(pack(codes, layout), layout, rows)
    assert torch.equal(from_blocks(cut, layout), pack(codes, layout))
    row, block = random.randrange(rows), random.randrange(blocks)
    part = from_blocks(cut[row:, block:], layout)
    assert torch.equal(unpack(part, layout, rows - row, layout.total_bits), codes[row:, 64 * block :])
