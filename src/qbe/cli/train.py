"""`qbe train …`: what learned policies need before they serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from qbe.cli.console import err, out, print_json
from qbe.cli.options import DEFAULT, Device, Dtype, Json, Model, make_engine
from qbe.errors import QBEError

if TYPE_CHECKING:
    from qbe.policies.learned import Learned

app = typer.Typer(no_args_is_help=True, help="Train a learned policy for a model; what it learns stays in the cache.")
Data = Annotated[Path | None, typer.Option(help="folder with the data sets; left out, $QBE_DATA, else ../shared/data")]


@app.command()
def paq(
    model: Model = DEFAULT, data: Data = None,
    limit: Annotated[int, typer.Option(help="prompts of each data set at most, spread over it")] = 100,
    dtype: Dtype = "float32", device: Device = "auto", as_json: Json = False,
) -> None:  # fmt: skip
    """Train PAQ's router: the fewest bits that are enough for a prompt, by perplexity on training data.

    What was measured is kept: an interrupted run goes on, and one with a higher --limit adds to it.
    """
    from qbe.datasets.items import read_training
    from qbe.learning import fitting
    from qbe.learning.paq import comparison, train
    from qbe.policies import learned
    from qbe.progress import bar

    fitting.check()
    _positive("--limit", limit)
    learned.ready()
    items = read_training(data, limit)
    from qbe.datasets.results import Results, identity
    from qbe.models.load import quiet

    with (
        quiet(),
        make_engine(model, "static", dtype, device, "device") as engine,
        closing(Results(identity(model, engine))) as results,
    ):
        with bar("prompts", comparison(engine, items, results).steps, err.is_terminal) as tick:
            fitted = train(engine, items, results, tick)
        path = learned.write("paq", engine.table, fitted)
    if as_json:
        print_json({"file": str(path), **fitted.about})
        return
    table = Table(box=None, padding=(0, 2, 0, 0), caption=f"wrote {path}", caption_justify="left")
    for column in ("threshold", "right", "constant", "share of each width", "as labelled", "bits"):
        table.add_column(column, no_wrap=True)
    for router in fitted.about["routers"]:
        seeds = router["seeds"]
        right = [s["accuracy"] for s in seeds]
        table.add_row(
            f"{router['threshold']:g} ({router['tier']})", f"{_mean(right):.0%} ({min(right):.0%} to {max(right):.0%})",
            f"{_mean([s['constant_accuracy'] for s in seeds]):.0%}", _shares([s["share"] for s in seeds]),
            _shares([s["share_of_labels"] for s in seeds]), f"{_mean([s['bits'] for s in seeds]):.2f}",
        )  # fmt: skip
    console = out if out.is_terminal else Console(width=max(out.width, 150))  # a file need not fold its lines
    console.print(f"{fitted.about['prompts']} prompts, a quarter of them held out, three splits", highlight=False)
    console.print(table)


@app.command()
def predicted(
    model: Model = DEFAULT, data: Data = None,
    limit: Annotated[int, typer.Option(help="queries of each data set at most, spread over it")] = 32,
    dtype: Dtype = "float32", device: Device = "auto", as_json: Json = False,
) -> None:  # fmt: skip
    """Train the predictor of a query's sensitivities from what its prompt's prefill shows.

    What was measured is kept: an interrupted run goes on, and one with a higher --limit adds to it.
    """
    from qbe.datasets.items import read_training
    from qbe.engine.devices import pick_device
    from qbe.learning.predicted import train
    from qbe.policies import learned
    from qbe.progress import bar

    _positive("--limit", limit)
    learned.ready()
    items = read_training(data, limit)
    from qbe.datasets.results import Results, identity_of
    from qbe.models.load import quiet
    from qbe.store.prepare import prepare

    with quiet():
        prepared = prepare(model, dtype=dtype, device=pick_device(device), originals="device", progress=err.is_terminal)
        kind = next(prepared.model.parameters())
        with (
            closing(Results(identity_of(model, kind.dtype, kind.device))) as results,
            bar("queries", len(items), err.is_terminal) as tick,
        ):
            fitted = train(prepared, items, results, tick)
    path = learned.write("predicted", prepared.table, fitted)
    about = fitted.about
    if as_json:
        print_json({"file": str(path), **about})
        return
    out.print(
        f"{about['queries']} queries; a site's share of the damage differs between them by a factor of "
        f"e^{about['pattern_deviation']:.2f} (one deviation), of which {about['explained_of_pattern']:.0%} is "
        f"predicted on {about['held_out']} held-out ones\nwrote {path}",
        highlight=False,
    )  # fmt: skip


@app.command()
def proxy(
    model: Model = DEFAULT,
    policy: Annotated[str, typer.Option(help="the policy to learn from")] = "tiered",
    records: Annotated[
        Path | None, typer.Option(help="records in JSON lines ('qbe records --export'); left out, the user's own")
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Train the proxy scorer on past requests: their features, and the blueprints that a policy chose for them.

    Where a server scored some of the answers, queries that diverged more than their bits explain get more.
    """
    from qbe.learning import fitting
    from qbe.learning.proxy import read_records, train
    from qbe.policies import learned
    from qbe.progress import bar
    from qbe.records import RecordStore

    fitting.check()
    past: Sequence[Any] = list(RecordStore()) if records is None else read_records(records)
    with make_engine(model, policy, "auto", "cpu", "device", kv_tokens=1024) as engine:
        with bar("records", len(past), err.is_terminal) as tick:
            fitted = train(past, policy, engine.table, tick)
        path = learned.write("proxy", engine.table, fitted)
    if as_json:
        print_json({"file": str(path), **fitted.about})
        return
    about = fitted.about
    out.print(
        f"{about['records']} records of '{policy}', {about['distinct']} blueprints in {about['clusters']} clusters; "
        f"{about['parameters']} numbers. Of the newest quarter it answers {about['handled']:.1%}, of these "
        f"{about['agreed']:.1%} within 0.1 bits of the policy\n{_scored(about['tiers'])}wrote {path}",
        highlight=False,
    )  # fmt: skip


def _scored(tiers: Sequence[dict[str, Any]]) -> str:
    """What scored answers brought, a line for each analysis tier that had enough."""
    lines = [
        f"{of['scored']} scored answers: bits by how hard queries proved diverge {of['ratio']:.2f} times as much "
        f"({of['ratio_interval'][0]:.2f} to {of['ratio_interval'][1]:.2f}) at the same average: "
        f"{'learned' if of['used'] else 'left out'}\n"
        for of in (tier["quality"] for tier in tiers)
        if of.get("ratio_interval") and of["ratio_interval"][0] < of["ratio_interval"][1]
    ]  # fmt: skip
    return (
        "".join(lines)
        or f"{sum(tier['quality']['scored'] for tier in tiers)} scored answers, nothing learned from them\n"
    )


Steps = Annotated[int, typer.Option(help="of training, each of eight texts")]
Seed = Annotated[int, typer.Option(help="of the split in training and held-out texts, and of the training")]


@app.command()
def qaq(
    model: Model = DEFAULT, data: Data = None,
    limit: Annotated[int, typer.Option(help="texts of each data set at most, spread over it")] = 100,
    steps: Steps = 80, seed: Seed = 0, dtype: Dtype = "float32", device: Device = "auto", as_json: Json = False,
) -> None:  # fmt: skip
    """Train QAQ's routers: bits of every block for a query, from what its prompt's hidden states are."""
    from qbe.learning.qaq import train

    _routers("qaq", train, model, data, limit, steps, seed, dtype, device, as_json)


@app.command()
def mobi(
    model: Model = DEFAULT, data: Data = None,
    limit: Annotated[int, typer.Option(help="texts of each data set at most, spread over it")] = 100,
    steps: Steps = 80, seed: Seed = 0, dtype: Dtype = "float32", device: Device = "auto", as_json: Json = False,
) -> None:  # fmt: skip
    """Train MoBiQuant's routers: bits of every site for each token, from the hidden states it comes with."""
    from qbe.learning.mobi import train

    _routers("mobi", train, model, data, limit, steps, seed, dtype, device, as_json)


@app.command()
def tokenwise(
    model: Model = DEFAULT, data: Data = None,
    limit: Annotated[int, typer.Option(help="texts of each data set at most, spread over it")] = 1000,
    steps: Steps = 200, seed: Seed = 0, dtype: Dtype = "float32", device: Device = "auto", as_json: Json = False,
) -> None:  # fmt: skip
    """Train QBE's own routers: bits of every site for each token, by what fewer would do to the answer."""
    from qbe.learning.tokenwise import train

    _routers("tokenwise", train, model, data, limit, steps, seed, dtype, device, as_json)


@app.command()
def cascade(
    model: Model = DEFAULT, data: Data = None,
    limit: Annotated[int, typer.Option(help="prompts of each data set at most, spread over it")] = 300,
    steps: Steps = 200, seed: Seed = 0, dtype: Dtype = "float32", device: Device = "auto", as_json: Json = False,
) -> None:  # fmt: skip
    """Train the cascade (--cascade): bits of later layers for each token of an answer, by what its attention shows."""
    from qbe.learning.cascade import train

    _routers("cascade", train, model, data, limit, steps, seed, dtype, device, as_json)


def _routers(
    policy: str, train: Callable[..., Learned], model: str, data: Path | None, limit: int, steps: int, seed: int,
    dtype: str, device: str, as_json: bool,
) -> None:  # fmt: skip
    """Trains routers of blocks, keeps them and says what they reach."""
    from qbe.datasets.items import read_training
    from qbe.engine.devices import pick_device
    from qbe.learning.distil import check_enough
    from qbe.models.load import quiet
    from qbe.policies import learned
    from qbe.progress import bar
    from qbe.store.prepare import prepare

    for option, value in (("--limit", limit), ("--steps", steps)):
        _positive(option, value)
    if seed < 0:
        raise QBEError(f"--seed is {seed}, but must be 0 or more")
    learned.ready()
    items = read_training(data, limit)
    check_enough(items)  # before the model is nested
    with quiet():
        prepared = prepare(model, dtype=dtype, device=pick_device(device), originals="device", progress=err.is_terminal)
        with bar("steps", steps, err.is_terminal) as tick:
            fitted = train(prepared, items, steps, seed, tick)
    path = learned.write(policy, prepared.table, fitted)
    if as_json:
        print_json({"file": str(path), **fitted.about})
        return
    for before, after in zip(fitted.about["before"], fitted.about["after"], strict=True):
        out.print(
            f"held-out texts at {after['asked']:g} bits over the blocks: got {after['bits']:.2f}, KL {after['kl']:.5f} "
            f"nats a token; untrained {before['bits']:.2f} and {before['kl']:.5f}",
            highlight=False,
        )
    out.print(f"{fitted.about['parameters']} numbers, {steps} steps\nwrote {path}", highlight=False)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _shares(splits: Sequence[dict[str, float]]) -> str:
    return ", ".join(f"{width}: {_mean([s[width] for s in splits]):.0%}" for width in splits[0])


def _positive(option: str, value: int) -> None:
    if value < 1:
        raise QBEError(f"{option} is {value}, but must be 1 or more")
