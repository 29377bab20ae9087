"""Attention over pages of 16, 8, 4 and 2 bits and over mixtures of them; quantising pages; what a token's pages
take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from qbe.bench.kv_attention import Decode, Prefill, Quantise, halved
from qbe.bench.kv_cases import FULL, Cases, KVCase
from qbe.bench.machine import Roofline
from qbe.bench.measure import Failed, Outcome, Timing, take_turns
from qbe.bench.passes import WHOLE
from qbe.bench.report import Row, rows_beside
from qbe.blueprint import Blueprint
from qbe.engine.devices import out_of_memory
from qbe.errors import QBEError
from qbe.format.kv_blocks import FULL_BITS, KV_BITS, PAGE_SIZE
from qbe.kvcache.pages import KVShape, PagePool, pages_for
from qbe.models import DEFAULT_MODEL
from qbe.progress import bar

SIXTEEN = "16-bit pages"
UNEVEN = (16, 4)  # precisions at which sequences of different lengths are measured
UNEQUAL, EQUAL = " halves", " equal lengths"
TEXT = "The library keeps letters, maps and logbooks of ships that sailed to the northern islands. "


@dataclass(frozen=True)
class KVSizes:
    """What is measured.

    Attributes:
        heads: query heads.
        shape: keys and values of a layer.
        context: tokens of each sequence; halved until the pages fit into the memory.
        batches: sequences of a decode step.
        layers: that a pass reads, each with memory of its own: even at 2 bits larger than the caches.
        chunk: tokens of a prompt's step, the last ones of a context.
        averages: bits of which there are mixtures.
        rounds: per batch size.
        model: whose pages are counted; None leaves that out.
    """

    heads: int
    shape: KVShape
    context: int
    batches: tuple[int, ...]
    layers: int
    chunk: int
    averages: tuple[int, ...] = (8, 4)
    rounds: int = 15
    model: str | Path | None = DEFAULT_MODEL
    dtype: torch.dtype = torch.bfloat16


def sizes_for(device: torch.device) -> KVSizes:
    """Llama-3.1-8B's heads on a GPU, SmolLM2's on a CPU."""
    if device.type == "cuda":
        return KVSizes(32, KVShape(8, 128, 128), 32768, (8,), 8, 2048)
    return KVSizes(9, KVShape(3, 64, 64), 4096, (1, 4), 30, 512)


def run(device: torch.device, limits: Roofline, sizes: KVSizes, progress: bool = False) -> list[Row]:
    """For each precision and mixture a row per peer: microseconds of a layer's attention, of a page that is quantised.

    Sequences of different lengths stand beside equal ones with as many tokens. Then bytes of pages per token of the
    model, at every precision and as its default policy chooses them.

    Raises:
        QBEError: not even pages for a short context fit into the memory, or whatever is wrong with the model.
    """
    rows: list[Row] = []
    with bar("kv", len(sizes.batches) * (sizes.rounds + 2) + 2 * (sizes.rounds + 1), progress) as tick:
        for batch in sizes.batches:
            cases, note = fitting(sizes, batch, device)
            tick()
            rows += _decode(cases, sizes, limits, note, tick)
            if batch == sizes.batches[0]:
                rows += _prefill(cases, sizes, limits, note, tick)
                rows += _quantise(cases, sizes, limits, note, tick)
            del cases
    if sizes.model is None:
        return rows
    try:
        return rows + memory(sizes.model, sizes.context, progress)
    except QBEError as error:  # a model that cannot be had must not cost what was measured
        peer = Failed.because(error)
        return [*rows, Row("KV memory", "", f"{sizes.context} tokens", FULL_BITS, None, SIXTEEN, peer, "bytes/token")]


def fitting(sizes: KVSizes, batch: int, device: torch.device) -> tuple[Cases, str]:
    """Sequences as long as the memory allows, and a note where that is shorter than was wanted."""
    context, refused = sizes.context, ""
    while context > max(PAGE_SIZE, sizes.context // 64):
        try:
            cases = Cases(sizes.layers, sizes.shape, batch, context, sizes.averages, sizes.dtype, device)
            return cases, f"{sizes.context} tokens do not fit into the memory ({refused})" if refused else ""
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            refused = refused or (str(error).strip().splitlines() or ["no room"])[0][:80]
            context //= 2
            if device.type == "cuda":
                torch.cuda.empty_cache()
    raise QBEError(
        f"the KV pages of {batch} sequences of {sizes.context} tokens do not fit into the memory of {device} "
        f"({refused}), nor do those of {2 * context}: free some and try again"
    )


def _decode(cases: Cases, sizes: KVSizes, limits: Roofline, note: str, tick: Callable[[], None]) -> list[Row]:
    decode = Decode(cases, sizes.heads)
    ours = {name: decode.ours(case) for name, case in cases.found.items()}
    uneven, even = halved(cases.batch, cases.context)
    halves = [str(b) for b in UNEVEN if cases.batch > 1 and max(even) < cases.full.shape[1] - 1]
    for name in halves:
        ours |= {
            pages: decode.ours(cases.found[name], n) for pages, n in ((name + UNEQUAL, uneven), (name + EQUAL, even))
        }
    mine, theirs = take_turns(ours, decode.peers(), sizes.rounds, tick)
    rows: list[Row] = []
    for name, case in cases.found.items():
        mixed, _, average = name.partition(", ")
        peers: dict[str, Outcome] = {} if name == FULL else {SIXTEEN: mine[FULL]}
        peers = {f"{average}-bit pages": mine[average], **peers} if average else {**peers, **theirs}
        rows += rows_beside(
            peers, WHOLE, 1e6 / cases.layers, what=f"decode, mixed {mixed}" if average else "decode attention",
            size=_size(sizes), case=f"{cases.context} tokens, batch {cases.batch}", bits=_bits(case),
            ours=mine[name][WHOLE], unit="us", limit=decode.seconds(case, limits) * 1e6 / cases.layers,
            notes=dict.fromkeys(peers, note),
        )  # fmt: skip
    part = sum(uneven) / cases.full[:, 1:].numel()
    for name in halves:
        rows += rows_beside(
            {EQUAL.strip(): mine[name + EQUAL]}, WHOLE, 1e6 / cases.layers, what="decode, lengths", size=_size(sizes),
            case=f"{max(uneven) * PAGE_SIZE + 1} to {min(uneven) * PAGE_SIZE + 1} tokens, batch {cases.batch}",
            bits=_bits(cases.found[name]), ours=mine[name + UNEQUAL][WHOLE], unit="us",
            limit=decode.seconds(cases.found[name], limits, part) * 1e6 / cases.layers, notes={EQUAL.strip(): note},
        )  # fmt: skip
    return rows


def _prefill(cases: Cases, sizes: KVSizes, limits: Roofline, note: str, tick: Callable[[], None]) -> list[Row]:
    count = min(sizes.chunk, cases.context // 2 // PAGE_SIZE * PAGE_SIZE)
    work = Prefill(cases, sizes.heads, count)
    uniform = {n: c for n, c in cases.found.items() if len(c.bits) == 1}
    mine, theirs = take_turns({n: work.ours(c) for n, c in uniform.items()}, work.peers(), sizes.rounds, tick)
    return [
        row
        for name, case in uniform.items()
        for row in rows_beside(
            theirs if name == FULL else {SIXTEEN: mine[FULL], **theirs}, WHOLE, 1e6, what="prompt attention",
            size=_size(sizes), case=f"{count} tokens after {cases.context - count}", bits=_bits(case),
            ours=mine[name][WHOLE], unit="us", limit=work.seconds(case, limits) * 1e6,
            notes=dict.fromkeys((SIXTEEN, *theirs), note),
        )
    ]  # fmt: skip


def _quantise(cases: Cases, sizes: KVSizes, limits: Roofline, note: str, tick: Callable[[], None]) -> list[Row]:
    work = Quantise(cases)
    low = {n: c for n, c in cases.found.items() if len(c.bits) == 1 and n != FULL}
    mine, theirs = take_turns({n: work.ours(c) for n, c in low.items()}, work.peers(), sizes.rounds, tick)
    each = 1e6 / work.count / cases.layers
    return [
        row
        for name, case in low.items()
        for row in rows_beside(
            theirs, WHOLE, each, what="quantising a page",
            size=f"{cases.shape.kv_heads} heads of {cases.shape.key_dim}",
            case=f"{work.count} pages, {cases.layers} layers at once", bits=_bits(case), ours=mine[name][WHOLE],
            unit="us", limit=work.seconds(case, limits) * each, notes=dict.fromkeys(theirs, note),
        )
    ]  # fmt: skip


def memory(model: str | Path, context: int, progress: bool) -> list[Row]:
    """Bytes of pages per token that a sequence of so many tokens holds while it fills its last page.

    The last row is what the default policy chooses for a prompt of that length.

    Raises:
        QBEError: the model cannot be had or run.
    """
    from qbe.engine.engine import Engine

    with Engine(model, device="cpu", max_sequences=1, records=False, progress=progress) as engine:
        context = min(context, engine.core.context or context)
        chosen = engine.explain(TEXT * (context // engine.explain(TEXT).prompt_tokens)).blueprint
        plain = replace(chosen, first_kv_bits=None)
        held: dict[int | str, float] = {
            b: _held(engine.core.pool, plain.with_kv_bits((b,) * len(chosen.kv_bits)), context)
            for b in sorted(KV_BITS, reverse=True)
        }
        held["default"] = _held(engine.core.pool, chosen, context)
        average = chosen.average_kv_bits(engine.table)
    full, size = Timing.of([held[FULL_BITS]]), f"{len(chosen.kv_bits)} layers"
    notes = {"default": f"{average:g} bits on average are the default policy's choice at {context} tokens"}
    return [
        Row("KV memory", size, f"{context} tokens", bits, Timing.of([value]), SIXTEEN, full, "bytes/token",
            note=notes.get(str(bits), ""))
        for bits, value in held.items()
    ]  # fmt: skip


def _held(pool: PagePool, blueprint: Blueprint, tokens: int) -> float:
    """Bytes per token: all pages of a sequence, the last one in its staging page."""
    first, format = (pool.format(blueprint.kv_bits_of(page), Counter()) for page in (0, 1))
    quantised = first.nbytes + (pages_for(tokens) - 1) * format.nbytes
    return (quantised + (0 if format.full else pool.page_bytes)) / tokens


def _size(sizes: KVSizes) -> str:
    return f"{sizes.heads}/{sizes.shape.kv_heads} heads of {sizes.shape.key_dim}"


def _bits(case: KVCase) -> int | str:
    return case.bits[0] if len(case.bits) == 1 else "+".join(map(str, case.bits))
