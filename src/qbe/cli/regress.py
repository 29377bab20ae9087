"""`qbe regress`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from qbe.cli.console import err, print_json, say
from qbe.cli.options import Json
from qbe.errors import QBEError

if TYPE_CHECKING:
    from qbe.regress.suite import Suite
    from qbe.regress.target import Target

Where = "folder, QBE folder, GGUF file, hub id or built-in name; or the address of an OpenAI-compatible server"


def regress(
    baseline: Annotated[str, typer.Option(help=f"what the candidate must be as good as: {Where}")],
    candidate: Annotated[str, typer.Option(help="what is to be served instead, named the same way")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="folder for verdict.json, items.jsonl and report.html")
    ],
    serve: Annotated[Path | None, typer.Option(help="settings file that the candidate is served with (TOML)")] = None,
    tier: Annotated[str | None, typer.Option(help="service tier of the candidate's requests")] = None,
    bits: Annotated[float | None, typer.Option(help="average weight bits of the candidate's requests")] = None,
    suite: Annotated[
        Path | None, typer.Option(help="what is asked and how much may be lost (TOML); left out, the built-in one")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="the short built-in suite")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Decide whether a candidate, as it is served, still does what its baseline does.

    Exit code 0: pass; 1: fail or anomalous (too good to be true); 3: inconclusive; 2: bad input.
    """
    for name in ("fastapi", "jsonschema", "llguidance", "pydantic", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise QBEError(f"qbe regress needs {name}: pip install 'qbe[serve]'")
    from qbe.regress.suite import load

    if suite is not None and quick:
        raise QBEError("--quick is a suite of its own: give it, or --suite")
    asked = load(suite, quick)
    before, now = _baseline(baseline, asked), _candidate(candidate, asked, serve, tier, bits)
    from qbe.models.load import quiet
    from qbe.progress import bar
    from qbe.regress.run import Regression
    from qbe.regress.verdict import EXIT, check_folder, note, render, write

    check_folder(output)
    regression = Regression(before, now, asked)
    with quiet(), bar("questions", regression.steps, err.is_terminal) as tick:
        outcome = regression.run(tick)
    described = write(outcome, output)
    try:
        note(described, now)
    except QBEError as error:  # a folder that nobody may write to; the verdict stands in its own
        say(f"the candidate's folder does not hold the verdict: {error}", "yellow")
    if as_json:
        print_json(described)
    else:
        out = Console()
        out = out if out.is_terminal else Console(width=max(out.width, 150))  # a file need not fold its lines
        out.print(render(described))
        out.print(f"wrote {output}", highlight=False, markup=False, soft_wrap=True)
    if code := EXIT[outcome.verdict]:
        raise typer.Exit(code)


def _baseline(where: str, suite: Suite) -> Target:
    from qbe.regress.target import FULL_PRECISION, Target

    side, url = suite.baseline, where.startswith(("http://", "https://"))
    request = ({} if url else FULL_PRECISION) if side.request is None else side.request
    # The 16-bit weights: on a GPU a server keeps them only where it is told to.
    options = side.options if url or "--originals" in side.options else (*side.options, "--originals", "device")
    return Target(where, "", request, options, suite.device)


def _candidate(where: str, suite: Suite, serve: Path | None, tier: str | None, bits: float | None) -> Target:
    from qbe.regress.target import Target
    from qbe.server.settings import TIER_NAMES
    from qbe.server.settings_file import load

    settings, request = "", dict(suite.candidate.request or {})
    if serve is not None:
        if where.startswith(("http://", "https://")):
            raise QBEError("--serve is for a candidate that is served here: leave it out with an address")
        rollout = load(serve).rollout  # which says what is wrong with it
        if rollout is not None and rollout.candidate is not None:
            raise QBEError(
                f"--serve {serve}: [rollout] would answer some of the items otherwise: leave it out, or put what it "
                "tries into the tiers' tables to judge that"
            )
        settings = serve.read_text(encoding="utf-8")
    if tier is not None:
        if tier not in TIER_NAMES:
            raise QBEError(f"--tier '{tier}' is unknown: choose {', '.join(TIER_NAMES)}")
        request["service_tier"] = tier
    if bits is not None:
        if not 1 <= bits <= 16:
            raise QBEError(f"--bits is {bits:g}, but must be from 1 to 16")
        request["qbe"] = {**_contract(request), "bits": bits}
    return Target(where, settings, request, suite.candidate.options, suite.device)


def _contract(request: dict[str, Any]) -> dict[str, Any]:
    found = request.get("qbe") or {}
    if not isinstance(found, dict):
        raise QBEError("the suite's candidate.request.qbe is no table")
    return found
