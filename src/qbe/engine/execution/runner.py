"""Runs the model on one step's work: inputs, plan, pages, forward, logits."""

from __future__ import annotations

import collections.abc
import inspect
import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributions import Categorical
from transformers import PretrainedConfig

from qbe.engine.adaptive import entropy
from qbe.engine.adaptive.activation_statistics import collecting
from qbe.engine.adaptive.routing import Routing
from qbe.engine.execution.compiled import has_compiler
from qbe.engine.execution.decode import DecodeStep, batch_sizes
from qbe.engine.execution.latents import keep_latents
from qbe.engine.execution.mixers import Mixers, StepPart
from qbe.engine.execution.prompt_step import PromptStep
from qbe.engine.sampling.sampler import Scores, likeliest
from qbe.engine.scheduling.scheduler import ScheduledTokens
from qbe.errors import QBEError
from qbe.kvcache.attention import ATTENTION, Observe, Span, StepLayout, step
from qbe.kvcache.cache import PagedCache, cache_argument, decoder_config, is_recurrent, slot_of
from qbe.kvcache.pages import newly_quantised
from qbe.pictures.tower import PictureTower
from qbe.policies.per_token import TokenRouters
from qbe.progress import bar
from qbe.store.plan import Plan

log = logging.getLogger(__name__)

COMPILED_ROWS = 16  # of the largest step that is compiled on a CPU: 12 s of compilation each, 4 s once it is cached

# Rotary embeddings whose frequencies depend on the longest position of the forward.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def can_pack(config: PretrainedConfig) -> bool:
    """Whether tokens of different sequences may share one forward, as far as the configuration says: no token's
    rotary frequencies depend on another's position."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(v for v in rope.values() if isinstance(v, dict))]
    return not any(k.get("rope_type") in _LENGTH_DEPENDENT_ROPE for k in kinds)


def can_cascade(config: PretrainedConfig) -> bool:
    """Whether the cascade can be trained for it, and moves bits in it: nothing but attention mixes tokens."""
    return can_pack(config) and not is_recurrent(config)


def recompute_length(config: PretrainedConfig) -> int | None:
    """The length at which rotary frequencies change for good and the cache must be made anew (LongRoPE), if any."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return None if original is None else int(original) + 1


def set_attention(model: nn.Module, implementation: str | None) -> None:
    """Let the language model inside `model` take this attention; towers keep theirs."""
    config: Any = model.config
    decoder, kinds = decoder_config(model), {"": implementation}
    for name in getattr(config, "sub_configs", None) or ():
        part = getattr(config, name, None)
        if part is not None:
            own = part.get_text_config(decoder=True) is decoder
            kinds[name] = implementation if own else part._attn_implementation
    several = len(kinds) > 1 and decoder is not config
    model.set_attn_implementation(kinds if several else implementation)  # type: ignore[operator]


def use_paged_attention(model: nn.Module) -> None:
    """Route the model's attention through `qbe.kvcache.attention`.

    Raises:
        QBEError: a model that does not take its attention from transformers' AttentionInterface.
    """
    set_attention(model, ATTENTION)
    if decoder_config(model)._attn_implementation != ATTENTION:
        raise QBEError(f"{type(model).__name__} brings its own attention code: QBE cannot run this model")


class Runner:
    """Runs steps.

    Args:
        model: a causal language model of transformers, in evaluation mode, with paged attention.
        cache: its pages.
        plan: its precisions, bound to it.
        mixers: its recurrent layers; None where it has none.
        packed: whether one forward serves all sequences of a step; otherwise each has its own.

    Attributes:
        recompute_at: see `recompute_length`.
        decode: runs steps of one new token per sequence, once `prepare_decode` made it.
        prompts: runs other steps on a CPU, once `compile_steps` made it.
        observe: called after the attention of each layer, for its rows of one token (`qbe.kvcache.attention.Observe`).
        routing: routers in the forward pass, if a policy has them (`route`).
        tower: of a model that reads pictures.
    """

    def __init__(self, model: nn.Module, cache: PagedCache, plan: Plan, mixers: Mixers | None, packed: bool) -> None:
        self.model, self.cache, self.plan = model, cache, plan
        self.mixers, self.packed = mixers, packed
        cache.attach(model)
        keep_latents(model, cache)
        self.config = decoder_config(model)
        self.recompute_at = recompute_length(self.config)
        self.device = plan.device
        self.decode: DecodeStep | None = None
        self.prompts: PromptStep | None = None
        self.observe: Observe | None = None
        self.routing: Routing | None = None
        self.tower: PictureTower | None = None
        names = inspect.signature(model.forward).parameters
        self._cache_name = cache_argument(model)
        self._takes_positions = "position_ids" in names
        self._takes_keep = "logits_to_keep" in names

    def route(self, routers: TokenRouters) -> None:
        """Let these routers, and no others, run in the forward pass; what was captured or compiled is made anew.

        Raises:
            QBEError: a model whose tokens cannot have bits of their own.
        """
        if self.routing is not None:
            if self.routing.digest == routers.digest:
                return
            self.routing.remove()
            self.routing = None
        self.prompts = None  # dynamo would compile no module's hooks
        self.routing = Routing(self.model, self.plan, routers)
        if self.decode is not None:
            self.decode.renew()

    @staticmethod
    def keeps_logits(model: nn.Module) -> bool:
        """Whether the model's output head can be made to see only the rows whose logits are wanted."""
        return "logits_to_keep" in inspect.signature(model.forward).parameters

    def has_fixed_shape(self, work: collections.abc.Sequence[ScheduledTokens]) -> bool:
        """Whether `decode` runs this work."""
        return self.decode is not None and self.decode.serves(work) and not _pictured(work)

    @torch.inference_mode()
    def step(self, work: collections.abc.Sequence[ScheduledTokens]) -> Scores:
        """Run the work and advance each sequence's `computed`.

        Returns:
            On the model's device, a row for every work that samples, in order; valid until the next step.
        """
        fixed = self.decode if self.has_fixed_shape(work) else None
        if fixed is not None:
            scores = fixed.run(work)
            self._count(len(work))
            entropy.note(work, fixed.entropy, self.cache)
        else:
            logits = torch.cat([self._forward(part) for part in ([work] if self.packed else [[w] for w in work])])
            if any(w.sequence.sampling.scoring for w in work):
                logits = self._hand_out(work, logits)
            scores = Scores(logits, likeliest(logits))
            for row, w in enumerate(w for w in work if w.samples):
                if w.sequence.activation_stats is not None and w.start < len(w.sequence.prompt_ids):
                    w.sequence.activation_stats.entropy = Categorical(logits=logits[row], validate_args=False).entropy()
        if self.routing is not None:
            self.routing.count(work, head_sees_all=fixed is not None or not self._takes_keep)
        for w in work:
            if w.certain:
                w.sequence.computed = w.start + w.count
        # Prompts quantise their pages layer by layer (`PagedCache.update`).
        alone = [w for w in work if w.count == 1]
        full = [p for w in alone for p in newly_quantised(w.sequence.pages, w.start, w.start + 1)]
        self.cache.pool.quantise(self.cache.pool.to_quantise(full))
        return scores

    def _hand_out(self, work: collections.abc.Sequence[ScheduledTokens], logits: torch.Tensor) -> torch.Tensor:
        """Give logits `[kept rows, vocabulary]` to those who want them; returns the rows of every work that samples."""
        first, last = 0, []
        for w in work:
            rows, first = logits[first : first + len(w.kept)], first + len(w.kept)
            if w.sequence.sampling.scoring is not None and len(rows):
                w.sequence.sampling.scoring.take(w.kept.start, rows)
            if w.samples:
                last.append(first - 1)
        return logits[last]

    def _gathering(
        self, work: collections.abc.Sequence[ScheduledTokens], tokens: int
    ) -> AbstractContextManager[None] | None:
        """In which what prompts show to policies that read them (`qbe.engine.adaptive.activation_statistics`) is
        gathered, if any does."""
        first, parts = 0, []
        for w in work:
            if w.sequence.activation_stats is not None and w.start < len(w.sequence.prompt_ids):
                if w.start == 0:
                    w.sequence.activation_stats.restart()
                parts.append((range(first, first + w.count), w.sequence.activation_stats))
            first += w.count
        mixers = self.mixers
        running = None if mixers is None else lambda: mixers.rows
        return collecting(self.model, self.plan.table, parts, tokens, running) if parts else None

    def prepare_decode(self, largest: int, pages: int, compile: bool, progress: bool, several: int = 0) -> None:
        """Let steps of one new token per sequence run at fixed shapes; on a GPU from CUDA graphs.

        Args:
            largest: sequences of the largest step.
            pages: pages that one sequence can have.
            compile: compile steps: on a CPU of up to `COMPILED_ROWS` sequences and those with prompts, on a GPU of one,
                and of up to 4 rows of `several`.
            progress: show that it is under way.
            several: be ready for steps of sequences that have several rows, up to so many.
        """
        if not self._takes_positions:
            return
        decode = DecodeStep(self.model, self.cache, self.plan, largest, pages, self._cache_name)
        self.decode, decode.observe = decode, self.observe
        if self.device.type == "cuda":
            with bar("capturing decode steps", len(batch_sizes(largest)), progress) as advance:
                self.decode = decode if decode.capture(advance, several) else None
        if compile and self.device.type == "cpu":
            self.compile_steps(progress, COMPILED_ROWS, prompts=self._takes_keep)
        elif compile:
            self.compile_steps(progress, min(several, 4))

    def compile_steps(self, progress: bool, rows: int = 1, prompts: bool = False) -> None:
        """Compile the steps of up to so many rows, if steps run at fixed shapes; on a GPU each takes minutes."""
        if self.decode is None:
            return
        if self.device.type == "cpu" and not has_compiler():
            log.warning("steps run without torch.compile: there is no C++ compiler (g++, or the one that CXX names)")
            return
        sizes = [s for s in batch_sizes(self.decode.largest) if s <= max(1, rows)]
        with bar("compiling steps", len(sizes) + prompts, progress) as advance:
            for size in sizes:
                self.decode.compile(size)
                advance()
            if prompts and self.routing is None:
                if self.plan.use is not None:
                    self.plan.use.keep(False)
                try:
                    self.prompts = PromptStep(self.model, self.cache, self._cache_name)
                except RuntimeError as error:  # what dynamo and Inductor raise
                    log.warning("steps with prompts run without torch.compile: %s", str(error).splitlines()[0])
                if self.plan.use is not None:
                    self.plan.use.restart()  # compiling has run it
                advance()

    def _mixing(self, work: collections.abc.Sequence[ScheduledTokens]) -> AbstractContextManager[None]:
        """In which recurrent layers find the states of the sequences of a step."""
        if self.mixers is None:
            return nullcontext()
        first, parts = 0, []
        for w in work:
            assert w.sequence.state_slot is not None
            parts.append(StepPart(w.sequence.state_slot, first, w.start, w.count))
            first += w.count
        return self.mixers.step(parts)

    def _seeing(self, pictured: list[tuple[list[int], torch.Tensor]]) -> AbstractContextManager[None]:
        """In which these rows of a step are those of pictures."""
        if not pictured:
            return nullcontext()
        assert self.tower is not None
        at = [row for rows, _ in pictured for row in rows]
        return self.tower.inserted(at, torch.cat([features for _, features in pictured]))

    def _forward(self, work: collections.abc.Sequence[ScheduledTokens]) -> torch.Tensor:
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        kept: list[int] = []
        spans: list[Span] = []
        for w in work:
            s = w.sequence
            spans.append(Span(len(ids), w.count, w.start, s.pages, s.kv_limit))
            ids += s.token_ids[w.start : w.start + w.count]
            positions += s.positions(w.start, w.count)
            if s.pages:
                slots += [slot_of(s.pages, p) for p in range(w.start, w.start + w.count)]
            kept += [len(ids) - w.start - w.count + position for position in w.kept]
        # The head must see a row even when no sequence samples.
        rows = kept or [len(ids) - 1]
        runs = [w.sequence.rows(w.start, w.count) for w in work]
        owners = [w.sequence.blueprint_at(p) for w in work for p in w.kept] or [runs[-1][-1][0]]
        self.plan.write([run for r in runs for run in r], owners)
        # One small copy to the device for all indices.
        both = torch.tensor(ids + positions + slots + rows).to(self.device, non_blocking=True)
        t = len(ids)
        input_ids, position_ids, slot_ids, keep = both.split([t, t, len(slots), len(rows)])
        arguments: dict[str, object] = {"input_ids": input_ids[None], self._cache_name: self.cache, "use_cache": True}
        if self._takes_positions:
            arguments["position_ids"] = position_ids[None]
            if any(w.sequence.mrope is not None for w in work):
                arguments["position_ids"] = _of_three(work).to(self.device, non_blocking=True)[:, None]
        if self._takes_keep:
            arguments["logits_to_keep"] = keep
        layout = StepLayout(self.cache, spans, slot_ids, self.observe)
        collecting, pictured = self._gathering(work, t), _pictured(work)
        if self.prompts is not None and collecting is None and not pictured and self.prompts.serves(work):
            logits = self.prompts.run(layout, input_ids, position_ids, keep)
        else:
            with collecting or nullcontext(), step(layout), self._mixing(work), self._seeing(pictured):
                logits = self.model(**arguments).logits[0]
        if layout.single is not None:
            entropy.note([w for w in work if w.count == 1], layout.single[1].entropy, self.cache)
        if layout.bounded:
            for w, counts in zip(work, layout.counted(), strict=True):
                w.sequence.bounded.count(*counts)
        if not self._takes_keep:
            logits = logits.index_select(0, keep)
        self._count(t)
        return logits[: len(kept)].float()

    def _count(self, tokens: int) -> None:
        """Where experts are counted: a forward of so many tokens has run."""
        if self.plan.use is not None:
            self.plan.use.count(tokens)


def _pictured(work: collections.abc.Sequence[ScheduledTokens]) -> list[tuple[list[int], torch.Tensor]]:
    """The rows of a step that are those of pictures, and these."""
    found, first = [], 0
    for w in work:
        for placed in w.sequence.pictures:
            some = placed.between(w.start, w.start + w.count)
            if some.start < some.stop:
                assert placed.rows is not None
                found.append(([first - w.start + place for place in placed.places[some]], placed.rows[some]))
        first += w.count
    return found


def _of_three(work: collections.abc.Sequence[ScheduledTokens]) -> torch.Tensor:
    """Rotary positions of a step's rows for M-RoPE, int64 `[3, rows]`."""
    parts = []
    for w in work:
        mrope = w.sequence.mrope
        plain = torch.arange(w.start, w.start + w.count).expand(3, -1)
        parts.append(plain if mrope is None else mrope.of(w.start, w.count))
    return torch.cat(parts, 1)
