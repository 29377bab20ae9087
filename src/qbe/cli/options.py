"""Options that several commands share, and what is made of them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qbe.cli.console import err, say
from qbe.errors import QBEError

if TYPE_CHECKING:  # torch and transformers are imported when a command needs them: `qbe --help` stays quick
    from qbe.budget import Budget
    from qbe.engine.engine import Engine
    from qbe.engine.sampling.sampling_params import SamplingParams

_TOGETHER = 8  # answers that are written in the same steps; more wait
DEFAULT = "smollm2-135m-instruct"
Model = Annotated[str, typer.Option(help="hub id, transformers folder, GGUF file, QBE folder or built-in name")]
Policy = Annotated[str, typer.Option(help="which policy chooses the blueprint: tiered, uniform or a plug-in's name")]
Bits = Annotated[float | None, typer.Option(help="budget: average bits over the weights of nested sites")]
ActivationBits = Annotated[int, typer.Option(help="budget: bits of the inputs of nested sites, 8 or 16")]
HighPrecisionTokens = Annotated[
    bool,
    typer.Option(
        "--high-precision-tokens",
        "--careful-tokens",
        help="budget: with 8-bit activations, 16 for tokens hard to predict (--careful-tokens is its older name)",
    ),
]
KVBits = Annotated[str | None, typer.Option(help="budget: average bits of the KV cache, 2 to 16, or turbo2 or turbo4")]
KVError = Annotated[
    float | None, typer.Option(help="budget: what KV bits may change of attention's outputs, as a part of their norm")
]
StateBits = Annotated[
    int | None, typer.Option(help="budget: bits of recurrent states: 8, 10 (8 with error feedback), 16 or 32")
]
Speculate = Annotated[
    bool, typer.Option("--speculate", help="draft tokens, at fewer bits or from the text, and check several at once")
]
Refresh = Annotated[
    bool, typer.Option("--refresh", help="budget: choose again within the tier while the answer is hard or easy")
]
RefreshInterval = Annotated[
    int | None, typer.Option(help="with --refresh: tokens after which the answer is looked at; 32 if left out")
]
RefreshCount = Annotated[
    int | None, typer.Option(help="with --refresh: looks in a row that must say the same; 3 if left out")
]
BestEffort = Annotated[
    bool, typer.Option("--best-effort", help="budget: leave out what cannot be done here and say so, not refuse")
]
Cascade = Annotated[
    bool, typer.Option("--cascade", help="budget: each token's attention moves the bits of later layers")
]
Tier = Annotated[str, typer.Option(help="budget: flex, default or priority (OpenAI's service tiers)")]
Dtype = Annotated[str, typer.Option(help="of the 16-bit weights and activations: auto, float32, bfloat16, float16")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
Originals = Annotated[
    str | None, typer.Option(help="16-bit weights: none (the default on a GPU), or on the host or the device")
]
MostBits = Annotated[int | None, typer.Option(help="load the store up to these bits only: 4, 6 or 8")]
DeviceMemory = Annotated[
    str | None, typer.Option(help="bytes of weights and KV cache on the device, as in 12GiB; the rest stays on disk")
]
Miss = Annotated[
    str | None, typer.Option(help="with --device-memory, of slices not there: lower (default) reads less, or wait")
]
Trust = Annotated[
    bool, typer.Option("--trust", help="load a QBE folder whose files are not those that its provenance.json lists")
]
KVTokens = Annotated[
    int | None, typer.Option(help="size of the KV cache in tokens of 16 bits; left out, one that fits")
]
Compile = Annotated[
    bool, typer.Option("--compile", help="faster tokens for a start of a minute or more (less once it is cached)")
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
Images = Annotated[
    list[Path] | None,
    typer.Option("--image", help="a picture (PNG, JPEG, WebP, GIF) before the prompt; may be given several times"),
]
Chat = Annotated[bool, typer.Option("--chat", help="put the prompt into the model's chat template")]
Analysis = Annotated[
    int | None,
    typer.Option(help="1 thresholds, 2 classifier, 3 encoder too; left out, 1 for short prompts, else 2"),
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object on standard output")]


def make_engine(
    model: str, policy: str, dtype: str, device: str, originals: str | None, kv_tokens: int | None = None,
    compile: bool = False, tune: bool = False, answers: int = 1, analysis_tier: int | None = None, quiet: bool = False,
    speculate: bool = False, most_bits: int | None = None, device_memory: str | None = None, miss: str | None = None,
    trust: bool = False,
) -> Engine:  # fmt: skip
    """The engine that the options ask for, with room for so many answers at once; `quiet` shows no progress."""
    from transformers.utils import logging

    from qbe.engine.engine import Engine

    if compile and not quiet and not err.is_terminal:  # a terminal gets a spinner
        say("--compile takes a minute or more now, less once it is cached", "dim")
    logging.set_verbosity_error()  # its advice on optional kernels would stand in the middle of an answer
    return Engine(
        model, policy=policy, dtype=dtype, device=device, originals=originals, most_bits=most_bits,
        max_sequences=max(1, min(answers, _TOGETHER)), kv_tokens=kv_tokens, compile=compile, tune=tune,
        speculate=speculate, device_memory=device_memory, miss=miss, trust=trust, analysis_tier=analysis_tier,
        progress=err.is_terminal and not quiet,
    )  # fmt: skip


def make_budget(
    bits: float | None, tier: str, activation_bits: int, kv_bits: str | None, kv_error: float | None,
    refresh: bool = False, cascade: bool = False, high_precision_tokens: bool = False,
    refresh_interval: int | None = None, refresh_count: int | None = None, best_effort: bool = False,
    state_bits: int | None = None,
) -> Budget:  # fmt: skip
    from qbe.budget import Budget

    kv: float | str | None = kv_bits
    if kv_bits is not None and kv_bits.isascii():  # float() reads the digits of any script
        with suppress(ValueError):
            kv = float(kv_bits)
    return Budget(
        bits=bits, tier=tier, activation_bits=activation_bits, kv_bits=kv, kv_error=kv_error, refresh=refresh,
        cascade=cascade, high_precision_tokens=high_precision_tokens, refresh_interval=refresh_interval,
        refresh_count=refresh_count, best_effort=best_effort, state_bits=state_bits,
    )  # fmt: skip


def make_params(
    max_tokens: int, greedy: bool, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float,
    seed: int | None, stop: list[str] | None, speculate: bool = False,
) -> SamplingParams:  # fmt: skip
    from qbe.engine.sampling.sampling_params import SamplingParams

    if "" in (stop or ()):
        raise QBEError("--stop is empty: give the text that shall end the answer, or leave the option out")
    return SamplingParams(
        max_tokens=max_tokens, temperature=0.0 if greedy else temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=penalty, seed=seed, stop=tuple(stop or ()), speculate=speculate,
    )  # fmt: skip
