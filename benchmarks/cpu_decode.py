"""Times decode and prefill of the default model on the CPU, beside transformers' own model, in interleaved rounds.

    python benchmarks/cpu_decode.py [--bits 4 4.5 16] [--rounds 5] [--tokens 60] [--batch 1 8] [--threads 2]

Decode: one engine with `compile=True` (batch 1 compiled, larger batches at fixed shapes), one without, one made to take
the packed steps, and transformers' `generate` in bfloat16. Prefill: one chunk of the prompt. Medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict

import qbe  # isort: skip  (before torch: it sets how torch's threads wait)

import torch
import transformers

PROMPT = "Once upon a time there was"


def decode(engine: qbe.Engine, bits: float, batch: int, tokens: int) -> float:
    """Tokens a second of all sequences together, the first token of each not counted."""
    params = qbe.SamplingParams(max_tokens=tokens, ignore_eos=True)
    ids = [engine.submit(qbe.Request(PROMPT, params, qbe.Budget(bits=bits))) for _ in range(batch)]
    engine.step()  # the prompts
    start = time.perf_counter()
    while not all(map(engine.finished, ids)):
        engine.step()
    seconds = time.perf_counter() - start
    for i in ids:
        engine.take_result(i)
    return batch * (tokens - 1) / seconds


def prefill(engine: qbe.Engine, bits: float, tokens: int) -> float:
    """Tokens a second of a prompt in one step."""
    prompt = PROMPT * tokens
    ids = engine.tokenizer(prompt)["input_ids"][:tokens]
    text = engine.tokenizer.decode(ids)
    engine.submit(qbe.Request(text, qbe.SamplingParams(max_tokens=1), qbe.Budget(bits=bits)))
    start = time.perf_counter()
    engine.step()
    return len(engine.tokenizer(text)["input_ids"]) / (time.perf_counter() - start)


def plain_decode(model: torch.nn.Module, ids: torch.Tensor, tokens: int) -> float:
    def run(n: int) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0)  # type: ignore[operator]
        return time.perf_counter() - start

    first = run(1)
    return ids.shape[0] * (tokens - 1) / (run(tokens) - first)


def plain_prefill(model: torch.nn.Module, ids: torch.Tensor) -> float:
    start = time.perf_counter()
    with torch.inference_mode():
        model(ids, logits_to_keep=1)
    return ids.shape[1] / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=float, nargs="+", default=[4, 4.5, 16])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()

    def make(compile: bool) -> tuple[qbe.Engine, float]:
        start = time.perf_counter()
        engine = qbe.Engine(device="cpu", dtype="bfloat16", records=False, compile=compile)
        return engine, time.perf_counter() - start

    (plain, without), (compiled, with_it) = make(False), make(True)
    packed, _ = make(False)
    packed.core.runner.decode = None
    from qbe.models.load import load_model

    model = load_model(qbe.pull(), dtype="bfloat16").model.eval()
    print(f"start of the engine {without:.1f} s, with compile {with_it:.1f} s; torch {torch.__version__}, "
          f"{args.threads} threads")  # fmt: skip

    found: dict[str, list[float]] = defaultdict(list)
    ids = torch.tensor([plain.tokenizer(PROMPT)["input_ids"]])
    long = torch.arange(args.prefill)[None] % 1000 + 1000
    for _ in range(args.rounds):
        for batch in args.batch:
            for bits in args.bits:
                name = f"decode, batch {batch}, {bits:g} bits"
                for label, engine in (("compiled", compiled), ("fixed shapes", plain), ("packed", packed)):
                    if label != "compiled" or batch == 1:
                        found[f"{name}, {label}"].append(decode(engine, bits, batch, args.tokens))
            found[f"decode, batch {batch}, transformers bf16"].append(
                plain_decode(model, ids.repeat(batch, 1), args.tokens)
            )
        for bits in args.bits:
            found[f"prefill of {args.prefill}, {bits:g} bits"].append(prefill(plain, bits, args.prefill))
        found[f"prefill of {args.prefill}, transformers bf16"].append(plain_prefill(model, long))
    for name, values in found.items():
        print(f"{name:48s} median {statistics.median(values):8.1f} tok/s   {min(values):.1f} to {max(values):.1f}")


if __name__ == "__main__":
    main()
