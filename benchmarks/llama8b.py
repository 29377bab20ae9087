"""The default prompts on a random-weight model of Llama-3.1-8B's shape, on one GPU.

    PYTHONPATH=src python benchmarks/llama8b.py [--json FILE] [--originals device|host]

The answers are noise (the weights are random); what is measured is that every blueprint runs, what memory the store
takes and what a decoded token costs in this first, eager engine. Needs about 30 GB of GPU memory, 22 with
`--originals host`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import qbe
from qbe.store.nested_tensor import nested_linears

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from conftest import byte_tokenizer

PROMPTS = {
    "fact": "What is the capital of France?",
    "arithmetic": "Tom has 3 apples, buys 5 more and gives 2 away. How many are left? Explain each step.",
    "code": "Write a Python function that reverses a linked list.",
}


def random_llama() -> LlamaForCausalLM:
    """Llama-3.1-8B's shape in bfloat16 on the GPU, made there."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, rope_theta=500000.0,
        bos_token_id=None, eos_token_id=None, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--originals", choices=("device", "host"), default="device")
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()

    model = random_llama()
    start = time.perf_counter()
    engine = qbe.Engine(model, tokenizer=byte_tokenizer(), originals=args.originals, records=False, kv_tokens=16384)
    ready_s = time.perf_counter() - start
    weights = [w for _, _, w in nested_linears(engine.model)]
    nested_bits = 8 * sum(w.nested_bytes() for w in weights) / sum(w.numel() for w in weights)
    on_device = torch.cuda.memory_allocated() / 1e9
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; nested and measured in {ready_s:.0f} s")
    print(f"{len(weights)} nested sites, {nested_bits:.3f} bits a weight, {on_device:.1f} GB on the device in all")
    rows = []
    params = qbe.SamplingParams(max_tokens=args.tokens)
    engine.generate(PROMPTS["fact"], params)  # compiles the kernels

    def row(what: str, r: qbe.Result) -> None:
        rows.append(
            {
                "what": what,
                "bits": r.average_weight_bits,
                "tokens_per_s": r.decode_tokens_per_s,
                "bytes_per_token": r.bytes_per_token,
                "score": r.profile.score,
                "blueprint": r.blueprint.key,
            }
        )

    for name, prompt in PROMPTS.items():
        row(f"{name}, tiered", engine.generate(prompt, params))
    for bits in (4, 6, 8, 16):
        row(f"uniform {bits}", engine.generate(PROMPTS["fact"], params, budget=qbe.Budget(bits=bits), policy="uniform"))
    mixed = zip([*PROMPTS.values()] * 2, (4, 6, 8, 16, 4, 8), strict=True)
    batch = engine.generate_batch([qbe.Request(p, params, qbe.Budget(bits=b), "uniform") for p, b in mixed])
    written, longest = sum(len(r.token_ids) for r in batch), max(r.decode_ms for r in batch)
    average = sum(r.average_weight_bits for r in batch) / len(batch)
    rows.append({"what": "batch of 6 at 4, 6, 8, 16, 4, 8", "bits": average, "tokens_per_s": written / longest * 1e3})
    for found in rows:
        print(f"{found['what']:34s} {found['bits']:5.2f} bits {found['tokens_per_s']:7.1f} tok/s "
              f"{found.get('bytes_per_token', 0) / 1e9:6.2f} GB/token")  # fmt: skip
    assert len({r["blueprint"] for r in rows[:3]}) == 3, "three queries, three blueprints"
    if args.json:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "originals": args.originals}
        facts = {"nested_bits_per_weight": nested_bits, "device_gb": on_device, "ready_s": ready_s}
        args.json.write_text(json.dumps({"hardware": about, **facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
