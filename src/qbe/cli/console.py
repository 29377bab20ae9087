"""What the command prints: answers on standard output, everything else on standard error."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

from rich.console import Console

out = Console()
err = Console(stderr=True)


def keep_stdout() -> None:
    """Once, in the command's own process: standard output is what the command prints, and nothing else.

    Libraries write straight to file descriptor 1 (HiGHS does, whatever it is told), where `--json` belongs; what they
    say goes to standard error.
    """
    if sys.stdout is None:
        return
    try:
        stdout = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # one of them is closed
        return
    os.set_inheritable(stdout, False)
    lines = 1 if os.isatty(stdout) else -1
    sys.stdout = os.fdopen(stdout, "w", lines, encoding=sys.stdout.encoding, errors=sys.stdout.errors)


def print_json(value: Any) -> None:
    """One line of JSON on standard output."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False))


def say(message: str, style: str) -> None:
    """One line on standard error."""
    err.print(f"qbe: {message}", style=style, markup=False, highlight=False, soft_wrap=True)


def usage(error: Any) -> str:
    """The line for a wrong command line: what is wrong, which commands there are, whose help to read.

    Args:
        error: one of `qbe.cli.main.USAGE_ERRORS`.
    """
    message = " ".join(error.format_message().split()).rstrip(".")
    names, context = [], getattr(error, "ctx", None)
    if message.startswith("No such command") and context is not None:
        message = f"{message.partition('. ')[0]}: choose {', '.join(context.command.commands)}"
    while context is not None and context.parent is not None:
        names.append(context.info_name)
        context = context.parent
    return f"{message}; see '{' '.join(['qbe', *reversed(names), '--help'])}'"


def with_options(message: str, root: Any) -> str:
    """The message with the library's parameters named as options of a command under `root`: `max_tokens` becomes
    `--max-tokens`.

    A parameter of one word is a word of the language too, so it counts only as the subject: `seed is -1, but ...`.
    """
    names = {p.name for c in root.commands.values() for p in c.params if any(o.startswith("--") for o in p.opts)}
    long, short = ("|".join(n for n in names if ("_" in n) is wide) for wide in (True, False))
    return re.sub(
        rf"(?<![\w/.'\"-])(?:{long})(?![\w/.'\"-])|^(?:{short})(?= is )",
        lambda match: "--" + match[0].replace("_", "-"),
        message,
    )
