"""Does QBE inside vLLM answer as the embedded engine does, and at 16 bits as vLLM without QBE?

    python benchmarks/vllm_agreement.py MODEL-QBE [--dtype float32|float16] [--activations 8] [--compile] [--json FILE]

MODEL-QBE: a folder that 'qbe quantize' wrote.

20 prompts, 32 greedy tokens. vLLM with QBE answers all of them at 4, 6, 8 and 16 bits in one batch, and at 16 bits
alone; the embedded engine at the same blueprints; vLLM without QBE once. Each engine runs in a process of its own.
--activations are those of requests below 16 bits: at 16 activations have 16 bits, too, as without QBE.
In bfloat16 vLLM and transformers round differently outside of QBE's layers, so that their answers part where two tokens
are nearly as likely; a line says how often at 16 bits. vLLM compiled and not compiled round differently, too: with
--compile the last line says how often vLLM without QBE then agrees with itself. In float32 what is left is QBE.
Needs an environment with vLLM (`make setup-vllm`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

WIDTHS = (4, 6, 8, 16)
TOKENS = 32
PROMPTS = [
    "The capital of France is", "Water boils at", "Once upon a time there was a", "def fibonacci(n):",
    "The three primary colours are", "In 1969, the first person", "A haiku about rain:", "2 + 2 =",
    "The opposite of hot is", "To make bread you need", "Photosynthesis is the process by which",
    "Dear Sir or Madam,", "The largest planet of the solar system", "import numpy as np\n", "My favourite book is",
    "Shakespeare wrote", "A triangle has", "The quick brown fox", "Q: Who painted the Mona Lisa?\nA:",
    "List four seasons:",
]  # fmt: skip


def plain_folder(model: Path, into: Path) -> Path:
    """The same model without QBE's files, as vLLM alone would serve it."""
    from qbe.store.checkpoint import MANIFEST, is_checkpoint, read_manifest

    if not is_checkpoint(model):
        return model
    ours = {*read_manifest(model).files, MANIFEST}
    for file in model.iterdir():
        if file.name not in ours:
            os.symlink(file.resolve(), into / file.name)
    return into


def run_vllm(
    model: str, quantization: str | None, dtype: str, activations: int, compiled: bool
) -> dict[str, list[list[int]]]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model, dtype=dtype, quantization=quantization, enforce_eager=not compiled, max_model_len=512, max_num_seqs=16,
        max_num_batched_tokens=512, kv_cache_memory_bytes=1 << 28, gpu_memory_utilization=0.3,  # others may be there
        additional_config={"qbe_rows": "exact"},
    )  # fmt: skip

    def ask(prompts: list[str], bits: list[int | None]) -> list[list[int]]:
        args = [
            None if b is None
            else {"qbe_bits": b, "qbe_activation_bits": activations_at(b, activations), "qbe_policy": "uniform"}
            for b in bits
        ]  # fmt: skip
        params = [SamplingParams(temperature=0, max_tokens=TOKENS, extra_args=a) for a in args]
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]

    if quantization is None:
        return {"plain": ask(PROMPTS, [None] * len(PROMPTS))}
    mixed = ask([p for p in PROMPTS for _ in WIDTHS], list(WIDTHS) * len(PROMPTS))
    found = {f"{b} mixed": mixed[i :: len(WIDTHS)] for i, b in enumerate(WIDTHS)}
    return found | {"16 alone": ask(PROMPTS, [16] * len(PROMPTS))}


def activations_at(bits: int, activations: int) -> int:
    return 16 if bits == 16 else activations


def run_embedded(model: str, dtype: str, activations: int) -> dict[str, list[list[int]]]:
    import qbe

    engine = qbe.Engine(model, policy="uniform", dtype=dtype, records=False)
    params = qbe.SamplingParams(temperature=0, max_tokens=TOKENS)
    found = {}
    for bits in WIDTHS:
        budget = qbe.Budget(bits=bits, activation_bits=activations_at(bits, activations))
        requests = [qbe.Request(p, params, budget) for p in PROMPTS]
        found[str(bits)] = [r.token_ids for r in engine.generate_batch(requests)]
    return found


def stage(
    name: str, model: Path, dtype: str, activations: int, compiled: bool, out: Path
) -> dict[str, list[list[int]]]:
    command = [sys.executable, __file__, str(model), "--stage", name, "--dtype", dtype, "--json", str(out),
               "--activations", str(activations)]  # fmt: skip
    subprocess.run(command + ["--compile"] * compiled, check=True)
    return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--activations", type=int, default=16, choices=(8, 16), help="bits, of requests below 16")
    parser.add_argument("--compile", action="store_true", help="torch.compile and CUDA graphs, as vLLM serves")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--stage", choices=("plain", "qbe", "embedded"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        run = {
            "plain": lambda: run_vllm(str(args.model), None, args.dtype, args.activations, args.compile),
            "qbe": lambda: run_vllm(str(args.model), "qbe", args.dtype, args.activations, args.compile),
            "embedded": lambda: run_embedded(str(args.model), args.dtype, args.activations),
        }[args.stage]
        args.json.write_text(json.dumps(run()))
        return
    with tempfile.TemporaryDirectory() as folder:
        plain_model = Path(folder) / "plain"
        plain_model.mkdir()
        out = Path(folder) / "answers.json"
        how = args.dtype, args.activations
        qbe = stage("qbe", args.model, *how, args.compile, out)
        embedded = stage("embedded", args.model, *how, args.compile, out)
        plain_model = plain_folder(args.model, plain_model)
        plain = stage("plain", plain_model, *how, args.compile, out)["plain"]
        eager = stage("plain", plain_model, *how, False, out)["plain"] if args.compile else None

    def same(ours: list[list[int]], theirs: list[list[int]]) -> int:
        return sum(a == b for a, b in zip(ours, theirs, strict=True))

    result = {f"{b} bits, embedded engine": same(qbe[f"{b} mixed"], embedded[str(b)]) for b in WIDTHS}
    result["16 bits mixed, vLLM alone"] = same(qbe["16 mixed"], plain)
    result["16 bits alone, vLLM alone"] = same(qbe["16 alone"], plain)
    result["embedded at 16 bits, vLLM alone"] = same(embedded["16"], plain)
    if eager:
        result["vLLM alone, compiled and not"] = same(plain, eager)
    for name, count in result.items():
        print(f"{name:34} {count} of {len(PROMPTS)} answers equal")
    if args.json:
        args.json.write_text(
            json.dumps(
                {
                    "dtype": args.dtype,
                    "activations": args.activations,
                    "compiled": args.compile,
                    "prompts": len(PROMPTS),
                    "equal": result,
                },
                indent=1,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
