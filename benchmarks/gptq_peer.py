"""Independent GPTQ at fixed widths by llm-compressor, for benchmarks/elasticity.py to compare with.

    python -m venv peer && peer/bin/pip install llmcompressor
    peer/bin/python benchmarks/gptq_peer.py MODEL OUT [--data DIR] [--widths 3,4,5,6] [--windows 32]

Runs in an environment of its own (llm-compressor pins another transformers), without qbe. Its GPTQModifier as it comes,
asymmetric, group 64, every linear but the output head, calibrated on the first windows of 1024 tokens of WikiText-2's
validation split. Writes the weights as they are read, float32, to OUT/<bits>.safetensors; widths that lie there already
are not made again.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

WINDOW, GROUP = 1024, 64


def quantised(name: str, ids: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    """The weights of every quantised linear, float32 [N, K], by name; `ids` int64 [windows, tokens]."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    rows = {"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()}
    args = QuantizationArgs(num_bits=bits, type="int", symmetric=False, strategy="group", group_size=GROUP)
    recipe = GPTQModifier(
        config_groups={"all": QuantizationScheme(targets=["Linear"], weights=args)}, ignore=["lm_head"]
    )
    oneshot(model=model, dataset=Dataset.from_dict(rows), recipe=recipe, max_seq_length=WINDOW,
            num_calibration_samples=len(ids), tokenizer=AutoTokenizer.from_pretrained(name))  # fmt: skip
    found = {}
    for site, module in model.named_modules():
        if hasattr(module, "weight_scale"):
            weight = module.weight.data
            scale, zero = (t.repeat_interleave(GROUP, 1)[:, : weight.shape[1]].float()
                           for t in (module.weight_scale.data, module.weight_zero_point.data))  # fmt: skip
            codes = (torch.round(weight / scale) + zero).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
            found[site] = ((codes - zero) * scale).contiguous()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("QBE_DATA", "../shared/data")))
    parser.add_argument("--widths", default="3,4,5,6")
    parser.add_argument("--windows", type=int, default=32)
    args = parser.parse_args()
    text = (args.data / "wikitext2_valid.txt").read_text()
    ids = AutoTokenizer.from_pretrained(args.model)(text[: 8 * WINDOW * args.windows])["input_ids"]
    windows = torch.tensor(ids[: WINDOW * args.windows]).view(-1, WINDOW)
    args.out.mkdir(parents=True, exist_ok=True)
    for bits in map(int, args.widths.split(",")):
        path = args.out / f"{bits}.safetensors"
        if not path.exists():
            draft = path.with_suffix(".partial")
            save_file(quantised(args.model, windows, bits), draft)
            draft.rename(path)


if __name__ == "__main__":
    main()
