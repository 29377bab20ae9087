"""Reading a long prompt. GPU: the linear layers at many rows. CPU: a whole model, beside transformers and llama.cpp."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from qbe.bench import linears
from qbe.bench.engines import PREFILL, DecodeRun, core_of, ours, peer_notes, peers_of, random_prompt
from qbe.bench.linear_peers import CUBLAS, FP8
from qbe.bench.machine import Roofline
from qbe.bench.measure import Failed, take_turns
from qbe.bench.report import Row, rows_beside
from qbe.bench.weights import LLAMA_8B
from qbe.models import DEFAULT_MODEL
from qbe.progress import bar


@dataclass(frozen=True)
class PrefillSizes:
    """What is measured.

    Attributes:
        model: measured as a whole, where `linears` is None.
        tokens: of the prompt.
        averages: bits a weight.
        rounds: of whole prompts.
        linears: the linear layers alone, at these sizes.
    """

    model: str | Path = DEFAULT_MODEL
    tokens: int = 2048
    averages: tuple[float, ...] = (4, 8, 16)
    rounds: int = 5
    linears: linears.LinearSizes | None = field(default=None)


def sizes_for(device: torch.device) -> PrefillSizes:
    if device.type != "cuda":
        return PrefillSizes()
    return PrefillSizes(
        linears=linears.LinearSizes(
            LLAMA_8B,
            rows=(512, 2048),
            widths=(4, 8, 16),
            groups=(64, 128),
            rounds=10,
            peers=(CUBLAS, FP8),
            prompts=(8, 16),
        )
    )


def run(device: torch.device, limits: Roofline, sizes: PrefillSizes, progress: bool = False) -> list[Row]:
    """Rows of `qbe.bench.linears`, or for a whole model tokens per second for each average and peer.

    Raises:
        QBEError: whatever is wrong with the model.
    """
    if sizes.linears is not None:
        return linears.run(device, limits, sizes.linears, progress)
    core = core_of(sizes.model, device, sizes.tokens + 1, progress)
    work = DecodeRun(random_prompt(sizes.tokens, core.vocabulary), 0)
    peers = peers_of(sizes.model, device, work, progress)
    with bar("prefill", sizes.rounds + 1, progress) as tick:
        mine, theirs = take_turns(ours(core, sizes.averages, work), peers, sizes.rounds, tick)
    # The head sees one token; the attention's own products are left out, so the limit is a little generous.
    body = sum(s.parameters for s in core.table if s.is_linear and s.role != "output_head")
    limit = sizes.tokens / limits.seconds(0.0, 2.0 * body * sizes.tokens)
    notes, rows = peer_notes(sizes.model), list[Row]()
    for average, parts in mine.items():
        rates = {n: o if isinstance(o, Failed) else {PREFILL: o[PREFILL].rate(sizes.tokens)} for n, o in theirs.items()}
        rows += rows_beside(
            rates, PREFILL, 1.0, what="prefill", size=str(sizes.model), case=f"{sizes.tokens} tokens", bits=average,
            ours=parts[PREFILL].rate(sizes.tokens), unit="tokens/s", limit=limit,
            notes=notes,
        )  # fmt: skip
    return rows
