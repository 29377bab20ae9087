"""Launch of `qbe::nested_linear` on a weight in the tiled layout (`qbe.kernels.triton.linear.tiled.layout`).

Which kernel runs when is in `qbe.kernels.cuda.dispatch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton

from qbe.format.layout import SliceLayout
from qbe.kernels.cuda.dispatch import MOST_MERGED, linear_kernel
from qbe.kernels.triton.linear.round_rows import round_rows
from qbe.kernels.triton.linear.tiled.batch_kernel import batch_kernel
from qbe.kernels.triton.linear.tiled.configs import BATCH, DECODE
from qbe.kernels.triton.linear.tiled.decode_kernel import decode_kernel
from qbe.kernels.triton.linear.tiled.float32_kernel import float32_kernel
from qbe.kernels.triton.linear.tiled.half import half_bytes, half_rows_kernel
from qbe.kernels.triton.linear.tiled.layout import group_size_of, padded_shape, unit
from qbe.kernels.triton.linear.tiled.prefill import prefill
from qbe.kernels.triton.linear.tiled.quantise import quantise_kernel, quantised_bytes
from qbe.kernels.triton.linear.tiled.row_loop import packed_rows
from qbe.kernels.tuning.tunable import Config

_HALF_BLOCK = 16384  # inputs of a row that `half_rows_kernel` holds at once


@cache
def early(device: torch.device) -> dict[str, bool]:
    """Whether a kernel may be launched before the one ahead of it has ended."""
    hopper = device.type == "cuda" and torch.cuda.get_device_properties(device).major >= 9
    early = hopper and torch.version.hip is None
    return {"EARLY": early, **({"launch_pdl": True} if early else {})}


def tiled_linear(
    x: torch.Tensor,
    tiled: torch.Tensor,
    bits: torch.Tensor,
    original: torch.Tensor | None,
    bias: torch.Tensor | None,
    layout: SliceLayout,
    exponent: int,
    y: torch.Tensor,
    config: Config | None = None,
    ready: torch.Tensor | None = None,
    batch_invariant: bool = True,
) -> None:
    """y = x @ W(bits).T + bias, every row at its own bits.

    Args:
        x: float16, bfloat16 or float32 [M, K], contiguous, M at least 1.
        tiled: uint8 [bytes], the weight.
        bits: int32 [M], words of precision, contiguous, on the device; read by the kernels only.
        original: [N, K] for rows at 16 bits; None serves them by the widest slice.
        y: [M, N] in x's dtype or float32, contiguous; written.
        config: to launch with, for a trial; by itself the best one known.
        ready: what `quantised` gives for x, if somebody made that already; for the decode kernel.
        batch_invariant: as the op's.
    """
    m, k = x.shape
    n = y.shape[1]
    group = group_size_of(tiled, n, k, layout)
    rows, inputs = padded_shape(n, k, layout)
    kernel = linear_kernel(m, x.dtype, True, None if original is None else original.dtype, batch_invariant)
    if kernel == "float32":
        float32_kernel[(-(-n // 32) * -(-m // 32),)](
            round_rows(x, bits, group), tiled, bits, original, bias, y, m, n, k, rows, inputs, exponent,
            PRECISIONS=layout.precisions, PARTS=layout.needed_parts, GROUP=group, EVEN=k == inputs, STEPS=inputs // 64,
            BN=32, BM=32, STAGES=2, ASM=x.device.type == "cuda", num_warps=4,
        )  # fmt: skip
        return
    if kernel == "prefill":
        prefill(round_rows(x, bits, group), tiled, bits, original, bias, layout, exponent, y)
        return
    few = kernel == "decode"
    config = config or (DECODE if few else BATCH).config(
        x.device,
        m,
        (n,),
        k,
        layout.slices,
        group,
        x.dtype,
        original is not None,
        bias is not None,
        y.dtype != x.dtype,
    )
    grid, units, constants, sums = split_launch(y, (n,), group, layout, config)
    converted = ready
    if converted is None:
        converted = quantised(x, inputs, group) if few else half_rows(x, [bits], inputs, group)
    arguments = (x, converted, tiled, bits, original, bias, y, sums, m, n, k, rows, inputs, exponent, units)
    if few:
        decode_kernel[grid](*arguments, **constants, ROWS=packed_rows(m))
    else:
        batch_kernel[grid](*arguments, **constants)


def quantised(x: torch.Tensor, inputs: int, group: int) -> torch.Tensor:
    """x [M, K] as the decode kernels read it (`qbe.kernels.triton.linear.tiled.quantise`)."""
    m, k = x.shape
    out = torch.empty(quantised_bytes(m, inputs, group), dtype=torch.uint8, device=x.device)
    quantise_kernel[(m, -(-inputs // 1024))](
        x, out, m, k, inputs, GROUP=group, GROUPS=1024 // group, num_warps=4, **early(x.device)
    )
    return out


def half_rows(x: torch.Tensor, bits: Sequence[torch.Tensor], inputs: int, group: int) -> torch.Tensor:
    """x [M, K] as the batch kernels read it, for each of up to three weights with these bits (`half`)."""
    m, k = x.shape
    size, block = half_bytes(m, inputs), min(_HALF_BLOCK, triton.next_power_of_2(inputs))
    out = torch.empty(len(bits) * size, dtype=torch.uint8, device=x.device)
    half_rows_kernel[(m, len(bits))](
        x, *three(bits), out, size, m, k, inputs, GROUP=group, BLOCK=block, num_warps=8 if block <= 8192 else 16,
        **early(x.device),
    )  # fmt: skip
    return out


def three(many: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Of each weight of a launch, the last one's again where there are fewer."""
    return [many[min(i, len(many) - 1)] if many else None for i in range(MOST_MERGED)]


def split_launch(
    y: torch.Tensor, outputs: Sequence[int], group: int, layout: SliceLayout, config: Config
) -> tuple[tuple[int, int], int, dict[str, Any], torch.Tensor]:
    """Grid, units of a part, the kernel's constants and the memory of split sums, for weights of these many outputs.

    How a sum is split is no constant of the kernels: one compilation then serves matrices of many shapes.
    """
    tile = dict(config)
    splits, units = tile.pop("SPLITS"), tile.pop("SPLIT_UNITS")
    sums = y if splits == 1 else torch.empty(splits, *y.shape, dtype=torch.float32, device=y.device)
    tiles = sum(-(-o // tile["BN"]) for o in outputs)
    constants = {
        "PRECISIONS": layout.precisions, "PARTS": layout.needed_parts, "GROUP": group, "UNIT": unit(layout),
        "SPLIT": splits > 1, "ASM": y.device.type == "cuda", **tile, **early(y.device),
    }  # fmt: skip
    return (tiles * -(-y.shape[0] // tile["BM"]), splits), units, constants, sums
