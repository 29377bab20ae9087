"""`qbe bench …`: measures, prints a table, writes JSON and a picture."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from qbe.cli.json_option import JsonCommand, JsonOrFile, json_file, prints_json, tell_json
from qbe.errors import QBEError
from qbe.files import check_writable

if TYPE_CHECKING:
    from qbe.bench.record import Record
    from qbe.bench.report import BenchmarkReport

BENCHMARKS = ("linears", "experts", "decode", "prefill", "switch", "batch", "kv", "speculate", "engine", "serve")

app = typer.Typer(
    no_args_is_help=True,
    help="Measure QBE beside its peers on this machine, with the physical limit beside both.",
)
Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
Against = Annotated[
    Path | None, typer.Option(help="say what got worse than in this record, and end with exit code 1 if anything did")
]
Taken = Annotated[
    Path | None, typer.Option("--record", help="keep what is new or better in this record of best numbers")
]
Plot = Annotated[Path | None, typer.Option("--plot", help="draw the ratios into this PNG (needs matplotlib)")]


def measure(name: str, device: str = "auto", sizes: Any = None, progress: bool = False) -> BenchmarkReport:
    """Runs one benchmark.

    Args:
        name: one of `BENCHMARKS`.
        device: `auto`, `cpu` or `cuda`.
        sizes: the `Sizes` of the benchmark's module; None takes the sizes that the targets are about.
        progress: show bars on standard error.

    Raises:
        QBEError: an unknown benchmark or device, or whatever is wrong with a model.
    """
    import torch

    from qbe.bench.machine import hardware, measure_limits
    from qbe.bench.report import BenchmarkReport
    from qbe.engine.devices import pick_device
    from qbe.models.load import quiet
    from qbe.store.nested_linears import NestedWeightConfig

    if name not in BENCHMARKS:
        raise QBEError(f"there is no benchmark '{name}': choose {', '.join(BENCHMARKS)}")
    where = pick_device(device)
    module = import_module(f"qbe.bench.{name}")
    sizes = module.sizes_for(where) if sizes is None else sizes
    with torch.cuda.device(where) if where.type == "cuda" else nullcontext(), quiet():
        limits = measure_limits(where)
        machine = hardware(where, limits)
        began = datetime.datetime.now(datetime.UTC)
        rows = module.run(where, limits, sizes, progress)
        if where.type == "cuda":
            torch.cuda.empty_cache()
    conditions = {
        "started": began.isoformat(timespec="seconds"),
        "seconds": round((datetime.datetime.now(datetime.UTC) - began).total_seconds(), 1),
        "load_average_after": list(os.getloadavg()),
        "statistic": "median of interleaved rounds after one that does not count; spread: quartiles",
        "timing": "device events around CUDA graph replays" if where.type == "cuda" else "wall clock",
        "store": asdict(NestedWeightConfig()),
        "sizes": _plain(asdict(sizes)),
    }
    return BenchmarkReport(name, machine, conditions, rows)


def _plain(value: Any) -> Any:
    """What `asdict` made, as JSON: a peer is its name, a path its text."""
    if isinstance(value, dict):
        return value["name"] if {"name", "prepare"} <= set(value) else {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, int | float | str) else str(value)


@dataclass(frozen=True)
class Outputs:
    """On which ways a report is told: as JSON, into files, and beside the record `against`; None: not on this one."""

    json: Path | None = None
    plot: Path | None = None
    against: Path | None = None
    record: Path | None = None


def _told(name: str, device: str, outputs: Outputs, sizes: Any = None) -> None:
    """Measure, and tell on every way that was asked for."""
    from qbe.bench.record import Record

    json, plot = outputs.json, outputs.plot
    check_writable(json=json_file(json), plot=plot, record=outputs.record)
    against = None if outputs.against is None else Record.read(outputs.against)
    kept = Record.read(outputs.record) if outputs.record is not None and outputs.record.is_file() else Record()
    if plot is not None:
        from qbe.bench.plot import check_plot

        check_plot(plot)
    err = Console(stderr=True)
    report = measure(name, device, sizes, progress=err.is_terminal)
    from qbe.bench.table import render

    tell_json(json, report.describe())
    if plot is not None:
        from qbe.bench.plot import draw

        draw(report, plot)
    out = Console(stderr=prints_json(json))
    if not out.is_terminal:  # a file need not fold its lines
        out = Console(stderr=prints_json(json), width=max(out.width, 130))
    if not prints_json(json):
        out.print(render(report))
    if outputs.record is not None:
        kept.take(report)
        kept.write(outputs.record)
    if against is not None:
        _compare(report, against, out)


def _compare(report: BenchmarkReport, record: Record, out: Console) -> None:
    """Says what changed; exit code 1 when anything got worse."""
    changes = record.changes(report)
    for change in changes:
        out.print(Text(change.line, style="green" if change.better else "red"))
    worse = sum(not c.better for c in changes)
    out.print(f"{record.known(report)} of {len(report.rows)} rows are in the record: {len(changes) - worse} better, "
              f"{worse} worse")  # fmt: skip
    if worse:
        raise typer.Exit(1)


def _command(name: str, does: str) -> Callable[..., None]:
    def command(
        device: Device = "auto", json: JsonOrFile = None, plot: Plot = None, against: Against = None,
        record: Taken = None,
    ) -> None:  # fmt: skip
        _told(name, device, Outputs(json, plot, against, record))

    command.__doc__ = does
    return app.command(name, cls=JsonCommand)(command)


for _name, _does in (
    ("linears", "All linear layers of a token against cuBLAS, tinygemm, torchao (GPU) or F.linear (CPU)."),
    ("experts", "The experts of a mixture-of-experts layer at several bits against own 16 bits and torch in bfloat16."),
    ("prefill", "Reading a prompt of 2 048 tokens at several bits against 16 bits and llama.cpp."),
    ("engine", "Decode steps by batch and mix of precisions, exact and shared, beside all rows at 16 bits."),
    ("switch", "The time that a change of blueprint between two steps adds."),
    ("batch", "A batch of mixed precisions against all rows at the highest, and a launch per precision."),
    ("kv", "Attention over KV pages of 16, 8, 4, 2 and mixed bits, quantising them, and their memory."),
):
    _command(_name, _does)


@app.command("decode", cls=JsonCommand)
def decode(
    model: Annotated[str | None, typer.Option(help="left out, the default model; on a GPU a random 8B one")] = None,
    device: Device = "auto", json: JsonOrFile = None, plot: Plot = None, against: Against = None, record: Taken = None,
) -> None:  # fmt: skip
    """Whole decode steps against the same engine at 16 bits, transformers and llama.cpp."""
    from dataclasses import replace

    from qbe.bench.decode import sizes_for
    from qbe.engine.devices import pick_device

    sizes = sizes_for(pick_device(device))
    outputs = Outputs(json, plot, against, record)
    _told("decode", device, outputs, sizes if model is None else replace(sizes, model=model))


@app.command("speculate", cls=JsonCommand)
def speculate(
    data: Annotated[Path | None, typer.Option(help="ask prompts of this folder's data sets, too, 56 in all")] = None,
    device: Device = "auto", json: JsonOrFile = None, plot: Plot = None, against: Against = None, record: Taken = None,
) -> None:  # fmt: skip
    """Answers with speculation against without: speed, acceptance of each drafter, same tokens."""
    from qbe.bench.speculate import sizes_for, with_traffic
    from qbe.engine.devices import pick_device

    sizes = sizes_for(pick_device(device))
    _told(
        "speculate", device, Outputs(json, plot, against, record), sizes if data is None else with_traffic(sizes, data)
    )


@app.command("serve", cls=JsonCommand)
def serve(
    model: Annotated[str | None, typer.Option(help="left out, the default model")] = None,
    data: Annotated[
        Path | None, typer.Option(help="folder of traces and schemas; left out, $QBE_DATA, else ../shared/data")
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option(help="bound, overhead, priority, schemas or soak; left out, all of them")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="settings file of the server whose tiers are measured")] = None,
    device: Device = "auto", json: JsonOrFile = None, plot: Plot = None, against: Against = None, record: Taken = None,
) -> None:  # fmt: skip
    """A real server under Azure's traces: requests within a latency bound, overhead, priority, JSON schemas."""
    from dataclasses import replace

    from qbe.bench.serve import sizes_for
    from qbe.bench.serve_sizes import PARTS
    from qbe.engine.devices import pick_device

    try:
        import llguidance  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise QBEError(f"the server needs {error.name}: pip install 'qbe[serve]'") from None
    if wrong := set(part or ()) - set(PARTS):
        raise QBEError(f"--part '{wrong.pop()}' is unknown: choose {', '.join(PARTS)}")
    sizes = sizes_for(pick_device(device))
    settings = sizes.settings
    if config is not None:
        from qbe.server.settings_file import load

        load(config)  # says what is wrong with it
        settings = config.read_text(encoding="utf-8")
    sizes = replace(sizes, data=data, parts=tuple(part or PARTS), settings=settings, model=model or sizes.model)
    _told("serve", device, Outputs(json, plot, against, record), sizes)
