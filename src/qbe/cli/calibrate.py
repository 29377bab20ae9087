"""`qbe calibrate`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer

from qbe.cli.console import err, out, print_json
from qbe.cli.options import DEFAULT, Json, Model
from qbe.errors import QBEError

app = typer.Typer(no_args_is_help=True, help="Make the set of passages that a store is calibrated on.")
_NEEDED = {
    "serve": ("fastapi", "jsonschema", "llguidance", "pydantic"),
    "calibrate": ("datasketch", "presidio_analyzer", "py3langid"),
}


@app.callback()
def calibrate() -> None:
    """Make the set of passages that a store is calibrated on."""


@app.command()
def build(
    logs: Annotated[list[Path], typer.Argument(help="requests of OpenAI's form, JSON lines; responses beside them")],
    output: Annotated[Path, typer.Option("--output", "-o", help="folder to write; new, or empty")],
    model: Model = DEFAULT,
    passages: Annotated[int, typer.Option(help="to take, at most")] = 64,
    suite: Annotated[
        Path | None, typer.Option(help="suite of `qbe regress` whose items are kept out, beside the built-in one")
    ] = None,
    licence: Annotated[
        str | None, typer.Option("--licence", "--license", help="of lines that have no 'license' of their own")
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Choose passages from logs that look like the traffic, for `qbe quantize --calibrate`.

    They go through the model's chat template. Personal data is masked, near-duplicates and what is near an item of a
    suite are left out, and set.json says what was taken.
    """
    for extra, modules in _NEEDED.items():
        for name in modules:
            if importlib.util.find_spec(name) is None:
                raise QBEError(f"qbe calibrate needs {name}: pip install 'qbe[{extra}]'")
    if passages < 1:
        raise QBEError(f"--passages is {passages}, but must be at least 1")
    from qbe.calibration.build import build as choose
    from qbe.models import pull
    from qbe.models.load import load_config_and_tokenizer, quiet
    from qbe.regress.sources import read
    from qbe.regress.suite import load
    from qbe.store import calibration_set, draft

    draft.check(output)
    suites = [load(None), *([] if suite is None else [load(suite)])]
    items = [text for one in suites for task in read(one)[0] for text in (task.prompt, task.plain) if text]
    path = pull(model, progress=err.is_terminal)
    config, tokenizer = load_config_and_tokenizer(path)
    context = int(getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or 1 << 30)
    with quiet():
        found, about = choose(logs, tokenizer, model, context, items, passages, licence, progress=err.is_terminal)
    about["suites"] = [{"name": one.name, "sha256": one.digest} for one in suites]
    described = calibration_set.write(output, found, about)
    if as_json:
        print_json(described)
    else:
        _say(output, described)


def _say(output: Path, described: dict[str, Any]) -> None:
    gone = ", ".join(f"{n} {why}" for why, n in described["left_out"].items()) or "nothing"
    masked = ", ".join(f"{n} {kind}" for kind, n in described["masked"].items()) or "nothing"
    for label, values in described["quotas"].items():
        taken = ", ".join(f"{value} {of['taken']}" for value, of in values.items())
        out.print(f"{label}: {taken}", highlight=False, markup=False, soft_wrap=True)
    out.print(f"left out: {gone}", highlight=False, markup=False, soft_wrap=True)
    out.print(f"masked: {masked}", highlight=False, markup=False, soft_wrap=True)
    told = f"wrote {output}: {described['passages']} passages, {described['tokens']} tokens"
    out.print(told, highlight=False, markup=False, soft_wrap=True)
