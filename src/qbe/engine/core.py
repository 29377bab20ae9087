"""The engine's loop: admit, run, sample, finish. Token ids in, token ids out; no tokenizer, no policies.

What only some requests need is in `qbe.engine.extensions`, a file each; the loop tells them when it gets to their part.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from qbe.blueprint import Blueprint
from qbe.compatibility import Situation, check_engine
from qbe.engine import self_check
from qbe.engine.adaptive.cascade import Cascade
from qbe.engine.devices import reserved
from qbe.engine.execution.runner import can_cascade, can_pack
from qbe.engine.extensions.bounded_kv import BoundedKV
from qbe.engine.extensions.cascade import CascadeExtension
from qbe.engine.extensions.extension import Extension
from qbe.engine.extensions.high_precision import HighPrecisionTokens
from qbe.engine.extensions.pictures import PictureRows
from qbe.engine.extensions.refresh import BlueprintRefresh
from qbe.engine.extensions.routers import Routers
from qbe.engine.extensions.shared_rows import SharedReads
from qbe.engine.extensions.speculation import SpeculationExtension
from qbe.engine.sampling.constraint import was_cut
from qbe.engine.scheduling.kv_size import with_kv
from qbe.engine.scheduling.scheduler import ScheduledTokens
from qbe.engine.scheduling.sequence import Sequence
from qbe.engine.setup import (
    StepSizes,
    bind_plan,
    compile_steps,
    longest_forward,
    longest_sequence,
    page_pool,
    prepare_layers,
    runner_of,
    scheduler_of,
    speculator_of,
    state_pool,
)
from qbe.engine.speculation.accept_tokens import accept_tokens
from qbe.engine.step_output import StepOutput, why_no_token
from qbe.errors import QBEError
from qbe.kernels.cpu import dispatch
from qbe.kvcache.allocator import PageFormat
from qbe.kvcache.cache import decoder_config
from qbe.kvcache.originals import Originals
from qbe.kvcache.probe import probe
from qbe.models.model_errors import one_line
from qbe.pictures.tower import PictureTower
from qbe.policies.per_token import TokenRouters
from qbe.residency.residency import Residency
from qbe.sites import KVBits, SiteTable


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
        device_memory: bytes that this core and what residency keeps may take on a GPU; the default cache fits in it.
        device: the model's device, when it is not that of its first parameter.
        progress: show progress bars while kernels are compiled and decode steps captured.
        compile: compile steps with torch.compile, on a CPU those with prompts and decode steps of up to 16 sequences,
            on a GPU decode steps of one. The first start takes minutes, later ones find most of it in torch's cache; no
            request waits for it.
        speculate: make ready the steps of a few rows that requests with `SamplingParams.speculate` need. Without it
            they may speculate where `max_sequences` gives such steps room and nothing was compiled.
        cascade: what `qbe train cascade` found, for requests whose bits the cascade moves; None moves none.
        routers: to run in the forward pass from the start (`add_routers` takes others later).
        shared_rows: rows of a step read each site at the highest bits of any (`qbe.store.shared_rows`), not their own.
        tower: of a model that reads pictures, for sequences that have some.

    Attributes:
        cascade: what moves their rows; None where nothing was learned, and for models that can have none.
        context: the model's context in tokens, None when it has no limit.
        graph_bytes: of the device's memory that captured steps took.
        vocabulary: number of tokens the model knows.
        states: of recurrent layers, their pool; None where the model has none.
        speculator: makes and checks draft tokens; None where no request can speculate.
        extensions: told of every request and step, in this order.
        residency: of a nested store that is not all on the device (`qbe.engine.bounded_memory`); None: it is.

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
        device_memory: int | None = None,
        device: torch.device | None = None,
        progress: bool = False,
        compile: bool = False,
        speculate: bool = False,
        cascade: TokenRouters | None = None,
        routers: TokenRouters | None = None,
        shared_rows: bool = False,
        tower: PictureTower | None = None,
    ) -> None:
        self.model = model.eval()
        self.table = table
        self.eos_ids = frozenset(eos_ids)
        self.device = device if device is not None else next(model.parameters()).device
        config = decoder_config(model)
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        self.vocabulary: int = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        with one_line(model):
            kept = probe(model)
        packed = can_pack(config) and kept.packs
        longest = longest_forward(packed, self.context)
        sizes = StepSizes.of(self.device, max_batch_tokens, max_sequences, longest, speculate)

        self.residency: Residency | None = None
        self.plan = bind_plan(model, table, self.device, sizes.plan_rows, shared_rows)
        prepare_layers(model, self.plan, sizes, self.vocabulary, progress)
        with one_line(model):
            expected = self_check.expect(model, self.plan, self.vocabulary, self.context)
        self.states = state_pool(kept, max_sequences, self.device)
        self.pool = page_pool(model, kept.kv, kept.dtype, self.device, self.context, kv_tokens, device_memory)
        self.originals = Originals(self.pool)
        self.scheduler = scheduler_of(
            self.pool,
            self.states,
            self.originals,
            packed,
            sizes.batch_tokens,
            max_sequences,
            self.context,
            self._format,
        )
        self.runner = runner_of(model, kept, self.pool, self.states, self.plan, packed)
        self.runner.tower = tower
        pages = longest_sequence(self.pool, self.context)
        steps = functools.partial(self_check.compare, self.runner, self.scheduler, expected)
        with one_line(model):
            compile_steps(self.runner, steps, pages, progress)
            self_check.check(model, self.runner, self.scheduler, self.vocabulary, expected)
        self.table = replace(with_kv(table, self.runner.cache), context=self.context)

        self.cascade: Cascade | None = None
        if cascade is not None and can_cascade(config) and self.scheduler.paged:
            self.cascade = Cascade(cascade, table, self.plan)
            self.runner.observe = self.cascade.observe
        self._routers = Routers(self.runner)
        if routers is not None:
            self.add_routers(routers)
            self.runner.route(routers)
        self._prepare_decode(sizes, pages, compile, speculate, progress)
        self.speculator = speculator_of(self.table, self.runner, sizes, ready=speculate or not compile)
        self._refresh = BlueprintRefresh(self.pool, self.scheduler, lambda: self.situation, self.cascade)
        self.extensions = self._extensions()
        asked = {"compile": compile, "speculate": speculate, "rows": shared_rows}
        check_engine([name for name in asked if asked[name]], self.situation)

    @property
    def situation(self) -> Situation:
        """What options meet here, as far as the core knows."""
        return Situation(
            alone=not self.runner.packed,
            recurrent=self.states is not None,
            recurrent_state=self.states is not None and any(s.recurrent for s in self.states.shapes),
            attention=self.scheduler.paged,
            latent=self.pool.latent,
            cuda=self.device.type == "cuda",
            device_memory=self.residency is not None,
            fixed_shapes=self.runner.decode is not None,
            drafts=self.speculator is not None,
            originals_full=self.originals.refused,
        )

    def _prepare_decode(self, sizes: StepSizes, pages: int, compile: bool, speculate: bool, progress: bool) -> None:
        """Decode steps at fixed shapes, where the model has them; what comes now is counted."""
        if self.plan.use is not None:
            self.plan.use.begin(sizes.decode_rows)
        before, latent = reserved(self.device), self.pool.latent
        able = not latent if self.device.type == "cuda" else dispatch.reads_pages(self.pool.dtype)
        if able and self.runner.packed and self.scheduler.paged and self.states is None:
            several = sizes.speculation_rows if speculate else 0
            self.runner.prepare_decode(sizes.decode_rows, pages, compile and not latent, progress, several)
        self.graph_bytes = max(0, reserved(self.device) - before)

    def _extensions(self) -> list[Extension]:
        """In the order in which they look at a request: one may take from it what the next one would ask for."""
        extensions: list[Extension] = [self._routers, HighPrecisionTokens(lambda: self.situation)]
        extensions.append(CascadeExtension(self.cascade))
        if self.runner.tower is not None:
            extensions.append(PictureRows(self.runner.tower, self.scheduler))
        if self.speculator is not None:
            extensions.append(SpeculationExtension(self.speculator, self.runner))
        if self.plan.shared is not None:
            extensions.append(SharedReads(self.plan.shared))
        return [*extensions, BoundedKV(self.originals, self.scheduler), self._refresh]

    def _format(self, kv_bits: tuple[KVBits, ...]) -> PageFormat:
        """The pool's format with these bits; pages that nobody owns go if it takes one of their numbers."""
        allocator = self.scheduler.allocator
        while not self.pool.has_number(kv_bits, allocator.uses) and allocator.evict():
            pass
        return self.pool.format(kv_bits, allocator.uses)

    def raise_kv(self, sequence: Sequence, kv_bits: tuple[KVBits, ...]) -> None:
        """Give a running request's pages to come these KV bits, if what it may still write then fits in the cache."""
        self._refresh.raise_kv(sequence, kv_bits)

    def refresh(self, sequence: Sequence, blueprint: Blueprint) -> bool:
        """Let a running request go on at this blueprint from its next step on; whether that is another one. Pages that
        are written stay. Those to come get its KV bits if what the request may still write then fits."""
        return self._refresh.exchange(sequence, blueprint)

    def add_routers(self, routers: TokenRouters) -> None:
        """Take requests whose bits these routers choose. They run in the forward pass from the step on in
        which the first of them begins, which is when no request of other routers is running (`Scheduler`).

        Raises:
            QBEError: a model whose tokens cannot have bits of their own.
        """
        self._routers.add(routers)

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
        for extension in self.extensions:
            extension.admit(sequence)
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
        if not work:
            return self._oversized()
        try:
            self.pool.copy(self.scheduler.paging.copies)
            self.scheduler.paging.copies.clear()
            for extension in self.extensions:
                work = extension.extend(work)
            outputs = self._oversized()
            if not work:
                return outputs
            scores = self.runner.step(work)
            for extension in self.extensions:
                extension.observe(work, scores)
            self.scheduler.complete(work)
            rows = [w for w in work if w.samples and w.draft is None]
            accept_tokens(rows, scores, lambda s, token: outputs.append(self._advance(s, token)))
            for extension in self.extensions:
                extension.finish(work)
        except BaseException as error:
            self._fail(work, error)
            raise
        return outputs

    def _oversized(self) -> list[StepOutput]:
        """Of sequences that ended before the step."""
        outputs = [StepOutput(s, None, True, "error") for s in self.scheduler.oversized]
        self.scheduler.oversized.clear()
        return outputs

    def _fail(self, work: list[ScheduledTokens], error: BaseException) -> None:
        """What the step's sequences have in the cache is unknown now: they cannot go on."""
        why = str(error) if isinstance(error, QBEError) else "the model failed while this request was in the batch"
        for sequence in {w.sequence for w in work if w.sequence.finish_reason is None}:
            sequence.error = why
            self.scheduler.finish(sequence, "error")

    def _advance(self, sequence: Sequence, token: int | None) -> StepOutput:
        """Give a sequence its token and end it when that was the last."""
        for extension in self.extensions:
            extension.advance(sequence, token)
        if token is None or sequence.error is not None:  # an extension's, which cannot keep what was promised
            sequence.error = sequence.error or why_no_token(sequence, self.pool)
            reason: str | None = "error"
        else:
            sequence.append(token)
            reason = self._finish_reason(sequence, token)
        if reason is not None:
            self.scheduler.finish(sequence, reason)
        elif len(sequence.token_ids) == self.runner.recompute_at:
            self.scheduler.restart(sequence)
        return StepOutput(sequence, token, reason is not None, reason)

    def _finish_reason(self, sequence: Sequence, token: int) -> str | None:
        """Why its last token ends an answer; None: it goes on."""
        complete = sequence.sampling.constraint is not None and sequence.sampling.constraint.accept(token)
        if complete or (token in self.eos_ids and not sequence.params.ignore_eos):
            return "length" if was_cut(sequence.sampling.constraint) else "stop"
        return "length" if len(sequence.token_ids) >= sequence.max_length else None
