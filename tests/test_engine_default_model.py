"""`qbe.Engine` with the default model: exact at 16 bits, budgets met, three kinds of query told apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import qbe
from covering import FULL
from engine_models import ARITHMETIC, CODE, FACT
from qbe import Budget, Engine, Request, SamplingParams
from qbe.engine.stop_tokens import eos_ids

PROMPTS = [
    "The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at", "The first president of",
    "In 1969, the first man", "2 + 2 =", "The largest planet is", "To make bread you need", "import numpy as np\n",
    "Q: What is photosynthesis?\nA:", "Dear Sir or Madam,", "The opposite of hot is", "SELECT name FROM",
    "My favourite colour is", "The speed of light", "A haiku about rain:", "Monday, Tuesday,", "Roses are red,",
    "The mitochondria is the",
]  # fmt: skip


@pytest.mark.model
def test_default_model_at_16_bits_is_transformers(default_model: Path, device: torch.device) -> None:
    prompts = PROMPTS if FULL or device.type == "cuda" else PROMPTS[:6]
    plain = qbe.models.load_model(default_model, dtype="float32", progress=False)
    plain.model.to(device)
    engine = Engine(policy="uniform", dtype="float32", device=device.type, records=False, max_sequences=20)
    sizes = [64 if FULL or device.type == "cuda" or i < 2 else 16 for i in range(len(prompts))]  # 64: a second page
    ours = engine.generate_batch(
        [Request(p, SamplingParams(max_tokens=n), Budget(bits=16)) for p, n in zip(prompts, sizes, strict=True)]
    )
    for i, (prompt, size, result) in enumerate(zip(prompts, sizes, ours, strict=True)):
        ids = plain.tokenizer(prompt, return_tensors="pt")["input_ids"].to(device)
        if i < 1:
            theirs = plain.model.generate(ids, max_new_tokens=size, do_sample=False)
            assert result.token_ids == theirs[0, ids.shape[1] :].tolist(), prompt
        # An answer is the greedy one if each of its tokens is the likeliest after those before it.
        whole = torch.cat([ids, torch.tensor([result.token_ids], device=device)], 1)
        with torch.inference_mode():
            likeliest = plain.model(input_ids=whole, use_cache=False).logits[0].argmax(-1)
        assert result.token_ids == likeliest[ids.shape[1] - 1 : -1].tolist(), prompt
        assert len(result.token_ids) == size or result.token_ids[-1] in eos_ids(plain.model, plain.tokenizer), prompt


@pytest.mark.model
def test_default_model_end_to_end(default_model: Path, device: torch.device) -> None:
    engine = Engine(device=device.type, records=False)
    three = [engine.explain(p) for p in (FACT, ARITHMETIC, CODE)]
    assert [e.profile.prompt_class for e in three] == ["question_answering", "mathematics", "code"]
    assert three[0].profile.score < three[1].profile.score < three[2].profile.score
    fact, arithmetic, code = (e.blueprint.key for e in three)
    assert fact != arithmetic == code, "a tier has few averages, so that prompts can share pages"
    for bits in (4.3, 5.0, 6.5, 8.0, 11.0):
        assert bits - 0.05 <= engine.explain(FACT, budget=Budget(bits=bits)).average_bits <= bits + 1e-6
    # By a wide margin: of the fact alone the first two words of an answer are 0.1 nats apart, which bfloat16 can turn.
    message = [{"role": "user", "content": f"{FACT} Answer in one short sentence."}]
    answer = engine.generate(message, SamplingParams(max_tokens=30), budget=Budget(bits=8))
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"
    assert answer.bytes_per_token < 0.56 * three[0].bytes_per_token_16bit
    assert engine.generate(message, SamplingParams(max_tokens=30)).bytes_per_token < answer.bytes_per_token
