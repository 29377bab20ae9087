"""The work of `qbe bench kv` on one set of cases: a decode step's attention, a prompt's, quantising; and torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as sdpa

from qbe.bench.kv_cases import Cases, KVCase
from qbe.bench.machine import Roofline
from qbe.bench.measure import Failed, Sample, attempt
from qbe.bench.passes import check, whole
from qbe.format.kv_blocks import quantised_pages
from qbe.kernels.ops.paged_attention import paged_attention, shared_attention
from qbe.kvcache.pages import PAGE_SIZE
from qbe.kvcache.prompt import PromptSpan, attend_prompt
from qbe.kvcache.shares import Shares

SDPA, SDPA_GROUPED = "SDPA", "SDPA, a group's queries as rows"
TOLERANCE = 0.05  # relative, between our result and torch's over the same numbers


def _flash(device: torch.device) -> AbstractContextManager[None]:
    """On a GPU, only torch's flash kernel may serve."""
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if device.type == "cuda" else nullcontext()


def halved(batch: int, context: int) -> tuple[list[int], list[int]]:
    """Pages before the new token of sequences of which each has half of those of the one before, and equal numbers."""
    pages = [max(1, (context - 1) // PAGE_SIZE >> i) for i in range(batch)]
    each, more = divmod(sum(pages), batch)
    return pages, [each + (i < more) for i in range(batch)]


class Decode:
    """One new token for each sequence, attending at every layer in turn."""

    def __init__(self, cases: Cases, heads: int) -> None:
        self.cases, self.heads, pool, shape = cases, heads, cases.pool, cases.shape
        self.device, self.scaling = pool.device, shape.key_dim**-0.5
        torch.manual_seed(1)
        make = {"dtype": pool.dtype, "device": pool.device}
        self.query = torch.randn(cases.batch, heads, shape.key_dim, **make)  # type: ignore[call-overload]
        self.key = torch.randn(cases.batch, shape.kv_heads, shape.key_dim, **make)  # type: ignore[call-overload]
        self.value = torch.randn(cases.batch, shape.kv_heads, shape.value_dim, **make)  # type: ignore[call-overload]
        self.entropy = torch.empty(cases.batch, heads, device=pool.device)
        self.lengths = torch.full((cases.batch,), cases.context, device=pool.device)
        self.shares = Shares(pool, [None] * cases.layers) if pool.device.type == "cuda" else None
        self.slots = cases.full[:, -1] + (cases.context - 1) % PAGE_SIZE

    def ours(self, case: KVCase, pages: Sequence[int] | None = None) -> Sample:
        """All layers over this case's pages, once their result is known to be right.

        Args:
            pages: that each sequence has before its new token, fewer than a table has; None: the whole context.
        """
        where = self.slots, case.block_tables, self.lengths
        if pages is not None:
            rows, pages_now = torch.arange(len(pages)), torch.tensor(pages)
            block_tables = case.block_tables.clone()
            block_tables[rows, pages_now] = self.cases.full[:, -1]
            where = self.cases.full[:, -1], block_tables, (pages_now * PAGE_SIZE + 1).to(self.device)
        with torch.inference_mode():
            out = self._step(where)[0]
            read = self.cases.pool.read(0, where[1][0])
            expected = self._grouped(self.query[:1], *(t[:, :, : int(where[2][0])] for t in read))
        check(out[:1], expected, TOLERANCE)
        return whole(lambda: self._step(where), self.device)

    def peers(self) -> dict[str, Sample | Failed]:
        """torch's attention over the numbers of 16 bits, one after the other in memory; nothing is written there."""
        try:
            cache = self._contiguous()
        except (RuntimeError, MemoryError) as error:
            return dict.fromkeys((SDPA, SDPA_GROUPED), Failed.because(error))

        def plain(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return sdpa(query[:, :, None], keys, values, scale=self.scaling, enable_gqa=True)

        def run(call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
            with _flash(self.device):
                return [call(self.query, k, v) for k, v in cache]

        return {
            name: attempt(lambda c=call: whole(lambda: run(c), self.device))  # type: ignore[misc]
            for name, call in ((SDPA, plain), (SDPA_GROUPED, self._grouped))
        }

    def seconds(self, case: KVCase, limits: Roofline, part: float = 1.0) -> float:
        """The limit of a pass: query and result and that part of the pages move once."""
        shape, layers = self.cases.shape, self.cases.layers
        size = self.query.element_size() * self.heads * (shape.key_dim + shape.value_dim)
        work = 2 * self.heads * self.cases.context * (shape.key_dim + shape.value_dim)
        batch = self.cases.batch * layers
        return limits.seconds(part * case.nbytes + batch * size, batch * work * part)

    def _step(self, where: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        """All layers at these slots, tables and lengths, as an engine's step has them."""
        cases, layers = self.cases, range(self.cases.layers)
        new, numbers = (self.query, self.key, self.value, cases.pool.memory), (self.scaling, 0, 0.0)
        head_offsets = [w for w in cases.pool.head_offsets if w is not None]
        if self.shares is None or not self.shares.pay(*where[1].shape):
            return [paged_attention(*new, head_offsets[i], *where, self.entropy, *numbers) for i in layers]
        self.shares.find(*where[1:])
        cuts = [c for c in self.shares.cuts if c is not None]
        return [shared_attention(*new, head_offsets[i], *where, self.entropy, *numbers, cuts=cuts[i]) for i in layers]

    def _grouped(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Queries that share a key head become rows of one product, and no key is read twice."""
        packed = query.view(query.shape[0], keys.shape[1], -1, query.shape[-1])
        return sdpa(packed, keys, values, scale=self.scaling).reshape(*query.shape[:2], -1)

    def _contiguous(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        layers = []
        for layer in range(self.cases.layers):
            pairs = [self.cases.pool.read(layer, row) for row in self.cases.full]
            layers.append(
                tuple(torch.cat(t)[:, :, : self.cases.context].contiguous() for t in zip(*pairs, strict=True))
            )
        return layers  # type: ignore[return-value]


class Prefill:
    """The last `count` tokens of the first sequence, attending to the pages before them and to each other."""

    def __init__(self, cases: Cases, heads: int, count: int) -> None:
        self.cases, self.heads, self.count, pool, shape = cases, heads, count, cases.pool, cases.shape
        self.device, self.scaling, self.start = pool.device, shape.key_dim**-0.5, cases.context - count
        torch.manual_seed(2)
        self.query = torch.randn(1, heads, count, shape.key_dim, dtype=pool.dtype, device=pool.device)
        keys, values = pool.read(0, cases.full[0])
        self.keys, self.values = keys[:, :, : cases.context], values[:, :, : cases.context]

    def ours(self, case: KVCase) -> Sample:
        """One layer; only the first one is used, whose pages a long prompt reads again and again."""
        formats = frozenset(p.format for p in case.pages)
        staging_pages = self.cases.full[0, quantised_pages(self.start // PAGE_SIZE) :]
        prompt = PromptSpan(0, self.count, self.start, case.block_tables[0], staging_pages, formats)
        key, value = self.keys[:, :, self.start :], self.values[:, :, self.start :]

        def run() -> torch.Tensor:
            return attend_prompt(self.cases.pool, 0, prompt, self.query, key, value, self.scaling, None, None)

        if min(case.bits) >= 8:  # fewer bits are too far from 16 to tell an error
            with torch.inference_mode():
                check(run(), self._torch().transpose(1, 2), TOLERANCE)
        return whole(run, self.device)

    def peers(self) -> dict[str, Sample | Failed]:
        """torch's causal attention over the numbers of 16 bits, one after the other in memory."""

        def run() -> torch.Tensor:
            with _flash(self.device):
                return self._torch()

        return {SDPA: attempt(lambda: whole(run, self.device))}

    def seconds(self, case: KVCase, limits: Roofline) -> float:
        """The limit: keys and values are read once, and each token multiplies with those before it."""
        shape = self.cases.shape
        moved = case.nbytes / self.cases.layers / self.cases.batch + 2 * self.query.nbytes
        seen = self.count * (self.start + self.count / 2)
        return limits.seconds(moved, 2 * self.heads * seen * (shape.key_dim + shape.value_dim))

    def _torch(self) -> torch.Tensor:
        mask = causal_lower_right(self.count, self.cases.context)
        return sdpa(self.query, self.keys, self.values, mask, scale=self.scaling, enable_gqa=True)


class Quantise:
    """The full pages of the first sequence, brought from staging pages to their own bytes at all layers."""

    def __init__(self, cases: Cases) -> None:
        self.cases, self.count = cases, cases.full.shape[1] - 1
        self.moved = self.count * cases.pool.page_bytes

    def ours(self, case: KVCase) -> Sample:
        """Again to the bytes where they are."""
        both = torch.stack([self.cases.full[0, :-1], case.block_tables[0, :-1]])
        return whole(lambda: self.cases.pool.quantise(both), self.cases.pool.device)

    def peers(self) -> dict[str, Sample | Failed]:
        """torch's copy of so many bytes as the staging pages have."""
        source = self.cases.pool.memory[: self.moved]

        def build() -> Sample:
            target = torch.empty_like(source)
            return whole(lambda: target.copy_(source), self.cases.pool.device)

        return {"copy at 16 bits": attempt(build)}

    def seconds(self, case: KVCase, limits: Roofline) -> float:
        """The limit: staging pages are read, pages written."""
        return limits.seconds(self.moved + sum(p.format.nbytes for p in case.pages))
