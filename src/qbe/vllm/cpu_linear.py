"""Nested linear layers on a CPU: rows at 16 bits take vLLM's own product, so that they are what they are without QBE.

Sums of another order would give another token now and then. vLLM packs 16-bit weights for its product and drops the
plain ones, so nothing is kept twice. Which rows those are is known on the host (`qbe.vllm.full_rows`): the custom op
(`qbe.kernels.ops.numbered_linear`) asks there while a step runs, as vLLM's attention asks its forward context, under
torch.compile, too; where no row is at 16 bits it need not ask.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from qbe.kernels.ops import merged_linear as merged_ops  # noqa: F401  (they define the custom ops)
from qbe.kernels.ops import numbered_linear as numbered_ops
from qbe.kernels.reference.activations import eight_bits, has_eight
from qbe.store.plan import Plan
from qbe.vllm.full_rows import FullRows
from qbe.vllm.linear import NestedLinearMethod
from qbe.vllm.served import ServedModel

_one, _many = torch.ops.qbe.nested_linear.default, torch.ops.qbe.nested_linears.default


class CPUNestedLinearMethod(NestedLinearMethod):
    """As its base; `full_rows` is that of the tokens, for the output head that of the tokens whose logits are kept."""

    def __init__(self, model: ServedModel, plan: Plan, rows: list[int], full_rows: FullRows) -> None:
        super().__init__(model, plan, rows)
        self.full_rows = full_rows

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=not isinstance(layer, ParallelLMHead))
        # Every step asks a hundred layers for these: a look-up by name would cost as much as a small product.
        self.packed, self.meta = (
            [getattr(layer, f"qbe_{n}_{i}") for i in range(len(self.rows))] for n in ("packed", "meta")
        )
        self.precision_words_of: tuple[int, list[torch.Tensor]] = -1, []  # a number of rows, and the words of so many
        run = functools.partial(self.run, weakref.proxy(layer))  # the numbers must not keep a layer alive
        self.number = numbered_ops.number(
            run, self.packed, self.meta, self.precision_words(layer), self.slices, self.exponents
        )
        weakref.finalize(layer, numbered_ops.release, self.number)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.ops.qbe.numbered_linear(x, bias, sum(self.sizes), self.number)

    def run(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """What the custom op computes, whatever the rows' precisions."""
        every = self.full_rows.every(self.rows)
        if every:
            return layer.cpu_linear(x, layer.weight, bias)
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        if len(rows) != self.precision_words_of[0]:
            self.precision_words_of = len(rows), [w[: len(rows)] for w in self.precision_words(layer)]
        precision_words = self.precision_words_of[1]
        y = (
            self.narrow(rows, bias, precision_words)
            if every is False
            else self.mixed(layer, rows, bias, precision_words)
        )
        return y if x.dim() == 2 else y.view(*x.shape[:-1], -1)

    def narrow(self, x: torch.Tensor, bias: torch.Tensor | None, precision_words: list[torch.Tensor]) -> torch.Tensor:
        """The product of rows none of which is at 16 bits."""
        if len(precision_words) == 1:
            return _one(x, self.packed[0], self.meta[0], precision_words[0], None, bias, self.slices, self.exponents[0])
        biases = [] if bias is None else list(bias.split(self.sizes))
        return _many(x, self.packed, self.meta, precision_words, [], biases, self.slices, self.exponents)

    def mixed(
        self, layer: Any, rows: torch.Tensor, bias: torch.Tensor | None, precision_words: list[torch.Tensor]
    ) -> torch.Tensor:
        """The product of rows some of which are at 16 bits, or all of which are with 8-bit activations."""
        full = [self.full_rows.of(row) for row in self.rows]
        eight = any(bool(has_eight(w).any()) for w in precision_words)
        masks = [f if isinstance(f, torch.Tensor) else torch.full((len(rows),), f) for f in full]
        some = ~torch.stack(masks).all(0)
        y = rows.new_empty(len(rows), sum(self.sizes))
        if some.any():  # in a row of which only some parts are at 16 bits, these are computed at the lowest, in vain
            lowest = self.model.nesting.slices[0]
            low = [torch.where(m, lowest, w)[some] for m, w in zip(masks, precision_words, strict=True)]
            y[some] = self.narrow(rows[some], bias, low)
        end = 0
        for mask, words, size in zip(masks, precision_words, self.sizes, strict=True):
            end += size
            if not mask.any():
                continue
            x_full = rows[mask]
            if eight:
                low_x = eight_bits(x_full, self.model.nesting.group_size).to(rows.dtype)
                x_full = torch.where(has_eight(words[mask])[:, None], low_x, x_full)
            y[mask, end - size : end] = layer.cpu_linear(x_full, layer.weight, bias)[:, end - size : end]
        return y
