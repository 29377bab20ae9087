"""Decode steps at fixed shapes: one new token for each sequence, replayed from a CUDA graph.

There is one graph for each batch size of a short list; a batch in between is padded. Whatever differs between two steps
of a size is in tensors that the graph reads: tokens, positions, pages, lengths and, for each row, the number of its
blueprint's column. The graph's first kernel spreads those columns over the plan. So one graph serves every blueprint,
and a change of precision costs nothing but another number in a copy that is made anyway.

A sequence that speculates has several rows in a step. Such steps, and those with a bounded sequence or with a row
that the cascade moves, have graphs of their own, so that others do not pay for what they need more. They are captured
when the first such step of a size runs, unless `capture` or `compile` has.
"""

from __future__ import annotations

import collections.abc
import functools
import importlib.util
import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from qbe.compile.backend import register
from qbe.engine.adaptive.cascade import is_cascaded
from qbe.engine.execution import patch_modules
from qbe.engine.execution.captured import Captured, Forward, Kind, capture
from qbe.engine.execution.compiled import Step, compile_step
from qbe.engine.sampling.sampler import Scores, likeliest
from qbe.engine.scheduling.scheduler import ScheduledTokens
from qbe.engine.scheduling.sequence import Sequence
from qbe.format.kv_blocks import NO_ORIGINAL, PAGE_SIZE, quantised_pages
from qbe.kvcache.attention import Bounds, DecodeLayout, Observe, step
from qbe.kvcache.cache import PagedCache, slot_of
from qbe.kvcache.pages import block_ids_of, in_runs
from qbe.kvcache.shares import Shares
from qbe.store.plan import Plan

log = logging.getLogger(__name__)

_INPUTS = 5  # numbers per row: token, position, slot, length, column


def batch_sizes(largest: int) -> list[int]:
    """The sizes that have a graph: powers of two up to 16, then multiples of 16, and `largest` itself."""
    sizes = [1, 2, 4, 8, *range(16, largest, 16)]
    return [s for s in sizes if s < largest] + [largest]


def _row_means(device: torch.device) -> AbstractContextManager[Any]:
    """In which a norm of a row does not depend on how many there are."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return nullcontext()  # torch's are so on a CPU
    from qbe.kernels.triton.rows.means import RowMeans

    return RowMeans(device)


class DecodeStep:
    """Runs steps of one new token per sequence.

    Args:
        model: a causal language model whose forward packs sequences and takes positions.
        cache: its pages.
        plan: its precisions.
        largest: sequences of the largest step.
        pages: pages that one sequence can have.

    Attributes:
        captures: how often a graph was captured; once the engine serves, by bounded steps only.
        renewals: how often one was captured again in an idle moment, because a kernel had been tuned.
        entropy: per layer float32 `[largest, heads]` or None: of attention weights, in nats, row i its i-th sequence's.
        observe: called after the attention of each layer in steps with cascaded rows and in compiled ones; None: never.
    """

    def __init__(
        self, model: nn.Module, cache: PagedCache, plan: Plan, largest: int, pages: int, cache_name: str
    ) -> None:
        self.model, self.cache, self.plan, self.largest = model, cache, plan, largest
        self.device = plan.device
        self.captures = self.renewals = 0
        self._cache_name = cache_name
        self._graphs: dict[Kind, Captured] = {}
        self._refused: set[Kind] = set()  # could not be captured
        self._memory: Any = None  # of the graphs
        self._several = 0  # rows up to which steps of several are captured
        self._compiled: dict[int, Step] = {}
        self._compiled_graphs: set[int] = set()
        self._inputs = torch.zeros(_INPUTS * largest, dtype=torch.long, device=self.device)
        self._staging = torch.zeros(_INPUTS * largest, dtype=torch.long, pin_memory=self.device.type == "cuda")
        self._block_tables = torch.zeros(largest, max(1, pages), dtype=torch.long, device=self.device)
        self.entropy: list[torch.Tensor | None] = [
            torch.zeros(largest, heads, device=self.device) if heads else None for heads in cache.heads
        ]
        self._originals = torch.full_like(self._block_tables, NO_ORIGINAL)
        self._limits = torch.full((largest,), math.inf, device=self.device)
        self._counts = torch.zeros(largest, 3, dtype=torch.long, device=self.device)
        self._layouts: dict[Kind, DecodeLayout] = {}
        # Whose pages are in a row of `_block_tables`, at which version of them, and the row's limit.
        self._owners: list[tuple[Sequence, int, float] | None] = [None] * largest
        self._copied: torch.cuda.Event | None = None
        self.observe: Observe | None = None
        self._shares = Shares(cache.pool, cache.windows) if self.device.type == "cuda" else None
        self._means = _row_means(self.device)

    def capture(self, on_size: Callable[[], None] | None = None, several: int = 0) -> bool:
        """Capture a graph for every size; whether that worked. A model that cannot be captured keeps running eagerly.

        Largest first: the smaller ones then live in the memory that the larger ones have taken.

        Args:
            on_size: called when a size is done (a progress bar): the first start on a machine compiles the kernels.
            several: capture steps of sequences with several rows now, too, up to so many; 0 leaves them for later. In
                steps of up to so many rows each comes out the same, bit for bit, whatever rows are beside it; where
                they share what they read, of up to `FEW_ROWS` (`qbe.kernels.cuda.dispatch`).
        """
        self._memory, self._several = torch.cuda.graph_pool_handle(), several
        try:
            for size in reversed(batch_sizes(self.largest)):
                for kind in [Kind(size)] + [Kind(size, several=True)] * (1 < size <= several):
                    self._graphs[kind] = self._capture(kind, self._run_model)
                    self.captures += 1
                if on_size is not None:
                    on_size()
        except RuntimeError as error:
            self._graphs.clear()
            torch.cuda.synchronize(self.device)
            log.warning("decode steps run without CUDA graphs: %s", str(error).splitlines()[0])
            return False
        return True

    @torch.inference_mode()
    def _capture(self, kind: Kind, forward: Forward) -> Captured:
        size = kind.size
        self._stage([], size)
        with step(self._layout(kind)):
            return capture(forward, size, self.device, self._memory)

    def renew(self) -> None:
        """The forward pass has become another: capture and compile again what was."""
        torch._dynamo.reset()  # it does not guard a module's hooks
        compiled = [*self._compiled, *self._compiled_graphs]
        self._compiled.clear()
        self._compiled_graphs.clear()
        self._refused.clear()
        if self._graphs:
            self._graphs.clear()
            self.capture(several=self._several)
        for size in compiled:
            self.compile(size)
        self.plan.forget()

    def outdated(self) -> Kind | None:
        """A graph that should be captured again, if any."""
        return next((kind for kind, captured in self._graphs.items() if captured.outdated()), None)

    def recapture(self, kind: Kind) -> None:
        """Capture a graph anew. No request may run: it takes as long as some steps, and uses the inputs."""
        old = self._graphs[kind]
        self._synchronize()  # the thread that tunes has a stream of its own
        try:
            self._graphs[kind] = self._capture(kind, old.forward)
            self.renewals += 1
        except RuntimeError as error:
            old.final = True
            log.warning("decode steps of %d keep their graph: %s", kind.size, str(error).splitlines()[0])
        self._synchronize()
        self.plan.forget()  # the capture has set the plan's rows

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def serves(self, work: collections.abc.Sequence[ScheduledTokens]) -> bool:
        """Whether this step is one: rows of a single new token, not too many, and no others' logits."""
        single = all(w.count == 1 and w.samples and not w.sequence.sampling.scoring for w in work)
        return single and len(work) <= self.largest

    def size_of(self, rows: int) -> int:
        """The rows of the step that so many run in: those that there is a graph, or a compiled step, for."""
        sizes = batch_sizes(self.largest) if self._graphs else sorted(self._compiled)
        return next((s for s in sizes if s >= rows), rows)

    @torch.inference_mode()
    def run(self, work: collections.abc.Sequence[ScheduledTokens]) -> Scores:
        """Run a step.

        Returns:
            A row for every work, valid until the next step; measured where a graph ran.
        """
        n = len(work)
        size = self.size_of(n)
        several = len({w.sequence.request_id for w in work}) < n
        cascaded = self.observe is not None and any(is_cascaded(w.blueprint) for w in work)
        kind = Kind(size, any(w.sequence.kv_limit < math.inf for w in work), several, cascaded)
        captured = self._graph(kind)
        self._stage(work, size)
        self.plan.forget()
        if kind.bounded:
            self._counts.zero_()
        if captured is not None:
            captured.replay()
            scores = Scores(captured.logits[:n], captured.tokens[:n], captured.measured[:, :n])
        else:
            with step(self._layout(kind)):
                if size in self._compiled and not kind.bounded:
                    self._prepare(size)
                    logits, tokens = self._compiled[size]()
                else:
                    logits, tokens = self._run_model(size)
            scores = Scores(logits[:n], tokens[:n])
        if kind.bounded:
            for w, counts in zip(work, self._counts[:n].tolist(), strict=True):
                w.sequence.bounded.count(*counts)
        return scores

    @torch.inference_mode()
    def compile(self, size: int) -> bool:
        """Compile the step of this size; whether that worked. It takes tens of seconds unless a cache has it.

        Of graphs those with cascaded rows, too, where this engine has a cascade, and of several rows where they have
        been captured: each is another computation.
        """
        register()
        self._stage([], size)
        try:
            if self._graphs:
                kinds = [Kind(size)] + [Kind(size, cascaded=True)] * (self.observe is not None)
                kinds += [k for k in self._graphs if k == Kind(size, several=True)]
                for kind in kinds:
                    self._graphs[kind] = self._capture(kind, self._compiled_forward())
                    self.captures += 1
                    self._compiled_graphs.add(size)  # whatever becomes of the next kind
            else:
                with (
                    patch_modules.unpatched(self.model),
                    step(self._layout(Kind(size, cascaded=self.observe is not None))),
                ):
                    self._compiled[size] = compile_step(functools.partial(self._run_planned, size))
        except RuntimeError as error:  # what dynamo and Inductor raise
            log.warning("some decode steps of %d run without torch.compile: %s", size, str(error).splitlines()[0])
            return False
        return True

    def _compiled_forward(self) -> Forward:
        """`_run_model` compiled, but for the plan's rows: torch.compile refuses what writes to a tensor and reads views
        of it, as routers and the cascade read the plan."""
        planned = torch.compile(self._run_planned, backend="qbe", fullgraph=True, dynamic=False)

        def run(size: int) -> tuple[torch.Tensor, torch.Tensor]:
            self._prepare(size)
            with patch_modules.unpatched(self.model):
                return planned(size)

        return run

    def _graph(self, kind: Kind) -> Captured | None:
        """The graph of such steps, captured now if these are the first of their kind; None: run them eagerly."""
        if self._graphs and kind not in self._graphs and kind not in self._refused:
            try:
                self._graphs[kind] = self._capture(kind, self._run_model)
                self.captures += 1
            except RuntimeError as error:
                self._refused.add(kind)
                log.warning("some steps of %d rows run without a CUDA graph: %s", kind.size, str(error).splitlines()[0])
        return self._graphs.get(kind)

    def _rows(self, size: int) -> torch.Tensor:
        """tokens, positions, slots, lengths and columns, int64 [5, size]"""
        return self._inputs[: _INPUTS * size].view(_INPUTS, size)

    def _layout(self, kind: Kind) -> DecodeLayout:
        if kind not in self._layouts:
            size, bounded, several, cascaded = kind
            _, _, slots, lengths, _ = self._rows(size)
            entropy = [None if e is None else e[:size] for e in self.entropy]
            bounds = Bounds(self._originals[:size], self._limits[:size], self._counts[:size]) if bounded else None
            batch_invariant = size <= self._several and bounds is None
            self._layouts[kind] = DecodeLayout(
                self.cache, slots, self._block_tables[:size], lengths, entropy, bounds, several,
                self.observe if cascaded else None, batch_invariant=batch_invariant,
                shares=None if batch_invariant or bounds else self._shares_for(size),
            )  # fmt: skip
        return self._layouts[kind]

    def _shares_for(self, size: int) -> Shares | None:
        """Of steps of this size, where they are worth a launch."""
        shares = self._shares
        return shares if shares is not None and shares.pay(size, self._block_tables.shape[1]) else None

    def _stage(self, work: collections.abc.Sequence[ScheduledTokens], size: int) -> None:
        """Bring the step's numbers to the device: one small copy, and a row of pages for each that changed hands."""
        sequences = [w.sequence for w in work]
        pad = size - len(work)
        columns = self.plan.columns([w.blueprint for w in work])
        numbers = [w.token for w in work] + [0] * pad
        numbers += [w.sequence.positions(w.start, 1)[0] for w in work] + [0] * pad
        numbers += [slot_of(w.sequence.pages, w.start) for w in work] + [self.cache.pool.spare] * pad
        numbers += [w.start + 1 for w in work] + [1] * pad
        numbers += columns + columns[-1:] * pad if columns else [0] * pad
        if self._copied is not None:
            self._copied.synchronize()  # the copy before this one has long left the staging memory
        self._staging[: len(numbers)] = torch.tensor(numbers)
        self._inputs[: len(numbers)].copy_(self._staging[: len(numbers)], non_blocking=True)
        if self.device.type == "cuda":
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record()
        for row, sequence in enumerate(sequences):
            before, owner = self._owners[row], (sequence, sequence.paging.version, sequence.kv_limit)
            if before != owner:
                quantised = quantised_pages(work[row].start // PAGE_SIZE)
                pages = in_runs(sequence.pages, quantised, self.cache.slides)
                block_ids = torch.tensor(block_ids_of(pages, quantised))
                self._block_tables[row, : len(block_ids)].copy_(block_ids, non_blocking=True)
                if before is None or before[2] != owner[2]:
                    self._limits[row] = owner[2]
                if owner[2] < math.inf:
                    kept = torch.tensor([NO_ORIGINAL if p.original is None else p.original for p in pages[:quantised]])
                    self._originals[row, :quantised].copy_(kept, non_blocking=True)
                    self._originals[row, quantised:] = NO_ORIGINAL
                self._owners[row] = owner

    def _run_model(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The step on the inputs as they are on the device now, inside its layout."""
        self._prepare(size)
        with self._means:
            return self._run_planned(size)

    def _prepare(self, size: int) -> None:
        """What all layers need, from the inputs on the device: the plan's rows, and who reads which pages."""
        self.plan.gather(self._rows(size)[-1])
        layout = self.cache.layout
        if isinstance(layout, DecodeLayout) and layout.shares is not None:
            layout.shares.find(layout.block_tables, layout.lengths)

    def _run_planned(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The step with the plan as it is."""
        ids, positions, _, _, _ = self._rows(size)
        out = self.model(
            input_ids=ids[None], position_ids=positions[None], use_cache=True, **{self._cache_name: self.cache}
        )
        logits = out.logits[0].float()
        return logits, likeliest(logits)
