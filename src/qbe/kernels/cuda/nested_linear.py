"""`qbe::nested_linear` and `qbe::nested_linears` on weights in the layout of fragments (`fragments`).

up to 128 rows     linear.cu, 32 rows at a time: every row at its own precision, one launch for up to three weights
beyond             dense.cu: the weight once for each precision, then a dense product for the rows that read it
float32            the same, multiplied by torch: exact, not fast
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qbe.errors import QBEError
from qbe.kernels.cuda import linear
from qbe.kernels.cuda.dense import dequantise
from qbe.kernels.cuda.fragments import group_size_of
from qbe.sites import FULL_BITS

FEW_ROWS = 128  # up to here weights are read anew for every 32 rows
PRECISIONS = (4, 6, 8)
CHUNK_ROWS = 8192  # rows of one dense launch
_ANY = 2**30  # beyond every width


def nested_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    meta: torch.Tensor,
    bits: torch.Tensor,
    original: torch.Tensor | None,
    bias: torch.Tensor | None,
    exponent: int,
    wide: bool = False,
) -> torch.Tensor:
    """y[r] = x[r] @ W(bits[r]).T + bias. Arguments and result as the custom op's (`qbe.kernels.ops`)."""
    originals, biases = [] if original is None else [original], [] if bias is None else [bias]
    return nested_linears(x, [packed], [meta], [bits], originals, biases, [exponent], wide)


def nested_linears(
    x: torch.Tensor,
    packed: Sequence[torch.Tensor],
    meta: Sequence[torch.Tensor],
    bits: Sequence[torch.Tensor],
    originals: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    exponents: Sequence[int],
    wide: bool = False,
) -> torch.Tensor:
    """See `qbe.kernels.ops.merged_linear.nested_linears`; `wide` gives float32.

    Raises:
        QBEError: x in another dtype than float16, bfloat16 or float32, or an original in pageable host memory.
    """
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise QBEError(f"nested_linear takes float16, bfloat16 or float32 inputs, not {x.dtype}")
    if any(o.device != x.device and not o.is_pinned() for o in originals):
        raise QBEError("the 16-bit original lies in pageable host memory, which a GPU cannot read: pin it first")
    outputs, count = [m.shape[1] for m in meta], len(packed)
    k = x.shape[-1]
    rows = x.reshape(-1, k).contiguous()
    m = rows.shape[0]
    y = torch.empty(m, sum(outputs), dtype=torch.float32 if wide else x.dtype, device=x.device)
    precision_words = [b.contiguous() for b in bits]
    whole: Sequence[torch.Tensor | None] = originals or [None] * count
    added: Sequence[torch.Tensor | None] = biases or [None] * count
    same = all(t is None or t.dtype == x.dtype for t in (*whole, *added))
    if y.numel() and m <= FEW_ROWS and x.dtype != torch.float32 and same:
        for begin in range(0, m, linear.MOST_ROWS):
            part = slice(begin, begin + linear.MOST_ROWS)
            for first in range(0, count, linear.MOST_WEIGHTS):
                some = slice(first, first + linear.MOST_WEIGHTS)
                linear.linears(
                    rows[part], packed[some], [w[part] for w in precision_words[some]], whole[some], added[some],
                    outputs[some], exponents[some], y[part, sum(outputs[:first]) :],
                )  # fmt: skip
    elif y.numel():
        column = 0
        for i, n in enumerate(outputs):
            y[:, column : column + n] = _many(
                rows, packed[i], precision_words[i], whole[i], added[i], n, exponents[i], y.dtype
            )
            column += n
    return y.view(*x.shape[:-1], y.shape[1])


def _many(
    x: torch.Tensor,
    packed: torch.Tensor,
    precision_words: torch.Tensor,
    original: torch.Tensor | None,
    bias: torch.Tensor | None,
    n: int,
    exponent: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Of many rows, or in float32; the launches do not depend on the precision_words."""
    from qbe.kernels.triton.linear.round_rows import round_rows

    k = x.shape[1]
    rounded = round_rows(x, precision_words, group_size_of(packed, n, k))
    if x.dtype != torch.float32 and all(t is None or t.dtype == x.dtype for t in (original, bias)):
        return _dense(rounded, packed, precision_words, original, bias, n, exponent, dtype)
    y = torch.zeros(x.shape[0], n, dtype=torch.float32, device=x.device)
    low = precision_words & 255
    top = FULL_BITS if original is not None else _ANY
    bounds = (-_ANY, *PRECISIONS[1:], top)
    for p in range(len(PRECISIONS)):
        weight = dequantise(packed, n, k, exponent, p, torch.float32)[0][:n, :k]
        in_range = (low >= bounds[p]) & (low < bounds[p + 1])
        y = torch.where(in_range[:, None], rounded.float() @ weight.t(), y)
    if original is not None:
        y = torch.where((low >= top)[:, None], rounded.float() @ original.to(x.device).float().t(), y)
    return (y if bias is None else y + bias.float()).to(dtype)


def _dense(
    x: torch.Tensor, packed: torch.Tensor, precision_words: torch.Tensor, original: torch.Tensor | None,
    bias: torch.Tensor | None, n: int, exponent: int, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """In x's dtype: each precision in use is dequantised once and multiplied for its rows."""
    from qbe.kernels.triton.linear.tiled.dense_kernel import dense_kernel

    k = x.shape[1]
    y = torch.empty(x.shape[0], n, dtype=dtype, device=x.device)
    weight: torch.Tensor | None = None
    tile = {"BM": 128, "BN": 256, "BK": 64, "STAGES": 3, "EVEN": k % 64 == 0, "KSTEPS": -(-k // 64), "num_warps": 8}
    top = FULL_BITS if original is not None else _ANY
    bounds = (-_ANY, *PRECISIONS[1:], top)
    for first in range(0, x.shape[0], CHUNK_ROWS):
        x_part, y_part, some = (t[first : first + CHUNK_ROWS] for t in (x, y, precision_words))
        m = x_part.shape[0]
        grid = (-(-n // 256) * -(-m // 128),)
        for p in range(len(PRECISIONS)):
            low, high = bounds[p], bounds[p + 1]
            weight, _ = dequantise(packed, n, k, exponent, p, x.dtype, wanted=(some, low, high), out=weight)
            dense_kernel[grid](
                x_part, weight, some, bias, y_part, m, n, k, weight.shape[1], low, high, **tile
            )  # fmt: skip
        if original is not None:
            dense_kernel[grid](x_part, original, some, bias, y_part, m, n, k, k, top, _ANY, **tile)
    return y
