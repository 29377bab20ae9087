"""Steps with prompts in them, compiled for any number of tokens.

A step's length differs from one to the next, and so do the sequences that it has, so that shapes are symbols and
attention is one op that finds out whose tokens are whose (`qbe.kvcache.step_op`). What is around attention is compiled.
"""

from __future__ import annotations

import collections.abc

import torch
from torch import nn

from qbe.engine.adaptive.cascade import is_cascaded
from qbe.engine.execution import patch_modules
from qbe.engine.execution.compiled import compile_prompts
from qbe.engine.scheduling.scheduler import ScheduledTokens
from qbe.kvcache.attention import OpenLayout, StepLayout, step
from qbe.kvcache.cache import PagedCache
from qbe.kvcache.step_op import running

_TOKENS, _KEPT = 37, 3  # of the step that is compiled: like no size of a model, and unlike each other
_FEWEST = 2  # rows of a size that is a symbol


class PromptStep:
    """Runs such steps.

    Args:
        model: a causal language model whose forward packs sequences, takes positions and the rows whose logits to keep.
        cache: its pages. A step has run.
        cache_name: of the argument of the forward that takes it.

    Raises:
        RuntimeError: it cannot be compiled.
    """

    @torch.inference_mode()
    def __init__(self, model: nn.Module, cache: PagedCache, cache_name: str) -> None:
        self._model, self._cache, self._cache_name = model, cache, cache_name
        tokens, positions, kept = (torch.zeros(n, dtype=torch.long) for n in (_TOKENS, _TOKENS, _KEPT))
        nobody = StepLayout(cache, [], torch.full((_TOKENS,), cache.pool.spare))
        given = tokens, positions, kept
        with step(OpenLayout(cache)), running(nobody):
            try:
                with patch_modules.unpatched(model, rotary=cache.pool.dtype is not patch_modules.SERVED):
                    self._run = compile_prompts(self._forward, given)
            except RuntimeError:  # not every dynamo follows the function that stands for a module's own
                with patch_modules.unpatched(model):
                    self._run = compile_prompts(self._forward, given)

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        out = self._model(
            input_ids=tokens[None], position_ids=positions[None], logits_to_keep=kept, use_cache=True,
            **{self._cache_name: self._cache},
        )  # fmt: skip
        logits: torch.Tensor = out.logits[0]
        return logits.float()

    @staticmethod
    def serves(work: collections.abc.Sequence[ScheduledTokens]) -> bool:
        """Whether it runs this step: several tokens, none of them moved by the cascade."""
        return sum(w.count for w in work) >= _FEWEST and not any(is_cascaded(w.blueprint) for w in work)

    def run(
        self, layout: StepLayout, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor
    ) -> torch.Tensor:
        """Logits of the kept rows, float32 `[n, vocabulary]`. Other arguments int64 `[T]`, `[T]` and `[n]`."""
        rows = kept if len(kept) >= _FEWEST else kept.repeat(_FEWEST)
        with running(layout):
            return self._run(tokens, positions, rows)[: len(kept)]
