"""What `qaq` and `mobi` have in common while they are trained: a student whose weights are mixed of slices.

The teacher multiplies the original weights, the student the first slice and, of each further one, as much as a gate
says: y = W_1 x + sum_e g_e (W_e - W_{e-1}) x. With gates of 0 and 1 that is what a nested site computes at a width;
with those in between it is the expected weight sum_b p_b W_b of QAQ's equation 4, and gradients pass to the gates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear

from qbe.datasets.items import Item, encode
from qbe.errors import QBEError
from qbe.policies.routers import Network, Numbers, RoutedBlock, blocks_of, gear_bits, static_gears
from qbe.sites import SiteTable
from qbe.store.prepare import PreparedModel

PROMPT, ANSWER = 128, 128  # tokens: the last ones of a prompt, the first ones of its answer
TOGETHER = 8  # texts of a step
HELD_OUT = 0.25
HELD_AT = (4.5, 5.0, 6.0)  # bits over the blocks at which held-out texts are measured
HELD = 12  # steps' worth of them at most
RATE = 3e-3
RANGE = (0.08, 0.7)  # of the way from the lowest width to the highest: averages that training asks for
BASE = 5.0  # bits of the static assignment that gives sites without a router theirs while routers are trained


@dataclass(frozen=True)
class Batch:
    """Some texts.

    Attributes:
        tokens: int64 [texts, tokens], padded at the right. prompt: bool, likewise.
        routed: bool, likewise: whose bits routers choose; here all but padding.
        predicted: bool, likewise: whose logits tell of a token of the text. answer: of one of the answer.
    """

    tokens: torch.Tensor
    routed: torch.Tensor
    prompt: torch.Tensor
    predicted: torch.Tensor
    answer: torch.Tensor


Text = tuple[list[int], list[int]]  # token ids of a prompt and of its answer


def batches(items: Sequence[Item], tokenizer: Any, device: torch.device) -> list[Batch]:
    """The items with their reference answers."""
    every = (encode(item, tokenizer) for item in items)
    texts = [(e.prompt_ids[-PROMPT:], e.reference_ids[:ANSWER]) for e in every if e.prompt_ids and e.reference_ids]
    return batched(texts, device)


def batched(texts: Sequence[Text], device: torch.device) -> list[Batch]:
    """Texts of about the same length together."""
    ordered = sorted(texts, key=lambda t: len(t[0]) + len(t[1]))
    return [_batch(ordered[i : i + TOGETHER], device) for i in range(0, len(ordered), TOGETHER)]


def _batch(texts: Sequence[Text], device: torch.device) -> Batch:
    shape = len(texts), max(len(p) + len(a) for p, a in texts)
    tokens = torch.zeros(shape, dtype=torch.int64)
    routed, prompt, predicted, answer = torch.zeros((4, *shape), dtype=torch.bool)
    for row, (p, a) in enumerate(texts):
        tokens[row, : len(p) + len(a)] = torch.tensor(p + a)
        routed[row, : len(p) + len(a)], prompt[row, : len(p)] = True, True
        predicted[row, : len(p) + len(a) - 1] = True
        answer[row, len(p) - 1 : len(p) + len(a) - 1] = True
    return Batch(*(t.to(device) for t in (tokens, routed, prompt, predicted, answer)))


def check_enough(items: Sequence[Item]) -> None:
    """Raises QBEError for too few items to train on."""
    if len(items) < 8:
        raise QBEError(f"{len(items)} texts are too few to train on; give a higher --limit")


def split(items: Sequence[Item], seed: int) -> tuple[list[Item], list[Item]]:
    """Items to train on and those held out. Raises QBEError for too few."""
    check_enough(items)
    order = np.random.default_rng(seed).permutation(len(items))
    held = round(len(items) * HELD_OUT)
    return [items[i] for i in order[held:]], [items[i] for i in order[:held]]


@dataclass
class Student:
    """A model inside `sliced`.

    Attributes:
        blocks: whose sites have gates.
        gates: for each nested site [texts, tokens or 1, slices after the first]; None reads its `base` gear.
        on_block: called with a block's number and the input of its module [texts, tokens, inputs] before that runs.
        full: whether all sites multiply their original weights instead, as the teacher.
    """

    model: nn.Module
    table: SiteTable
    blocks: Sequence[RoutedBlock]
    gates: list[torch.Tensor | None]
    on_block: Callable[[int, torch.Tensor], None] | None = None
    full: bool = True
    _slices: list[list[torch.Tensor]] = field(default_factory=list)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """[texts, tokens, vocabulary], with gradients where they are enabled."""
        out: torch.Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return out

    @torch.no_grad()
    def teacher(self, tokens: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """Log probabilities at 16 bits where bool [texts, tokens] says so, float32 [counted, vocabulary]."""
        self.full = True
        return self.logits(tokens)[counted].float().log_softmax(-1)

    def divergence(
        self, tokens: torch.Tensor, counted: torch.Tensor, teacher: torch.Tensor, temperature: float = 1.0
    ) -> torch.Tensor:
        """Mean KL of the student from the teacher over these tokens, both at a temperature, nats []."""
        self.full = False
        rows = (self.logits(tokens)[counted].float() / temperature).log_softmax(-1)
        before = (teacher / temperature).log_softmax(-1)
        return (before.exp() * (before - rows)).sum(-1).mean() * temperature**2


@contextmanager
def sliced(prepared: PreparedModel, blocks: Sequence[RoutedBlock] | None = None) -> Iterator[Student]:
    """Inside, the nested sites and blocks of a model, not yet served, are those of the student.

    Args:
        blocks: whose sites have gates; None: attention and feed-forward of every layer.

    Raises:
        QBEError: a nested site lost its 16-bit original, or no layer is nested.
    """
    model, table = prepared.model, prepared.table
    blocks = blocks_of(table) if blocks is None else blocks
    widths, base = gear_bits(table), static_gears(table, BASE)
    routed = {s for block in blocks for s in block.sites}
    student = Student(model, table, blocks, [None] * len(table.nested))
    changed: list[nn.Module] = []

    def replace(index: int, module: Any) -> None:
        weight, bias = module.weight, module.bias
        if weight.original is None:
            raise QBEError(f"{table.nested[index].name} was stored without its 16-bit weight: nothing can be learned")
        read = [weight.dequantise(g) for g in (widths if index in routed else (base[index],))]
        parts = [read[0], *(high - low for low, high in pairwise(read))]
        original = weight.original

        def forward(x: torch.Tensor) -> torch.Tensor:
            if student.full:
                return linear(x, original, bias)
            y, gates = linear(x, parts[0], bias), student.gates[index]
            if gates is not None:
                for e, part in enumerate(parts[1:]):
                    y = y + gates[..., e, None] * linear(x, part)
            return y

        module.forward = forward
        changed.append(module)

    def on_block(number: int, x: torch.Tensor) -> None:
        if student.on_block is not None:
            student.on_block(number, x)

    try:
        with torch.no_grad():
            for i, site in enumerate(table.nested):
                replace(i, model.get_submodule(site.name))
        with torch.enable_grad(), watched(model, blocks, on_block):
            yield student
    finally:
        for module in changed:
            del module.forward  # the class's method shows again


@contextmanager
def watched(
    model: nn.Module, blocks: Sequence[RoutedBlock], on_block: Callable[[int, torch.Tensor], None]
) -> Iterator[None]:
    """Inside, `on_block` is called with a block's number and the input of its module before that runs."""

    def watch(number: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            on_block(number, args[0] if args else kwargs["hidden_states"])

        return hook

    hooks = [
        model.get_submodule(b.name).register_forward_pre_hook(watch(i), with_kwargs=True) for i, b in enumerate(blocks)
    ]
    try:
        yield
    finally:
        for h in hooks:
            h.remove()


class RouterNetworks(nn.Module):
    """A network for each block (`qbe.policies.routers.Network`), which begins by giving every token the same scores.

    Args:
        inputs: of each block. begin: for each block the scores float [scores] that it begins with.
        hidden: units of each network.
    """

    def __init__(self, inputs: Sequence[int], begin: Sequence[Numbers], hidden: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for i, (width, scores) in enumerate(zip(inputs, begin, strict=True)):
            inner = torch.randn(width, hidden, generator=generator) / width**0.5
            self.register_parameter(f"inner{i}", nn.Parameter(inner))
            self.register_parameter(f"inner_bias{i}", nn.Parameter(torch.zeros(hidden)))
            self.register_parameter(f"outer{i}", nn.Parameter(torch.zeros(hidden, len(scores))))
            self.register_parameter(f"outer_bias{i}", nn.Parameter(torch.tensor(scores, dtype=torch.float32)))

    def scores(self, block: int, x: torch.Tensor) -> torch.Tensor:
        """[..., scores]"""
        hidden = (x.float() @ self.get_parameter(f"inner{block}") + self.get_parameter(f"inner_bias{block}")).relu()
        return hidden @ self.get_parameter(f"outer{block}") + self.get_parameter(f"outer_bias{block}")

    def networks(self, count: int) -> list[Network]:
        names = ("inner", "inner_bias", "outer", "outer_bias")
        return [Network(*(self.get_parameter(f"{n}{i}").detach().cpu().numpy() for n in names)) for i in range(count)]


def worth(table: SiteTable, sites: Sequence[int]) -> Numbers:
    """Logarithms of what a further bit of a weight is worth by the measured sensitivities, nats per token, [slices].

    Of the sites together, falling from slice to slice.
    """
    widths = gear_bits(table)
    size = sum(table.nested[s].parameters for s in sites)
    loss = [sum(table.nested[s].sensitivity[g] for s in sites) for g in widths]
    gains = [
        np.log(max(before - after, 1e-30) / ((high - low) * size))
        for before, after, low, high in zip(loss, loss[1:], widths, widths[1:], strict=False)
    ]
    for e in range(1, len(gains)):
        gains[e] = min(gains[e], gains[e - 1] - 0.1)
    return np.array(gains)


def descend(
    routers: nn.Module, optimiser: torch.optim.Optimizer, divergence: torch.Tensor, average: torch.Tensor,
    price: torch.Tensor,
) -> float:  # fmt: skip
    """A step down the divergence along which the average bits stay as they are. Returns what a bit is worth, nats.

    The price of a bit (or threshold) goes where the average is the one asked for, whatever the routers say; so what
    they are told is the gradient of the divergence less what it would be by bits alone. It is of the divergence's
    logarithm, so that high averages, at which there is little of it, count as much.
    """
    parameters = list(routers.parameters())
    of_loss = torch.autograd.grad(divergence.log(), [*parameters, price], retain_graph=True)
    of_bits = torch.autograd.grad(average, [*parameters, price])
    rate = of_loss[-1] / of_bits[-1]
    for p, loss, bits in zip(parameters, of_loss[:-1], of_bits[:-1], strict=True):
        p.grad = loss - rate * bits
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimiser.step()
    return -float(rate) * float(divergence.detach())


def solve(average: Callable[[float], float], bits: float) -> float:
    """The price at which a falling average is `bits`."""
    low, high = -200.0, 200.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if average(middle) > bits else (low, middle)
    return (low + high) / 2
