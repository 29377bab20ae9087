"""All linear layers of a token, beside other ways to multiply by the same weights."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TypeVar

import torch
from torch.nn.functional import linear

from qbe.bench.linear_peers import LinearPeer, PreparedPeers, peers_for
from qbe.bench.machine import Roofline
from qbe.bench.measure import Sample, take_turns
from qbe.bench.passes import check, one_pass, pass_rows
from qbe.bench.report import Row
from qbe.bench.weights import LinearGroup, Token, Weights, call, random_weights, token_for
from qbe.hardware import detect
from qbe.kernels.cuda.dispatch import UNIFORM_ROWS, linear_kernel
from qbe.kernels.reference.activations import precision_word
from qbe.kernels.reference.eight_bit_rows import DTYPES
from qbe.progress import bar

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class LinearSizes:
    """What is measured.

    Attributes:
        token: whose linear layers.
        rows: batch sizes M.
        widths: precisions of ours; all rows of a batch have the same.
        groups: group sizes of the nested store.
        rounds: per batch size.
        peers: None takes all that the device has.
        prompts: activation bits of passes that are one prompt: all rows read the same word and the weights know it, as
            in a step that an engine gives to one prompt. Only for `rows` from which an engine tells them.
    """

    token: Token
    rows: tuple[int, ...] = (1, 16, 64)
    widths: tuple[int, ...] = (4, 6, 8)
    groups: tuple[int, ...] = (64,)
    rounds: int = 15
    peers: tuple[LinearPeer, ...] | None = None
    prompts: tuple[int, ...] = ()


def sizes_for(device: torch.device) -> LinearSizes:
    if device.type != "cuda":
        return LinearSizes(token_for(device))
    return LinearSizes(token_for(device), rows=(1, 8, 16, 32, 64, 128, 256, 512, 2048), groups=(64, 128))


def run(device: torch.device, limits: Roofline, sizes: LinearSizes, progress: bool = False) -> list[Row]:
    """Measures every precision and every peer on the same weights and inputs.

    Returns:
        For each batch size, group size and precision a row per peer and part (microseconds a linear layer) and one for
        the whole token (milliseconds).
    """
    total = len(sizes.token.all_parts) + 1 + len(sizes.rows) * (sizes.rounds + 1)
    with bar("linears", total, progress) as tick:
        weights = random_weights(sizes.token, device, sizes.groups, tick)
        prepared = PreparedPeers(sizes.peers or peers_for(device), weights)
        tick()
        notes = {p.name: p.note for p in prepared.peers}
        rows: list[Row] = []
        for m in sizes.rows:
            x = random_inputs(sizes.token, m, device)
            ours: dict[tuple[int, int, str], Sample] = {}
            for g, exact in product(sizes.groups, (True, False) if kernel_depends_on_company(m, device) else (True,)):
                case = "" if exact else ", shared rows"
                ours |= {(g, b, case): s for b, s in uniform(weights, x, sizes.widths, g, exact).items()}
            for g, b, a in product(sizes.groups, sizes.widths, sizes.prompts if m >= UNIFORM_ROWS else ()):
                ours[g, b, f", one prompt, {a}-bit activations"] = prompt(weights, x, precision_word(b, a), g)
            mine, theirs = take_turns(ours, prepared.samples(x), sizes.rounds, tick)
            for (group, bits, case), parts in mine.items():
                beside = {p.name: theirs[p.name] for p in prepared.peers if bits in p.against}
                rows += pass_rows(
                    weights, limits, parts, beside, rows=m, group=group, widths=(bits,), bits=bits, notes=notes,
                    case=case, eight="8-bit" in case,
                )  # fmt: skip
            del ours  # graphs keep their memory while they live
    return rows


def random_inputs(token: Token, m: int, device: torch.device) -> dict[int, torch.Tensor]:
    """k -> bfloat16 [m, k] for every width of input there is."""
    torch.manual_seed(1)
    return {k: torch.randn(m, k, device=device).bfloat16() for k in sorted({p.k for p in token.all_parts})}


def kernel_depends_on_company(rows: int, device: torch.device) -> bool:
    """Whether so many rows have a faster kernel if a row may come out otherwise in another batch, as where rows share
    what they read (`qbe serve --rows shared`)."""
    kernels = {linear_kernel(rows, torch.bfloat16, True, batch_invariant=b) for b in (True, False)}
    return device.type == "cuda" and len(kernels) > 1


def uniform(
    weights: Weights, x: dict[int, torch.Tensor], widths: Iterable[int], group: int, batch_invariant: bool = True
) -> dict[int, Sample]:
    """Bits -> a pass of ours in which every row has them. On a GPU all of them replay the same graphs."""
    m = next(iter(x.values())).shape[0]
    return passes_at(weights, x, {b: [b] * m for b in widths}, group, batch_invariant)


def prompt(weights: Weights, x: dict[int, torch.Tensor], precision_word: int, group: int) -> Sample:
    """A pass of ours in which every row reads this word, and the weights know it.

    8-bit activations are multiplied in the device's own format everywhere, as at sites that bear it.
    """
    nested, token = weights.nested[group], weights.token
    native = DTYPES.get(detect(weights.device).prompt_format or "")
    bits = torch.full((next(iter(x.values())).shape[0],), precision_word, dtype=torch.int32, device=weights.device)

    def one(part: LinearGroup, i: int) -> torch.Tensor:
        weight = nested[part.name][i]
        weight.uniform, weight.native = precision_word, native
        y = call(x[part.k], weight, bits)
        weight.uniform = weight.native = None
        return y

    with torch.inference_mode():
        for part in token.all_parts:
            check(one(part, 0), linear(x[part.k], weights.dense[part.name][0]))
    return one_pass(token, one, weights.device)


def passes_at(
    weights: Weights,
    x: dict[int, torch.Tensor],
    batches: Mapping[Name, list[int]],
    group: int,
    batch_invariant: bool = True,
) -> dict[Name, Sample]:
    """Name -> a pass of ours whose row r has the r-th of these bits."""
    nested, token = weights.nested[group], weights.token
    for weight in (w for copies in nested.values() for w in copies):
        weight.batch_invariant = batch_invariant  # read as the calls below are captured
    wanted = {n: torch.tensor(b, dtype=torch.int32, device=weights.device) for n, b in batches.items()}
    bits = torch.zeros_like(next(iter(wanted.values())))
    with torch.inference_mode():
        for values in wanted.values():
            bits.copy_(values)
            for part in token.all_parts:
                y = call(x[part.k], nested[part.name][0], bits)
                check(y, linear(x[part.k], weights.dense[part.name][0]))
    shared = one_pass(token, lambda p, i: call(x[p.k], nested[p.name][i], bits), weights.device)

    def at(values: torch.Tensor) -> Mapping[str, float]:
        bits.copy_(values)
        return shared()

    return {name: partial(at, values) for name, values in wanted.items()}
