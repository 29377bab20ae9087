"""README and docs: short enough, links lead somewhere, commands exist, the reference is the code's."""

from __future__ import annotations

import functools
import re
import runpy
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from explain_samples import dense
from qbe.analysis.profile import QueryProfile
from qbe.budget import Budget
from qbe.cli.main import USAGE_ERRORS, app

ROOT = Path(__file__).parents[1]
reference = runpy.run_path(str(ROOT / "scripts/docs_reference.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(p for p in (ROOT / "docs").rglob("*.md") if p.parent.name != "reference")])
GLOSSARY = ROOT / "docs/glossary.md"


@functools.cache
def made(name: str) -> str:
    """A page of the reference."""
    page: str = reference["PAGES"][name]()
    return page


def code(page: str) -> list[str]:
    """The lines of a page that stand in code, continued ones joined."""
    page = page.replace("\\\n", " ")
    fenced = re.findall(r"^ *```(?:bash|sh)?\n(.*?)^ *```", page, re.MULTILINE | re.DOTALL)
    return [line.strip() for block in fenced for line in block.splitlines()] + re.findall(
        r"^ {4,}(\S.*)$", page, re.MULTILINE
    )


def commands(page: str) -> list[list[str]]:
    """The arguments of each `qbe` command that a page gives, without redirections and comments."""
    lines = [re.sub(r"^(?:[A-Z_]+=\S* )+", "", line) for line in code(page)]
    found = [shlex.split(line, comments=True) for line in lines if line.startswith("qbe ")]
    return [next((f[1:i] for i, a in enumerate(f) if a in "<>|"), f[1:]) for f in found]


def parse(args: list[str]) -> None:
    """Raises one of `USAGE_ERRORS` for what the command line does not take. Nothing is run."""
    command: Any = typer.main.get_group(app)
    context = command.make_context("qbe", list(args))
    while getattr(command, "commands", {}) and context.invoked_subcommand is None and (rest := left_over(context)):
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


def left_over(context: Any) -> list[str]:
    return [*context._protected_args, *context.args]


def slug(heading: str) -> str:
    """The anchor of a heading, as Markdown makes it."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading)
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


def test_the_readme_measures_twelve_things() -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Measured\n")[1].split("\n## ")[0]
    assert len(re.findall(r"^\| ", section, re.MULTILINE)) == 1 + 12


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        to = (page.parent / name).resolve() if name else page
        if to.parent.name == "reference":
            assert to.name in reference["PAGES"], target
            there = made(to.name)
        else:
            assert to.is_file(), f"{page.name}: {target}"
            there = to.read_text(encoding="utf-8") if to.suffix == ".md" else ""
        if anchor:
            assert anchor in map(slug, re.findall(r"^#+ (.*)$", there, re.MULTILINE)), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_are_ones_that_there_are(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for args in commands(text):
        try:
            parse(args)
        except USAGE_ERRORS as error:
            pytest.fail(f"{page.name}: qbe {' '.join(args)}: {getattr(error, 'message', error)}")
    for script in re.findall(r"\b((?:benchmarks|scripts|examples|tests)/[\w/]+\.(?:py|sh|h))\b", text):
        assert (ROOT / script).is_file(), f"{page.name}: {script}"
    for target in re.findall(r"^ {4,}make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"{page.name}: make {target}"


def test_a_command_that_there_is_not_is_found() -> None:
    for args in (
        ["generate", "x", "--colour"],
        ["paint"],
        ["bench", "colours"],
        ["generate"],
        ["generate", "x", "--bits", "five"],
    ):
        with pytest.raises(USAGE_ERRORS):
            parse(args)
    assert commands("\n    OMP_NUM_THREADS=1 qbe generate - --bits 5 < a.txt  # comment\n") == [
        ["generate", "-", "--bits", "5"]
    ]


def test_the_reference_has_every_command_and_option() -> None:
    page = made("cli.md")

    def walk(path: str, command: Any) -> None:
        below = getattr(command, "commands", {})
        if not below:
            section = page.split(f"\n## {path}\n")[1].split("\n## ")[0]
            for option in (o for p in command.params if not p.hidden for o in p.opts if o.startswith("-")):
                assert f"`{option}`" in section, (path, option)
        for name, one in below.items():
            walk(f"{path} {name}", one)

    walk("qbe", typer.main.get_group(app))


def test_the_reference_has_every_route_and_field() -> None:
    pytest.importorskip("fastapi", reason="the server's extra is not installed")
    from qbe.server.protocol import ChatRequest, Contract

    page = made("http.md")
    assert "POST /v1/chat/completions" in page
    assert "GET /v1/qbe/live" in page
    for of in (ChatRequest, Contract):
        section = page.split(f"\n### {of.__name__}\n")[1].split("\n### ")[0]
        assert all(f"| `{name}` |" in section for name in of.model_fields)
    # Every field of ours is explained; OpenAI's are known.
    section = page.split("\n### Contract\n")[1].split("\n### ")[0]
    assert not re.findall(r"^\|.*\|  \|$", section, re.MULTILINE)


def test_the_reference_has_every_setting_and_variable() -> None:
    pytest.importorskip("pydantic", reason="the server's extra is not installed")
    from qbe.server.settings import Energy, Limits, Tier

    page = made("settings.md")
    for of in (Tier, Limits, Energy):
        for name in of.model_fields:
            row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
            assert not row.endswith("|  |"), "explained"
    source = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "src").rglob("*.py"))
    read = set(re.findall(r"\$(QBE_[A-Z_]+)", source)) | set(re.findall(r"environ\S*\"(QBE_[A-Z_]+)", source))
    assert read == set(reference["ENVIRONMENT"])


def test_the_reference_has_what_callers_make() -> None:
    page = made("python.md")
    for name in ("Request", "Budget", "SamplingParams", "NestedWeightConfig", "Engine"):
        section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert re.search(r"^\| `\w+` \| .+ \| .+ \|$", section, re.MULTILINE), name


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    docs = ROOT / "docs"
    there = {str(p.relative_to(docs)) for p in PAGES if docs in p.parents} | {
        f"reference/{n}" for n in reference["PAGES"]
    }
    assert listed == there


def test_the_picture_of_the_architecture_is_what_its_script_draws() -> None:
    drawn = runpy.run_path(str(ROOT / "scripts/draw_request_flow.py"))["draw"]()
    assert (ROOT / "docs/request-flow.svg").read_text(encoding="utf-8") == drawn


def test_pages_load_nothing_from_elsewhere() -> None:
    """Neither what Markdown shows nor what the site's own script would fetch for it."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"!\[[^]]*\]\(https?:|<(?:img|script|iframe|link)\b|^```mermaid", text, re.MULTILINE), page
    for file in [*(ROOT / "docs").glob("*.svg"), *(ROOT / "docs").glob("*.css")]:
        assert not re.search(r"url\([\"']?https?:|href=[\"']https?:|@import", file.read_text(encoding="utf-8")), file


def test_the_policy_that_the_docs_show_works() -> None:
    page = (ROOT / "docs/policies.md").read_text(encoding="utf-8")
    shown: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], shown)
    table, policy = dense(), shown["CodeFirst"]()
    averages = {
        kind: policy.blueprint(QueryProfile(0.5, kind, 2), Budget(), table).average_weight_bits(table)
        for kind in ("code", "dialogue")
    }
    assert averages["code"] == pytest.approx(6, abs=0.05)
    assert averages["dialogue"] == pytest.approx(4.5, abs=0.05)
    asked = policy.blueprint(QueryProfile(0.5, "code", 2), Budget(bits=5), table)
    assert asked.average_weight_bits(table) == pytest.approx(5, abs=0.05)


def test_the_folders_are_listed_as_import_linter_orders_them() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split("| where | what is inside |\n")[1]
    first = [line.split("|")[1] for line in page.split("\n\n")[0].splitlines()[1:]]
    listed = [name for cell in first for name in re.findall(r"`(\w+)(?:/|\.py)`", cell)]
    layers = [sorted(layer.split(" : ")) for layer in contract["layers"]]
    for layer in layers:
        assert sorted(listed[: len(layer)]) == layer
        del listed[: len(layer)]
    assert not listed


def test_the_glossary_says_where_each_thing_is() -> None:
    files = re.findall(r"^\| .* \| `([\w/]+\.\w+)` \|$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(files) > 60
    assert not [f for f in files if not (ROOT / "src/qbe" / f).is_file()]


def test_nothing_refers_to_documents_that_are_not_here() -> None:
    outside = re.compile(r"\bDESIGN\b|\b[Ss]eeds? 0\d\d\b|\b[Ss]ubsystems? \d{3}|\b[Tt]he specification\b")
    looked = [p for d in ("src", "tests", "docs", "benchmarks", "scripts", "examples") for p in (ROOT / d).rglob("*")]
    found = [
        f"{p.relative_to(ROOT)}: {line.strip()}"
        for p in [*looked, *ROOT.glob("*.md")]
        if p.suffix in {".py", ".md", ".c", ".cpp", ".cu", ".cuh", ".h", ".sh"} and p != Path(__file__)
        for line in p.read_text(encoding="utf-8").splitlines()
        if outside.search(line)
    ]
    assert not found
