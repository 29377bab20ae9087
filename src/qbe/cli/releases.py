"""`qbe promote`, `qbe rollback` and `qbe releases`. None of them imports torch."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qbe.cli.console import err, print_json, say
from qbe.cli.options import Json
from qbe.errors import QBEError

if TYPE_CHECKING:
    from qbe.releases.folder import Release, ReleaseFolder, State

Folder = Annotated[Path, typer.Option("--releases", help="folder of the releases")]
DEFAULT = Path("releases")


def promote(
    model: Annotated[Path, typer.Argument(help="model folder or GGUF file")],
    verdict: Annotated[Path, typer.Option(help="folder that `qbe regress -o` wrote about exactly this model")],
    alias: Annotated[str, typer.Option(help="what it becomes: stable or candidate")] = "stable",
    releases: Folder = DEFAULT, as_json: Json = False,
) -> None:  # fmt: skip
    """Make a model that has passed `qbe regress` the stable release; what was stable becomes previous.

    Exit code 1: the verdict is not a pass; 2: bad input, or the verdict is about another model.
    """
    from qbe.releases.folder import ReleaseFolder
    from qbe.releases.promote import NotProven
    from qbe.releases.promote import promote as switch
    from qbe.releases.verdict import read

    folder = ReleaseFolder(releases)
    try:
        state = switch(model, read(verdict), folder, alias, err.is_terminal)
    except NotProven as error:
        say(str(error), "red")
        raise typer.Exit(1) from None
    _print(folder, state, as_json, switched=alias == "stable")


def rollback(releases: Folder = DEFAULT, as_json: Json = False) -> None:
    """Make the previous release the stable one again."""
    from qbe.releases.folder import ReleaseFolder
    from qbe.releases.promote import rollback as switch

    folder = ReleaseFolder(releases)
    _print(folder, switch(folder, err.is_terminal), as_json, switched=True)


def releases(
    releases: Folder = DEFAULT,
    manifest: Annotated[
        str | None, typer.Option(help="print what shifts a fleet from stable to candidate: argo or kserve")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="settings with [rollout], whose steps and limits it has")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Show which models are stable, candidate and previous."""
    from qbe.releases.folder import ReleaseFolder

    folder = ReleaseFolder(releases)
    if manifest is not None:
        _manifest(folder.state(), manifest, config, as_json)
        return
    if config is not None:
        raise QBEError("--config says what --manifest prints: give that, too")
    _print(folder, folder.state(), as_json, switched=False)


def _manifest(state: State, kind: str, config: Path | None, as_json: bool) -> None:
    import yaml

    from qbe.releases.manifest import later_steps, manifests
    from qbe.server.settings_file import load

    if config is None:
        raise QBEError("--manifest needs --config FILE, whose [rollout] has the steps and limits")
    rollout = load(config).rollout
    found = manifests(kind, rollout, state)
    if as_json:
        print_json({"apiVersion": "v1", "kind": "List", "items": found})
    else:
        print(yaml.safe_dump_all(found, sort_keys=False, width=1000), end="")
    for line in later_steps(rollout) if rollout is not None and kind == "kserve" else ():
        say(line, "dim")


def _print(folder: ReleaseFolder, state: State, as_json: bool, switched: bool) -> None:
    if as_json:
        aliases = {alias: _described(folder, release) for alias, release in state.aliases().items()}
        print_json({"releases": str(folder.path), **aliases, "earlier": len(state.earlier)})
        return
    for alias, release in state.aliases().items():
        print(f"{alias:10}{_line(folder, release)}")
    if switched:
        say(f"servers of {folder.path / 'stable'} go on with what they started with: restart them in turn", "dim")


def _described(folder: ReleaseFolder, release: Release | None) -> dict[str, Any] | None:
    return None if release is None else {**asdict(release), "path": str(folder.target(release))}


def _line(folder: ReleaseFolder, release: Release | None) -> str:
    from qbe.releases.promote import short

    if release is None:
        return "none"
    return f"{folder.target(release)}  {short(release.digest)}  suite {release.suite}, promoted {release.promoted}"
