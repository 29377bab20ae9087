"""What a core is made of before its first step: the sizes of its steps, its plan, its pages and their kernels."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from qbe.engine.devices import reserved
from qbe.engine.execution import patch_modules
from qbe.engine.execution.mixers import Mixers
from qbe.engine.execution.runner import Runner, use_paged_attention
from qbe.engine.execution.warmup import attention_launches, compile_kernels, linear_launches, sampling_launches
from qbe.engine.scheduling.kv_size import default_kv_tokens, state_slots
from qbe.engine.scheduling.scheduler import Scheduler
from qbe.engine.speculation.speculator import ROWS, Speculator
from qbe.errors import QBEError
from qbe.hardware import free_memory
from qbe.kernels.cpu import native
from qbe.kernels.cuda.dispatch import FEW_ROWS
from qbe.kvcache.allocator import PageAllocator, PageFormat
from qbe.kvcache.cache import PagedCache, decoder_config
from qbe.kvcache.originals import Originals
from qbe.kvcache.pages import PAGE_SIZE, KVShape, PagePool, most_pages, page_bytes, pages_for
from qbe.kvcache.probe import Kept
from qbe.kvcache.state_pool import StateLayout, StatePool
from qbe.kvcache.state_slots import StateSlots
from qbe.sites import KVBits, SiteTable
from qbe.store.plan import Plan

log = logging.getLogger(__name__)

_BATCH_TOKENS = {"cpu": 512, "cuda": 2048}
_LONGEST = 8192  # rows of a forward, beyond which no other kernels are needed


def check_sizes(**sizes: object) -> None:
    """Raises QBEError for one that is no whole number from 1 on; None leaves it to the engine."""
    for name, size in sizes.items():
        if size is not None and (isinstance(size, bool) or not (isinstance(size, int) and 1 <= size < 2**40)):
            raise QBEError(f"{name} is {size}, but must be a whole number, 1 or more and below 2^40")


@dataclass(frozen=True)
class StepSizes:
    """Rows of the steps that are made ready for.

    Attributes:
        batch_tokens: tokens of one step, at most.
        forward_rows: of the longest forward.
        decode_rows: of the largest step of single tokens.
        speculation_rows: of the largest step that checks draft tokens.
        plan_rows: of the plan. They begin at multiples of 16 bytes: Triton compiles a kernel for such pointers and
            another for the rest. One where every forward has one sequence.
    """

    batch_tokens: int
    forward_rows: int
    decode_rows: int
    speculation_rows: int
    plan_rows: int

    @classmethod
    def of(
        cls, device: torch.device, batch_tokens: int | None, sequences: int, longest: int | None, speculate: bool
    ) -> StepSizes:
        """Those of an engine.

        Args:
            batch_tokens: None: what suits the device.
            sequences: that run at the same time.
            longest: tokens of the longest forward where one cannot be spread over steps; None: it can.
            speculate: whether requests that speculate are expected.
        """
        if batch_tokens is None:
            batch_tokens = _BATCH_TOKENS["cuda" if device.type == "cuda" else "cpu"]
        forward_rows = min(batch_tokens if longest is None else longest, _LONGEST)
        speculation_rows = min(ROWS[device.type], batch_tokens)
        decode_rows = max(sequences, speculation_rows) if speculate else sequences
        plan_rows = -(-batch_tokens // 4) * 4 if longest is None else 1
        return cls(batch_tokens, forward_rows, decode_rows, speculation_rows, plan_rows)


def longest_forward(packed: bool, context: int | None) -> int | None:
    """`longest` of `StepSizes.of`: models that pack sequences spread a prompt over steps, others do not."""
    return None if packed else context or _LONGEST


def bind_plan(model: nn.Module, table: SiteTable, device: torch.device, rows: int, shared: bool) -> Plan:
    """A plan of so many rows that the model's nested weights read, `shared` or not."""
    plan = Plan(table, rows, device, Runner.keeps_logits(model), shared)
    plan.bind(model)
    return plan


def prepare_layers(model: nn.Module, plan: Plan, sizes: StepSizes, vocabulary: int, progress: bool) -> None:
    """Compile the kernels of layers and of sampling; some of the model's modules become ours, where there are kernels
    for that."""
    device = plan.device
    has_ops = native.load() if device.type == "cpu" else importlib.util.find_spec("triton") is not None
    if not has_ops:
        return
    head_rows = sizes.decode_rows if Runner.keeps_logits(model) else sizes.forward_rows
    linears = linear_launches(model, plan.table, sizes.forward_rows, head_rows)
    together = patch_modules.launches(model, device)
    compile_kernels(chain(linears, together, sampling_launches(vocabulary, device)), device, progress)
    patch_modules.patch_modules(model, device)


def page_pool(
    model: nn.Module, shapes: Sequence[KVShape | None], dtype: torch.dtype, device: torch.device, context: int | None,
    kv_tokens: int | None, device_memory: int | None = None,
) -> PagePool:  # fmt: skip
    """Pages for so many tokens of 16 bits, by default as many as suit the device; the model's attention reads them.

    Args:
        shapes, dtype: of the numbers in them (`qbe.kvcache.probe`).
        device_memory: bytes that all of an engine may take on a GPU; None: what is free.

    Raises:
        QBEError: a model whose attention QBE cannot page, or more than the memory holds.
    """
    paged = any(shapes)
    if paged:
        use_paged_attention(model)
    free, each = free_memory(device), page_bytes(shapes, dtype)
    if device_memory is not None and device.type == "cuda":
        free = min(free, max(0, device_memory - reserved(device)))
    tokens = kv_tokens if kv_tokens is not None else default_kv_tokens(context, device, each, free=free)
    pages = pages_for(tokens) if paged else 0
    if kv_tokens is not None and pages * each > free - each:  # there is one more than asked for
        raise QBEError(
            f"kv_tokens is {tokens}, but {free / 1e9:.1f} GB free on {device} hold at most "
            f"{max(0, free // each - 1) * PAGE_SIZE}: ask for fewer"
        )
    return PagePool(shapes, pages, dtype, device)


def state_pool(kept: Kept, sequences: int, device: torch.device) -> StatePool | None:
    """Slots for the states of so many sequences, or as many as there is room for; None for a model without states."""
    if not kept.states:
        return None
    slots = state_slots(sequences, device, StateLayout(kept.states).nbytes)
    if slots < sequences:
        log.warning("there is room for the recurrent states of %d sequences on %s: others wait", slots, device)
    return StatePool(kept.states, slots, device)


def scheduler_of(
    pool: PagePool, states: StatePool | None, originals: Originals, packed: bool, batch_tokens: int, sequences: int,
    context: int | None, format_of: Callable[[tuple[KVBits, ...]], PageFormat],
) -> Scheduler:  # fmt: skip
    """The scheduler of these pages and states.

    Args:
        format_of: the pool's format with these bits.
    """
    return Scheduler(
        PageAllocator(pool.num_pages, pool.full, originals.drop),
        max_batch_tokens=batch_tokens,
        max_sequences=sequences,
        context=context,
        paged=any(pool.shapes),
        chunked=packed,
        reusable=packed and states is None,
        slots=None if states is None else StateSlots(states.nbytes, states.slot_bytes),
        format_of=lambda sequence, page: format_of(sequence.kv_bits_of(page)),
    )


def runner_of(
    model: nn.Module, kept: Kept, pool: PagePool, states: StatePool | None, plan: Plan, packed: bool
) -> Runner:  # fmt: skip
    """Runs steps on these pages and states; the model's recurrent layers find them, too."""
    cache = PagedCache(decoder_config(model), pool)
    mixers = None if states is None else Mixers(model, kept.mixers, cache, states)
    return Runner(model, cache, plan, mixers, packed)


def speculator_of(table: SiteTable, runner: Runner, sizes: StepSizes, ready: bool) -> Speculator | None:
    """What makes draft tokens, where decode steps have room for them and are `ready` for several rows of a sequence."""
    rows = min(sizes.speculation_rows, sizes.decode_rows)
    if runner.plan.shared is not None and runner.device.type == "cuda":
        rows = min(rows, FEW_ROWS)  # more would round in another way than the steps of one token that they stand for
    if runner.decode is None or rows < 2 or not ready:
        return None
    return Speculator(table, rows, runner.decode.size_of)


def compile_steps(runner: Runner, steps: Callable[[], object], pages: int, progress: bool) -> None:
    """Compile the kernels of the KV cache, for sequences of up to so many pages, and what else some `steps` launch."""
    launches = attention_launches(runner.cache, pages) if any(runner.cache.pool.shapes) else ()
    compile_kernels(chain([steps], launches), runner.device, progress)


def longest_sequence(pool: PagePool, context: int | None) -> int:
    """Pages that one sequence can have."""
    pages = most_pages(pool.shapes, pool.dtype, pool.num_pages)
    return pages if context is None else min(pages, pages_for(context))
