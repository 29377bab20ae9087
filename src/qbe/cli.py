"""The `qbe` command. Parses, calls the library, prints; a QBEError becomes one line on stderr and exit code 2."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from qbe.bench.command import app as bench
from qbe.errors import QBEError
from qbe.eval.command import app as evaluate
from qbe.files import reason

if TYPE_CHECKING:  # torch and transformers are imported when a command needs them: `qbe --help` stays quick
    from qbe.budget import Budget
    from qbe.engine.engine import Engine, Result
    from qbe.engine.sequence import SamplingParams

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Quantization Blueprint Engine: the precision of every layer, chosen for each query.",
)
app.add_typer(bench, name="bench")
app.add_typer(evaluate, name="eval")
# What a wrong option or command raises; Typer carries its own copy of click, whose classes it does not export.
USAGE_ERRORS: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
out = Console()
err = Console(stderr=True)

_TOGETHER = 8  # answers that are written in the same steps; more wait
DEFAULT = "smollm2-135m-instruct"
Model = Annotated[str, typer.Option(help="hub id, transformers folder, GGUF file, QBE folder or built-in name")]
Policy = Annotated[str, typer.Option(help="which policy chooses the blueprint: tiered, uniform or a plug-in's name")]
Bits = Annotated[float | None, typer.Option(help="budget: average bits over the weights of nested sites")]
ActivationBits = Annotated[int, typer.Option(help="budget: bits of the inputs of nested sites, 8 or 16")]
KVBits = Annotated[float | None, typer.Option(help="budget: average bits of the KV cache, 2 to 16")]
KVError = Annotated[
    float | None, typer.Option(help="budget: what KV bits may change of attention's outputs, as a part of their norm")
]
Tier = Annotated[str, typer.Option(help="budget: flex, default or priority (OpenAI's service tiers)")]
Dtype = Annotated[str, typer.Option(help="of the 16-bit weights and activations: auto, float32, bfloat16, float16")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
Originals = Annotated[str, typer.Option(help="where 16-bit weights live when the device is a GPU: device or host")]
KVTokens = Annotated[
    int | None, typer.Option(help="size of the KV cache in tokens of 16 bits; left out, one that fits")
]
Compile = Annotated[
    bool, typer.Option("--compile", help="faster tokens for a start of tens of seconds (less once it is cached)")
]
Tune = Annotated[bool, typer.Option("--tune", help="on a GPU, tune kernels while nothing is asked; it is kept on disk")]
Greedy = Annotated[bool, typer.Option("--greedy", help="take the likeliest token (the same as --temperature 0)")]
MaxTokens = Annotated[int, typer.Option(help="tokens to write at most")]
Temperature = Annotated[float, typer.Option(help="0 is greedy")]
TopK = Annotated[int, typer.Option(help="keep the k likeliest tokens; 0 keeps all")]
TopP = Annotated[float, typer.Option(help="keep the likeliest tokens that add up to p")]
MinP = Annotated[float, typer.Option(help="keep tokens at least this likely relative to the likeliest")]
Penalty = Annotated[float, typer.Option(help="above 1 discourages repetition")]
Seed = Annotated[int | None, typer.Option(help="same seed, same answer")]
Answers = Annotated[int, typer.Option("--n", help="answers to write, each with a seed of its own")]
Stop = Annotated[list[str] | None, typer.Option(help="end the answer at this text (repeatable)")]
Chat = Annotated[bool, typer.Option("--chat", help="put the prompt into the model's chat template")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object on standard output")]
Prompt = Annotated[str, typer.Argument(help="the prompt; - reads it from standard input")]


def _version(asked: bool) -> None:
    if asked:
        from qbe import __version__

        print(__version__)
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print it and end")]


@app.callback()
def options(version: Version = False) -> None:
    """Quantization Blueprint Engine: the precision of every layer, chosen for each query."""


@app.command()
def generate(
    prompt: Prompt, model: Model = DEFAULT, policy: Policy = "tiered", bits: Bits = None,
    activation_bits: ActivationBits = 16, tier: Tier = "default", dtype: Dtype = "auto", device: Device = "auto",
    originals: Originals = "device", greedy: Greedy = False, kv_bits: KVBits = None, kv_error: KVError = None,
    kv_tokens: KVTokens = None, max_tokens: MaxTokens = 128, temperature: Temperature = 0.7, top_k: TopK = 0,
    top_p: TopP = 0.95, min_p: MinP = 0.0, repetition_penalty: Penalty = 1.0, seed: Seed = None, stop: Stop = None,
    n: Answers = 1, chat: Chat = False, compile: Compile = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Answer one prompt at the precision chosen for it, streaming the text.

    Several answers (--n) come one after the other when all are written; with --json as a list.
    """
    text = _prompt(prompt)
    params = _params(max_tokens, greedy, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop)
    budget = _budget(bits, tier, activation_bits, kv_bits, kv_error)
    with _engine(model, policy, dtype, device, originals, kv_tokens, compile, answers=n) as engine:
        asked: Any = [{"role": "user", "content": text}] if chat else text
        several = [] if n == 1 else engine.answers(asked, n, params, budget=budget)
        results = several or [_stream(engine, asked, params, budget, quiet=as_json)]
    if as_json:
        _print_json([r.describe() for r in results] if several else results[0].describe())
    for result in results:
        if result.error is not None:
            raise QBEError(result.error)
        if several and not as_json:
            print(result.text, flush=True)
        if not as_json:
            _summary(result)


@app.command("chat")
def chat_command(
    model: Model = DEFAULT, policy: Policy = "tiered", bits: Bits = None, activation_bits: ActivationBits = 16,
    tier: Tier = "default", dtype: Dtype = "auto", device: Device = "auto", originals: Originals = "device",
    greedy: Greedy = False, kv_bits: KVBits = None, kv_error: KVError = None, kv_tokens: KVTokens = None,
    max_tokens: MaxTokens = 512, temperature: Temperature = 0.7, top_k: TopK = 0, top_p: TopP = 0.95, min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0, seed: Seed = None, compile: Compile = False, tune: Tune = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Talk with the model; every message gets its own blueprint. /clear starts over, /exit or Ctrl-D ends.

    With --json every answer is one line of JSON.
    """
    params = _params(max_tokens, greedy, temperature, top_k, top_p, min_p, repetition_penalty, seed, None)
    budget = _budget(bits, tier, activation_bits, kv_bits, kv_error)
    with _engine(model, policy, dtype, device, originals, kv_tokens, compile, tune) as engine:
        if sys.stdin is None:
            raise QBEError("standard input is closed; a chat needs one")
        if isinstance(sys.stdin, io.TextIOWrapper):  # bad bytes then reach `_utf8`, which refuses that line alone
            sys.stdin.reconfigure(errors="surrogateescape")
        messages: list[dict[str, str]] = []
        while True:
            try:
                line = input("you> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                break
            if line in ("/exit", "/quit"):
                break
            if line == "/clear":
                messages = []
                continue
            if not line:
                continue
            try:
                asked = [*messages, {"role": "user", "content": _utf8(line, "the message")}]
                result = _stream(engine, asked, params, budget, quiet=as_json)
                if result.error is not None:
                    raise QBEError(result.error)
            except QBEError as error:  # a message too long, say: the conversation so far is kept
                _say(_with_options(str(error)), "red")
                continue
            except KeyboardInterrupt:
                err.print("(stopped)")
                continue
            messages = [*asked, {"role": "assistant", "content": result.text}]
            if as_json:
                _print_json(result.describe())
            else:
                _summary(result)


@app.command()
def explain(
    prompt: Prompt, model: Model = DEFAULT, policy: Policy = "tiered", bits: Bits = None,
    activation_bits: ActivationBits = 16, kv_bits: KVBits = None, kv_error: KVError = None,
    max_tokens: MaxTokens = 128, tier: Tier = "default", chat: Chat = False, as_json: Json = False,
    html: Annotated[Path | None, typer.Option(help="write a self-contained page to this file")] = None,
) -> None:  # fmt: skip
    """Show why a prompt gets its blueprint: features, score, budget, bits per layer, bytes per token."""
    text = _prompt(prompt)
    budget = _budget(bits, tier, activation_bits, kv_bits, kv_error)
    with _engine(model, policy, "auto", "cpu", "device") as engine:
        asked: Any = [{"role": "user", "content": text}] if chat else text
        found = engine.explain(asked, _params(max_tokens, True, 0.0, 0, 1.0, 0.0, 1.0, None, None), budget=budget)
    if html is not None:
        from qbe.explain.html import render as page
        from qbe.files import write_text

        write_text(html, page(found, prompt=text))
        err.print(f"wrote {str(html).encode('utf-8', 'replace').decode()}", markup=False, highlight=False)
    if as_json:
        _print_json(found.describe())
    elif html is None:
        from qbe.explain.terminal import render

        out.print(render(found))


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="hub id, transformers folder, GGUF file or built-in name")],
    output: Annotated[Path, typer.Option("--output", "-o", help="folder to write; it must not exist yet")],
    group_size: Annotated[int, typer.Option(help="inputs that share a scale, a multiple of 64")] = 64,
    slices: Annotated[str, typer.Option(help="widths of the slices, most significant first")] = "4,2,2",
    device: Device = "auto", as_json: Json = False,
) -> None:  # fmt: skip
    """Write a model's nested store and its measured sensitivities as a folder that every command takes."""
    from qbe.engine.devices import pick_device
    from qbe.store.nested_tensor import NestedWeightConfig
    from qbe.store.prepare import quantise_to

    try:
        widths = tuple(int(s) for s in slices.split(","))
    except ValueError:
        raise QBEError(f"--slices '{slices}' is not a list of whole numbers; give 4,2,2 for example") from None
    config = NestedWeightConfig(group_size, widths)
    quantise_to(model, output, config, pick_device(device), progress=err.is_terminal)
    described = _about(str(output))
    if as_json:
        _print_json(described)
    else:
        store = described["store"]
        out.print(
            f"wrote {output}: {store['nested_sites']} sites, {store['bits_per_weight']:.2f} bits a weight",
            highlight=False,
        )


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="hub id, folder, GGUF file or built-in name")] = DEFAULT,
    as_json: Json = False,
) -> None:
    """Fetch a model into the cache and print where it lies."""
    from qbe.models import pull as fetch

    path = fetch(name, progress=err.is_terminal)
    if as_json:
        _print_json({"name": name, "path": str(path)})
    else:
        print(path)


@app.command()
def info(
    model: Model = DEFAULT,
    verify: Annotated[bool, typer.Option("--verify", help="compare the checksums of a QBE folder's files")] = False,
    as_json: Json = False,
) -> None:
    """Show a model's sites and roles, its nested store, and what this machine offers."""
    described = _about(model, verify=verify)
    if as_json:
        _print_json(described)
        return
    from qbe.about import render

    out.print(render(described))


@app.command()
def records(
    export: Annotated[Path | None, typer.Option(help="write all records to this file; - is standard output")] = None,
    format: Annotated[str, typer.Option(help="of --export: jsonl or parquet")] = "jsonl",
    limit: Annotated[int, typer.Option(help="how many to list, newest first")] = 20,
    as_json: Json = False,
) -> None:
    """List or export what past requests were given and what it cost."""
    from qbe.about import records_table
    from qbe.records import RecordStore
    from qbe.records import export as write

    store = RecordStore()
    if export is not None:
        count = write(store, None if str(export) == "-" else export, format)
        err.print(f"wrote {count} records to {export}", markup=False, highlight=False)
        return
    if format != "jsonl":
        raise QBEError("--format says how --export writes; give --export FILE too, or --json to list as JSON")
    if not 1 <= limit <= 1_000_000:
        raise QBEError(f"--limit {limit} is out of range; give 1 to 1000000, or --export for all")
    rows = store.list(limit)
    if as_json:
        _print_json([r.describe() for r in rows])
    else:
        out.print(records_table(rows, store.count()))


def _about(model: str, verify: bool = False) -> dict[str, Any]:
    from qbe.about import about

    return about(model, verify=verify, progress=err.is_terminal)


def _engine(
    model: str, policy: str, dtype: str, device: str, originals: str, kv_tokens: int | None = None,
    compile: bool = False, tune: bool = False, answers: int = 1,
) -> Engine:  # fmt: skip
    from transformers.utils import logging

    from qbe.engine.engine import Engine

    logging.set_verbosity_error()  # its advice on optional kernels would stand in the middle of an answer
    return Engine(
        model, policy=policy, dtype=dtype, device=device, originals=originals,
        max_sequences=max(1, min(answers, _TOGETHER)), kv_tokens=kv_tokens, compile=compile, tune=tune,
        progress=err.is_terminal,
    )  # fmt: skip


def _budget(
    bits: float | None, tier: str, activation_bits: int, kv_bits: float | None, kv_error: float | None
) -> Budget:  # fmt: skip
    from qbe.budget import Budget

    return Budget(bits=bits, tier=tier, activation_bits=activation_bits, kv_bits=kv_bits, kv_error=kv_error)


def _params(
    max_tokens: int, greedy: bool, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float,
    seed: int | None, stop: list[str] | None,
) -> SamplingParams:  # fmt: skip
    from qbe.engine.sequence import SamplingParams

    return SamplingParams(
        max_tokens=max_tokens, temperature=0.0 if greedy else temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=penalty, seed=seed, stop=tuple(stop or ()),
    )  # fmt: skip


def _prompt(argument: str) -> str:
    if argument == "-":
        if sys.stdin is None:
            raise QBEError("standard input is closed; give the prompt as an argument")
        try:
            text = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise QBEError(f"standard input is not valid UTF-8 (byte {error.start}); convert it first") from None
    else:
        text = _utf8(argument, "the prompt")
    if not text.strip():
        raise QBEError("the prompt is empty; give some text, or - to read it from standard input")
    return text


def _utf8(text: str, what: str) -> str:
    """Bytes that were no UTF-8 arrive from the shell as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise QBEError(f"{what} is not valid UTF-8 (character {error.start}); convert it first") from None
    return text


def _stream(engine: Engine, prompt: Any, params: SamplingParams, budget: Budget, quiet: bool = False) -> Result:
    stream = engine.stream(prompt, params, budget=budget)
    for piece in stream:
        if not quiet:
            sys.stdout.write(piece)
            sys.stdout.flush()
    if not quiet:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return stream.result


def _summary(result: Result) -> None:
    from qbe.explain.terminal import strip

    line = strip(result.blueprint, result.table)
    eight = "  activations 8 bits" if min(result.blueprint.activation_bits, default=16) == 8 else ""
    eight += f" ({result.careful_tokens} tokens 16)" if result.careful_tokens else ""
    kv = f"  KV {result.average_kv_bits:.1f} bits" if result.average_kv_bits < 16 else ""
    if result.pages_read:
        kv += f" ({result.pages_raised / result.pages_read:.1%} read again at 16)"
    line.append(
        f"  {result.average_weight_bits:.2f} bits{eight}{kv}  {result.bytes_per_token / 1e6:.1f} MB/token"
        f"  score {result.profile.score:.2f}  {result.decode_tokens_per_s:.0f} tok/s",
        style="dim",
    )
    err.print(line, soft_wrap=True)


def _print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, allow_nan=False))


def main(argv: list[str] | None = None) -> None:
    """Entry point of `qbe`. Exit code 0, 2 for bad input (one line on stderr), 130 interrupted, 141 after `| head`."""
    warnings.showwarning = _warn  # type: ignore[assignment]
    warnings.simplefilter("ignore", SyntaxWarning)  # of a library that is compiled on its first import
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminated)
    try:
        if sys.stdout is None:
            raise QBEError("standard output is closed; redirect it to a file, or to /dev/null to discard it")
        code = app(argv, standalone_mode=False)
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
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        if error.filename is not None:  # not a stream of ours: a defect that should be seen whole
            raise
        _fail(f"the output cannot be written: {reason(error)}")
    except USAGE_ERRORS as error:
        if not error.format_message():  # `qbe` alone: the help has been printed
            sys.exit(2)
        _fail(f"{error.format_message()}; see 'qbe --help'".replace("\n", " "))
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _terminated(*_: object) -> None:
    """SIGTERM (a scheduler, `timeout`, `docker stop`) takes the way of an exit: nothing half-written stays behind."""
    sys.exit(128 + signal.SIGTERM)


def _reader_left(error: BaseException | None) -> bool:
    """Whether a closed pipe is behind it: whoever read our output has enough."""
    while error is not None and not isinstance(error, BrokenPipeError):
        error = error.__context__
    return error is not None


def _warn(message: Warning | str, *_rest: Any) -> None:
    _say(str(message), "yellow")


def _fail(message: str) -> None:
    _say(_with_options(message), "red")
    sys.exit(2)


def _say(message: str, style: str) -> None:
    err.print(f"qbe: {message}", style=style, markup=False, highlight=False, soft_wrap=True)


def _with_options(message: str) -> str:
    """The message with the library's parameters named as options: `max_tokens` becomes `--max-tokens`.

    A parameter of one word is a word of the language too, so it counts only as the subject: `seed is -1, but ...`.
    """
    commands = typer.main.get_group(app).commands.values()
    names = {p.name for c in commands for p in c.params if any(o.startswith("--") for o in p.opts)}
    long, short = ("|".join(n for n in names if ("_" in n) is wide) for wide in (True, False))
    return re.sub(
        rf"(?<![\w/.'\"-])(?:{long})(?![\w/.'\"-])|^(?:{short})(?= is )",
        lambda found: "--" + found[0].replace("_", "-"),
        message,
    )
