"""Compiles, before an engine serves, every kernel of ours that its steps can launch: no request waits for one."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import product

import torch
from torch import nn

from qbe.analysis.difficulty import difficulty
from qbe.format.kv_blocks import KV_BITS, NO_ORIGINAL
from qbe.kernels.cuda.dispatch import PREFILL_ROWS, UNIFORM_ROWS
from qbe.kernels.reference.activations import precision_word
from qbe.kvcache.attention import Bounds, DecodeLayout, attend_decode
from qbe.kvcache.cache import PagedCache
from qbe.kvcache.prompt import PromptSpan, attend_prompt
from qbe.progress import bar
from qbe.sites import ACTIVATION_GEARS, Role, SiteTable
from qbe.store.nested_tensor import NestedTensor

Launch = Callable[[], object]


@torch.inference_mode()
def compile_kernels(launches: Iterable[Launch], device: torch.device, progress: bool) -> None:
    """Compile what these calls launch in several processes, or find it in Triton's disk cache, and load it.

    Args:
        launches: made in turn, first without any effect on the device; each may need what the ones before it noticed.
        device: theirs; nothing happens on a CPU or without Triton.
        progress: show a progress bar.
    """
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return
    from qbe.kernels.tuning.compiling import CompilePool, collecting
    from qbe.kernels.tuning.tunable import recording

    with recording():  # none of them is a step's
        made: list[Launch] = []
        with collecting() as kernels:
            for launch in launches:
                launch()
                made.append(launch)
        pool = CompilePool(workers=max(1, min(16, len(os.sched_getaffinity(0)))))  # nothing else is running yet
        try:
            with bar("compiling kernels", len(kernels), progress and bool(kernels)) as advance:
                pool.compile(kernels, advance)
        finally:
            pool.close()
        for launch in made:  # one that did not compile raises here what Triton says
            launch()
    torch.cuda.synchronize(device)


def row_counts(most: int) -> list[int]:
    """Numbers of rows that stand for all up to `most`: a kernel and its configuration change at these only."""
    powers = [1 << i for i in range(max(most, 8).bit_length() + 1)]
    return sorted({min(n, most) for n in (*powers, PREFILL_ROWS - 1)})


def linear_launches(model: nn.Module, table: SiteTable, rows: int, head_rows: int) -> Iterator[Launch]:
    """Calls that together need every kernel of nested linear layers, for each kind of layer once.

    Args:
        rows: of the longest step.
        head_rows: of it that the output head sees at most.
    """
    seen: set[object] = set()
    for site in table.nested:
        if site.expert is not None:
            continue
        layer = model.get_submodule(site.name)
        weight = layer.weight
        assert isinstance(weight, NestedTensor)
        most = head_rows if site.role is Role.OUTPUT_HEAD else rows
        layout = (tuple(weight.slices), weight.group_size, weight.packed.dim() == 1)
        # A plan of one row has bits that do not lie at a multiple of 16 bytes, for which Triton compiles once more.
        aligned = weight.bits.data_ptr() % 16 == 0
        kind = (
            weight.shape,
            layout,
            weight.original is not None,
            layer.bias is not None,
            aligned,
            weight.float32_output,
            most,
        )
        if kind not in seen:
            seen.add(kind)
            for m in row_counts(most):
                yield functools.partial(_multiply, layer, m)
        uniform = (layout, aligned, weight.native)
        if uniform not in seen and weight.packed.dim() == 1 and most >= UNIFORM_ROWS:
            seen.add(uniform)
            for width in weight.layout.precisions:
                for activations in ACTIVATION_GEARS:
                    yield functools.partial(_multiply, layer, UNIFORM_ROWS, precision_word(width, activations))


def _multiply(layer: nn.Module, rows: int, uniform: int | None = None) -> torch.Tensor:
    """A call with that many rows, and the precision word that all of them read if it is known."""
    weight: NestedTensor = layer.weight  # type: ignore[assignment]
    x = torch.zeros(rows, weight.in_features, dtype=weight.logical_dtype, device=weight.packed.device)
    weight.uniform = uniform
    try:
        y: torch.Tensor = layer(x)
    finally:
        weight.uniform = None
    return y


def sampling_launches(vocabulary: int, device: torch.device) -> Iterator[Launch]:
    """Calls that together need every kernel by which tokens are chosen."""
    logits = torch.zeros(1, vocabulary, device=device)
    yield functools.partial(difficulty, logits, torch.zeros(1, dtype=torch.long, device=device))


def attention_launches(cache: PagedCache, pages: int) -> Iterator[Launch]:
    """Calls that together need every kernel of the KV cache, for each kind of attention layer once.

    They read and write the spare page only.

    Args:
        cache: through which a step has run.
        pages: that one sequence can have.
    """
    from qbe.kernels.triton.attention.paged import MOST_SPLITS, combine
    from qbe.kernels.triton.kv_cache.write_rows import write_rows

    pool = cache.pool
    spare = torch.tensor([pool.spare], device=pool.device)
    formats = frozenset([pool.format((KV_BITS[0],) * len(pool.shapes), Counter())])
    # How many parts the keys are cut into changes a kernel at powers of two only; those are put together by any number.
    widths = sorted({min(pages, 1 << i) for i in range(pages.bit_length() + 1)})
    seen: set[object] = set()
    for layer, (shape, heads, call) in enumerate(zip(pool.shapes, cache.heads, cache.calls, strict=True)):
        if shape is None or call is None or shape.latent:
            continue
        alike = (shape, heads, *call[:3], call[3] is None)
        if alike in seen:
            continue
        seen.add(alike)
        yield functools.partial(pool.quantise, torch.stack([spare, spare]), layer)
        yield functools.partial(pool.read, layer, spare)
        out = torch.zeros(1, heads, shape.value_dim, dtype=pool.dtype, device=pool.device)
        for parts in (1 << i for i in range(MOST_SPLITS.bit_length())):
            means = torch.zeros(1, parts, heads, shape.value_dim, device=pool.device)
            sums = torch.zeros(1, parts, 3, heads, device=pool.device)
            yield functools.partial(combine, means, sums, out, sums[:, 0, 0], None)
        for n in (1, 2):
            sizes = ((heads, shape.key_dim), (shape.kv_heads, shape.key_dim), (shape.kv_heads, shape.value_dim))
            q, k, v = (torch.zeros(1, h, n, d, dtype=pool.dtype, device=pool.device) for h, d in sizes)
            yield functools.partial(
                attend_prompt, pool, layer, PromptSpan(0, n, 0, spare, spare, formats), q, k, v, *call
            )
            head_offsets = pool.head_offsets[layer]
            assert head_offsets is not None
            new = k[0].transpose(0, 1), v[0].transpose(0, 1)  # as `attend_decode` has those of a speculating sequence
            yield functools.partial(write_rows, *new, pool.memory, head_offsets, spare.repeat(n))
            for width, bounded in product(widths, (False, True)):
                block_tables = torch.zeros(n, width, dtype=torch.long, device=pool.device)
                lengths = torch.ones_like(block_tables[:, 0])
                limits = torch.full((n,), float("inf"), device=pool.device)
                bounds = Bounds(block_tables + NO_ORIGINAL, limits, torch.zeros_like(block_tables[:, :1]).repeat(1, 3))
                layout = DecodeLayout(cache, spare.repeat(n), block_tables, lengths, [], bounds if bounded else None)
                yield functools.partial(attend_decode, layout, layer, q, k, v, *call)
