"""The palette, the heat map and the JSON of an explanation."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explain_samples import blueprint, dense, digits, explanation, hybrid, linear, plain, printed, with_kv
from qbe.blueprint import Blueprint
from qbe.explain import html, palette, terminal
from qbe.explain.heatmap import HeatMap, kv_note, size
from qbe.sites import Role, SiteTable


def rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def test_more_bits_are_brighter() -> None:
    light = [palette.luminance(rgb(palette.colour(b))) for b in range(1, 17)]
    assert light == sorted(light)
    assert len(set(light)) == 16


def test_neighbouring_gears_differ_also_in_grey() -> None:
    for a, b in ((3, 4), (4, 6), (6, 8), (8, 16)):
        assert palette.contrast(rgb(palette.colour(a)), rgb(palette.colour(b))) > 1.25


@given(st.floats(1, 16))
def test_every_number_reads_on_its_cell(bits: float) -> None:
    assert palette.contrast(rgb(palette.ink(bits)), rgb(palette.colour(bits))) >= 4.5


def test_bits_beyond_the_scale_take_its_ends() -> None:
    assert palette.colour(0) == palette.colour(1)
    assert palette.colour(32) == palette.colour(16)


def test_the_heat_map_holds_every_site_once() -> None:
    for table in (dense(), hybrid()):
        b = blueprint(table)
        heat = HeatMap.of(b, table)
        cells = [c for row in heat.rows.values() for c in row if c] + list(heat.outside.values())
        assert sorted(s.name for c in cells for s, _ in c.sites) == sorted(s.name for s in table.nested)
        assert {s.name: bits for c in cells for s, bits in c.sites} == dict(
            zip([s.name for s in table.nested], b.weight_bits, strict=True)
        )


def test_rows_are_in_the_order_of_the_network() -> None:
    assert list(HeatMap.of(blueprint(dense()), dense()).rows) == ["q", "k", "v", "o", "gate", "up", "down"]
    heat = HeatMap.of(blueprint(hybrid()), hybrid())
    assert list(heat.rows) == ["qkv", "o", "ssm_in", "ssm_out"]
    assert [c is not None for c in heat.rows["qkv"]] == [i in (2, 5, 8) for i in range(10)]
    assert heat.fixed == {"moe_router": 10, "moe_expert": 10}


def test_two_sites_of_one_role_share_a_cell_by_weight() -> None:
    sites = (
        linear("a", Role.FFN_UP, 0, (30, 100)),
        linear("b", Role.FFN_UP, 0, (10, 100)),
    )
    table = SiteTable(sites, "m", 1)
    heat = HeatMap.of(Blueprint.of("p", table, (4, 8)), table)
    (cell,) = heat.rows["up"]
    assert cell is not None
    assert cell.bits == pytest.approx(5.0)


def test_describe_is_json_with_the_promised_keys() -> None:
    e = explanation(dense())
    d = json.loads(json.dumps(e.describe()))
    assert set(d) == {
        "prompt_tokens",
        "asked_weight_bits",
        "context",
        "fits_context",
        "profile",
        "policy",
        "cache",
        "budget",
        "blueprint",
        "kv_measured",
        "long_prompts",
        "refresh",
        "ignored",
        "bytes_per_token",
        "bytes_per_token_16bit",
        "ratio",
        "timings",
    }
    asked = {
        "bits": None,
        "activation_bits": 16,
        "high_precision_tokens": False,
        "careful_tokens": False,
        "tier": "default",
        "kv_bits": None,
        "state_bits": None,
        "kv_error": None,
        "refresh": False,
        "cascade": False,
    }
    assert d["budget"] == asked | {"target_bits": 6.24}
    assert d["ratio"] == pytest.approx(e.bytes_per_token / e.bytes_per_token_16bit, abs=1e-4)
    assert len(d["blueprint"]["sites"]) == 211


SIZES = {
    0: "0 B",
    999: "999 B",
    1500: "1.5 kB",
    999_999: "1 MB",
    99_600_000: "99.6 MB",
    269e6: "269 MB",
    16.1e9: "16.1 GB",
}


@pytest.mark.parametrize(("n", "text"), SIZES.items())
def test_sizes(n: float, text: str) -> None:
    assert size(n) == text


@pytest.mark.parametrize(
    ("bits", "said"),
    [(4, "KV cache 4 bits, read at 16 where an error could exceed 0.1 of a head's output"),
     (16, "KV cache 16 bits in any case")],
)  # fmt: skip
def test_a_bound_on_the_kv_caches_error_is_told(bits: int, said: str) -> None:
    table = with_kv(hybrid(), (2, 5, 8))
    e = explanation(table, kv_bits=[bits] * 10)
    assert said not in kv_note(e)
    assert said in kv_note(replace(e, blueprint=replace(e.blueprint, kv_error=0.1)))


def test_a_first_page_of_more_bits_is_told() -> None:
    e = explanation(with_kv(hybrid(), (2, 5, 8)), kv_bits=[4] * 5 + [8] * 5)
    for first, said in ((8, "8 in the first page"), (16, "16 in the first page")):
        assert f"4 to 8 bits, 6.67 on average, {said}" in kv_note(
            replace(e, blueprint=replace(e.blueprint, first_kv_bits=first))
        )


def test_a_prompt_without_room_for_an_answer_is_told() -> None:
    said = "too long for the model's context of"
    for context, fits in ((None, True), (56, True), (55, False)):
        e = explanation(replace(dense(), context=context))
        assert e.describe()["fits_context"] is fits
        told = " ".join(printed(terminal.render(e), 120, color_system=None).split())
        assert (f"{said} 55" in told) is not fits
        assert (f"{said} 55" in html.render(e, prompt="p").replace("&#39;", "'")) is not fits


def test_the_kv_cache_has_a_row_of_its_own_everywhere() -> None:
    """Layers 2, 5 and 8 of the hybrid have one; heads of a layer may differ."""
    table = with_kv(hybrid(), (2, 5, 8))
    e = explanation(table, kv_bits=[(4, 8, 4) if i == 2 else 8 if i == 5 else 2 for i in range(10)])
    heat = HeatMap.of(e.blueprint, table)
    assert [None if c is None else c.bits for c in heat.kv if c] == [pytest.approx(16 / 3), 8, 2]
    assert [i for i, c in enumerate(heat.kv) if c] == [2, 5, 8]
    text = plain(printed(terminal.render(e), 120))
    assert digits(text, "kv") == [-1, -1, 5, -1, -1, 8, -1, -1, 2, -1]
    assert "KV cache 2 to 8 bits, 5.11 on average for up to 4,096 tokens" in " ".join(text.split())
    page = html.render(e)
    assert "layer 2, key head 1: KV 8 bits, read by 3 query heads, KL 1e-05 nats, entropy 40%" in page
    assert page.count("key head") == 9
    d = json.loads(json.dumps(e.describe()))
    assert d["blueprint"]["kv_bits"][2:6] == [[4, 8, 4], 2, 2, 8]
    assert d["blueprint"]["average_kv_bits"] == 5.1111
    assert next(s for s in d["blueprint"]["sites"] if s["role"] == "attention_qkv")["kv_bits"] == [4, 8, 4]
    assert d["context"] == 4096
    assert d["kv_measured"]
