"""`make demo`: three very different prompts, answered live, each at the blueprint chosen for it."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.text import Text

import qbe
from qbe.engine.result import PromptInput
from qbe.explain.terminal import strip

PROMPTS = {
    "a fact": "What is the capital of France?",
    "arithmetic in steps": (
        "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
        "Each clip costs 3 dollars. How much money did she earn in April and May altogether? Think step by step."
    ),
    "code": "Write a Python function that returns the n-th Fibonacci number, with a docstring and an example.",
}


def main() -> None:
    out = Console(highlight=False)
    out.print("[bold]QBE[/]: one nested store, and a precision for each request\n")
    with qbe.Engine(progress=True, max_sequences=1) as engine:
        params = qbe.SamplingParams(max_tokens=120)
        for title, question in PROMPTS.items():
            messages: PromptInput = [{"role": "user", "content": question}]
            why = engine.explain(messages)
            out.rule(f"[bold]{title}[/]", align="left")
            out.print(f"[bold]{question}[/]")
            out.print(
                f"complexity {why.profile.score:.2f} ({why.profile.prompt_class.replace('_', ' ')}, "
                f"tier {why.profile.tier}, {why.analysis_ms:.2f} ms)"
            )
            out.print(Text("blueprint  ").append_text(strip(why.blueprint, engine.table)))
            out.print(
                f"average {why.average_bits:.2f} bits, {why.bytes_per_token / 1e6:.1f} MB a token "
                f"(16 bits: {why.bytes_per_token_16bit / 1e6:.1f} MB, {why.ratio:.0%})\n"
            )
            stream = engine.stream(messages, params)
            for piece in stream:
                sys.stdout.write(piece)
                sys.stdout.flush()
            result = stream.result
            out.print(f"\n[dim]{len(result.token_ids)} tokens, {result.decode_tokens_per_s:.0f} a second[/]\n")
    out.print("Next: [bold].venv/bin/qbe chat[/], or [bold].venv/bin/qbe explain --html why.html 'your prompt'[/]")


if __name__ == "__main__":
    try:
        main()
    except qbe.QBEError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
