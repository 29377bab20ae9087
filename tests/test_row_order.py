"""Rows sorted by precision, and the launches of products of many rows that a CPU can check."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from qbe.kernels.cuda import decode_attention, dense, linear
from qbe.kernels.cuda.many_rows import OUTPUTS, STEP, pairs_for, source, tile_rows
from qbe.kernels.cuda.row_order import places_for, row_order


@pytest.mark.parametrize("rows", [1, 2, 33, 128, 129, 256, 600])
@pytest.mark.parametrize("tile", [64, 128, 256])
def test_each_tile_has_rows_of_one_precision(rows: int, tile: int) -> None:
    generator = torch.Generator().manual_seed(rows * tile)
    for choices in ([4], [8], [4, 8], [4, 6, 8], [3, 4, 5, 6, 7, 8, 16]):
        words = torch.tensor(choices, dtype=torch.int32)[torch.randint(len(choices), (rows,), generator=generator)]
        words |= torch.randint(2, (rows,), generator=generator, dtype=torch.int32) * 8 << 8
        order, place = row_order(words, tile, (4, 6, 8))
        assert len(order) == places_for(rows, tile, 3)
        assert len(order) % tile == 0
        assert torch.equal(order[place], torch.arange(rows, dtype=torch.int32))
        assert (order >= 0).sum() == rows
        for part in order.view(-1, tile):
            present = part[part >= 0]
            assert torch.equal(part[: len(present)], present), "a tile's rows begin at its first place"
            assert (
                len({max((p for p in (4, 6, 8) if p <= b), default=4) for b in (words[present.long()] & 255).tolist()})
                <= 1
            )


def test_any_mix_has_room() -> None:
    for a, b, c in itertools.product(range(0, 140, 7), repeat=3):
        if a + b + c:
            assert -(-a // 64) * 64 + -(-b // 64) * 64 + -(-c // 64) * 64 <= places_for(a + b + c, 64, 3)
    assert places_for(256, 128, 3) == 4 * 128, "what many_rows.cu counts arrivals of"


@pytest.mark.parametrize(
    ("n", "inputs"), [(64, 64), (64, 14336), (192, 128), (6144, 4096), (28672, 4096), (4096, 14336)]
)
@pytest.mark.parametrize("outputs", sorted(set(OUTPUTS.values())))
def test_all_work_is_shared_out_and_arrivals_can_be_counted(n: int, inputs: int, outputs: int) -> None:
    """The formulas of many_rows.cu: where a pair begins, and which pairs a tile's sums come from."""
    pairs = pairs_for(n, inputs, 132, outputs)
    tiles, steps = -(-n // outputs), -(-inputs // STEP)
    work = tiles * steps
    begins = [pair * work // pairs for pair in range(pairs + 1)]
    assert begins[0] == 0
    assert begins[-1] == work
    assert all(a < b for a, b in itertools.pairwise(begins))
    for tile in range(tiles):
        first, last = tile * steps, (tile + 1) * steps
        some = [pair for pair in range(pairs) if begins[pair] < last and begins[pair + 1] > first]
        assert some[0] == ((first + 1) * pairs - 1) // work
        assert some[-1] == (last * pairs - 1) // work
        assert len(some) <= 15


def test_the_sources_are_made_for_every_shape() -> None:
    for rows in (33, 64, 65, 128, 129, 256):
        assert rows <= tile_rows(rows)
    for kernel, eight in itertools.product(("many_rows", "dense_rows"), (False, True)):
        text = source(kernel, 256, 64, True, False, eight)
        assert f"m64n256k{32 if eight else 16}" in text
        assert "__launch_bounds__" in text


@pytest.mark.parametrize(
    "text",
    [source(name, 64, 64, True) for name in ("many_rows", "dense_rows", "eight_bit_rows")]
    + [linear.source(), linear.source(dense.SOURCES)]
    + [decode_attention.source(), decode_attention.source(decode_attention.SHARE_SOURCES)],
    ids=["many_rows", "dense_rows", "eight_bit_rows", "linear", "dense", "attention", "share"],
)
def test_files_that_are_compiled_as_one_define_no_function_twice(text: str) -> None:
    """NVRTC would refuse them, and a machine without a GPU has none."""
    defined = re.findall(r"^DEVICE [\w ]*?(\w+\([^)]*\)) \{", text, re.MULTILINE)
    assert len(defined) > 10
    assert len(defined) == len(set(defined)), {d for d in defined if defined.count(d) > 1}
