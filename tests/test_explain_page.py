"""The page of an explanation: whole, self-contained, escaped."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from explain_samples import dense, explanation, hybrid, linear
from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.explain import Explanation, html, palette
from qbe.sites import Role, SiteTable


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
