"""How long the first and a later start of a big model take, and how much device memory while loading and after.

    python benchmarks/start.py --vocabulary 8192 --folder /tmp/shape --json start.json

A model of Llama-3.1-8B's shape with random weights is made on the device and written to the folder; then an engine
starts twice, each time in a process of its own: first with an empty cache of stores, then with what that left.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch


def make(folder: Path, vocabulary: int, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int) -> float:
    """Writes the model; returns the seconds that took."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    began = time.perf_counter()
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=8192, rms_norm_eps=1e-5,
        rope_theta=500000.0, tie_word_embeddings=False, bos_token_id=1, eos_token_id=0, dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in LlamaForCausalLM(config).named_parameters()}
    folder.mkdir(parents=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    files, shard, size = [], {}, 0
    for name, shape in shapes.items():
        one = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, device=device) * 0.02
        shard[name] = one.bfloat16().cpu()
        size += shard[name].numel() * 2
        if size > 4e9:
            files.append(shard)
            shard, size = {}, 0
    files.append(shard)
    where = {}
    for i, tensors in enumerate(files, 1):
        file = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({t: i for i, t in enumerate(["<|end|>", "<|start|>", *alphabet])}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", bos_token="<|start|>", model_max_length=8192
    ).save_pretrained(folder)
    return time.perf_counter() - began


def start(folder: str, device: str, options: dict[str, object]) -> None:
    """One start; prints what it took as JSON."""
    began = time.perf_counter()
    from qbe.engine.devices import pick_device
    from qbe.engine.engine import Engine
    from qbe.engine.memory import predicted
    from qbe.store import prepare as preparing

    imported = time.perf_counter()
    where = pick_device(device)
    gpu = where.type == "cuda"
    told: dict[str, object] = {"imports_s": round(imported - began, 1)}
    whole = preparing.prepare

    def timed(*args: object, **kwargs: object) -> object:
        from qbe.engine import engine

        found = whole(*args, **kwargs)  # type: ignore[arg-type]
        assert engine
        told["prepared_s"] = round(time.perf_counter() - imported, 1)
        print(f"prepared after {told['prepared_s']} s", file=sys.stderr, flush=True)
        if gpu:
            told["weights_bytes"] = torch.cuda.memory_allocated(where)
            told["peak_bytes"] = torch.cuda.max_memory_allocated(where)
        told["parameters"] = sum(p.numel() for p in found.model.parameters())  # type: ignore[attr-defined]
        return found

    import qbe.engine.engine as module

    module.prepare = timed  # type: ignore[assignment]
    few = {name: value for name, value in options.items() if name in ("originals", "most_bits")}
    told["predicted"] = predicted(Path(folder), where, **few).describe()  # type: ignore[arg-type]
    told["predicted_s"] = round(time.perf_counter() - imported, 1)
    with Engine(folder, device=device, records=False, blueprint_cache=False, **options) as engine:  # type: ignore[arg-type]
        told["started_s"] = round(time.perf_counter() - began, 1)
        engine.generate("Once upon a time")
        told["answered_s"] = round(time.perf_counter() - began, 1)
        if gpu:
            told["bits_a_weight"] = round(8 * int(told["weights_bytes"]) / int(told["parameters"]), 3)  # type: ignore[call-overload]
            told["peak_over_weights"] = round(int(told["peak_bytes"]) / int(told["weights_bytes"]), 3)  # type: ignore[call-overload]
            told["card"] = torch.cuda.get_device_name(where)
        told["memory"] = engine.memory.describe()
    print(json.dumps(told))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", default="32,4096,14336,32,8", help="layers, hidden, ffn, heads, key heads")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--options", default='[{}, {}, {"most_bits": 4}]', help="of the engine, for each start")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        start(str(args.folder), args.device, json.loads(args.one))
        return
    out: dict[str, object] = {"shape": args.shape, "vocabulary": args.vocabulary}
    if not args.folder.exists():
        out["made_s"] = round(make(args.folder, args.vocabulary, *map(int, args.shape.split(","))), 1)
    starts = []
    for options in json.loads(args.options):
        command = [sys.executable, __file__, "--folder", str(args.folder), "--device", args.device]
        began = time.perf_counter()
        done = subprocess.run(
            [*command, "--one", json.dumps(options)], stdout=subprocess.PIPE, env=os.environ, text=True
        )
        if done.returncode:
            raise SystemExit(f"a start with {options} failed")
        starts.append({"options": options, **json.loads(done.stdout.splitlines()[-1])})
        starts[-1]["process_s"] = round(time.perf_counter() - began, 1)
        print(json.dumps(starts[-1]), flush=True)
    out["starts"] = starts
    if args.json is not None:
        args.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
