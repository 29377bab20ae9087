"""Which kernel of a GPU runs when: Triton's or CUDA C++'s, for how many rows, in which layout and dtype.

Everything that is decided by these is decided here, without Triton: the store and compiled graphs ask, too. How a
kernel is then launched (tiles, splits, warps) is its own: `qbe.kernels.triton.linear.tiled.configs` and what was tuned.

nested_linear(s)     uniform     the host knows that all rows read one precision word: the weight once, then a
                                 library's product
                     canonical   packed has two dimensions: what was not brought into the tiled layout, small matrices
  tiled layout:      decode      up to 16 rows, 4 if rows may differ by their company (`batch_invariant`): integer
                                 products, every row at its own precision
                     batch       up to 255: float16 products, a pass for each precision of a tile
                                 (either: up to three weights that read the same x in one launch)
                     prefill     from 256: the weight once for each precision, then a dense product
                     float32     exact, not fast
nested_experts       Triton's, whatever the rows (`qbe.kernels.ops.experts.nested`)
paged attention      CUDA C++ where it has a kernel (`decode_attention.serves`: Hopper's instructions, heads of 64 or
                     128), else Triton; bounded attention is Triton's
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch

DECODE_ROWS = 16  # of the tiled layout: up to here every row is multiplied at its own precision
FEW_ROWS = 4  # and up to here that is the fastest, too (H200, every row at 4 bits, at 8 likewise)
PREFILL_ROWS = 256  # of the tiled layout: from here the weight is dequantised once for all rows
# from here on the weight is made once, when the host knows the precision words of all rows to be the same
UNIFORM_ROWS = 256
SHARED_TILE_ROWS = 64  # of the canonical layout: up to here rows share one tile and codes are multiplied undequantised
MOST_MERGED = 3  # weights of one launch
WHOLE_ROW = 16384  # inputs, padded, of a row that one program of a norm or a gate holds

LinearKernel = Literal["canonical", "decode", "batch", "prefill", "float32"]


def linear_kernel(
    rows: int, dtype: torch.dtype, tiled: bool, original: torch.dtype | None = None, batch_invariant: bool = True
) -> LinearKernel:  # fmt: skip
    """Which kernel multiplies so many rows of that dtype, at least one, whatever their precision words.

    Args:
        tiled: whether the weight is in the tiled layout (`qbe.kernels.triton.linear.tiled.layout`).
        original: dtype of the 16-bit weight, if there is one.
        batch_invariant: whether a row of few has to come out the same, bit for bit, whatever rows are beside it.
    """
    if not tiled:
        return "canonical"
    if dtype == torch.float32:
        return "float32"
    if rows >= PREFILL_ROWS and original in (None, dtype):
        return "prefill"
    return "decode" if rows <= (DECODE_ROWS if batch_invariant else FEW_ROWS) else "batch"


def input_form(
    rows: int, dtype: torch.dtype, tiled: bool, weights: int, batch_invariant: bool = True
) -> Literal["quantised", "half"] | None:
    """In which form one launch for so many weights reads its rows; None: as they are, or there is no such launch."""
    if rows == 0 or weights > MOST_MERGED:
        return None
    kernel = linear_kernel(rows, dtype, tiled, batch_invariant=batch_invariant)
    return "quantised" if kernel == "decode" else "half" if kernel == "batch" else None


def merges(rows: int, dtype: torch.dtype, tiled: bool, weights: int) -> bool:
    """Whether one launch of some kernel does."""
    return 0 < rows < PREFILL_ROWS and 1 < weights <= MOST_MERGED and tiled and dtype != torch.float32


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    memory: torch.Tensor,
    head_offsets: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    entropy: torch.Tensor,
    scaling: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None = None,
    cuts: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Of `qbe.kernels.ops.paged_attention`: with `cuts` `shared_attention`, which Triton's kernel does not need; with
    `batch_invariant` the op of that name. Any head sizes, any ratio of query to key heads up to 64.
    """
    from qbe.kernels.cuda import decode_attention
    from qbe.kernels.triton.attention import paged as in_triton

    where = memory, head_offsets, slots, block_tables, lengths, entropy
    if decode_attention.serves(query, key, value, softcap):
        count = in_triton.processors(query.device)
        return decode_attention.launch(
            query, key, value, *where, scaling, window, softcap, sinks, count, cuts, batch_invariant
        )
    return in_triton.paged_attention(query, key, value, *where, scaling, window, softcap, sinks, batch_invariant)


def shared_attention(*arguments: Any) -> torch.Tensor:
    """The op of that name, whose cuts come before sinks."""
    first, cuts, sinks = arguments[:12], arguments[12], arguments[13] if len(arguments) > 13 else None
    return paged_attention(*first, sinks=sinks, cuts=cuts)  # type: ignore[misc]


batch_invariant_attention = functools.partial(paged_attention, batch_invariant=True)
