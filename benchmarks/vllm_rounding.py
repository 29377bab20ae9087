"""vLLM's rounding in transformers' Llama, for `vllm_agreement.py`: to tell what it does to answers from what QBE does.

Both keep 16-bit numbers between operations, but at three places vLLM's CPU kernels round later than transformers:

norm        a layer's output is added to the residual in float32 and that sum normalised; transformers rounds it first
rotary      queries and keys are turned in float32 and rounded once; transformers rounds each product and the sum
attention   all of it is computed in float32 from 16-bit queries, keys and values (only that of prompts differs here)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

PLACES = ("norm", "rotary", "attention")


def round_as_vllm(places: Collection[str]) -> None:
    """Changes transformers' Llama and the embedded engine's attention in this process, for good."""
    if "norm" in places:
        _norm()
    if "rotary" in places:
        _rotary()
    if "attention" in places:
        _attention()


def _norm() -> None:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

    def layer(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        out, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = added(hidden_states, out)
        return added(hidden_states, self.mlp(self.post_attention_layernorm(hidden_states)))

    def added(residual: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        exact = residual.float() + out.float()
        rounded = exact.to(out.dtype)
        rounded.exact = exact  # type: ignore[attr-defined]
        return rounded

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        exact = getattr(x, "exact", x).float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * exact.to(x.dtype)

    LlamaDecoderLayer.forward, LlamaRMSNorm.forward = layer, norm


def _rotary() -> None:
    from transformers.models.llama import modeling_llama

    inner = modeling_llama.apply_rotary_pos_emb

    def rotary(q: torch.Tensor, k: torch.Tensor, *turns: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(t.to(q.dtype) for t in inner(q.float(), k.float(), *(t.float() for t in turns), **kwargs))

    modeling_llama.apply_rotary_pos_emb = rotary


def _attention() -> None:
    from qbe.kvcache import attention

    inner = attention.attend_prompt

    def attend(pool: Any, layer: int, prompt: Any, q: Any, k: Any, v: Any, *args: Any) -> torch.Tensor:
        return inner(pool, layer, prompt, q.float(), k.float(), v.float(), *args).to(q.dtype)

    attention.attend_prompt = attend
