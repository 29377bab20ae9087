"""Recurrent states at 16, 10 and 8 bits beside 32: perplexity and KL divergence by position, read token by token.

    OMP_NUM_THREADS=1 python benchmarks/state_precision.py MODEL TEXT [--tokens 8192] [--windows 2] [--dtype float32]
                                                           [--json FILE]

Windows of the text lie side by side. Each is read once at every precision, in steps of one token, as an answer is: a
prompt's states are rounded at the end of a step only. The weights have 16 bits. Sizes are those of recurrent states
alone, over what bfloat16 would take.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch

import qbe
from qbe.blueprint import Blueprint
from qbe.engine.scheduling.scheduler import ScheduledTokens
from qbe.engine.scheduling.sequence import Sequence
from qbe.kvcache.pages import pages_for
from qbe.sites import STATE_BITS, STATE_FULL_BITS


def sequences(engine: qbe.Engine, windows: list[list[int]], bits: list[int]) -> list[list[Sequence]]:
    """Of each window one at every precision, with pages and slots for all of it."""
    core, found = engine.core, []
    slots = core.scheduler.slots
    assert slots is not None
    full = tuple(max(site.gears) for site in core.table.nested)
    for w, ids in enumerate(windows):
        found.append([])
        for gear in bits:
            blueprint = Blueprint("bench", full, (16,) * len(full), (16,) * core.table.layers,
                                  state_bits=(gear,) * core.table.layers)  # fmt: skip
            sequence = Sequence(f"{w}-{gear}", ids, qbe.SamplingParams(max_tokens=1), blueprint)
            sequence.pages = core.scheduler.allocator.allocate(pages_for(len(ids))) or []
            sequence.state_slot = slots.take(blueprint.state_bits)
            found[-1].append(sequence)
    return found


def measure(engine: qbe.Engine, windows: list[list[int]], bits: list[int], every: int) -> list[dict[str, Any]]:
    """For each stretch of `every` tokens: by how much perplexity up to its end grows, in %, and its mean KL in nats."""
    rows = sequences(engine, windows, bits)
    losses, divergence = torch.zeros(len(bits), dtype=torch.float64), torch.zeros(len(bits), dtype=torch.float64)
    found: list[dict[str, Any]] = []
    length = len(windows[0]) - 1
    for position in range(length):
        work = [ScheduledTokens(s, position, 1) for of_window in rows for s in of_window]
        for w in work:
            w.sequence.token_ids = w.sequence.prompt_ids[: position + 1]
        logs = engine.core.runner.step(work).logits.double().log_softmax(-1).view(len(windows), len(bits), -1)
        for ids, of_window in zip(windows, logs, strict=True):
            losses -= of_window[:, ids[position + 1]]
            divergence += (of_window[0].exp() * (of_window[0] - of_window)).sum(-1)
        if (position + 1) % every == 0:
            grown = ((losses - losses[0]) / ((position + 1) * len(windows))).exp().sub(1).mul(100)
            kl = divergence / (every * len(windows))
            found.append({
                "tokens": position + 1, "perplexity": math.exp(float(losses[0]) / ((position + 1) * len(windows))),
                "grown %": dict(zip(bits, [round(float(g), 4) for g in grown], strict=True)),
                "kl": dict(zip(bits, [float(f"{k:.2e}") for k in kl], strict=True)),
            })  # fmt: skip
            print(found[-1], flush=True)
            divergence.zero_()
    return found


def sizes(engine: qbe.Engine, bits: list[int]) -> dict[int, float]:
    """Bytes of the recurrent states over those of bfloat16."""
    pool = engine.core.states
    assert pool is not None
    states = [shape for shape in pool.shapes if shape.recurrent]
    plain = sum(2 * math.prod(shape.size) for shape in states)
    return {gear: round(sum(shape.nbytes(gear) for shape in states) / plain, 4) for gear in bits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--every", type=int, default=1024)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    bits = sorted(STATE_BITS, reverse=True)
    assert bits[0] == STATE_FULL_BITS
    rows = given.windows * len(bits)
    engine = qbe.Engine(
        given.model, device="cpu", dtype=given.dtype, records=False, policy="uniform", max_sequences=rows,
        kv_tokens=rows * (given.tokens + 64),
    )  # fmt: skip
    ids = engine.tokenizer.encode(given.text.read_text())[: given.windows * (given.tokens + 1)]
    windows = [ids[i * (given.tokens + 1) : (i + 1) * (given.tokens + 1)] for i in range(given.windows)]
    with torch.inference_mode():
        found = {"sizes": sizes(engine, bits), "stretches": measure(engine, windows, bits, given.every)}
    print("bytes over bfloat16", found["sizes"])
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
