"""`qbe train cascade`: when a layer's attention says that later layers need more or fewer bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from qbe.commands.console import err, out, print_json
from qbe.commands.options import DEFAULT, Device, Dtype, Json, Model, make_engine
from qbe.errors import QBEError
from qbe.files import make_folder
from qbe.learning.command import Data

if TYPE_CHECKING:
    from qbe.store.cascade_table import CascadeTable


def cascade(
    model: Model = DEFAULT, data: Data = None,
    limit: Annotated[int, typer.Option(help="prompts of each data set at most, spread over it")] = 16,
    dtype: Dtype = "float32", device: Device = "auto", as_json: Json = False,
) -> None:  # fmt: skip
    """Learn when the attention of a layer shall move the bits of later layers (--cascade), from the model's answers."""
    from qbe.eval.items import read_training
    from qbe.learning.cascade import TOGETHER, train
    from qbe.models import cache_dir
    from qbe.models.load import quiet
    from qbe.progress import bar
    from qbe.store import cascade_table

    if limit < 1:
        raise QBEError(f"--limit is {limit}, but must be 1 or more")
    make_folder(cache_dir() / "learned")  # told before the work, not after
    items = read_training(data, limit)
    with quiet(), make_engine(model, "static", dtype, device, "device", answers=TOGETHER) as engine:
        with bar("answers", len(items), err.is_terminal) as tick:
            found = train(engine, items, tick)
        path = cascade_table.save(found, engine.table)
    if as_json:
        print_json({"file": str(path), **found.about})
        return
    _show(found)
    err.print(f"wrote {path}", markup=False, highlight=False)


def _show(table: CascadeTable) -> None:
    about = table.about
    held = about["held_out"]
    between = "" if held["interval"] is None else " ({:.2f} to {:.2f})".format(*held["interval"])
    points = ", ".join(f"{p.layer} ({'high' if p.sign > 0 else 'low'} entropy raises)" for p in table.points)
    rho = ", ".join(f"{layer}: {value:+.2f}" for layer, value in about["correlations"].items())
    out.print(
        f"{about['answers']} answers, {about['tokens']} tokens at {about['bits']:.2f} bits; rank correlation of a "
        f"layer's entropy with what later layers are worth: {rho}\n"
        f"points behind layers {points}; each moves {table.share:.0%} of the tokens\n"
        f"divergence on held-out answers over that of the blueprint alone: {held['ratio']:.3f}{between} at "
        f"{held['bits']:.2f} bits, {held['at_random']:.3f} with the same moves at random tokens", highlight=False,
    )  # fmt: skip
