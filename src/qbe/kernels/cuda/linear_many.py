"""`qbe::nested_linear` of more rows than a few, on weights in fragments: shared or exact rows, and originals."""

from __future__ import annotations

import torch

from qbe.kernels.cuda import many_rows
from qbe.kernels.cuda.row_order import row_order
from qbe.sites import FULL_BITS

CAPABILITY = (9, 0)  # wgmma is Hopper's alone
_ANY = 2**30  # beyond every width


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for x of that type on the device."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and dtype in (torch.float16, torch.bfloat16)
        and torch.cuda.get_device_capability(device) == CAPABILITY
    )


def linear_many(
    x: torch.Tensor,
    packed: torch.Tensor,
    precision_words: torch.Tensor,
    original: torch.Tensor | None,
    bias: torch.Tensor | None,
    n: int,
    exponent: int,
    dtype: torch.dtype,
    shared: bool = False,
    eight: bool = False,
    precisions: tuple[int, ...] = many_rows.PRECISIONS,
) -> torch.Tensor:
    """y = x @ W(precision_words).T + bias; the launches do not depend on the precision_words.

    Args:
        x: float16 or bfloat16 [M, K], M at least 1; rows of 8-bit activations are rounded already, unless `eight`.
        packed: uint8 [1, 1, bytes] (`qbe.kernels.cuda.fragments`).
        precision_words: int32 [M], precision words.
        original: [n, K] in x's dtype for rows at 16 bits; None serves them by the widest precision.
        bias: [n] in x's dtype or None.
        dtype: of y, x's or float32.
        shared: all rows are read at the highest precision of any; else each at its own.
        eight: both sides in int8 with a scale per row (`qbe.kernels.reference.eight_bit_rows`); with `shared` only.
        precisions: that the weight has.

    Returns:
        [M, n].
    """
    assert shared or not eight, "rows of several precisions have no int8 product"
    m, k = x.shape
    y = torch.empty(m, n, dtype=dtype, device=x.device)
    rows = x.contiguous()
    if k % 8 or rows.data_ptr() % 16:
        rows = torch.nn.functional.pad(rows, (0, -k % 8)) if k % 8 else rows.clone()
    # A weight's padding is a whole group, so that x with a few more zeros has the same fragments.
    if shared:
        many_rows.multiply(rows, packed, precision_words, bias, exponent, y, eight=eight, precisions=precisions)
    else:
        tile = 128 if m <= many_rows.SPLIT_ROWS else many_rows.DENSE_ROWS
        order, place = row_order(precision_words, tile, precisions)
        placed = rows.new_zeros(len(order), rows.shape[1]).index_copy_(0, place, rows)
        many_rows.multiply(placed, packed, precision_words, bias, exponent, y, order, precisions=precisions)
    if original is not None:
        from qbe.kernels.triton.linear.tiled.dense_kernel import dense_kernel

        tile_of = {
            "BM": 128, "BN": 256, "BK": 64, "STAGES": 3, "EVEN": k % 64 == 0, "KSTEPS": -(-k // 64), "num_warps": 8,
        }  # fmt: skip
        grid = (-(-n // 256) * -(-m // 128),)
        dense_kernel[grid](x.contiguous(), original, precision_words, bias, y, m, n, k, k, FULL_BITS, _ANY, **tile_of)
    return y
