"""Measures what the query analysis is trained on: the damage of 4-bit weights along the answer of each prompt.

For a pair (prompt, answer) the label is the KL divergence (nats) from the 16-bit model's next-token distribution to
that of the same model with every linear layer of its decoder rounded to 4 bits (plain round to nearest, asymmetric,
groups of 64 inputs; the GGUF's own 4-bit grid has groups of 32, so the rounding is a real one), at each answer token.
"""

from __future__ import annotations

import json
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from analysis_pairs import Pair
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

ANSWER_TOKENS = 72  # answers are cut here, so `total` counts at most this many tokens
PROMPT_TOKENS = 640
GROUP = 64
GROUP_OF_PAIRS = 32


def load(model: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The bfloat16 model and its tokenizer from a GGUF file or a transformers folder."""
    gguf = {"gguf_file": model.name} if model.suffix == ".gguf" else {}
    where = model.parent if gguf else model
    tokenizer = AutoTokenizer.from_pretrained(where, **gguf)
    return AutoModelForCausalLM.from_pretrained(where, dtype=torch.bfloat16, **gguf).eval(), tokenizer


def round_to_4_bits(w: torch.Tensor) -> torch.Tensor:
    """`w` [out, in] on an asymmetric 16-level grid for each group of 64 inputs, in the dtype of `w`."""
    g = w.float().reshape(w.shape[0], -1, GROUP)
    low, high = g.amin(-1, keepdim=True), g.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp_min(1e-8)
    return (((g - low) / scale).round().clamp_(0, 15) * scale + low).reshape(w.shape).to(w.dtype)


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if len(ids) > PROMPT_TOKENS:
        prompt = str(tokenizer.decode(ids[:PROMPT_TOKENS]))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@torch.inference_mode()
def _own_answers(model: PreTrainedModel, prompts: list[list[int]], pad: int, batch: int = 16) -> list[list[int]]:
    """The model's greedy answers, end token included when it came within the limit."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    out: list[list[int]] = [[] for _ in prompts]
    for at in range(0, len(order), batch):
        rows = order[at : at + batch]
        width = max(len(prompts[i]) for i in rows)
        ids = torch.tensor([[pad] * (width - len(prompts[i])) + prompts[i] for i in rows])
        mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in rows])
        new = model.generate(ids, attention_mask=mask, max_new_tokens=ANSWER_TOKENS, do_sample=False, pad_token_id=pad)[
            :, width:
        ]
        for i, answer in zip(rows, new.tolist(), strict=True):
            out[i] = answer[: answer.index(pad) + 1] if pad in answer else answer
    return out


def measure(pairs: list[Pair], model_path: Path, out: Path, limit_s: float) -> None:
    """Appends one JSON line per pair to `out`: key, answer_tokens, cut, mean_kl (nats per token), total_kl (nats).

    Pairs that `out` has already are skipped, and the order is a fixed shuffle, so that a run which stops at `limit_s`
    seconds leaves an even sample and the next run goes on from there.
    """
    start = time.perf_counter()
    done = {json.loads(line)["key"] for line in out.read_text(encoding="utf-8").splitlines()} if out.exists() else set()
    todo = sorted(
        {p.key: p for p in pairs if p.key not in done}.values(), key=lambda p: sha256(p.key.encode()).digest()
    )
    if not todo:
        return
    model, tokenizer = load(model_path)
    linears = [m for m in model.model.modules() if isinstance(m, torch.nn.Linear)]
    full = [m.weight.data for m in linears]
    low = [round_to_4_bits(w) for w in full]
    with out.open("a", encoding="utf-8") as f:
        for at in range(0, len(todo), GROUP_OF_PAIRS):
            rows = _measure_some(todo[at : at + GROUP_OF_PAIRS], model, tokenizer, linears, full, low)
            f.write("".join(json.dumps(r) + "\n" for r in rows))
            f.flush()
            seconds = time.perf_counter() - start
            print(f"labels {at + len(rows)}/{len(todo)} after {seconds:.0f} s", flush=True)
            if seconds > limit_s:
                return


@torch.inference_mode()
def _measure_some(
    pairs: list[Pair],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    linears: list[torch.nn.Linear],
    full: list[torch.Tensor],
    low: list[torch.Tensor],
) -> list[dict[str, Any]]:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompts = [_prompt_ids(tokenizer, p.prompt) for p in pairs]
    answers = [
        [*tokenizer(p.answer, add_special_tokens=False)["input_ids"], end][:ANSWER_TOKENS]
        if p.answer is not None
        else []
        for p in pairs
    ]
    own = [i for i, p in enumerate(pairs) if p.answer is None]
    for i, answer in zip(own, _own_answers(model, [prompts[i] for i in own], end), strict=True):
        answers[i] = answer

    def log_probs(ids: torch.Tensor, n: int, weights: list[torch.Tensor]) -> torch.Tensor:
        for m, w in zip(linears, weights, strict=True):
            m.weight.data = w
        return model(ids, logits_to_keep=n + 1).logits[0, :-1].float().log_softmax(-1)

    rows = []
    for p, prompt, answer in zip(pairs, prompts, answers, strict=True):
        ids = torch.tensor([prompt + answer])
        b, a = (log_probs(ids, len(answer), w) for w in (low, full))  # ends with the full weights in place
        kl = (a.exp() * (a - b)).sum(-1).clamp_min(0)
        row = {"key": p.key, "answer_tokens": len(answer), "cut": answer[-1] != end}
        rows.append({**row, "mean_kl": kl.mean().item(), "total_kl": kl.sum().item()})
    return rows
