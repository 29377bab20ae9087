"""Commands that take a prompt: `qbe generate`, `qbe chat` and `qbe explain`."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qbe.cli.console import err, out, print_json, say, with_options
from qbe.cli.live import check_live, watch
from qbe.cli.options import (
    DEFAULT,
    ActivationBits,
    Analysis,
    Answers,
    BestEffort,
    Bits,
    Cascade,
    Chat,
    Compile,
    Device,
    DeviceMemory,
    Dtype,
    Greedy,
    HighPrecisionTokens,
    Images,
    Json,
    KVBits,
    KVError,
    KVTokens,
    MaxTokens,
    MinP,
    Miss,
    Model,
    MostBits,
    Originals,
    Penalty,
    Policy,
    Refresh,
    RefreshCount,
    RefreshInterval,
    Seed,
    Speculate,
    StateBits,
    Stop,
    Temperature,
    Tier,
    TopK,
    TopP,
    Trust,
    Tune,
    make_budget,
    make_engine,
    make_params,
)
from qbe.errors import QBEError
from qbe.files import check_writable

if TYPE_CHECKING:
    from qbe.budget import Budget
    from qbe.engine.engine import Engine, Result
    from qbe.engine.sampling.sampling_params import SamplingParams

Prompt = Annotated[str, typer.Argument(help="the prompt; - reads it from standard input")]


def generate(
    prompt: Prompt, model: Model = DEFAULT, policy: Policy = "tiered", bits: Bits = None,
    activation_bits: ActivationBits = 16, high_precision_tokens: HighPrecisionTokens = False, tier: Tier = "default",
    dtype: Dtype = "auto", device: Device = "auto", originals: Originals = None, most_bits: MostBits = None,
    device_memory: DeviceMemory = None, miss: Miss = None, state_bits: StateBits = None, trust: Trust = False,
    greedy: Greedy = False, kv_bits: KVBits = None, kv_error: KVError = None, kv_tokens: KVTokens = None,
    max_tokens: MaxTokens = 128, temperature: Temperature = 0.7, top_k: TopK = 0, top_p: TopP = 0.95, min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0, seed: Seed = None, stop: Stop = None, n: Answers = 1, chat: Chat = False,
    image: Images = None,
    refresh: Refresh = False, refresh_interval: RefreshInterval = None, refresh_count: RefreshCount = None,
    best_effort: BestEffort = False, cascade: Cascade = False, analysis_tier: Analysis = None, compile: Compile = False,
    speculate: Speculate = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Answer one prompt at the precision chosen for it, streaming the text.

    Several answers (--n) come one after the other when all are written; with --json as a list. With --image the prompt
    goes through the model's chat template.
    """
    text = _prompt(prompt)
    pictures = _pictures(image)
    from qbe.engine.sampling.sampling_params import MOST_ANSWERS

    if not 1 <= n <= MOST_ANSWERS:
        raise QBEError(f"--n is {n}, but must be a whole number, 1 to {MOST_ANSWERS}")
    params = make_params(
        max_tokens, greedy, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop, speculate
    )
    budget = make_budget(
        bits, tier, activation_bits, kv_bits, kv_error, refresh, cascade, high_precision_tokens, refresh_interval,
        refresh_count, best_effort, state_bits,
    )  # fmt: skip
    with make_engine(
        model, policy, dtype, device, originals, kv_tokens, compile, answers=n, analysis_tier=analysis_tier,
        quiet=as_json, speculate=speculate, most_bits=most_bits, device_memory=device_memory, miss=miss, trust=trust,
    ) as engine:  # fmt: skip
        asked: Any = [{"role": "user", "content": [*pictures, {"type": "text", "text": text}]}] if pictures else text
        if chat and not pictures:
            asked = [{"role": "user", "content": text}]
        several = [] if n == 1 else engine.answers(asked, n, params, budget=budget)
        results = several or [_stream(engine, asked, params, budget, quiet=as_json)]
    if as_json:
        print_json([r.describe() for r in results] if several else results[0].describe())
    for result in results:
        if result.error is not None:
            raise QBEError(result.error)
        if several and not as_json:
            print(result.text, flush=True)
        if not as_json:
            _summary(result)


def chat(
    context: typer.Context, model: Model = DEFAULT, policy: Policy = "tiered", bits: Bits = None,
    activation_bits: ActivationBits = 16, high_precision_tokens: HighPrecisionTokens = False, tier: Tier = "default",
    dtype: Dtype = "auto", device: Device = "auto", originals: Originals = None, most_bits: MostBits = None,
    device_memory: DeviceMemory = None, miss: Miss = None, state_bits: StateBits = None, trust: Trust = False,
    greedy: Greedy = False, kv_bits: KVBits = None, kv_error: KVError = None, kv_tokens: KVTokens = None,
    max_tokens: MaxTokens = 512, temperature: Temperature = 0.7, top_k: TopK = 0, top_p: TopP = 0.95, min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0, seed: Seed = None,
    refresh: Refresh = False, refresh_interval: RefreshInterval = None, refresh_count: RefreshCount = None,
    best_effort: BestEffort = False, cascade: Cascade = False, analysis_tier: Analysis = None, compile: Compile = False,
    speculate: Speculate = False, tune: Tune = False, as_json: Json = False,
    live: Annotated[bool, typer.Option("--live", help="draw bits per layer as they move, on a terminal")] = False,
) -> None:  # fmt: skip
    """Talk with the model; every message gets its own blueprint. /clear starts over, /exit or Ctrl-D ends.

    With --json every answer is one line of JSON.
    """
    if live:
        check_live(as_json)
    params = make_params(
        max_tokens, greedy, temperature, top_k, top_p, min_p, repetition_penalty, seed, None, speculate
    )
    budget = make_budget(
        bits, tier, activation_bits, kv_bits, kv_error, refresh, cascade, high_precision_tokens, refresh_interval,
        refresh_count, best_effort, state_bits,
    )  # fmt: skip
    with make_engine(
        model, policy, dtype, device, originals, kv_tokens, compile, tune, analysis_tier=analysis_tier, quiet=as_json,
        most_bits=most_bits, speculate=speculate, device_memory=device_memory, miss=miss, trust=trust,
    ) as engine:  # fmt: skip
        from qbe.engine.tokenize import check_chat

        check_chat(engine.tokenizer, model)
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
                if live:
                    result, _ = watch(engine, asked, params, budget, live=True)
                else:
                    result = _stream(engine, asked, params, budget, quiet=as_json)
                if result.error is not None:
                    raise QBEError(result.error)
            except QBEError as error:  # a message too long, say: the conversation so far is kept
                say(with_options(str(error), context.find_root().command), "red")
                continue
            except KeyboardInterrupt:
                err.print("(stopped)")
                continue
            messages = [*asked, {"role": "assistant", "content": result.text}]
            if as_json:
                print_json(result.describe())
            else:
                _summary(result)


def explain(
    prompt: Annotated[
        str | None, typer.Argument(help="the prompt; - reads it from standard input; none with --drift alone")
    ] = None,
    model: Model = DEFAULT, policy: Policy = "tiered", bits: Bits = None,
    activation_bits: ActivationBits = 16, high_precision_tokens: HighPrecisionTokens = False, kv_bits: KVBits = None,
    kv_error: KVError = None, state_bits: StateBits = None, max_tokens: MaxTokens = 128, tier: Tier = "default",
    refresh: Refresh = False, refresh_interval: RefreshInterval = None, refresh_count: RefreshCount = None,
    best_effort: BestEffort = False, cascade: Cascade = False, analysis_tier: Analysis = None, chat: Chat = False,
    trust: Trust = False, as_json: Json = False,
    html: Annotated[Path | None, typer.Option(help="write a self-contained page to this file")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="answer greedily and write how bits moved: a picture (.png) or .json")
    ] = None,
    drift: Annotated[
        Path | None, typer.Option(help="draw the drift of the model's recurrent states at fewer bits, and floors (PNG)")
    ] = None,
) -> None:  # fmt: skip
    """Show why a prompt gets its blueprint: features, score, budget, bits per layer, bytes per token."""
    if prompt is None and drift is None:
        raise QBEError("explain needs a prompt, or --drift FILE.png for the drift of a model's states")
    if prompt is None and (html is not None or trace is not None):
        raise QBEError("--html and --trace are about a prompt: give one, or leave them out")
    drawn = None
    if drift is not None:
        from qbe.cli.drift import draw_drift
        from qbe.explain import drift_picture

        drift_picture.check(drift)
        check_writable(drift=drift, trace=trace, html=html)
        drawn = draw_drift(model, drift, trust)
    if prompt is None:
        if as_json:
            print_json(drawn)
        return
    text = _prompt(prompt)
    if trace is not None:
        from qbe.explain import trace_picture

        trace_picture.check(trace)
    check_writable(trace=trace, html=html)
    budget = make_budget(
        bits, tier, activation_bits, kv_bits, kv_error, refresh, cascade, high_precision_tokens, refresh_interval,
        refresh_count, best_effort, state_bits,
    )  # fmt: skip
    with make_engine(model, policy, "auto", "cpu", "device", analysis_tier=analysis_tier, trust=trust) as engine:
        asked: Any = [{"role": "user", "content": text}] if chat else text
        params = make_params(max_tokens, True, 0.0, 0, 1.0, 0.0, 1.0, None, None)
        explanation = engine.explain(asked, params, budget=budget)
        if trace is not None:
            result, moved = watch(engine, asked, params, budget)
            if result.error is not None:
                raise QBEError(result.error)
            trace_picture.write(moved, trace)
            err.print(f"wrote {str(trace).encode('utf-8', 'replace').decode()}", markup=False, highlight=False)
    if html is not None:
        from qbe.explain.html import render as page
        from qbe.files import write_text

        write_text(html, page(explanation, prompt=text))
        err.print(f"wrote {str(html).encode('utf-8', 'replace').decode()}", markup=False, highlight=False)
    if as_json:
        print_json(explanation.describe() | ({} if drawn is None else {"drift": drawn}))
    elif html is None:
        from qbe.explain.terminal import render

        out.print(render(explanation))


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


def _pictures(files: list[Path] | None) -> list[dict[str, Any]]:
    """Parts of a message, of pictures that can be decoded: what cannot is told before a model is loaded."""
    if not files:
        return []
    from qbe.pictures import Picture
    from qbe.pictures.decode import decode

    pictures = [Picture.open(file) for file in files]
    for picture in pictures:
        decode(picture)
    return [{"type": "image", "image": picture} for picture in pictures]


def _utf8(text: str, source: str) -> str:
    """Bytes that were no UTF-8 arrive from the shell as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise QBEError(f"{source} is not valid UTF-8 (character {error.start}); convert it first") from None
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
    from qbe.explain.heatmap import span
    from qbe.explain.terminal import shares, strip

    line = shares(result.routed) if result.routed else strip(result.blueprint, result.table)
    eight = "  activations 8 bits" if min(result.blueprint.activation_bits, default=16) == 8 else ""
    eight += f" ({result.high_precision_tokens} tokens 16)" if result.high_precision_tokens else ""
    kv = f"  KV {result.average_kv_bits:.1f} bits" if result.average_kv_bits < 16 else ""
    kv += f"  state {span(result.blueprint.state_bits)} bits" if result.blueprint.state_bits else ""
    if result.pages_read:
        kv += f" ({result.pages_raised / result.pages_read:.1%} read again at 16)"
    drafted = (
        f", {result.accepted_tokens} of {result.drafted_tokens} draft tokens accepted" if result.drafted_tokens else ""
    )
    missed = f" ({result.read_weight_bits:.2f} read, {result.misses} misses)" if result.misses else ""
    line.append(
        f"  {result.average_weight_bits:.2f} bits{missed}{eight}{kv}  {result.bytes_per_token / 1e6:.1f} MB/token"
        f"  score {result.profile.score:.2f}  {result.decode_tokens_per_s:.0f} tok/s{drafted}",
        style="dim",
    )
    err.print(line, soft_wrap=True)
    for why in result.ignored.values():
        say(f"--{why.replace('_', '-', why.partition(' ')[0].count('_'))}", "yellow")
    if result.raised_tokens or result.lowered_tokens:
        err.print(
            f"  cascade: {result.raised_tokens} tokens raised, {result.lowered_tokens} lowered",
            style="dim", highlight=False,
        )  # fmt: skip
    for r in result.refreshes:
        err.print(
            f"  refresh after {r.token} tokens, {r.kind}: {r.entropy:.2f} nats, margin {r.margin:.1f}; "
            f"{r.bits_before:.2f} to {r.bits:.2f} bits",
            style="dim", highlight=False,
        )  # fmt: skip
