"""The layout of fragments: what it holds, bit by bit, and that it gives back what went in."""

from __future__ import annotations

import pytest
import torch

from qbe.errors import QBEError
from qbe.format.codes import quantise
from qbe.format.layout import SliceLayout
from qbe.format.packing import pack
from qbe.kernels.cuda import fragments

LAYOUT = SliceLayout()
SHAPES = [(64, 128), (1, 64), (70, 200), (192, 640), (100, 72)]


def made(n: int, k: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n * k))
    codes, meta, _ = quantise(weight, LAYOUT, group)
    return codes, meta


@pytest.mark.parametrize("group", fragments.GROUPS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_what_goes_in_comes_out(n: int, k: int, group: int) -> None:
    codes, meta = made(n, k, group)
    packed = pack(codes, LAYOUT)
    found = fragments.to_fragments(packed, meta, LAYOUT, k)
    assert found is not None
    assert fragments.is_fragments(found)
    assert fragments.group_size_of(found, n, k) == group
    assert torch.equal(fragments.from_fragments(found, n, k), packed)
    assert torch.equal(fragments.meta_of(found, n, k), meta)


@pytest.mark.parametrize("group", fragments.GROUPS)
def test_every_bit_is_where_the_kernels_look_for_it(group: int) -> None:
    """By the words of the module, weight by weight."""
    n, k = 70, 200
    codes, meta = made(n, k, group)
    found = fragments.to_fragments(pack(codes, LAYOUT), meta, LAYOUT, k)
    assert found is not None
    at = fragments.regions(n, k, group)
    flat = found.reshape(-1)
    words = [flat[a:b].view(torch.int32).tolist() for a, b in zip(at.planes, (*at.planes[1:], at.scales), strict=True)]
    for output in range(n):
        for i in range(codes.shape[1]):
            g, h, warp, tile = output % 8, output // 8 % 2, output // 16 % 4, output // 64
            e, t, kk, s, block = i % 2, i // 2 % 4, i // 8 % 2, i // 16 % 4, i // 64
            thread = ((tile * (at.inputs // 64) + block) * 4 + warp) * 32 + 4 * g + t
            j, pair = h + 2 * kk, 4 * (s % 2) + h + 2 * kk
            code = (words[0][4 * thread + s] >> (4 * j + 16 * e)) & 15
            for plane in words[1:]:
                code = code << 2 | (plane[2 * thread + s // 2] >> (2 * pair + 16 * e)) & 3
            assert code == codes[output, i]
    scales, groups = flat[at.scales : at.counts].tolist(), meta.shape[2]
    for output in range(n):
        for group_index in range(groups):
            for plane in range(6):
                where = (output // 64 * groups + group_index) * 3 + plane // 2
                where = ((where * 8 + output % 8) * 4 + output // 16 % 4) * 2 + output // 8 % 2
                assert scales[2 * where + plane % 2] == meta[plane, output, group_index]
    assert not flat[at.counts :].any()
    assert len(flat[at.counts :]) == 4 * at.rows // 64


@pytest.mark.parametrize(("group", "bits"), [(64, (4.5, 6.75, 8.75)), (128, (4.25, 6.375, 8.375))])
def test_bytes_a_weight(group: int, bits: tuple[float, ...]) -> None:
    for precisions, most in zip(((4,), (4, 6), (4, 6, 8)), bits, strict=True):
        at = fragments.regions(4096, 4096, group, precisions)
        assert at.counts * 8 / 4096**2 == most
        assert at.end - at.counts == 256


@pytest.mark.parametrize("precisions", [(4,), (4, 6)])
def test_planes_may_be_left_out(precisions: tuple[int, ...]) -> None:
    codes, meta = made(70, 200, 64)
    found = fragments.to_fragments(pack(codes, LAYOUT), meta, LAYOUT, 200, precisions)
    assert found is not None
    assert found.numel() == fragments.regions(70, 200, 64, precisions).end
    kept = 256 - 2 ** (8 - precisions[-1])
    assert torch.equal(fragments.codes_of(found, 70, 200, precisions), codes & kept)
    assert torch.equal(fragments.meta_of(found, 70, 200, precisions), meta[: 2 + 2 * len(precisions)])


def test_what_has_no_fragments() -> None:
    codes, meta, _ = quantise(torch.randn(64, 256), LAYOUT, 256)
    assert fragments.to_fragments(pack(codes, LAYOUT), meta, LAYOUT, 256) is None
    other = SliceLayout((3, 1, 1, 1, 2))
    codes, meta, _ = quantise(torch.randn(64, 256), other, 64)
    assert fragments.to_fragments(pack(codes, other), meta, other, 256) is None
    with pytest.raises(QBEError, match="precisions"):
        fragments.regions(64, 64, 64, (6, 8))
    with pytest.raises(QBEError, match="does not hold"):
        fragments.group_size_of(torch.zeros(1, 1, 5, dtype=torch.uint8), 64, 64)
