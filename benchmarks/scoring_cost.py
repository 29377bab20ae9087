"""What scoring finished answers by the widest gear costs a server, and whether it takes from who asks meanwhile.

    python benchmarks/scoring_cost.py --model ZOO/dense-tiny --json scoring.json

Two servers in turns, one that scores every answer and one that scores none, are asked the same in bursts with pauses in
which all of a burst is scored. The difference of their CPU times over the answers scored is what one costs; a hundredth
of it over what an answer costs to write is the cost at the default sample. Beside it the times of a third server at the
default sample that is never left idle.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import numpy as np

from qbe.bench.serving import RunningServer, serving
from qbe.server.health.settings import Health

BURST, WAIT_S = 8, 120.0
TICK = os.sysconf("SC_CLK_TCK")
QUIET = "ladder = false\nwindow = 4096\nleast = 4096\n"


def cpu_s(server: RunningServer) -> float:
    """CPU seconds of a process, all its threads."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


class Asker:
    """Asks one server for answers of so many tokens."""

    def __init__(self, server: RunningServer, tokens: int) -> None:
        self.server, self._tokens = server, tokens
        self._http = httpx2.Client(base_url=server.url, timeout=600.0)
        self._model = self._http.get("/v1/models").json()["data"][0]["id"]

    def ask(self, number: int) -> None:
        prompt = f"Question {number}: what happened on the way from the old house to the river? " * 3
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": self._tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        answer = self._http.post("/v1/completions", json=body)
        answer.raise_for_status()

    def burst(self, numbers: Sequence[int]) -> None:
        with ThreadPoolExecutor(BURST) as pool:
            list(pool.map(self.ask, numbers))

    def scored(self) -> int:
        told = self._http.get("/metrics").text
        return sum(int(float(n)) for n in re.findall(r"^qbe:live_kl_count\{[^}]*\} (\S+)$", told, re.MULTILINE))

    def all_scored(self, count: int) -> None:
        ends = time.monotonic() + WAIT_S
        while self.scored() < count:
            if time.monotonic() > ends:
                raise SystemExit(f"{self.scored()} of {count} answers were scored within {WAIT_S:g} s")
            time.sleep(0.2)


def in_bursts(model: str, device: str, sample: float, answers: int, tokens: int) -> float:
    """CPU seconds for each answer, scored or not."""
    with serving(model, device, f"[health]\nsample = {sample}\n{QUIET}") as server:
        asker = Asker(server, tokens)
        asker.burst(range(BURST))  # what is done once: the first steps, what sites read of the calibration text
        asker.all_scored(BURST if sample else 0)
        time.sleep(3.0)
        before = cpu_s(server)
        for at in range(BURST, BURST + answers, BURST):
            asker.burst(range(at, at + BURST))
            asker.all_scored(at + BURST if sample else 0)
            time.sleep(0.0 if sample else 1.0)  # the other one is idle for a second before it scores
        return (cpu_s(server) - before) / answers


def never_idle(model: str, device: str, sample: float, answers: int, tokens: int) -> float:
    """Tokens a second with a burst under way all the time."""
    with serving(model, device, f"[health]\nsample = {sample}\n{QUIET}") as server:
        asker = Asker(server, tokens)
        asker.burst(range(BURST))
        time.sleep(3.0)
        began = time.perf_counter()
        asker.burst(range(BURST, BURST + answers))
        return answers * tokens / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--answers", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    of = args.model, args.device
    rows = []
    for _ in range(args.rounds):
        none, every = (in_bursts(*of, sample, args.answers, args.tokens) for sample in (0.0, 1.0))
        default = Health().sample
        rows.append({"cpu_s_an_answer": none, "cpu_s_a_score": every - none,
                     "share_at_default": default * (every - none) / none})  # fmt: skip
        rows[-1] |= {f"tokens_s_at_{s:g}": never_idle(*of, s, args.answers, args.tokens) for s in (0.0, default)}
        print({k: round(v, 4) for k, v in rows[-1].items()}, flush=True)
    shares = [row["share_at_default"] for row in rows]
    print(f"at the default sample scoring takes {np.median(shares):.2%} of the CPU time ({min(shares):.2%} to "
          f"{max(shares):.2%}, {args.rounds} rounds)")  # fmt: skip
    if args.json is not None:
        args.json.write_text(json.dumps({"model": args.model, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
