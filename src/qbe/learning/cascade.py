"""Trains the cascade's routers (`qbe.policies.cascade`): as `tokenwise`'s, but what they read is attention's entropy,
and what they are trained on are the model's own answers, drawn with a seed.

The 16-bit model runs with attention whose weights can be seen; the entropy of each head at a point, over the most there
can be, is what the engine's attention gives for a row of a decode step. Before training its mean and deviation are
measured, so that all heads begin alike; they are part of the first matrix afterwards. Only an answer's tokens are
routed: the prompt's have what an untrained router gives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from qbe.datasets.items import Item, encode
from qbe.engine.execution.runner import can_cascade
from qbe.errors import QBEError
from qbe.kvcache.cache import decoder_config
from qbe.learning.distil import PROMPT, Batch, Text, batched, sliced
from qbe.learning.gates import train_routers
from qbe.learning.tokenwise import fit
from qbe.policies.cascade import blocks_of, check, points_of
from qbe.policies.learned import Learned
from qbe.policies.routers import named, networks
from qbe.progress import spinner
from qbe.sites import ATTENTION_ROLES, SiteTable
from qbe.store.prepare import PreparedModel

HIDDEN = 32  # units of a router: what a decode step can afford
ANSWER = 192  # tokens of an answer at most
TEMPERATURE = 0.8  # greedy answers of small models repeat themselves
TOGETHER = 96  # answers that are drawn at once
MEASURED = 8  # batches whose entropies say what is usual
LEAST = 1e-2  # of a head's deviation


def train(
    prepared: PreparedModel, items: Sequence[Item], steps: int, seed: int = 0, tick: Callable[[], None] = lambda: None
) -> Learned:
    """As `qbe.learning.gates.train_routers`; of the items only the prompts count.

    Raises:
        QBEError: what that raises; a model that can have no cascade, or whose attention does not show its weights.
    """
    table, texts = prepared.table, partial(drawn, prepared, seed)
    check(table, can_cascade(decoder_config(prepared.model)))
    with entropies(prepared.model, attention_of(table, points_of(table))) as seen:
        mean, deviation = _usual(prepared.model, texts(items[:: -(-len(items) // (8 * MEASURED))]), seen)

        def read(point: int, _: torch.Tensor) -> torch.Tensor:
            return (torch.cat(seen[: point + 1], -1) - mean[: point + 1].flatten()) / deviation[: point + 1].flatten()

        fitted = train_routers(fit, blocks_of, HIDDEN, prepared, items, steps, seed, tick, read, texts)
    return _with_usual(fitted, mean.cpu().numpy(), deviation.cpu().numpy())


@torch.no_grad()
def drawn(prepared: PreparedModel, seed: int, items: Sequence[Item]) -> list[Batch]:
    """Answers of the 16-bit model to the items' prompts, all within its context."""
    model, device = prepared.model, next(prepared.model.parameters()).device
    context = getattr(decoder_config(model), "max_position_embeddings", None) or PROMPT + ANSWER
    most = min(PROMPT, context // 2)
    prompts = sorted((p for i in items if (p := encode(i, prepared.tokenizer).prompt_ids[-most:])), key=len)
    ends = model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else {*(ends or ())}
    texts: list[Text] = []
    with (
        spinner("drawing answers", sys.stderr.isatty()), sliced(prepared) as student,
        torch.random.fork_rng([device] if device.type == "cuda" else []),
    ):  # fmt: skip
        student.full = True
        torch.manual_seed(seed)
        for begin in range(0, len(prompts), TOGETHER):
            part = prompts[begin : begin + TOGETHER]
            width = len(part[-1])
            ids = torch.tensor([[0] * (width - len(p)) + p for p in part], device=device)
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in part], device=device)
            out = model.generate(
                input_ids=ids, attention_mask=mask, do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0,
                repetition_penalty=1.0, max_new_tokens=min(ANSWER, context - width), pad_token_id=0,
            )  # fmt: skip
            for p, row in zip(part, out[:, width:].tolist(), strict=True):
                length = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
                texts.append((p, row[:length]))
    return [of_answers(b) for b in batched(texts, device)]


def of_answers(batch: Batch) -> Batch:
    """Of a text the tokens that the cascade acts on, and whose logits follow from them: its answer's."""
    return replace(batch, routed=batch.routed & ~batch.prompt, predicted=batch.answer)


@contextmanager
def entropies(model: Any, modules: Sequence[str]) -> Iterator[list[torch.Tensor]]:
    """Inside, the list has what the heads of each of these modules show in the forward that runs or ran last: float32
    [texts, tokens, heads], 0 for a head that looks at one token, 1 for one that looks at all alike.

    Raises:
        QBEError: attention that does not give its weights, in the first forward.
    """
    before, entropy = model.config._attn_implementation, [torch.empty(0)] * len(modules)

    def watch(number: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, out: Any) -> None:
            weights = out[1] if isinstance(out, tuple) and len(out) > 1 else None
            if not isinstance(weights, torch.Tensor) or weights.dim() != 4:
                raise QBEError(
                    f"{type(model).__name__} does not show its attention's weights: no cascade can be learned"
                )
            entropy[number] = entropy_of(weights.detach()).transpose(1, 2)

        return hook

    hooks = [m.register_forward_hook(watch(i)) for i, m in enumerate(map(model.get_submodule, modules))]
    model.set_attn_implementation("eager")
    try:
        yield entropy
    finally:
        model.set_attn_implementation(before)
        for h in hooks:
            h.remove()


def entropy_of(weights: torch.Tensor) -> torch.Tensor:
    """Of causal attention's weights [..., tokens, tokens], over the logarithm of the tokens seen [..., tokens].

    As `qbe.kernels.ops.cascade` has it, a token that is alone counts as two.
    """
    seen = torch.arange(1, weights.shape[-2] + 1, device=weights.device, dtype=torch.float32).clamp(min=2)
    return -torch.special.xlogy(weights.float(), weights.float()).sum(-1) / seen.log()


def attention_of(table: SiteTable, points: Sequence[int]) -> list[str]:
    """The names of these layers' modules of attention, which hold its linear layers."""
    of_layer = {s.layer: s.name.rpartition(".")[0] for s in table if s.role in ATTENTION_ROLES}
    return [of_layer[p] for p in points]


@torch.no_grad()
def _usual(model: Any, texts: Sequence[Batch], seen: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of each head's entropy over some answers' tokens, float32 [points, heads]."""
    rows = []
    for batch in texts:
        model(input_ids=batch.tokens, use_cache=False)
        rows.append(torch.stack([of[batch.routed] for of in seen], 1))
    every = torch.cat(rows)
    return every.mean(0), every.std(0).clamp(min=LEAST)


def _with_usual(fitted: Learned, mean: Any, deviation: Any) -> Learned:
    """Networks that read entropies as they are."""
    read = []
    for index, network in enumerate(networks(fitted.tensors, len(mean))):
        inner = network.inner / deviation[: index + 1].reshape(-1, 1)
        bias = network.inner_bias - mean[: index + 1].reshape(-1) @ inner
        read.append(replace(network, inner=inner.astype(np.float32), inner_bias=bias.astype(np.float32)))
    return replace(fitted, tensors={**fitted.tensors, **named(read)})
