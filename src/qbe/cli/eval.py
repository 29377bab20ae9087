"""`qbe eval …`: measures, prints a table, writes JSON and a picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from qbe.cli.json_option import JsonCommand, JsonGroup, JsonOrFile, json_file, prints_json, tell_json
from qbe.cli.options import DEFAULT, Device, Dtype, Model
from qbe.errors import QBEError
from qbe.files import check_writable
from qbe.sites import KV_BITS, TURBO_KINDS

if TYPE_CHECKING:
    from qbe.eval.needle import Setting

app = typer.Typer(no_args_is_help=True, invoke_without_command=True, cls=JsonGroup)
Plot = Annotated[Path | None, typer.Option("--plot", help="draw them into this PNG (needs matplotlib)")]


@app.callback()
def compare(
    context: typer.Context,
    policies: Annotated[str, typer.Option(help="policies to compare, e.g. static,random,tiered")] = "",
    bits: Annotated[str, typer.Option(help="average bits over the weights of nested sites, e.g. 4.5,5,6")] = "5",
    model: Model = DEFAULT,
    data: Annotated[
        Path | None, typer.Option(help="folder with the data sets; left out, $QBE_DATA, else ../shared/data")
    ] = None,
    datasets: Annotated[str, typer.Option(help="of text, gsm8k, bbh and humaneval")] = "text,gsm8k,bbh,humaneval",
    limit: Annotated[int, typer.Option(help="queries of each data set at most, spread over it")] = 50,
    seeds: Annotated[int, typer.Option(help="seeds of each policy that draws")] = 3,
    answers: Annotated[bool, typer.Option(help="write answers and count the right ones, which takes longest")] = True,
    dtype: Dtype = "float32",
    device: Device = "auto",
    as_json: JsonOrFile = None,
    plot: Plot = None,
) -> None:
    """Measure what lower precision costs: policies side by side, at equal average bits.

    Teacher-forced divergence from the 16-bit model, top-1 agreement and perplexity on each query's reference answer;
    and the answers written to GSM8K, BIG-Bench Hard and HumanEval (programs run in a sandboxed process). What was
    measured is kept: an interrupted run goes on where it was.
    """
    if context.invoked_subcommand is not None:
        if policies:
            raise QBEError(f"--policies is a comparison of its own: give it without '{context.invoked_subcommand}'")
        return
    names = tuple(dict.fromkeys(p.strip() for p in policies.split(",")))
    if not all(names):
        raise QBEError(f"--policies '{policies}' names none; give e.g. --policies static,random,tiered")
    averages = _numbers("--bits", bits, 1, 16)
    for option, value in (("--limit", limit), ("--seeds", seeds)):
        if value < 1:
            raise QBEError(f"{option} is {value}, but must be 1 or more")
    check_writable(json=json_file(as_json), plot=plot)
    if plot is not None:
        from qbe.bench.plot import check_plot

        check_plot(plot)
    from qbe.datasets.items import DATASETS, read

    wanted = tuple(dict.fromkeys(d.strip() for d in datasets.split(",")))
    for name in wanted:
        if name not in DATASETS:
            raise QBEError(f"--datasets has '{name}': give some of {', '.join(DATASETS)}")
    items = [item if answers else replace(item, right=None) for item in read(wanted, data, limit)]
    from contextlib import closing

    from qbe.datasets.results import Results, identity
    from qbe.engine.engine import Engine
    from qbe.eval.compare import TOGETHER, Comparison, settings_of
    from qbe.eval.report import compared
    from qbe.eval.summary import describe, render
    from qbe.models.load import quiet
    from qbe.progress import bar

    settings = settings_of(names, averages, seeds)
    err = Console(stderr=True)
    with (
        quiet(),
        Engine(model, dtype=dtype, device=device, originals="device", max_sequences=TOGETHER, records=False,
               progress=err.is_terminal) as engine,
        closing(Results(identity(model, engine))) as results,
    ):  # fmt: skip
        comparison = Comparison(engine, items, settings, results)
        began = compared(engine, wanted, limit, results)
        with bar("queries", comparison.steps, err.is_terminal) as tick:
            described = describe(comparison.run(tick))
    tell_json(as_json, {"eval": "policies", "conditions": began, **described})
    if plot is not None:
        from qbe.eval.pareto import draw as draw_pareto

        draw_pareto(described, engine.name, plot)
    if not prints_json(as_json):
        _wide().print(render(described, engine.name))


@app.command(cls=JsonCommand)
def needle(
    model: Model = DEFAULT,
    data: Annotated[
        Path | None, typer.Option(help="folder with 'paul_graham_essays'; left out, $QBE_DATA, else ../shared/data")
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="tokens of a prompt with its answer; left out, those of 1024,2048,4096 in the context")
    ] = "",
    depths: Annotated[str, typer.Option(help="percent of the text before the needle")] = "0,25,50,75,100",
    kv_bits: Annotated[
        str, typer.Option(help="settings to compare with 16 bits: 8, 4, 2, turbo4, turbo2, default (the policy's)")
    ] = "8,4,2,default",
    needles: Annotated[int, typer.Option(help="needles for each length and depth")] = 2,
    limit: Annotated[int | None, typer.Option(help="needles in all, spread over the grid")] = None,
    device: Device = "auto",
    as_json: JsonOrFile = None,
    plot: Plot = None,
) -> None:
    """Hide numbers in essays and ask for them, at 16-bit keys and values first, then at fewer bits."""
    settings = _settings(kv_bits)
    shares = tuple(d / 100 for d in _numbers("--depths", depths, 0, 100))
    wanted = tuple(int(n) for n in _numbers("--lengths", lengths, 1, 1 << 24)) if lengths else ()
    for option, value in (("--needles", needles), ("--limit", limit)):
        if value is not None and value < 1:
            raise QBEError(f"{option} is {value}, but must be 1 or more")
    check_writable(json=json_file(as_json), plot=plot)
    if plot is not None:
        from qbe.bench.plot import check_plot

        check_plot(plot)
    from qbe.datasets.haystack import read_essays

    text = read_essays(data)
    from qbe.engine.engine import Engine
    from qbe.eval.needle import ANSWER_TOKENS, Grid, run
    from qbe.eval.report import conditions, render
    from qbe.models.load import quiet
    from qbe.progress import bar

    err = Console(stderr=True)
    longest = max(wanted or Grid.lengths)
    with (
        quiet(),
        # Room for a prompt and for the pages that the one before it has left.
        Engine(model, device=device, originals="device", max_sequences=1,
               kv_tokens=2 * (longest + ANSWER_TOKENS + 64), records=False, progress=err.is_terminal) as engine,
    ):  # fmt: skip
        context = engine.core.context or longest
        default = tuple(n for n in Grid.lengths if n <= context) or (context,)
        grid = Grid(wanted or default, shares, needles, limit)
        began = conditions(engine)
        asked = len(grid.cells()) * len({16, *settings})
        with bar("needles", asked, err.is_terminal) as tick:
            outcome = run(engine, text, grid, settings, tick)
    tell_json(as_json, {"eval": "needle", "conditions": began, **outcome.describe()})
    if plot is not None:
        from qbe.eval.heat_map import draw

        draw(outcome, grid, engine.name, plot)
    if not prints_json(as_json):
        _wide().print(render(outcome, grid, engine.name))


def _wide() -> Console:
    out = Console()
    return out if out.is_terminal else Console(width=max(out.width, 150))  # a file need not fold its lines


def _settings(text: str) -> tuple[Setting, ...]:
    names: dict[str, Setting] = {str(b): b for b in KV_BITS} | {t: t for t in TURBO_KINDS} | {"default": None}
    parts = [p.strip() for p in text.split(",")]
    for part in parts:
        if part not in names:
            raise QBEError(f"--kv-bits has '{part}': give some of {', '.join(names)}, e.g. 8,4,default")
    return tuple(dict.fromkeys(names[p] for p in parts))


def _numbers(option: str, text: str, low: int, high: int) -> tuple[float, ...]:
    try:
        numbers = tuple(dict.fromkeys(float(p) for p in text.split(",")))
    except ValueError:
        raise QBEError(f"{option} '{text}' is not a list of numbers; give 0,50,100 for example") from None
    if any(not low <= n <= high for n in numbers):
        raise QBEError(f"{option} has a number out of range; give {low} to {high}")
    return numbers
