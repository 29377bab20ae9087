"""Function calls at fewer bits: whether name and arguments are right, and how far the call's tokens move.

    python benchmarks/tool_calls.py [--model NAME] [--data DIR] [--items N] [--calls N] [--bits 4,5,6,8,16]
        [--minutes N] [--json FILE]

Items are spread over BFCL's simple and multiple questions (`bfcl/` in `--data`, $QBE_DATA or ../shared/data), with the
prompt and the grammar that `qbe serve` makes of `tools`. Every site has the same bits (the store needs them: `qbe
quantize --slices 4,1,1,2` has 4, 5, 6 and 8), the KV cache 16, answers are greedy.

Right: `--items` are answered with the grammar (`tool_choice: required`) and without. A name is right where it is the
expected function's, a call where its arguments are accepted, too (strings without case and punctuation, as BFCL does).

Moved: teacher forcing runs `--calls` expected calls, and as many answers to ordinary tasks (alpaca_seed_tasks.jsonl),
of the same tokens at most. Printed are the divergence from 16 bits in nats a token, the part of tokens that would have
been others, and the part of answers without any such token; of calls also among the tokens that the grammar allows,
which is what is served. All with 95 % intervals over items.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import torch

from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.datasets.function_calls import Expected, first_accepted, graded, schema_of
from qbe.datasets.intervals import interval
from qbe.datasets.items import encode as encode_item
from qbe.datasets.items import read_training
from qbe.engine.engine import Engine
from qbe.engine.result import Request
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.engine.sampling.scoring import Scored, score
from qbe.engine.tokenize import encode
from qbe.policies.uniform import UniformPolicy
from qbe.server import tools
from qbe.server.call_reader import ARGUMENTS, CLOSE, OPEN
from qbe.server.grammar import Grammars, lark
from qbe.server.protocol import ChatRequest
from qbe.sites import FULL_BITS
from qbe.store.sensitivity import divergence_of_rows

FILES = ("BFCL_v4_simple_python", "BFCL_v4_multiple")
MOST_TOKENS, TOGETHER = 96, 8


@dataclass(frozen=True)
class Question:
    """One of BFCL's: what is asked, as a request's body, and the call that is expected."""

    body: ChatRequest
    expected: Expected

    @property
    def call(self) -> str:
        """The expected call with the first accepted value of every argument that must be there."""
        ((name, arguments),) = self.expected.items()
        values = {key: first_accepted(accepted[0]) for key, accepted in arguments.items() if "" not in accepted}
        return f"{OPEN}{json.dumps(name)}{ARGUMENTS}{json.dumps(values)}{CLOSE}"


def questions(folder: Path, limit: int) -> list[Question]:
    """So many, spread over the files."""
    found = []
    for name in FILES:
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        answers = {
            row["id"]: row["ground_truth"][0]
            for row in map(json.loads, (folder / f"{name}.answers.jsonl").read_text(encoding="utf-8").splitlines())
        }
        found += [(row, answers[row["id"]]) for row in rows]
    chosen = [found[i * len(found) // limit] for i in range(min(limit, len(found)))]
    return [Question(_body(row), expected) for row, expected in chosen]


def _body(row: dict[str, Any]) -> ChatRequest:
    functions = [{**f, "parameters": schema_of(f["parameters"])} for f in row["function"]]
    return ChatRequest(
        messages=row["question"][0],
        tools=[{"type": "function", "function": f} for f in functions],  # type: ignore[list-item]
        tool_choice="required",
        parallel_tool_calls=False,
    )


class Model:
    """An engine, and what `qbe serve` would make of questions for it."""

    def __init__(self, model: str) -> None:
        self.engine = Engine(
            model, policy="uniform", max_sequences=TOGETHER, records=False, blueprint_cache=False, progress=True
        )
        self.grammars, self._matchers = Grammars(self.engine), dict[str, llguidance.LLMatcher]()

    def messages(self, asked: Question) -> list[dict[str, Any]]:
        return tools.conversation(asked.body.messages, asked.body.tools or [], known=False)

    def matcher(self, asked: Question) -> llguidance.LLMatcher:
        """At the start of the question's grammar."""
        grammar = lark(tools.grammar(asked.body, asked.body.tools or [], None))
        if grammar not in self._matchers:
            self._matchers[grammar] = llguidance.LLMatcher(self.grammars.tokenizer, grammar, log_level=0)
        return self._matchers[grammar]

    def blueprint(self, bits: int) -> Blueprint:
        budget = Budget(bits=bits, kv_bits=FULL_BITS)
        return UniformPolicy().blueprint(QueryProfile(0.5, "", 2), budget, self.engine.table)

    def answers(self, asked: Sequence[Question], bits: int, structured: bool) -> list[str]:
        requests = [
            Request(
                self.messages(q), SamplingParams(max_tokens=MOST_TOKENS), Budget(bits=bits, kv_bits=FULL_BITS),
                constraint=self.grammars.constraint(self.matcher(q)) if structured else None,
            )
            for q in asked
        ]  # fmt: skip
        return [result.text for result in self.engine.generate_batch(requests)]

    def logits(self, prompt: list[int], reference: list[int], bits: int) -> torch.Tensor:
        """Float32 [reference, vocabulary]."""
        found = torch.empty(len(reference), self.engine.core.vocabulary)

        def keep(position: int, rows: torch.Tensor) -> None:
            at = position - len(prompt) + 1
            found[at : at + len(rows)] = rows

        score(
            self.engine.core, [Scored((prompt + reference)[:-1], self.blueprint(bits), len(prompt) - 1, keep)]
        )  # fmt: skip
        return found

    def allowed(self, asked: Question, reference: list[int]) -> torch.Tensor:
        """Bool [reference, vocabulary]: what the grammar allows before each token."""
        constraint, rows = self.grammars.constraint(self.matcher(asked)), []
        for token in reference:
            rows.append(constraint.allowed().clone())
            if not rows[-1][token]:
                raise ValueError(f"the grammar does not allow the expected call {asked.call}")
            constraint.accept(token)
        return torch.stack(rows)


@dataclass(frozen=True)
class Movement:
    """Of one answer's tokens: how many, divergence in nats, and how many would have been others."""

    tokens: int
    divergence: float
    flips: int

    @classmethod
    def of(cls, full: torch.Tensor, now: torch.Tensor, allowed: torch.Tensor | None = None) -> Movement:
        if allowed is not None:
            several = allowed.sum(-1) > 1  # what the grammar leaves no choice of, no bits can change
            full, now = (x.masked_fill(~allowed, -1e9)[several] for x in (full, now))
        moved = float(divergence_of_rows(full, full.softmax(-1), now).sum())
        return cls(len(full), max(0.0, moved), int((full.argmax(-1) != now.argmax(-1)).sum()))


def shown(over: Sequence[float], under: Sequence[float] | None = None) -> dict[str, Any]:
    """Sum over sum with its interval; a mean where nothing is below."""
    above, below = np.asarray(over, float), np.ones(len(over)) if under is None else np.asarray(under, float)
    return {"value": float(above.sum() / max(1e-12, below.sum())), "interval": interval(above, below), "n": len(above)}


def measure_answers(model: Model, asked: list[Question], bits: Sequence[int]) -> list[dict[str, Any]]:
    rows = []
    for structured in (True, False):
        for b in bits:
            found = []
            for i in range(0, len(asked), TOGETHER):
                part = asked[i : i + TOGETHER]
                written = model.answers(part, b, structured)
                found += [graded(text, q.expected) for text, q in zip(written, part, strict=True)]
            rows.append({
                "bits": b, "structured": structured, "name": shown([n for n, _ in found]),
                "call": shown([c for _, c in found]),
            })  # fmt: skip
            print(_line(rows[-1], ("name", "call")), flush=True)
    return rows


@dataclass(frozen=True)
class Text:
    """A prompt and a reference, as token ids; `asked` is the question that it is a call for."""

    of: str
    prompt: list[int]
    reference: list[int]
    asked: Question | None = None


def texts_of(model: Model, name: str, asked: Sequence[Question], data: Path) -> list[Text]:
    """Calls and ordinary answers in turn."""
    tokenizer = model.engine.tokenizer
    calls = [
        Text("calls", encode(model.messages(q), tokenizer, name)[2], _ids(tokenizer, q.call), q) for q in asked
    ]  # fmt: skip
    longest = round(float(np.mean([len(t.reference) for t in calls])))
    items = [encode_item(item, tokenizer) for item in read_training(data, len(calls), ("alpaca",))]
    ordinary = [Text("ordinary", e.prompt_ids, e.reference_ids[:longest]) for e in items if e.reference_ids]
    return [t for pair in zip_longest(calls, ordinary) for t in pair if t is not None]


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def measure_movement(model: Model, texts: Sequence[Text], bits: Sequence[int], ends: float) -> list[dict[str, Any]]:
    """Of as many of the texts as there is time for."""
    moved: dict[tuple[str, bool, int], list[Movement]] = {}
    for text in texts:
        if time.monotonic() > ends:
            break
        full = model.logits(text.prompt, text.reference, FULL_BITS)
        mask = None if text.asked is None else model.allowed(text.asked, text.reference)
        for b in bits:
            now = model.logits(text.prompt, text.reference, b)
            moved.setdefault((text.of, False, b), []).append(Movement.of(full, now))
            if mask is not None:
                moved.setdefault((text.of, True, b), []).append(Movement.of(full, now, mask))
    rows = []
    for (what, structured, b), found in sorted(moved.items()):
        tokens = [m.tokens for m in found]
        rows.append({
            "of": what, "bits": b, "structured": structured,
            "divergence": shown([m.divergence for m in found], tokens),
            "flips": shown([m.flips for m in found], tokens),
            "unchanged": shown([m.flips == 0 for m in found]), "tokens": sum(tokens),
        })  # fmt: skip
        print(_line(rows[-1], ("divergence", "flips", "unchanged")), flush=True)
    return rows


def _line(row: dict[str, Any], names: tuple[str, ...]) -> str:
    of, grammar = row.get("of", "answers"), "grammar" if row["structured"] else "free"
    parts = [
        f"{n} {row[n]['value']:.4f}" + (f" [{row[n]['interval'][0]:.4f}, {row[n]['interval'][1]:.4f}]"
                                        if row[n]["interval"] else "")
        for n in names
    ]  # fmt: skip
    return f"{of} {row['bits']:2} bits, {grammar}: " + ", ".join(parts) + f" (n {row[names[0]]['n']})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("QBE_DATA", "../shared/data")))
    parser.add_argument("--items", type=int, default=64)
    parser.add_argument("--calls", type=int, default=120)
    parser.add_argument("--bits", default="4,5,6,8,16")
    parser.add_argument(
        "--minutes", type=float, default=60, help="for teacher forcing; the texts after that are left out"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    bits, model = [int(b) for b in args.bits.split(",")], Model(args.model)
    lower = [b for b in bits if b < FULL_BITS]

    ends = time.monotonic() + args.minutes * 60
    asked = questions(args.data / "bfcl", args.calls)
    moved = measure_movement(model, texts_of(model, args.model, asked, args.data), lower, ends)
    right = measure_answers(model, questions(args.data / "bfcl", args.items), bits) if args.items else []
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "moved": moved, "right": right}, indent=1) + "\n")


if __name__ == "__main__":
    main()
