"""What the cascade costs in a decode step, and what it and refresh do to the divergence from 16 bits.

    python benchmarks/cascade.py cost [--model MODEL] [--compile] [--steps 200] [--device cuda] [--json FILE]
    python benchmarks/cascade.py kl [--model MODEL] [--data DIR] [--prompts 4] [--tokens 256] [--seeds 3] [--ways ...]

cost: requests of 20 steps take turns: nothing, the monitor of refresh, monitor and cascade. Medians and quartiles; on a
CPU of the process's time (set OMP_NUM_THREADS=1 to have that of one thread). The cascade is the one that was trained,
or with --untrained one of the same size that gives every token the bits of `static`: all of its work is done, and steps
read as much as without it. `sites_moved` says how many sites of a token had other bits than its blueprint.

kl: the model writes answers at 16 bits, drawn with a seed. The same tokens then go through decode steps with the
cascade, with refresh, and with both, whose bits are noted token by token. Every way is then measured by the same
replay: its own bits, the same bits at the answer's tokens in random order, and the best fixed blueprint at the same
average. Intervals are over answers. The cascade is what `qbe train cascade` found; refresh's thresholds are the
quartiles of the answers themselves. A way that is the name of a policy of tokens (tokenwise, mobi: `qbe train`) lets
every token of prompt and answer choose its own bits; fixed has the average of the answer's then.
"""

from __future__ import annotations

import argparse
import collections.abc
import json
import statistics
import time
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import qbe  # isort: skip  (before torch: it sets how torch's threads wait)

import numpy as np
import torch

from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.datasets.intervals import interval
from qbe.datasets.items import encode, read_training
from qbe.engine.adaptive.cascade import Cascade
from qbe.engine.scheduling.sequence import Sequence, Status
from qbe.engine.scheduling.sequence_state import Scoring
from qbe.eval.fidelity import Teacher
from qbe.learning.cascade import HIDDEN
from qbe.learning.distil import worth
from qbe.learning.gates import begin
from qbe.policies.cascade import blocks_of
from qbe.policies.per_token import LEVELS, TokenRouters
from qbe.policies.routers import Network, gear_bits
from qbe.refresh import thresholds
from qbe.refresh.monitor import Monitor
from qbe.sites import FULL_BITS
from qbe.store.sensitivity import divergence_of_rows

PROMPT = "Explain how photosynthesis works."


def cost(engine: qbe.Engine, steps: int) -> dict[str, Any]:
    """Microseconds of a step in each way: on a CPU of the process's own time, which other work does not lengthen."""
    cuda = engine.core.device.type == "cuda"
    clock = time.perf_counter if cuda else time.process_time
    ways = {
        "nothing": Budget(bits=5.0), "monitor": Budget(within=(5.0, 5.0), refresh=True),
        "monitor and cascade": Budget(within=(5.0, 5.0), refresh=True, cascade=True),
    }  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    moved = list[int]()
    params = qbe.SamplingParams(max_tokens=24, ignore_eos=True)
    for _ in range(-(-steps // 20)):
        for name, budget in ways.items():
            key = engine.submit(qbe.Request(PROMPT, params, budget))
            running = engine.sequence(key)
            for i in range(22):
                began = clock()
                engine.step()
                if cuda:
                    torch.cuda.synchronize()
                if i >= 2:
                    seconds[name].append(clock() - began)
            if budget.cascade:
                own = running.blueprint.weight_bits
                moved += [sum(a != b for a, b in zip(m.bits, own, strict=True)) for m in running.moves]
            engine.cancel(key)
            engine.take_result(key)
    quartiles = {name: [q * 1e6 for q in statistics.quantiles(s, n=4)] for name, s in seconds.items()}
    medians = {name: q[1] for name, q in quartiles.items()}
    return {
        "steps": {name: len(s) for name, s in seconds.items()}, "median_us": medians, "quartiles_us": quartiles,
        "points": 0 if engine.core.cascade is None else len(engine.core.cascade.routers.blocks),
        "sites_moved": statistics.fmean(moved),
        "share": medians["monitor and cascade"] / medians["nothing"] - 1,
        "share_of_cascade": (medians["monitor and cascade"] - medians["monitor"]) / medians["nothing"],
    }  # fmt: skip


def untrained(engine: qbe.Engine) -> None:
    """Gives the engine a cascade that does all of its work for every token, and gives each what `static` would."""
    table, core, heads = engine.table, engine.core, engine.model.config.num_attention_heads
    blocks, rng = blocks_of(table), np.random.default_rng(0)
    networks = []
    for point, block in enumerate(blocks):
        bias = begin(table, block.sites).astype(np.float32)
        inner = rng.standard_normal(((point + 1) * heads, HIDDEN)).astype(np.float32)
        networks.append(Network(inner, np.zeros(HIDDEN, np.float32), np.zeros((HIDDEN, len(bias)), np.float32), bias))
    worths = np.sort(np.concatenate([worth(table, [s]) for b in blocks for s in b.sites]))[::-1]
    thresholds = np.interp(np.linspace(0, 1, LEVELS), np.linspace(0, 1, len(worths)), worths).astype(np.float32)
    made = TokenRouters(blocks, tuple(networks), gear_bits(table), thresholds, "untrained")
    core.cascade = Cascade(made, table, core.plan)
    engine._selector.cascade = made
    for part in (core.runner, core.runner.decode):
        if part is not None:
            part.observe = core.cascade.observe
    if core.runner.decode is not None:
        core.runner.decode.renew()


class Forced:
    """Lets an answer be the given tokens."""

    def __init__(self, tokens: list[int], vocabulary: int) -> None:
        self.tokens, self.at, self.error = tokens, 0, None
        self.vocabulary = vocabulary

    def allowed(self) -> torch.Tensor:
        found = torch.zeros(self.vocabulary, dtype=torch.bool)
        found[self.tokens[self.at]] = True
        return found

    def accept(self, token: int) -> bool:
        assert token == self.tokens[self.at]
        self.at += 1
        return self.at == len(self.tokens)


class Replay(Sequence):
    """Tokens at blueprints given one by one."""

    given: list[Blueprint]

    def blueprint_at(self, position: int) -> Blueprint:
        return self.given[position]

    def rows(self, start: int, count: int) -> list[tuple[Blueprint, int]]:
        return [(b, len(list(run))) for b, run in groupby(self.given[start : start + count])]


def run(engine: qbe.Engine, requests: collections.abc.Sequence[qbe.Request], watched: bool = False) -> list[Sequence]:
    """Serves them together; their sequences. `watched`: measure tokens as a monitor does."""
    ids = [engine.submit(r) for r in requests]
    sequences = [engine.sequence(i) for i in ids]
    for s in sequences:
        s.monitor = Monitor(None) if watched else s.monitor
    while not all(map(engine.finished, ids)):
        engine.step()
    for i in ids:
        result = engine.take_result(i)
        if result.error is not None:
            raise qbe.QBEError(result.error)
    return sequences


def replay(engine: qbe.Engine, s: Sequence, given: list[Blueprint], take: Any) -> None:
    """Runs a sequence's tokens at these blueprints, one for each position; `take`: see `Scoring`."""
    core, start = engine.core, len(s.prompt_ids) - 1
    again = Replay("replay", s.token_ids[:-1], qbe.SamplingParams(max_tokens=1), given[0])
    again.given, again.scoring = given, Scoring(start, take)
    core.add(again)
    while again.status is not Status.FINISHED:
        core.step()


def divergence(engine: qbe.Engine, s: Sequence, ways: dict[str, list[Blueprint]], full: Blueprint) -> dict[str, float]:
    """Mean divergence from 16 bits over the answer's tokens, nats, of each way."""
    n, start, vocabulary = len(s.output_ids), len(s.prompt_ids) - 1, engine.core.vocabulary
    teacher, kl = torch.empty(n, vocabulary), torch.zeros(n)

    def keep(position: int, rows: torch.Tensor) -> None:
        teacher[position - start : position - start + len(rows)] = rows.cpu()

    def compare(position: int, rows: torch.Tensor) -> None:
        for i in range(0, len(rows), 32):
            now = rows[i : i + 32].cpu()
            at = slice(position - start + i, position - start + i + len(now))
            kl[at] = divergence_of_rows(teacher[at], teacher[at].softmax(-1), now)

    replay(engine, s, [full] * len(s.token_ids), keep)
    found = {}
    for name, given in ways.items():
        replay(engine, s, given, compare)
        found[name] = float(kl.double().clamp_min(0).mean())
    return found


def given_to(s: Sequence) -> list[Blueprint]:
    """What each of a sequence's tokens had."""
    return [replace(s.blueprint_at(p), dynamic_precision=None) for p in range(len(s.token_ids))]


def shuffled(s: Sequence, given: list[Blueprint], seed: int) -> list[Blueprint]:
    """The answer's tokens' blueprints in another order; the prompt's stay."""
    first = len(s.prompt_ids)
    order = np.random.default_rng(seed).permutation(len(given) - first)
    return given[:first] + [given[first + i] for i in order]


def kl(
    engine: qbe.Engine, prompts: collections.abc.Sequence[list[int]], tokens: int, seeds: int, bits: float,
    ways: collections.abc.Sequence[str]
) -> dict[str, Any]:  # fmt: skip
    """Divergences of every answer, by way, and what they come to."""
    table, rows = engine.table, list[dict[str, Any]]()
    full = engine.explain(prompts[0], budget=Budget(bits=FULL_BITS), policy="uniform").blueprint
    within = (bits - 0.7, bits + 0.7)
    policies = [way for way in ways if way in ("tokenwise", "mobi")]
    for seed in range(seeds):
        params = qbe.SamplingParams(max_tokens=tokens, temperature=0.8, seed=seed, ignore_eos=True)
        asked = [qbe.Request(p, params, Budget(bits=FULL_BITS), "uniform") for p in prompts]
        answers = run(engine, asked, watched=True)
        seen = [w for s in answers for w in thresholds.windows(s.token_entropies, s.token_margins)]
        engine._selector.thresholds = thresholds._of(seen)
        forced, size = qbe.SamplingParams(max_tokens=tokens, ignore_eos=True), engine.core.vocabulary
        budgets = {
            way: Budget(within=within, refresh="refresh" in way, cascade="cascade" in way)
            for way in ways if way not in policies
        }  # fmt: skip
        told = {
            name: run(engine, [
                qbe.Request(s.prompt_ids, forced, budget, "static", constraint=Forced(s.output_ids, size))
                for s in answers
            ])
            for name, budget in budgets.items()
        }  # fmt: skip
        for i, answer in enumerate(answers):
            read, averages = {}, {}
            for name in budgets:
                own = given_to(told[name][i])
                part = [b.average_weight_bits(table) for b in own[len(answer.prompt_ids) : -1]]
                averages[name] = statistics.fmean(part)
                read[name] = own
                read[f"{name}, shuffled"] = shuffled(answer, own[:-1], seed) + own[-1:]
                fixed = engine.explain(answer.prompt_ids, budget=Budget(bits=averages[name]), policy="static").blueprint
                averages[f"{name}, fixed"] = fixed.average_weight_bits(table)
                # The prompt runs as it did; what is compared is the answer.
                read[f"{name}, fixed"] = own[: len(answer.prompt_ids)] + [fixed] * len(answer.output_ids)
            found = divergence(engine, answer, read, full)
            for name in policies:
                for way, (nats, average) in routed(engine, answer, name, bits, full).items():
                    found[way], averages[way] = nats, average
            rows.append({
                "seed": seed, "answer": i, "kl": found, "bits": averages,
                "raised": {name: sum(m.shift > 0 for m in own[i].moves) for name, own in told.items()},
                "blueprints": {name: len({b.weight_bits for _, b in own[i].past} | {own[i].blueprint.weight_bits})
                          for name, own in told.items()},
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    return {"rows": rows, "summary": {name: summary(rows, name) for name in ways}}


def routed(
    engine: qbe.Engine, answer: Sequence, policy: str, bits: float, full: Blueprint
) -> dict[str, tuple[float, float]]:
    """Divergence and average bits of an answer whose tokens choose their bits, and of the best fixed ones as many."""
    teacher, found = Teacher(engine.core, full, answer.prompt_ids, answer.output_ids, engine.table), {}
    engine.make_ready(policy)
    for name, by in ((policy, policy), (f"{policy}, fixed", "static")):
        budget = Budget(bits=bits, kv_bits=FULL_BITS)
        blueprint = engine.explain(answer.prompt_ids, budget=budget, policy=by).blueprint
        of = teacher.compare(blueprint)
        bits = blueprint.average_weight_bits(engine.table) if of.bits is None else of.bits
        found[name] = of.kl / of.tokens, bits
    return found


def summary(rows: collections.abc.Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """Divergence over that of the fixed blueprint of the same average, and over that of shuffled moves."""
    own, fixed = (np.array([r["kl"][k] for r in rows]) for k in (name, f"{name}, fixed"))
    told = {
        "bits": float(np.mean([r["bits"][name] for r in rows])),
        "bits_fixed": float(np.mean([r["bits"][f"{name}, fixed"] for r in rows])),
        "kl": float(own.mean()), "kl_fixed": float(fixed.mean()),
        "over_fixed": float(own.sum() / fixed.sum()), "interval": interval(own, fixed),
    }  # fmt: skip
    if f"{name}, shuffled" not in rows[0]["kl"]:  # routers decide within the pass: there are no moves to give to others
        return told
    other = np.array([r["kl"][f"{name}, shuffled"] for r in rows])
    return {
        **told, "kl_shuffled": float(other.mean()), "shuffled_over_fixed": float(other.sum() / fixed.sum()),
        "interval_shuffled": interval(other, fixed),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "kl"))
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--untrained", action="store_true", help="cost: a cascade that gives every token the same")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--bits", type=float, default=5.0)
    parser.add_argument("--ways", nargs="+", default=["cascade", "refresh", "refresh and cascade"])
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    with qbe.Engine(
        arguments.model, policy="tiered" if arguments.what == "cost" else "static", device=arguments.device,
        dtype=arguments.dtype, compile=arguments.compile, records=False, max_sequences=16,
    ) as engine:  # fmt: skip
        if arguments.what == "cost":
            if arguments.untrained:
                untrained(engine)
            found = cost(engine, arguments.steps)
        else:
            # Not those that the table was learned from: items in between.
            items = read_training(arguments.data, 10_000)
            every = [i for i in items if i.dataset == "text"][1::2], [i for i in items if i.dataset == "alpaca"][1::2]
            chosen = [part[k * len(part) // max(1, arguments.prompts // 2)] for part in every
                      for k in range(max(1, arguments.prompts // 2))]  # fmt: skip
            prompts = [encode(item, engine.tokenizer).prompt_ids[-256:] for item in chosen]
            found = kl(engine, prompts, arguments.tokens, arguments.seeds, arguments.bits, arguments.ways)
        told = {k: v for k, v in found.items() if k != "rows"}
        print(json.dumps(told, indent=1))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
