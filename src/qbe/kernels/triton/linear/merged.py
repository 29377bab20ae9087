"""`qbe::nested_linears` on a GPU: up to three weights that read the same x share its conversion and one launch.

At batch 1 a launch costs its bytes and a fixed 4 to 6 us, which is most of what a small matrix (keys, values) takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qbe.format.layout import SliceLayout
from qbe.kernels.cuda.dispatch import MOST_MERGED, linear_kernel, merges
from qbe.kernels.triton.linear.nested import nested_linear
from qbe.kernels.triton.linear.tiled.batch_kernel import batch_three_kernel
from qbe.kernels.triton.linear.tiled.configs import BATCH, DECODE
from qbe.kernels.triton.linear.tiled.decode_kernel import decode_three_kernel
from qbe.kernels.triton.linear.tiled.half import half_bytes
from qbe.kernels.triton.linear.tiled.launch import half_rows, quantised, split_launch, three
from qbe.kernels.triton.linear.tiled.layout import group_size_of, padded_shape
from qbe.kernels.triton.linear.tiled.row_loop import packed_rows
from qbe.kernels.tuning.tunable import Config


def nested_linears(
    x: torch.Tensor,
    packed: Sequence[torch.Tensor],
    meta: Sequence[torch.Tensor],
    bits: Sequence[torch.Tensor],
    originals: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    slices: Sequence[int],
    exponents: Sequence[int],
    batch_invariant: bool = True,
    config: Config | None = None,
    ready: torch.Tensor | None = None,
    float32_output: bool = False,
) -> torch.Tensor:
    """See `qbe.kernels.ops.merged_linear.nested_linears`. Prompts, float32 and other layouts take a call for each
    weight.

    `config` is what a trial launches with; by itself the best one known. `ready` is x in the form that the
    kernel reads (`qbe.kernels.cuda.dispatch.input_form`), if that is made.
    `float32_output` gives float32, of a single weight.
    """
    rows = x.reshape(-1, x.shape[-1])
    tiled = all(p.dim() == 1 for p in packed)
    if not merges(len(rows), x.dtype, tiled, len(packed)):
        parts = [
            nested_linear(
                x, p, meta[i], bits[i], originals[i] if originals else None, biases[i] if biases else None, slices,
                exponents[i], float32_output, batch_invariant, ready=ready,
            )
            for i, p in enumerate(packed)
        ]  # fmt: skip
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
    layout = SliceLayout.of(slices)
    rows, (m, k) = rows.contiguous(), rows.shape
    outputs = [n.shape[1] for n in meta]
    group = group_size_of(packed[0], outputs[0], k, layout)
    inputs = padded_shape(outputs[0], k, layout)[1]
    y = torch.empty(m, sum(outputs), dtype=x.dtype, device=x.device)
    few = linear_kernel(m, x.dtype, True, batch_invariant=batch_invariant) == "decode"
    config = config or (DECODE if few else BATCH).config(
        x.device, m, tuple(outputs), k, layout.slices, group, x.dtype, bool(originals), bool(biases)
    )
    words = [b.contiguous() for b in bits]
    if ready is None:
        ready = quantised(rows, inputs, group) if few else half_rows(rows, words, inputs, group)
    grid, units, constants, sums = split_launch(y, outputs, group, layout, config)
    n = [*outputs, 0][:MOST_MERGED]
    matrices = (
        *three(packed), *three(words), *three(originals), *three(biases), y, sums, m, *n, k, inputs,
        *[*exponents, 0][:MOST_MERGED], units,
    )  # fmt: skip
    if few:
        decode_three_kernel[grid](rows, ready, *matrices, **constants, ROWS=packed_rows(m))
    else:
        batch_three_kernel[grid](rows, ready, half_bytes(m, inputs), *matrices, **constants)
    return y.view(*x.shape[:-1], y.shape[1])


def converted_linears(
    x: torch.Tensor,
    ready: torch.Tensor,
    packed: Sequence[torch.Tensor],
    meta: Sequence[torch.Tensor],
    bits: Sequence[torch.Tensor],
    originals: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    slices: Sequence[int],
    exponents: Sequence[int],
    float32_output: bool = False,
    batch_invariant: bool = True,
) -> torch.Tensor:
    """See `qbe.kernels.ops.fused`."""
    lists = packed, meta, bits, originals, biases
    return nested_linears(x, *lists, slices, exponents, batch_invariant, ready=ready, float32_output=float32_output)
