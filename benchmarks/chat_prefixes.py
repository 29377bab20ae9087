"""A conversation of ten turns: tokens of its prompts that were in the cache, and time to first tokens.

    python benchmarks/chat_prefixes.py [--model MODEL] [--max-tokens 24] [--json FILE]

The same ten messages, with the model's own greedy answers between them, at each tier, at fixed bits of the weights, and
at fixed bits of weights and KV cache. A system message parts the conversations, so that none finds another's pages.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from qbe.budget import Budget
from qbe.engine.engine import Engine
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.files import write_text
from qbe.models.load import quiet

TURNS = (
    "Hi.",
    "Write a long and detailed essay about the history of philosophy, with many examples, and compare the schools.",
    "Thanks!",
    "What is 2+2?",
    "Write a Python function that reverses a linked list, then prove that it is right, step by step, in every case.",
    "Why?",
    "Explain in depth how a compiler allocates registers, and discuss the trade-offs between the known algorithms.",
    "Is 7 a prime number?",
    "Tell me a story about a fox, a crow and a river; it should have three parts, and each should end with a question.",
    "Bye.",
)
BUDGETS = {
    "flex": Budget(tier="flex"), "default": Budget(), "priority": Budget(tier="priority"), "6 bits": Budget(bits=6),
    "6 bits, KV 16": Budget(bits=6, kv_bits=16),
}  # fmt: skip


def converse(engine: Engine, name: str, max_tokens: int) -> dict[str, Any]:
    """A row: sums over the turns, and the bits that each had."""
    messages = [{"role": "system", "content": f"You are a careful assistant. Conversation: {name}."}]
    params, rows = SamplingParams(max_tokens=max_tokens, ignore_eos=False), []
    for text in TURNS:
        messages.append({"role": "user", "content": text})
        found = engine.generate(list(messages), params, budget=BUDGETS[name])
        messages.append({"role": "assistant", "content": found.text})
        rows.append(found)
    return {
        "budget": name,
        "prompt_tokens": sum(r.prompt_tokens for r in rows),
        "cached": [r.cached_tokens for r in rows],
        "cached_tokens": sum(r.cached_tokens for r in rows),
        "first_token_s": round(sum(r.prefill_ms for r in rows) / 1e3, 2),
        "asked_bits": [round(r.asked_weight_bits, 2) for r in rows],
        "bits": [round(r.average_weight_bits, 2) for r in rows],
    }


def main() -> None:
    """Runs the conversations and prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--budgets", default=";".join(BUDGETS), help=f"some of: {'; '.join(BUDGETS)}")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    with (
        quiet(),
        Engine(args.model, device=args.device, records=False, blueprint_cache=False,
               progress=sys.stderr.isatty()) as engine,
    ):  # fmt: skip
        for name in args.budgets.split(";"):
            rows.append(converse(engine, name, args.max_tokens))
            print(json.dumps(rows[-1]), flush=True)
    if args.json is not None:
        write_text(args.json, json.dumps({"model": args.model, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
