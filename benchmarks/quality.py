"""Runs every command of docs/quality.md and the pages behind it, so that all of their figures can be had again.

    python benchmarks/quality.py --data DIR --zoo ZOO --out FOLDER [--only TEXT]

The pages themselves are the list: their indented lines that begin with `python` or `qbe`. `DIR` in them is the folder
with the data sets, `ZOO` the one with the small models. The output of the nth command goes to FOLDER/n.txt, what it
writes with `--json` and `--plot` into FOLDER. A command whose output is there is not run again, so an
interrupted run goes on.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commands(page: str) -> list[str]:
    """The page's commands, in order."""
    return re.findall(r"^    ((?:python|qbe) .*)$", page, re.MULTILINE)


def all_commands(docs: Path) -> list[str]:
    """Those of all pages on quality, each once."""
    pages = [docs / "quality.md", *sorted((docs / "measurements").glob("quality-*.md"))]
    return list(dict.fromkeys(c for page in pages for c in commands(page.read_text(encoding="utf-8"))))


def arguments(command: str, data: Path, zoo: Path) -> list[str]:
    """What to run, with paths in the place of DIR and ZOO."""
    program, *rest = shlex.split(re.sub(r"\bDIR\b", str(data), re.sub(r"\bZOO\b", str(zoo), command)))
    run = [sys.executable] if program == "python" else [sys.executable, "-m", "qbe"]
    return run + [str(ROOT / a) if (ROOT / a).is_file() else a for a in rest]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("QBE_DATA", "../shared/data")))
    parser.add_argument("--zoo", type=Path, default=Path("../shared/zoo"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="commands that contain this text")
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for i, command in enumerate(all_commands(ROOT / "docs")):
        kept = args.out / f"{i}.txt"
        if args.only not in command or kept.exists():
            continue
        print(f"{i}: {command}", flush=True)
        partial = kept.with_suffix(".partial")
        with open(partial, "w") as file:
            file.write(f"{command}\n\n")
            file.flush()
            run = arguments(command, args.data.resolve(), args.zoo.resolve())
            done = subprocess.run(run, cwd=args.out, stdout=file)
        if done.returncode == 0:
            partial.replace(kept)
        else:
            failed.append(i)
    if failed:
        sys.exit(f"these failed: {', '.join(map(str, failed))}; what they printed is in {args.out}")


if __name__ == "__main__":
    main()
