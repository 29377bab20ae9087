"""Writes a copy of a Llama-like model whose residual stream is rotated: the same function, weights on no grid.

    python benchmarks/rotated.py MODEL OUT [--seed N]

A checkpoint that was dequantised from a 4-bit file (SmolLM2's GGUF) lies on a grid that plain rounding may meet again,
which says nothing about other models. Here norm weights are folded into the linears that read them, and a random
orthogonal matrix turns the residual stream: the function stays (to float32's rounding; the largest change of a logit is
printed), the grid is gone. Tied embeddings become two matrices. The copy is float32.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

from qbe.models import load_model, pull


@torch.no_grad()
def rotate(model: nn.Module, seed: int) -> None:
    """Turns the residual stream of a float32 LlamaForCausalLM, in place."""
    config, inner = model.config, model.model
    generator = torch.Generator().manual_seed(seed)
    size = config.hidden_size
    turn = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    if config.tie_word_embeddings:
        config.tie_word_embeddings = False
        model.lm_head.weight = nn.Parameter(inner.embed_tokens.weight.clone(), requires_grad=False)

    def read(norm: nn.Module, linears: list[nn.Linear]) -> None:
        for linear in linears:
            linear.weight.copy_(linear.weight.double() * norm.weight.double() @ turn)
        norm.weight.fill_(1.0)

    for layer in inner.layers:
        attention, mlp = layer.self_attn, layer.mlp
        read(layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj])
        read(layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj])
        for linear in (attention.o_proj, mlp.down_proj):
            linear.weight.copy_(turn.T @ linear.weight.double())
    read(inner.norm, [model.lm_head])
    inner.embed_tokens.weight.copy_(inner.embed_tokens.weight.double() @ turn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    loaded = load_model(pull(args.model), dtype="float32")
    tokens = torch.arange(5, 261)[None]
    with torch.inference_mode():
        before = loaded.model(input_ids=tokens).logits
    rotate(loaded.model, args.seed)
    with torch.inference_mode():
        change = (loaded.model(input_ids=tokens).logits - before).abs().max()
    print(f"largest logit {float(before.abs().max()):.1f}, largest change {float(change):.1e}")
    loaded.model.save_pretrained(args.out)
    loaded.tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
