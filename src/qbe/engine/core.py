"""The engine's loop: admit, run, sample, finish. Token ids in, token ids out; no tokenizer, no policies."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import nn

from qbe.blueprint import Blueprint
from qbe.engine import self_check
from qbe.engine.adaptive.cascade import Cascade, steers
from qbe.engine.adaptive.routing import check_columns, is_routed
from qbe.engine.devices import reserved
from qbe.engine.execution import patch_modules
from qbe.engine.execution.runner import Runner, can_pack, use_paged_attention
from qbe.engine.execution.warmup import attention_launches, compile_kernels, linear_launches, sampling_launches
from qbe.engine.sampling.constraint import was_cut
from qbe.engine.scheduling.kv_size import default_kv_tokens, with_kv
from qbe.engine.scheduling.scheduler import ScheduledTokens, Scheduler
from qbe.engine.scheduling.sequence import Sequence
from qbe.engine.speculation.accept_tokens import accept_tokens
from qbe.engine.speculation.draft_tokens import Speculation
from qbe.engine.speculation.speculator import ROWS, Speculator
from qbe.errors import QBEError
from qbe.hardware import free_memory
from qbe.kernels.cpu import native
from qbe.kernels.cpu.paged_attention import compiled_for
from qbe.kvcache.allocator import PageAllocator, PageFormat
from qbe.kvcache.cache import PagedCache, decoder_config, probe_shapes
from qbe.kvcache.originals import Originals
from qbe.kvcache.pages import PAGE_SIZE, PagePool, most_pages, page_bytes, pages_for
from qbe.policies.per_token import TokenRouters
from qbe.sites import FULL_BITS, KVBits, SiteTable
from qbe.store.plan import Plan

log = logging.getLogger(__name__)

_BATCH_TOKENS = {"cpu": 512, "cuda": 2048}
_LONGEST = 8192  # rows of a forward, beyond which no other kernels are needed


@dataclass(frozen=True)
class StepOutput:
    """What a step did for one sequence: a new token, an end, or both.

    `finish_reason` is "stop", "length", "cancelled" or "error" when `finished`, else None.
    """

    sequence: Sequence
    new_token: int | None
    finished: bool
    finish_reason: str | None


class Core:
    """Continuous batching over one model; requests with different blueprints share steps.

    Args:
        model: causal language model of transformers, already on its device. From here on its attention reads pages,
            so it answers through this core only.
        table: the model's sites; its nested sites' weights are bound to the plan. Where it lacks the key heads of the
            KV cache they are added to it.
        eos_ids: tokens that end an answer; they stay in `output_ids`, as with transformers.
        max_batch_tokens: tokens of one step; longer prompts are spread over steps. By default 512 on the CPU, where a
            step is long, and 2048 on a GPU, where a short one leaves it idle.
        max_sequences: requests that run at the same time; others wait.
        kv_tokens: size of the KV cache in tokens of 16 bits; at fewer bits more fit. By default what 4 sequences at
            full context need, at most 16384 tokens on the CPU and 30 % of the free memory on a GPU.
        device: the model's device, when it is not that of its first parameter.
        progress: show progress bars while kernels are compiled and decode steps captured.
        compile: compile steps with torch.compile, on a CPU those with prompts and decode steps of up to 16 sequences,
            on a GPU decode steps of one. The first start takes minutes, later ones find most of it in torch's cache; no
            request waits for it.
        speculate: make ready the steps of a few rows that requests with `SamplingParams.speculate` need. Without it
            they may speculate where `max_sequences` gives such steps room and nothing was compiled.
        cascade: what `qbe train cascade` found, for requests whose blueprint the cascade steers; without it
            they run at their blueprint as it is.
        routers: to run in the forward pass from the start (`add_routers` takes others later).

    Attributes:
        cascade: what moves their rows; None where nothing was learned, and for models of which each sequence has its
            own forward.
        context: the model's context in tokens, None when it has no limit.
        graph_bytes: of the device's memory that captured steps took.
        vocabulary: number of tokens the model knows.

    Raises:
        QBEError: a model that QBE cannot run or runs wrong (`self_check`), or sizes that do not fit together.
    """

    def __init__(
        self,
        model: nn.Module,
        table: SiteTable,
        *,
        eos_ids: Iterable[int] = (),
        max_batch_tokens: int | None = None,
        max_sequences: int = 32,
        kv_tokens: int | None = None,
        device: torch.device | None = None,
        progress: bool = False,
        compile: bool = False,
        speculate: bool = False,
        cascade: TokenRouters | None = None,
        routers: TokenRouters | None = None,
    ) -> None:
        self.model, self.table, self.eos_ids = model.eval(), table, frozenset(eos_ids)
        self.device = device if device is not None else next(model.parameters()).device
        if max_batch_tokens is None:
            max_batch_tokens = _BATCH_TOKENS["cuda" if self.device.type == "cuda" else "cpu"]
        compiled_ops = self.device.type == "cpu" and native.load()
        config = decoder_config(model)
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        self.vocabulary: int = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        packed = can_pack(config)

        # Its rows begin at multiples of 16 bytes: Triton compiles a kernel for such pointers and another for the rest.
        plan_rows = -(-max_batch_tokens // 4) * 4 if packed else 1
        self.plan = Plan(table, plan_rows, self.device, Runner.keeps_logits(model))
        self.plan.bind(model)
        if compiled_ops:
            patch_modules.patch_modules(model)
        with self_check.one_line(model):
            shapes, dtype = probe_shapes(model)
            expected = self_check.expect(model, self.plan, self.vocabulary, self.context)
        paged = any(shapes)
        if paged:
            use_paged_attention(model)
        free, each = free_memory(self.device), page_bytes(shapes, dtype)
        tokens = kv_tokens if kv_tokens is not None else default_kv_tokens(self.context, self.device, each)
        pages = pages_for(tokens) if paged else 0
        if kv_tokens is not None and pages * each > free - each:  # there is one more than asked for
            raise QBEError(
                f"kv_tokens is {tokens}, but {free / 1e9:.1f} GB free on {self.device} hold at most "
                f"{max(0, free // each - 1) * PAGE_SIZE}: ask for fewer"
            )
        self.pool = PagePool(shapes, pages, dtype, self.device)
        self.originals = Originals(self.pool)
        allocator = PageAllocator(pages, self.pool.full, self.originals.drop)
        self.scheduler = Scheduler(
            allocator,
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            context=self.context,
            paged=paged,
            chunked=packed,
            reusable=packed,
            format_of=lambda sequence, page: self._format(sequence.kv_bits_of(page)),
        )
        self.runner = Runner(model, PagedCache(config, self.pool), self.plan)
        rows = min(max_batch_tokens if packed else self.context or _LONGEST, _LONGEST)
        most = min(ROWS[self.device.type], max_batch_tokens)  # rows of a step that checks guesses
        largest = max(max_sequences, most) if speculate else max_sequences
        head_rows = largest if Runner.keeps_logits(model) else rows
        sampling = sampling_launches(self.vocabulary, self.device)
        compile_kernels(chain(linear_launches(model, table, rows, head_rows), sampling), self.device, progress)
        with self_check.one_line(model):
            self_check.check(model, self.runner, allocator, self.vocabulary, expected)
        self.cascade = Cascade(cascade, table, self.plan) if cascade is not None and packed and paged else None
        self.runner.observe = None if self.cascade is None else self.cascade.observe
        self.table = replace(with_kv(table, self.runner.cache), context=self.context)
        longest = most_pages(shapes, dtype, pages)
        longest = longest if self.context is None else min(longest, pages_for(self.context))
        if paged:
            compile_kernels(attention_launches(self.runner.cache, longest), self.device, progress)
        self._routers: dict[str, TokenRouters] = {}
        if routers is not None:
            self.add_routers(routers)
            self.runner.route(routers)
        before = reserved(self.device)
        if self.runner.packed and paged and (self.device.type == "cuda" or compiled_for(dtype)):
            self.runner.prepare_decode(largest, longest, compile, progress, most if speculate else 0)
        self.graph_bytes = max(0, reserved(self.device) - before)
        if compile and self.runner.decode is None:
            why = f"the CPU kernels do not attend in {dtype}" if packed and paged else "its sequences share no step"
            log.warning("decode steps of this model are not compiled: %s", why)
        self.speculator: Speculator | None = None
        if self.runner.decode is not None and min(most, largest) > 1 and (speculate or not compile):
            self.speculator = Speculator(self.table, min(most, largest), self.runner.decode.size_of)

    def _format(self, kv_bits: tuple[KVBits, ...]) -> PageFormat:
        """The pool's format with these bits; pages that nobody owns go if it takes one of their numbers."""
        allocator = self.scheduler.allocator
        while not self.pool.has_number(kv_bits, allocator.uses) and allocator.evict():
            pass
        return self.pool.format(kv_bits, allocator.uses)

    def raise_kv(self, sequence: Sequence, kv_bits: tuple[KVBits, ...]) -> None:
        """Give a running request's pages to come these KV bits, if what it may still write then fits in the cache.

        Wherever they come from: from its own attention, or from another blueprint (`refresh`).
        """
        before = sequence.blueprint
        sequence.blueprint = before.with_kv_bits(kv_bits)
        if not self.pool.has_number(kv_bits, self.scheduler.allocator.uses) or (
            self.scheduler.paging.capacity(sequence) < sequence.max_length
        ):
            sequence.blueprint = before

    def refresh(self, sequence: Sequence, blueprint: Blueprint) -> bool:
        """Let a running request go on at this blueprint from its next step on; whether that is another one.

        Pages that are written stay. Those to come get its KV bits if what the request may still write then fits.
        """
        before = sequence.blueprint
        cascade = None if sequence.moved is None else self.cascade
        dynamic_precision = (
            blueprint.dynamic_precision if cascade is None else before.dynamic_precision
        )  # a policy's own comes with its bits
        blueprint = replace(blueprint, kv_error=before.kv_error, dynamic_precision=dynamic_precision)
        if blueprint.key == before.key:
            return False
        if cascade is not None:
            blueprint = cascade.steered(blueprint, sequence)
        sequence.exchange(blueprint.with_kv_bits(before.kv_bits))
        self.raise_kv(sequence, blueprint.kv_bits)
        return True

    def add_routers(self, routers: TokenRouters) -> None:
        """Take requests that these routers steer. They run in the forward pass from the step on in which the first of
        them begins, which is when no request is running that others steer (`Scheduler`).

        Raises:
            QBEError: a model whose tokens cannot have bits of their own.
        """
        check_columns(self.plan)
        self._routers[routers.digest] = routers

    def _route(self, work: list[ScheduledTokens]) -> None:
        """Have the routers that steer this step's sequences run in it: one policy's, as the scheduler sees to."""
        dynamic_precision = next(
            (w.sequence.blueprint.dynamic_precision for w in work if w.sequence.routed is not None), None
        )
        if dynamic_precision is not None:
            self.runner.route(self._routers[dynamic_precision.routers])

    def add(self, sequence: Sequence) -> None:
        """Queue a request.

        Raises:
            QBEError: a prompt that is empty, too long or has unknown tokens; a bias for an unknown token; an id in use.
        """
        self.check_tokens("prompt", sequence.prompt_ids)
        self.check_tokens("logit_bias", sequence.params.logit_bias or ())
        if len(sequence.blueprint.weight_bits) != len(self.table.nested):
            raise QBEError(
                f"the blueprint is for {len(sequence.blueprint.weight_bits)} sites, but the model has "
                f"{len(self.table.nested)}: make it for this model"
            )
        if is_routed(sequence.blueprint):
            dynamic_precision = sequence.blueprint.dynamic_precision
            routers = None if dynamic_precision is None else self._routers.get(dynamic_precision.routers)
            if routers is None:
                raise QBEError("this engine has no such routers: start it with the policy that the blueprint is of")
            sequence.routed = torch.zeros(2, len(routers.widths), dtype=torch.int64, device=self.device)
        # A plan of one row, as recurrent models have it, could not compute such a sequence again after a preemption.
        if not self.runner.packed or sequence.blueprint.full_activations is sequence.blueprint:
            sequence.difficult = None
        if not self.runner.packed:
            sequence.monitor = None
        if steers(sequence.blueprint):
            if self.cascade is None:
                sequence.blueprint = replace(sequence.blueprint, dynamic_precision=None)
            else:
                self.cascade.begin(sequence)
        # Bounds and high-precision tokens say of each token by itself how it is read, which a guess cannot know.
        free = sequence.blueprint.kv_error is None and sequence.difficult is None
        sequence.speculation = Speculation() if sequence.params.speculate and self.speculator and free else None
        if self.originals.refused:
            sequence.blueprint = replace(sequence.blueprint, kv_error=None)
        if sequence.watched and self.scheduler.paging.capacity(sequence) < self.scheduler.length(sequence):
            # Pages of fewer bits need a staging page beside them. A cache so small that this is most of it holds more
            # at 16 bits, and nobody asked for fewer.
            sequence.blueprint = sequence.blueprint.with_kv_bits((FULL_BITS,) * len(sequence.blueprint.kv_bits))
            sequence.watched = False
        self.scheduler.add(sequence)

    def check_tokens(self, name: str, tokens: Iterable[int]) -> None:
        """Raises QBEError if the model does not know one of these tokens."""
        for token in tokens:
            if not 0 <= token < self.vocabulary:
                raise QBEError(
                    f"{name} has token {token}, but the model knows 0 to {self.vocabulary - 1} only", field=name
                )

    def cancel(self, request_id: str, reason: str = "cancelled") -> Sequence | None:
        """End a request now and free its pages; None when there is no such request (it may have finished).

        `reason` becomes its finish reason: the caller that finds a stop string ends the request with "stop".
        """
        sequence = self.scheduler.get(request_id)
        if sequence is not None:
            self.scheduler.finish(sequence, reason)
        return sequence

    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.has_work()

    def step(self) -> list[StepOutput]:
        """Run one step; an output for every sequence that got a token or ended. Empty when there is nothing to do."""
        work = self.scheduler.schedule()
        oversized = [StepOutput(s, None, True, "error") for s in self.scheduler.oversized]
        self.scheduler.oversized.clear()
        if not work:
            return oversized
        try:
            self._route(work)
            self.pool.copy(self.scheduler.paging.copies)
            self.scheduler.paging.copies.clear()
            began, speculator, decode = time.perf_counter(), self.speculator, self.runner.decode
            decodes = decode is not None and decode.serves(work)
            if speculator is not None:
                work = speculator.extend(work) if decodes else speculator.pause(work)
                self.scheduler.last = work
            scores = self.runner.step(work)
            self._keep_originals(work)
            self.scheduler.complete(work)
            outputs: list[StepOutput] = []
            rows = [w for w in work if w.samples]
            if rows and rows[0].draft is not None and speculator is not None:
                speculator.guess([w.sequence for w in rows], scores.logits, scores.best)
            else:
                keep = None if self.cascade is None else self.cascade.fetch(work)
                accept_tokens(rows, scores, lambda s, token: outputs.append(self._advance(s, token, keep)))
            if speculator is not None and decodes:
                speculator.measured(work, time.perf_counter() - began)
        except BaseException:
            # What these sequences have in the cache is unknown now: they cannot go on.
            for sequence in {w.sequence for w in work if w.sequence.finish_reason is None}:
                sequence.error = "the model failed while this request was in the batch"
                self.scheduler.finish(sequence, "error")
            raise
        return oversized + outputs

    def _keep_originals(self, work: list[ScheduledTokens]) -> None:
        """Copies of the pages that the step has filled in bounded requests, while their staging pages still hold
        them."""
        for w in work:
            if w.sequence.kv_limit == math.inf:
                continue
            for page in w.sequence.pages[w.start // PAGE_SIZE : w.sequence.computed // PAGE_SIZE]:
                while page.staging_page is not None and page.original is None:
                    page.original = self.originals.keep(page.staging_page)
                    if page.original is None and not self.scheduler.allocator.evict():
                        self._refuse_originals()
                        return

    def _refuse_originals(self) -> None:
        """The host has no memory: every request goes on without a bound."""
        self.originals.refuse()
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            sequence.blueprint = replace(sequence.blueprint, kv_error=None)

    def _advance(
        self, sequence: Sequence, token: int | None, keep: Callable[[Sequence], None] | None = None
    ) -> StepOutput:
        """Give a sequence its token and end it when that was the last. `keep`: what `Cascade.fetch` returned."""
        if keep is not None:
            keep(sequence)
        if token is None:
            where = self.pool.not_numbers(sequence.pages, sequence.computed) or "the model's logits"
            refused = sequence.constraint.error if sequence.constraint is not None else None
            sequence.error = refused or (
                f"{where} were not numbers (NaN or infinity, or too large for the KV bits) after "
                f"{len(sequence.token_ids)} tokens: use a wider dtype (bfloat16 or float32) or more KV bits"
            )
            reason: str | None = "error"
        else:
            sequence.append(token)
            complete = sequence.constraint is not None and sequence.constraint.accept(token)
            if complete or (token in self.eos_ids and not sequence.params.ignore_eos):
                reason = "length" if was_cut(sequence.constraint) else "stop"
            elif len(sequence.token_ids) >= sequence.max_length:
                reason = "length"
            else:
                reason = None
        if reason is not None:
            self.scheduler.finish(sequence, reason)
        elif len(sequence.token_ids) == self.runner.recompute_at:
            self.scheduler.restart(sequence)
        return StepOutput(sequence, token, reason is not None, reason)
