"""The terminal picture of an explanation, at several widths."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.console import Console

from explain_samples import blueprint, dense, digits, explanation, hybrid, plain, printed
from qbe.analysis.encoder import default_encoder
from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint, DynamicPrecision
from qbe.budget import Budget
from qbe.explain import Explanation, html, palette, terminal
from qbe.explain.heatmap import HeatMap, size
from qbe.sites import Role, Site, SiteTable


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


@pytest.mark.parametrize(("bits", "says"), [(16, "activations 16 bits,"), (8, "activations 8 bits at 210 sites")])
def test_activation_bits_are_told(bits: int, says: str) -> None:
    e = explanation(dense())
    b = Blueprint.of("tiered", e.table, e.blueprint.weight_bits, e.table.activations(bits))
    e = dataclasses.replace(e, blueprint=b)
    assert says in " ".join(plain(printed(terminal.render(e))).split())
    page = html.render(e)
    assert says.capitalize() in page
    assert page.count(f'<td class="right">{bits}</td>') == (211 if bits == 16 else 210)


def test_where_long_prompts_take_the_devices_format_is_told() -> None:
    plain_e = explanation(dense())
    first, second, *_ = plain_e.table.nested
    table = plain_e.table.with_sensitivity({}, {}, {s.name: {"int8": 1e-9} for s in (first, second)})
    bits = (16, *plain_e.blueprint.weight_bits[1:])
    low = Blueprint.of("tiered", table, bits, table.activations(8))
    native = (True, True, *[False] * (len(bits) - 2))
    e = dataclasses.replace(plain_e, table=table, blueprint=low, prompt_format="int8", native=native)
    share = second.parameters / table.nested_parameters
    says = f"long prompts int8 at 1 sites, {share:.0%} of the weights"  # the first one is read at 16 bits
    assert says in " ".join(plain(printed(terminal.render(e))).split())
    assert says in html.render(e)
    assert e.describe()["long_prompts"] == {"format": "int8", "sites": [second.name]}
    for other in (dataclasses.replace(e, prompt_format=None), dataclasses.replace(e, blueprint=low.full_activations)):
        assert "long prompts" not in plain(printed(terminal.render(other)))
        assert other.describe()["long_prompts"]["sites"] == []


def test_that_tokens_choose_is_told() -> None:
    e = explanation(dense())
    routed = dataclasses.replace(
        e, blueprint=dataclasses.replace(e.blueprint, dynamic_precision=DynamicPrecision("routers", 9))
    )
    for shown, says in ((routed, True), (e, False)):
        assert ("every token chooses bits" in " ".join(plain(printed(terminal.render(shown))).split())) == says
        assert ("Every token chooses bits" in html.render(shown)) == says


def test_what_tokens_chose_adds_up() -> None:
    assert plain(printed(terminal.shares({8: 10.0, 4: 70.0, 6: 20.0}))).strip() == "tokens chose 4  70% 6  20% 8  10%"


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


def test_a_cached_blueprint_and_a_cluster_are_named() -> None:
    e = explanation(dense())
    assert "cached" not in plain(printed(terminal.render(e)))
    near = dataclasses.replace(
        e, cache="near", profile=dataclasses.replace(e.profile, tier=3, cluster=0, similarity=0.75)
    )
    text = plain(printed(terminal.render(near), 120))
    assert "tiered, cached for a query like it, in 0.09 ms" in text
    assert f"cluster 0 ({default_encoder().names[0]}), cosine 0.75" in text
