"""What steps of mixed precisions cost on a CPU: each row at its own bits, all at the highest of the step, all at 16.

    OMP_NUM_THREADS=1 python benchmarks/shared_rows.py [--batch 1 4 8 16] [--rounds 15] [--steps 4] [--compile]
                                                       [--prompt TOKENS] [--activation-bits 8|16] [--json FILE]

The clock is the CPU time of this process, with one thread: others may use the machine, but for its memory. The ways
take turns in each round; medians with quartiles, milliseconds a step.

    exact, shared   rows of the mix in turn, as `--rows` of `qbe serve`
    all at B        every row at B bits
    in bands        the rows of each precision in a step of their own: the sum of these steps, `exact`
    with --prompt   the step holds a prompt of so many tokens at the lowest bits of the mix, beside the rows
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import qbe
from qbe.blueprint import Blueprint
from qbe.engine.core import Core
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.engine.scheduling import sequence as sequences
from qbe.store.shared_rows import SharedRows

PARAMS = SamplingParams(max_tokens=4096, ignore_eos=True)


class Steps:
    """Decode steps of an engine's core with rows of these bits, exact or shared."""

    def __init__(self, core: Core, activation_bits: int, prompt: int) -> None:
        self._core, self._activation_bits, self._prompt = core, activation_bits, prompt
        self._shared = SharedRows(core.table)
        self._number = 0

    def blueprint(self, bits: int) -> Blueprint:
        table = self._core.table
        return Blueprint.of("bench", table, (bits,) * len(table.nested), table.activations(self._activation_bits))

    def seconds(self, rows: Sequence[int], steps: int, shared: bool) -> float:
        """CPU seconds of a step whose rows have these bits."""
        core, running = self._core, []
        core.plan.shared = self._shared if shared else None
        core.plan.forget()
        for bits in rows:
            running.append(self._add([1, 2, 3, bits], bits))
        while not all(s.output_ids for s in running):
            core.step()
        core.step()
        spent = 0.0
        for _ in range(steps):
            if self._prompt:
                running.append(self._add([5 + self._number % 90, *range(100, 99 + self._prompt)], min(rows)))
            began = time.process_time()
            core.step()
            spent += time.process_time() - began
            if self._prompt:
                core.cancel(running.pop().request_id)
        for s in running:
            core.cancel(s.request_id)
        return spent / steps

    def _add(self, prompt: list[int], bits: int) -> sequences.Sequence:
        self._number += 1
        made = sequences.Sequence(str(self._number), prompt, PARAMS, self.blueprint(bits))
        made.paging.cache_salt = str(self._number).encode()  # no prompt finds another's pages
        self._core.add(made)
        return made


def ways(steps: Steps, mix: Sequence[int], batch: int, count: int) -> dict[str, Callable[[], float]]:
    """Name -> seconds of a step."""
    rows = [mix[i % len(mix)] for i in range(batch)]
    bands = [[b for b in rows if b == band] for band in sorted(set(rows))]

    def run(rows: Sequence[int], shared: bool = False) -> Callable[[], float]:
        return lambda: steps.seconds(rows, count, shared)

    found = {"exact": run(rows), "shared": run(rows, True)}
    found |= {f"all at {b}": run([b] * batch) for b in sorted({*rows, 16})}
    if len(bands) > 1:
        found["in bands"] = lambda: sum(steps.seconds(band, count, False) for band in bands)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--mix", type=int, nargs="+", action="append")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=0)
    parser.add_argument("--activation-bits", type=int, default=16)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    with qbe.Engine(records=False, rows="shared", compile=args.compile, device="cpu", max_sequences=32) as engine:
        steps = Steps(engine.core, args.activation_bits, args.prompt)
        for mix in args.mix or [[4, 6, 8], [4, 6, 8, 16]]:
            for batch in args.batch:
                chosen = ways(steps, mix, batch, args.steps)
                times: dict[str, list[float]] = {name: [] for name in chosen}
                for turn in range(args.rounds + 1):
                    for name, run in chosen.items():
                        spent = run() * 1e3
                        times[name] += [spent] if turn else []
                shown = {n: statistics.quantiles(t, n=4) for n, t in times.items()}
                print(f"{'+'.join(map(str, mix))}, batch {batch}: ", end="")
                print(", ".join(f"{n} {m:.2f} ({a:.2f} to {b:.2f})" for n, (a, m, b) in shown.items()), flush=True)
                found.append({"mix": mix, "batch": batch, "ms": shown})
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
