"""The `qbe` command. Parses, calls the library, prints; a QBEError becomes one line on stderr and exit code 2."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import warnings
from typing import Annotated, Any

import typer

from qbe.cli.advise import advise
from qbe.cli.bench import app as bench
from qbe.cli.cache import app as cache
from qbe.cli.calibrate import app as calibrate
from qbe.cli.check import check
from qbe.cli.console import keep_stdout, say, usage, with_options
from qbe.cli.eval import app as evaluate
from qbe.cli.generate import chat, explain, generate
from qbe.cli.ledger import ledger
from qbe.cli.models import info, pull, quantize
from qbe.cli.records import records
from qbe.cli.regress import regress
from qbe.cli.releases import promote, releases, rollback
from qbe.cli.serve import serve
from qbe.cli.train import app as train
from qbe.errors import QBEError
from qbe.files import reason

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Quantization Blueprint Engine: LLM inference that decides precision per request.",
)
for _command in (
    generate,
    chat,
    explain,
    quantize,
    pull,
    info,
    records,
    ledger,
    serve,
    check,
    advise,
    regress,
    promote,
    rollback,
    releases,
):
    app.command()(_command)
app.add_typer(bench, name="bench")
app.add_typer(evaluate, name="eval")
app.add_typer(cache, name="cache")
app.add_typer(calibrate, name="calibrate")
app.add_typer(train, name="train")
# What a wrong option or command raises; Typer carries its own copy of click, whose classes it does not export.
USAGE_ERRORS: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def _version(asked: bool) -> None:
    if asked:
        from qbe.version import __version__

        print(__version__)
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print it and end")]


@app.callback()
def options(version: Version = False) -> None:
    """Quantization Blueprint Engine: LLM inference that decides precision per request."""


def main(argv: list[str] | None = None) -> None:
    """Entry point of `qbe`. Exit code 0, 2 for bad input (one line on stderr), 130 interrupted, 141 after `| head`."""
    # Waiting threads of torch's OpenMP spin by default. Beside any other busy process that slows a decode step manyfold
    # (measured: 39 ms became 1680), so they sleep instead. Read once, when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    if argv is None:
        keep_stdout()
    warnings.showwarning = _warn  # type: ignore[assignment]
    warnings.simplefilter("ignore", SyntaxWarning)  # of a library that is compiled on its first import
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminated)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where they are ignored (nohup)
            signal.signal(signal.SIGINT, _interrupted)
    try:
        if sys.stdout is None:
            raise QBEError("standard output is closed; redirect it to a file, or to /dev/null to discard it")
        code = _root()(argv, standalone_mode=False)
        sys.stdout.flush()
    except QBEError as error:
        _fail(str(error))
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except (BrokenPipeError, SystemExit) as error:  # click and rich turn a closed pipe into exit code 1
        if not _reader_left(error):
            raise
        # What a shell reports for a program that SIGPIPE ended, as it ends `cat`. The signal itself stays ignored: it
        # would also end us when a connection to the hub breaks. What is still buffered goes nowhere.
        _discard(sys.stdout.fileno(), 2)
        sys.exit(128 + signal.SIGPIPE)
    except RuntimeError as error:  # an exit within an op that torch calls through C++ comes out as one
        if _told_to_end.is_set():
            sys.exit(128 + signal.SIGTERM)
        if not _was_interrupted.is_set() or "API call failed" not in str(error):
            raise
        sys.exit(130)
    except OSError as error:
        if error.filename is not None:  # not a stream of ours: a defect that should be seen whole
            raise
        _discard(sys.stdout.fileno())  # or Python says at its end, too, that it cannot be written
        _fail(f"the output cannot be written: {reason(error)}")
    except USAGE_ERRORS as error:
        if not error.format_message():  # `qbe` alone: the help has been printed
            sys.exit(2)
        _fail(usage(error))
    else:
        sys.exit(code if isinstance(code, int) else 0)


@functools.cache
def _root() -> Any:
    """The commands with their options: Typer takes a tenth of a second to read them from the functions."""
    return typer.main.get_command(app)


_told_to_end = threading.Event()
_was_interrupted = threading.Event()


def _terminated(*_: object) -> None:
    """SIGTERM (a scheduler, `timeout`, `docker stop`) takes the way of an exit: nothing half-written stays behind."""
    _told_to_end.set()
    sys.exit(128 + signal.SIGTERM)


def _interrupted(*_: object) -> None:
    """SIGINT, which is Ctrl-C."""
    _was_interrupted.set()
    raise KeyboardInterrupt


def _reader_left(error: BaseException | None) -> bool:
    """Whether a closed pipe is behind it: whoever read our output has enough."""
    while error is not None and not isinstance(error, BrokenPipeError):
        error = error.__context__
    return error is not None


def _discard(*streams: int) -> None:
    """What is still buffered for these file descriptors goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream)


def _warn(message: Warning | str, *_rest: Any) -> None:
    say(str(message), "yellow")


def _fail(message: str) -> None:
    say(with_options(message, _root()), "red")
    sys.exit(2)
