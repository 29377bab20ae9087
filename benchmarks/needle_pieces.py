"""Does a needle that 16-bit keys and values find depend on how its prompt is cut, and does the default find the rest?

    python benchmarks/needle_pieces.py --data DIR [--model NAME] [--lengths 8192] [--pieces 512,2048] [--json FILE]

The cells of `qbe eval needle --needles 4`, once for each number of tokens that a step may have at most. In bfloat16 a
prompt that is cut otherwise is added up in another order, and where the right digit and a wrong one are as likely but
for one step of a bfloat16, another one is written. A needle counts as found by 16 bits if it is found at every size.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from qbe.datasets.haystack import read_essays
from qbe.engine.engine import Engine
from qbe.errors import QBEError
from qbe.eval.needle import ANSWER_TOKENS, Grid, Needle, run
from qbe.progress import bar
from qbe.sites import FULL_BITS


def found(args: argparse.Namespace, text: str, grid: Grid, piece: int) -> list[set[Needle]]:
    """Cells found at 16 bits and by default with prompts cut after so many tokens."""
    room = 2 * (max(grid.lengths) + ANSWER_TOKENS + 64)
    with (
        Engine(args.model, max_batch_tokens=piece, max_sequences=1, kv_tokens=room, records=False) as engine,
        bar(f"pieces of {piece}", 2 * len(grid.cells()), sys.stderr.isatty()) as tick,
    ):
        outcome = run(engine, text, grid, [None], tick)
    return [{cell for cell, row in outcome.of(setting).items() if row.found} for setting in (FULL_BITS, None)]


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' must be a whole number, 1 or more")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    return tuple(map(count, text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("QBE_DATA", "../shared/data")))
    parser.add_argument("--lengths", type=counts, default="7168,8192")
    parser.add_argument("--pieces", type=counts, default="512,1024,2048,4096,8192", help="the most tokens of a step")
    parser.add_argument("--needles", type=count, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    grid = Grid(lengths=args.lengths, needles=args.needles)
    try:
        text = read_essays(args.data)
        by_piece = {piece: found(args, text, grid, piece) for piece in args.pieces}
    except QBEError as error:
        raise SystemExit(f"needle_pieces: {error}") from None
    rows = []
    for length in grid.lengths:
        cells = {c for c in grid.cells() if c.length == length}
        always = cells.intersection(*(full for full, _ in by_piece.values()))
        row = {
            "length": length,
            "needles": len(cells),
            "full": {piece: len(cells & full) for piece, (full, _) in by_piece.items()},
            "full_always": len(always),
            "default": {piece: len(cells & default) for piece, (_, default) in by_piece.items()},
            "lost": {piece: len(always - default) for piece, (_, default) in by_piece.items()},
        }
        rows.append(row)
        print(
            "{length} tokens, {needles} needles: 16 bits by piece {full}, always {full_always}; default {default}, of "
            "those always found it loses {lost}".format(**row)
        )
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
