"""Where do vLLM on a CPU and transformers part in bfloat16, neither of them with QBE?

    python benchmarks/vllm_agreement.py MODEL --stage plain --json ANSWERS     # MODEL: a 16-bit checkpoint of a Llama
    python benchmarks/vllm_rounding.py MODEL ANSWERS

Both keep 16-bit numbers between operations, but at three places vLLM rounds later than transformers:

norm        a layer's output is added to the residual in float32 and that sum normalised; transformers rounds it first
rotary      queries and keys are turned in float32 and rounded once; transformers rounds each product and the sum
attention   all of it is computed in float32 from 16-bit queries, keys and values

Here transformers' modules are called one by one, rounding as transformers does or at some places as vLLM does, over
vLLM's own answers: at how many tokens is vLLM's the likeliest, and in how many answers at all of them?
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from vllm_agreement import PROMPTS

PLACES = ("norm", "rotary", "attention")


def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """RMSNorm of float32 or bfloat16 [1, T, hidden], as both compute it."""
    x = x.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    return module.weight * x.to(module.weight.dtype)


def logits(model: Any, ids: torch.Tensor, places: tuple[str, ...]) -> torch.Tensor:
    """[T, vocabulary] of tokens int64 [T], rounded as in vLLM at these places."""
    config, body, n = model.config, model.model, len(ids)
    size = config.hidden_size // config.num_attention_heads
    x = exact = body.embed_tokens(ids)[None]
    cos, sin = body.rotary_emb(x, torch.arange(n)[None])
    for layer in body.layers:
        own = layer.self_attn
        inner = norm(layer.input_layernorm, exact if "norm" in places else x)
        q, k, v = (f(inner).view(1, n, -1, size).transpose(1, 2) for f in (own.q_proj, own.k_proj, own.v_proj))
        if "rotary" in places:
            q, k = (t.to(x.dtype) for t in apply_rotary_pos_emb(q.float(), k.float(), cos.float(), sin.float()))
        else:
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        if "attention" in places:
            q, k, v = q.float(), k.float(), v.float()
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).to(x.dtype)
        exact = x.float() + own.o_proj(out.transpose(1, 2).reshape(1, n, -1)).float()
        x = exact.to(x.dtype)
        exact = x.float() + layer.mlp(norm(layer.post_attention_layernorm, exact if "norm" in places else x)).float()
        x = exact.to(x.dtype)
    return model.lm_head(norm(body.norm, exact if "norm" in places else x))[0]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("answers")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    with open(args.answers) as file:
        answers = json.load(file)["plain"]
    asked = [tokenizer(p)["input_ids"] for p in PROMPTS]
    whole = torch.tensor(asked[0] + answers[0])
    if not torch.equal(logits(model, whole, ()), model(whole[None]).logits[0]):
        raise SystemExit("called one by one, this model's modules do not compute what transformers does")
    for places in ((), *((p,) for p in PLACES), PLACES[:2], PLACES):
        found, gaps = [], []
        for prompt, answer in zip(asked, answers, strict=True):
            own = torch.tensor(answer)
            rows = logits(model, torch.tensor(prompt + answer)[:-1], places)[len(prompt) - 1 :].float()
            found.append(rows.argmax(-1) == own)
            gaps.append(rows.amax(-1) - rows.gather(1, own[:, None])[:, 0])
        tokens, largest = torch.cat(found), torch.cat(gaps).max().item()
        print(
            f"{'transformers ' + ' '.join(places):38} {int(tokens.sum())} of {len(tokens)} tokens, "
            f"{sum(bool(f.all()) for f in found)} of {len(found)} answers; vLLM's token at most {largest:.3f} lower",
            flush=True,
        )


if __name__ == "__main__":
    main()
