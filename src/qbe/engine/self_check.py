"""At load: whether the engine's steps give what the model gives without a cache.

transformers has families that look like the others and are not: some keep their state where this engine has no place
for it, some mix the tokens of requests that share a forward. So a few tokens go through the model before its attention
is replaced, without a cache, and then through the engine's own steps: a request by itself, beside another one's
prompt, and both one token further. Logits that differ by more than rounding can explain are cause to refuse the model.

Rounding is measured on the model itself: in a second pass every module's output is off by one unit in the last place
of the model's dtype, which is more than any rounding does (half a unit), and more often than most. What remains
uncounted (attention, sums along the residual stream) is within a few times that. A mixture of experts may lie so near
a tie that one pass flips it and the other does not; what differs is tried again on other tokens, and a family that is
wrong is wrong on all.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qbe.blueprint import Blueprint
from qbe.engine.execution.runner import Runner, set_attention
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.engine.scheduling.scheduler import ScheduledTokens, Scheduler
from qbe.engine.scheduling.sequence import Sequence
from qbe.errors import QBEError
from qbe.kvcache.cache import decoder_config
from qbe.models.model_errors import name
from qbe.sites import SiteTable
from qbe.store.latent import latent_modules
from qbe.store.nested_tensor import NestedTensor
from qbe.store.plan import Plan

_LENGTH = 4  # tokens of each request: no step has more rows than the smallest plan of a model that packs requests
# (request, from, to) of each step's work: alone, beside a prompt, both one token, and two tokens further.
_STEPS = (((0, 0, 2),), ((0, 2, 3), (1, 0, 1)), ((0, 3, 4), (1, 1, 2)), ((1, 2, 4),))
_TRIES = 3
# Roundings are independent: their effects add as squares. Beside the modules' outputs there are at most as many again
# in each of the two ways to compute (half a unit each), and this is above four standard deviations of their sum.
_SAFETY = 4.0
# What kernels that read activations as 16-bit fixed point leave of a number. The engine's steps multiply with all of it
# where a projection is absorbed (`qbe.store.latent`), and with nothing else in its place.
_FIXED_POINT = 2.0**-14


@dataclass(frozen=True)
class Expected:
    """What the model says without a cache.

    Attributes:
        tokens: int64 `[2, tokens]`, of the two requests.
        logits: after each of them, fp32 `[2, tokens, vocabulary]`.
        rounding: likewise, how far these are off when outputs are off by one unit.
        attention: the model's own implementation.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    rounding: torch.Tensor
    attention: str | None


def blueprint(table: SiteTable) -> Blueprint:
    """What the check runs at: the fewest bits, which every device has and reads fastest."""
    return Blueprint.of("trial", table, tuple(s.gears[0] for s in table.nested))


@torch.inference_mode()
def expect(model: nn.Module, plan: Plan, vocabulary: int, context: int | None, attempt: int = 0) -> Expected | None:
    """Runs the model without a cache, as it is before the engine takes its attention; None without room for tokens.

    Args:
        model: in evaluation mode, its nested weights bound to `plan`.
        context: in tokens, None when it has no limit.
        attempt: other tokens for each.
    """
    if context is not None and context < _LENGTH:
        return None
    places = torch.arange(2 * _LENGTH).view(2, _LENGTH)
    tokens = (1 + 7919 * attempt + 31 * places * (places + 1)) % vocabulary
    logits = _forward(model, plan, tokens)
    with _off_by_one_unit(model, torch.Generator().manual_seed(attempt)):
        moved = _forward(model, plan, tokens)
    return Expected(tokens, logits, moved - logits, decoder_config(model)._attn_implementation)


def _forward(model: nn.Module, plan: Plan, tokens: torch.Tensor) -> torch.Tensor:
    if 1 < plan.max_rows < tokens.numel():
        return torch.cat([_forward(model, plan, row[None]) for row in tokens])
    lowest = blueprint(plan.table)
    plan.write([(lowest, tokens.numel())], [lowest] * tokens.numel())
    arguments: dict[str, Any] = {"input_ids": tokens.to(plan.device)}
    if "use_cache" in inspect.signature(model.forward).parameters:
        arguments["use_cache"] = False
    logits: torch.Tensor = model(**arguments).logits
    return logits.float()


@contextmanager
def _off_by_one_unit(model: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """Every number that a module without modules of its own puts out is one unit in the last place up or down."""
    projections = [m.get_submodule("kv_b_proj") for m in latent_modules(model)]
    absorbed = {p for p in projections if isinstance(p.weight, NestedTensor)}

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        signs = torch.randint(0, 2, output.shape, generator=generator).to(output.device, output.dtype) * 2 - 1
        unit = torch.finfo(output.dtype).eps
        return output * (1 + (max(unit, _FIXED_POINT) if module in absorbed else unit) * signs)

    handles = [m.register_forward_hook(hook) for m in model.modules() if not any(m.children())]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check(model: nn.Module, runner: Runner, scheduler: Scheduler, vocabulary: int, expected: Expected | None) -> None:
    """Takes the engine's steps with the tokens of `expected`.

    Raises:
        QBEError: their logits are others, and so they are of other tokens.
    """
    worst = 0.0
    for attempt in range(1, _TRIES + 1):
        off = compare(runner, scheduler, expected)
        if off <= 1 or expected is None:
            return
        worst = max(worst, off)
        paged = decoder_config(model)._attn_implementation
        try:
            if paged != expected.attention:
                set_attention(model, expected.attention)
            expected = expect(model, runner.plan, vocabulary, None, attempt)
        finally:
            if paged != decoder_config(model)._attn_implementation:
                set_attention(model, paged)
    raise QBEError(
        f"{name(model)}: with QBE's cache its logits are {worst:.3g} times as far from those without one as rounding "
        "explains: QBE cannot run this family"
    )


def compare(runner: Runner, scheduler: Scheduler, expected: Expected | None) -> float:
    """By how many times what rounding explains the worst row differs; at most 1 is right, or nothing is expected."""
    if expected is None:
        return 0.0
    allocator, slots = scheduler.allocator, scheduler.slots
    pages = (allocator.allocate(2) or allocator.allocate(1)) if scheduler.paged else []
    if pages is None:
        return 0.0
    lowest = blueprint(runner.plan.table)
    tokens = expected.tokens.tolist()
    requests = [Sequence(f"trial-{i}", tokens[i][:1], SamplingParams(max_tokens=1), lowest) for i in range(2)]
    for request, page in zip(requests, pages, strict=False):
        request.pages = [page]
    several = (not scheduler.paged or len(pages) == 2) and (slots is None or slots.free > 1)
    if slots is not None:
        for request in requests[: slots.free]:
            request.state_slot = slots.take()
    # Who has a forward of its own reads a prompt in one.
    steps = _STEPS if scheduler.chunked else _STEPS[:-1]
    worst = 0.0
    try:
        for step in steps:
            parts = [part for part in step if several or part[0] == 0]
            work = []
            for which, start, end in parts:
                requests[which].token_ids = tokens[which][:end]
                work.append(ScheduledTokens(requests[which], start, end - start))
            if not work:
                continue
            logits = runner.step(work).logits.float().cpu()
            worst = max(
                worst,
                *(_distance(row, expected, which, e - 1) for row, (which, _, e) in zip(logits, parts, strict=True)),
            )
    finally:
        allocator.release(pages)
        for request in requests:
            if slots is not None and request.state_slot is not None:
                slots.give(request.state_slot)
    return worst


def _distance(actual: torch.Tensor, expected: Expected, which: int, at: int) -> float:
    """How far these logits are off, over what rounding explains."""
    want, rounding = expected.logits[which, at].cpu(), expected.rounding[which, at].cpu()
    if not want.isfinite().all():  # a model whose logits are no numbers is told in a request
        return 0.0
    floor = torch.finfo(torch.float32).eps * want.norm()  # of a model that rounding does not reach
    off = (actual - want).norm() / (_SAFETY * rounding.norm() + floor).clamp_min(torch.finfo(torch.float32).tiny)
    return float(off) if off.isfinite() else float("inf")
