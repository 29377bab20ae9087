"""Whole decode steps at batch 1: an engine core at several averages of bits, beside itself at 16 bits and others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qbe.bench.engines import STEP, DecodeRun, blueprint_at, core_of, ours, peer_notes, peers_of, random_prompt
from qbe.bench.machine import Roofline
from qbe.bench.measure import Failed, Outcome, take_turns
from qbe.bench.report import Row, rows_beside
from qbe.models import DEFAULT_MODEL
from qbe.progress import bar

SAME = "QBE at 16 bits"
LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


@dataclass(frozen=True)
class DecodeSizes:
    """What is measured.

    Attributes:
        model: a checkpoint, which peers can load too, or the fields of a LlamaConfig to be filled with random weights.
        averages: bits a weight; 16 is among them, as the peer of the others.
        prompt: tokens read before the steps that count.
        steps: decode steps a sample.
        rounds: samples.
    """

    model: str | Path | dict[str, Any] = DEFAULT_MODEL
    averages: tuple[float, ...] = (4, 4.5, 6, 8, 16)
    prompt: int = 16
    steps: int = 32
    rounds: int = 7


def sizes_for(device: torch.device) -> DecodeSizes:
    return DecodeSizes(LLAMA_8B, (4, 4.5, 6, 8, 16), 16, 64, 10) if device.type == "cuda" else DecodeSizes()


def random_llama(fields: dict[str, Any], device: torch.device) -> nn.Module:
    """A Llama of this shape with random bfloat16 weights, made on the device. No token ends its answers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**fields, bos_token_id=None, eos_token_id=None, dtype="bfloat16")
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def run(device: torch.device, limits: Roofline, sizes: DecodeSizes, progress: bool = False) -> list[Row]:
    """For each average a row per peer, in tokens per second; then the same with the step compiled, where steps can be.

    Raises:
        QBEError: whatever is wrong with the model.
    """
    random = isinstance(sizes.model, dict)
    model = random_llama(sizes.model, device) if isinstance(sizes.model, dict) else sizes.model
    core = core_of(model, device, sizes.prompt + sizes.steps + 1, progress)
    work = DecodeRun(random_prompt(sizes.prompt, core.vocabulary), sizes.steps)
    others, notes = (
        ({}, {}) if isinstance(model, nn.Module) else (peers_of(model, device, work, progress), peer_notes(model))
    )
    name = f"Llama of {sum(s.parameters for s in core.table) / 1e9:.2f} G, random" if random else str(sizes.model)
    rows: list[Row] = []
    for case in ("batch 1", "batch 1, compiled")[: 1 if core.runner.decode is None else 2]:
        if "compiled" in case:
            core.runner.compile_steps(progress)
        with bar(f"decode, {case}", sizes.rounds + 1, progress) as tick:
            mine, theirs = take_turns(ours(core, sizes.averages, work), others, sizes.rounds, tick)
        for average, parts in mine.items():
            peers: dict[str, Outcome] = dict(theirs) if average == 16 else {SAME: mine[16], **theirs}
            rates = {n: o if isinstance(o, Failed) else {STEP: o[STEP].rate(1)} for n, o in peers.items()}
            blueprint = blueprint_at(core, average)
            rows += rows_beside(
                rates, STEP, 1.0, what="decode", size=name, case=case,
                bits=round(blueprint.average_weight_bits(core.table), 2), ours=parts[STEP].rate(1), unit="tokens/s",
                limit=limits.bandwidth / blueprint.bytes_per_token(core.table), notes=notes,
            )  # fmt: skip
    return rows
