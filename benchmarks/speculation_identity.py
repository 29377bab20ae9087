"""Are greedy answers with speculation token for token those without, where several requests share steps?

    OMP_NUM_THREADS=1 python benchmarks/speculation_identity.py [--model M] [--data DIR] [--prompts 200] [--tokens 64]
                                                                [--bits 8] [--batches 2 4 8] [--json FILE]

Passages of WikiText-2, GSM8K, BIG-Bench Hard and HumanEval, dealt out to the batch sizes in turn. A CPU checks at most
8 rows in a step, so a full batch of 8 guesses nothing there.

    together   so many prompts begin at once, the next ones when all of them have ended: first nobody speculates, then
               all do as the engine chooses among the drafters, then with own drafts at the lowest gear, whatever they
               cost
    queue      prompts begin when places are free, beside answers that are being written. A step with a prompt in it
               has many rows, and its products round differently. Who speculates is at another token then: the rows
               `without, queue` beside `without` say how much of a difference that makes by itself

Each pass computes every prompt anew. Where answers differ, the first place where they do and by how much the two
tokens' logits differ there, teacher-forced.
"""

from __future__ import annotations

import argparse
import json
import sys
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from qbe.bench.speculate import CHOSEN, WITHOUT, FreeDrafts
from qbe.blueprint import Blueprint
from qbe.datasets.items import DATASETS, encode, read
from qbe.engine.core import Core
from qbe.engine.devices import pick_device
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.engine.sampling.scoring import Scored, score
from qbe.engine.scheduling.sequence import Sequence
from qbe.engine.speculation.acceptance_statistics import NGRAM_DRAFTER, Costs
from qbe.engine.speculation.ngram_proposer import NgramProposer
from qbe.errors import QBEError
from qbe.models import DEFAULT_MODEL
from qbe.progress import bar
from qbe.store.prepare import prepare

QUEUE = ", queue"


def serve(core: Core, asked: list[Sequence], tick: Callable[[], None]) -> None:
    """Until all of them have ended."""
    for sequence in asked:
        core.add(sequence)
    while core.has_work():
        for output in core.step():
            if output.finished:
                tick()
    for sequence in asked:
        if sequence.finish_reason != "length":
            raise RuntimeError(f"an answer ended early: {sequence.finish_reason}, {sequence.error}")


def difference(core: Core, plain: Sequence, made: Sequence) -> dict[str, object]:
    """Where two answers part, and how near the tokens were there."""
    at = next(i for i, (a, b) in enumerate(zip(plain.output_ids, made.output_ids, strict=True)) if a != b)
    ids, rows = plain.prompt_ids + plain.output_ids[:at], list[torch.Tensor]()
    score(core, [Scored(ids, plain.blueprint, len(ids) - 1, lambda _, logits: rows.append(logits[-1].clone()))])
    theirs, ours = plain.output_ids[at], made.output_ids[at]
    best = rows[-1].topk(2).values.tolist()
    return {"token": at, "tokens": [theirs, ours], "logits": rows[-1][[theirs, ours]].tolist(), "best": best}


def draft_tokens(asked: list[Sequence]) -> dict[str, tuple[int, int]]:
    """By drafter: how many were checked, and how many of them were right."""
    drafted, accepted = Counter[str](), Counter[str]()
    for sequence in asked:
        own = sequence.speculation
        for drafter, count in ({} if own is None else own.drafted_by).items():
            name = "the text" if drafter == NGRAM_DRAFTER else f"{drafter} bits"
            drafted[name] += count
            accepted[name] += own.accepted_by[drafter]
    return {name: (count, accepted[name]) for name, count in sorted(drafted.items()) if count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--bits", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    device, shown = pick_device(args.device), sys.stderr.isatty()
    items = read(tuple(DATASETS), args.data, -(-args.prompts // len(DATASETS)))[: args.prompts]
    prepared = prepare(args.model, device=device, need_sensitivity=False, progress=shown)
    prompts = [encode(item, prepared.tokenizer).prompt_ids for item in items]
    core = Core(prepared.model, prepared.table, device=device, max_sequences=max(args.batches), speculate=True)
    speculator = core.speculator
    if speculator is None:
        raise QBEError("this engine has no steps of several rows: no request can speculate")
    blueprint = Blueprint.of("identity", core.table, (args.bits,) * len(core.table.nested))
    lowest, everyone = min(core.table.gears()), {NGRAM_DRAFTER, *core.table.gears()}
    ways = {
        WITHOUT: None, CHOSEN: (Costs(), everyone), f"drafts at {lowest} bits": (FreeDrafts(args.bits), {lowest}),
        WITHOUT + QUEUE: None, CHOSEN + QUEUE: (Costs(), everyone),
    }  # fmt: skip

    def answers(numbers: range, batch: int, way: str) -> list[Sequence]:
        if ways[way] is not None:
            speculator.costs, speculator.drafters = ways[way]
            speculator.reader = NgramProposer()  # which does not know the answers yet
        while core.scheduler.allocator.evict():
            pass  # what others left
        core.scheduler.max_sequences = batch
        params = SamplingParams(max_tokens=args.tokens, temperature=0, ignore_eos=True, speculate=ways[way] is not None)
        asked = [Sequence(uuid.uuid4().hex, prompts[i], params, blueprint) for i in numbers]
        at_once = len(asked) if QUEUE in way else batch
        with bar(f"batch {batch}, {way}", len(asked), shown) as tick:
            for at in range(0, len(asked), at_once):
                serve(core, asked[at : at + at_once], tick)
        return asked

    cases, differences = [], []
    for number, batch in enumerate(args.batches):
        mine = range(number, len(prompts), len(args.batches))
        made = {WITHOUT: answers(mine, batch, WITHOUT)}
        for way in list(ways)[1:]:
            made[way] = answers(mine, batch, way)
            beside = WITHOUT + QUEUE if way == CHOSEN + QUEUE else WITHOUT
            pairs = list(zip(mine, made[beside], made[way], strict=True))
            parted = [(i, a, b) for i, a, b in pairs if a.output_ids != b.output_ids]
            told, equal = draft_tokens(made[way]), len(pairs) - len(parted)
            cases.append({
                "batch": batch, "way": way, "beside": beside, "answers": len(pairs), "equal": equal, "guesses": told,
            })  # fmt: skip
            said = ", ".join(f"{name} {right} of {n} right" for name, (n, right) in told.items()) or "nothing guessed"
            print(f"batch {batch}, {way:22} {equal} of {len(pairs)} as {beside}; {said}", flush=True)
            for i, a, b in parted:
                found = difference(core, a, b)
                differences.append({"batch": batch, "way": way, "prompt": items[i].name, **found})
                print("  {prompt}: token {token}, logits {logits}, the best {best}".format(**differences[-1]))
    if args.json:
        about = {"model": args.model, "bits": args.bits, "tokens": args.tokens, "device": device.type,
                 "threads": torch.get_num_threads()}  # fmt: skip
        args.json.write_text(json.dumps({**about, "cases": cases, "differences": differences}, indent=1) + "\n")


if __name__ == "__main__":
    main()
