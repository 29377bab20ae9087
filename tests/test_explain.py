"""The explanation's JSON, its terminal picture at several widths, and its page; on a dense and on a hybrid model."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.explain import Explanation, html, palette, terminal
from qbe.explain.heatmap import HeatMap, size
from qbe.sites import Role, Site, SiteTable

GEARS = (4, 6, 8, 16)


def linear(name: str, role: Role, layer: int | None, shape: tuple[int, int], gears: tuple[int, ...] = GEARS) -> Site:
    n = shape[0] * shape[1]
    bytes_at = {g: n * g // 8 + (0 if g == 16 else n // 64) for g in gears}
    return Site(name, role, layer, shape, True, gears, bytes_at, {g: 1e-3 / g for g in gears if g < 16})


def dense(layers: int = 30) -> SiteTable:
    """A Llama of SmolLM2's shape."""
    sites = [Site("model.embed_tokens", Role.EMBEDDING, None, (49152, 576), bytes_at={16: 1152})]
    for i in range(layers):
        for name, role, shape in (
            ("self_attn.q_proj", Role.ATTENTION_Q, (576, 576)),
            ("self_attn.k_proj", Role.ATTENTION_K, (192, 576)),
            ("self_attn.v_proj", Role.ATTENTION_V, (192, 576)),
            ("self_attn.o_proj", Role.ATTENTION_O, (576, 576)),
            ("mlp.gate_proj", Role.FFN_GATE, (1536, 576)),
            ("mlp.up_proj", Role.FFN_UP, (1536, 576)),
            ("mlp.down_proj", Role.FFN_DOWN, (576, 1536)),
        ):
            sites.append(linear(f"model.layers.{i}.{name}", role, i, shape))
        sites.append(Site(f"model.layers.{i}.input_layernorm", Role.NORM, i, (576,)))
    sites.append(linear("lm_head", Role.OUTPUT_HEAD, None, (49152, 576)))
    return SiteTable(tuple(sites), "smollm2-135m-instruct", layers)


def hybrid() -> SiteTable:
    """Seven Mamba2 layers, attention in layers 2, 5 and 8; experts and routers stay at 16 bits."""
    sites = []
    for i in range(10):
        if i in (2, 5, 8):
            sites.append(linear(f"model.layers.{i}.self_attn.qkv_proj", Role.ATTENTION_QKV, i, (384, 256)))
            sites.append(linear(f"model.layers.{i}.self_attn.o_proj", Role.ATTENTION_O, i, (256, 256)))
        else:
            sites.append(linear(f"model.layers.{i}.mamba.in_proj", Role.SSM_IN, i, (1804, 256)))
            sites.append(linear(f"model.layers.{i}.mamba.out_proj", Role.SSM_OUT, i, (256, 512)))
        sites.append(Site(f"model.layers.{i}.router", Role.MOE_ROUTER, i, (8, 256), True))
        sites.append(Site(f"model.layers.{i}.experts", Role.MOE_EXPERT, i, (8, 256, 512)))
    return SiteTable(tuple(sites), "hybrid-moe-tiny", 10)


def blueprint(table: SiteTable) -> Blueprint:
    """Ends of the model and the down projections higher, the middle lower, some of every gear."""
    bits = []
    for site in table.nested:
        if site.layer is None:
            bits.append(8)
        elif site.layer == 0:
            bits.append(16 if site.role is Role.FFN_DOWN else 8)
        elif site.layer >= table.layers - 2 or site.role in (Role.FFN_DOWN, Role.ATTENTION_V, Role.SSM_OUT):
            bits.append(6 if site.layer % 4 else 8)
        else:
            bits.append(6 if site.layer % 7 == 3 else 4)
    return Blueprint.of("tiered", table, tuple(bits))


FEATURES = {
    "token_count": 55.0,
    "vocabulary_diversity": 0.8364,
    "punctuation_density": 0.0513,
    "question_markers": 1.0,
    "digit_density": 0.0625,
    "code_marks": 0.0,
    "semantic_entropy": 4.2187,
    "asks_for_steps": 1.0,
}


def explanation(table: SiteTable, budget: Budget | None = None) -> Explanation:
    b = blueprint(table)
    full = Blueprint.of("uniform", table, (16,) * len(table.nested))
    profile = QueryProfile(0.62, "mathematics", 2, FEATURES)
    budget = budget or Budget()
    return Explanation(
        prompt_tokens=55,
        profile=profile,
        blueprint=b,
        table=table,
        budget=budget,
        target_bits=budget.bits_for(profile.score),
        analysis_ms=0.4213,
        policy_ms=0.0871,
        bytes_per_token=b.bytes_per_token(table),
        bytes_per_token_16bit=full.bytes_per_token(table),
    )


def printed(renderable: object, width: int = 80, **options: object) -> str:
    out = io.StringIO()
    settings = {"force_terminal": True, "color_system": "truecolor", **options}
    Console(file=out, width=width, **settings).print(renderable)
    return out.getvalue()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def digits(text: str, label: str) -> list[int]:
    """The numbers of every heat map row with this label, over all bands; -1 where the layer has no such site."""
    found = []
    for line in text.splitlines():
        if m := re.match(rf"\s+{label}\s+((?:[\d·]+\s*)+)", line):
            found += [-1 if d == "·" else int(d) for d in re.findall(r"\d+|·", m[1])]
    return found


class Page(HTMLParser):
    """Tags with attributes, and the text, of a page; fails on a tag left open."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._open = "", []
        self.feed(source)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.text += data + " "


# --- palette -----------------------------------------------------------------------------------------------------


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


# --- heat map and JSON -------------------------------------------------------------------------------------------


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
        "profile",
        "policy",
        "budget",
        "blueprint",
        "bytes_per_token",
        "bytes_per_token_16bit",
        "ratio",
        "timings",
    }
    assert d["budget"] == {"bits": None, "tier": "default", "target_bits": 6.24}
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


# --- terminal ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 30, 40, 80, 126])
@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("colour", [True, False])
def test_every_cell_is_printed_at_every_width(layers: int, width: int, colour: bool) -> None:
    table = dense(layers)
    e = explanation(table)
    text = plain(printed(terminal.render(e), width, no_color=not colour))
    assert max(map(len, text.splitlines())) <= width
    heat = HeatMap.of(e.blueprint, table)
    for name in ("q", "v", "down"):
        assert digits(text, name) == [int(c.bits) for c in heat.rows[name] if c]


def test_thirty_layers_fit_in_one_band_of_80_columns() -> None:
    assert plain(printed(terminal.render(explanation(dense())))).count(" layer ") == 1


def test_layers_without_a_site_show_a_dot() -> None:
    text = plain(printed(terminal.render(explanation(hybrid()))))
    assert [d > 0 for d in digits(text, "qkv")] == [i in (2, 5, 8) for i in range(10)]
    assert "10 moe router, 10 moe expert" in " ".join(text.split())


def test_no_color_has_no_colour_and_a_terminal_has() -> None:
    coloured = re.compile(r"\x1b\[[0-9;]*[34]8;")
    e = explanation(dense())
    assert coloured.search(printed(terminal.render(e)))
    assert not coloured.search(printed(terminal.render(e), no_color=True))
    assert "\x1b" not in printed(terminal.render(e), force_terminal=False, color_system=None)


def test_the_figures_are_there() -> None:
    text = plain(printed(terminal.render(explanation(dense(), Budget(bits=5.8)))))
    e = explanation(dense())
    figures = ["55 tokens", "mathematics", "0.62", "0.836", "tiered", "budget 5.8", "average 5.80 bits"]
    figures += ["analysis tier 2 in 0.42 ms", size(e.bytes_per_token), size(e.bytes_per_token_16bit)]
    for figure in figures:
        assert figure in text
    assert "tier default asks 6.24" in plain(printed(terminal.render(e)))


def test_a_longer_bar_means_more() -> None:
    text = plain(printed(terminal.render(explanation(dense()))))
    ours, full = (line.count("━") for line in text.splitlines() if line.startswith(("  this blueprint", "  16 bits")))
    assert full == 40
    assert ours == round(40 * explanation(dense()).ratio)


def test_an_ascii_terminal_gets_ascii() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    Console(file=file, width=80).print(terminal.render(explanation(hybrid())))
    file.flush()
    assert b"####" in raw.getvalue()


def test_a_feature_name_is_not_read_as_markup() -> None:
    e = explanation(dense())
    e.profile.features["[bold]x[/nothing]"] = 1.0
    try:
        assert "[bold]x[/nothing]" in plain(printed(terminal.render(e)))
    finally:
        del e.profile.features["[bold]x[/nothing]"]


def test_the_strip_has_one_block_per_layer_and_one_for_the_head() -> None:
    table = dense()
    text = terminal.strip(blueprint(table), table)
    assert len(text.plain) == 32
    assert text.plain[0] == "█"  # layer 0 is at 8 and 16
    assert text.plain[1] == "▅"  # 4.6 bits on average
    assert text.plain[30:] == " █"
    assert palette.colour(8.0) in {str(s.style.color.name) for s in text.spans if s.style.color}
    low = Blueprint.of("uniform", table, (4,) * len(table.nested))
    assert terminal.strip(low, table).plain == "▄" * 30 + " ▄"


def test_a_model_without_nested_sites_is_shown() -> None:
    table = SiteTable((Site("a", Role.UNKNOWN, 0, (4, 4), True),), "m", 1)
    e = Explanation(
        3, QueryProfile(0.0, "dialogue", 1), Blueprint.of("p", table, ()), table, Budget(), 4.5, 0, 0, 32, 32
    )
    assert "as many as at 16 bits" in plain(printed(terminal.render(e)))
    assert "0 sites" in html.render(e)
    assert terminal.strip(e.blueprint, table).plain == "·"


# --- page --------------------------------------------------------------------------------------------------------


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    source = html.render(explanation(dense()))
    page = Page(source)
    assert not {"script", "link", "img", "iframe", "object"} & {t for t, _ in page.tags}
    assert not {"src", "href"} & {a for _, attrs in page.tags for a in attrs}
    assert not re.search(r"https?:|//[a-z]|@import|url\(", source)
    assert "prefers-color-scheme: dark" in source
    assert 'name="viewport"' in source


@pytest.mark.parametrize("table", [dense(), dense(80), hybrid()], ids=["dense", "deep", "hybrid"])
def test_each_cell_has_its_number_colour_and_site(table: SiteTable) -> None:
    e = explanation(table)
    cells = [
        a for t, a in Page(html.render(e)).tags if t == "span" and "title" in a and "layer " not in (a["title"] or "")
    ]
    assert len(cells) == len(table.nested)
    for site, bits in zip(table.nested, e.blueprint.weight_bits, strict=True):
        (cell,) = [c for c in cells if (c["title"] or "").startswith(f"{site.name}: {bits} bits")]
        if site.layer is not None:
            assert f"background:{palette.colour(bits)}" in (cell["style"] or "")


def test_deep_models_get_bands() -> None:
    maps = [a for _, a in Page(html.render(explanation(dense(80)))).tags if a.get("class") == "map"]
    assert [a["style"] for a in maps] == ["--layers:40;--roles:8"] * 2


def test_the_prompt_is_there_only_when_given_and_escaped() -> None:
    e = explanation(dense())
    evil = '</p><script>alert("x")</script><img src=x onerror=y>&amp;{{ 7*7 }}'
    assert "Prompt" not in Page(html.render(e)).text
    page = Page(html.render(e, prompt=evil))
    assert evil in page.text
    assert not {"script", "img"} & {t for t, _ in page.tags}


def test_names_from_a_checkpoint_are_escaped() -> None:
    site = linear('x" onmouseover="y<script>', Role.FFN_UP, 0, (8, 8))
    table = SiteTable((site,), "<script>model</script>", 1)
    e = Explanation(
        3,
        QueryProfile(0.5, "<b>", 1, {"<i>": 1.0}),
        Blueprint.of("<u>", table, (4,)),
        table,
        Budget(),
        4.5,
        0,
        0,
        32,
        128,
    )
    page = Page(html.render(e))
    assert not {"script", "b", "u"} & {t for t, a in page.tags if not a}
    assert not any("onmouseover" in a for _, a in page.tags)
    assert "<script>model</script>" in page.text
