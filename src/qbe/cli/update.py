"""`qbe quantize --update FOLDER --from-records`."""

from __future__ import annotations

from pathlib import Path

from qbe.cli.console import out, print_json
from qbe.errors import QBEError


def update(folder: Path, from_records: bool, other: bool, as_json: bool) -> None:
    """Takes what serving has counted over into a store.

    Args:
        other: whether options were given that are for making a store.
    """
    from qbe.learning.served_use import take_over
    from qbe.records import RecordStore

    if not from_records:
        raise QBEError("--update says which store is brought up to date; say from what, too: --from-records")
    if other:
        raise QBEError(
            "--update changes what a store knows of the use of its experts: leave out the options of making one"
        )
    done = take_over(folder, RecordStore())
    if as_json:
        print_json({"folder": str(folder), **done.describe()})
    else:
        out.print(f"{folder}: {done.line()}", highlight=False, markup=False, soft_wrap=True)
