"""Launch of the Triton kernel of `qbe::nested_linear` (device code and its description: `nested_kernel`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton

from qbe.errors import QBEError
from qbe.format.layout import BLOCK, SliceLayout
from qbe.kernels.cuda.dispatch import SHARED_TILE_ROWS
from qbe.kernels.triton.linear import candidates
from qbe.kernels.triton.linear.nested_kernel import add_splits_kernel, nested_linear_kernel
from qbe.kernels.triton.linear.round_rows import round_rows
from qbe.kernels.triton.linear.tiled.launch import tiled_linear
from qbe.kernels.tuning.tunable import Config, Problem, Tunable

LEAST_ROWS = 16  # of a tile: fewer rows are launched as so many are, so that each comes out the same


@cache
def _parts(layout: SliceLayout) -> tuple[tuple[int, int, int, bool], ...]:
    """PARTS of the kernel: each part, the lowest precision that needs it, and whether it is that one's last part."""
    out = []
    for first, width in layout.parts:
        needed_by = next(i for i, p in enumerate(layout.precisions) if p > first)
        out.append((first, width, needed_by, first + width == layout.precisions[needed_by]))
    return tuple(out)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def launch_config(
    m: int, n: int, blocks: int, group_blocks: int, precisions: int, dtype: torch.dtype, device: torch.device
) -> dict[str, int | bool]:
    """Tile sizes and split of the sum over inputs for a shape. Depends on nothing that lives on the device.

    Splitting gives a matrix with few outputs enough programs to keep every multiprocessor loading.
    """
    step = 2 if group_blocks % 2 == 0 else 1
    if m > SHARED_TILE_ROWS:
        tile = 32 if dtype == torch.float32 else 128
        rows = tile if precisions <= 3 else tile // 2  # the code of more precisions needs registers
        return {
            "DEQUANTISE": True, "BLOCK_N": tile, "BLOCK_M": rows, "STEP_BLOCKS": 1, "SPLITS": 1, "SPLIT_BLOCKS": blocks,
            "STAGES": 2, "num_warps": 4 if dtype == torch.float32 else 8,
        }  # fmt: skip
    block_m = max(LEAST_ROWS, triton.next_power_of_2(m))
    block_n = 32 if dtype == torch.float32 else 64
    tiles = -(-n // block_n)
    splits = max(1, min(8, 4 * _multiprocessors(device) // tiles, blocks // 8))
    split_blocks = -(-blocks // splits)
    split_blocks = -(-split_blocks // step) * step
    return {
        "DEQUANTISE": False, "BLOCK_N": block_n, "BLOCK_M": block_m, "STEP_BLOCKS": step,
        "SPLITS": -(-blocks // split_blocks), "SPLIT_BLOCKS": split_blocks, "STAGES": 3, "num_warps": 4,
    }  # fmt: skip


def _generic(problem: Problem, device: torch.device) -> Config:
    blocks = -(-problem.inputs // problem.group_size) * problem.group_size // BLOCK
    precisions = len(SliceLayout.of(problem.slices).precisions)
    (n,) = problem.outputs
    return launch_config(problem.rows, n, blocks, problem.group_size // BLOCK, precisions, problem.dtype, device)


PLAIN = Tunable("plain", _generic, candidates.plain, candidates.valid_plain)


def nested_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    meta: torch.Tensor,
    bits: torch.Tensor,
    original: torch.Tensor | None,
    bias: torch.Tensor | None,
    slices: Sequence[int],
    exponent: int,
    float32_output: bool = False,
    batch_invariant: bool = True,
    config: Config | None = None,
    ready: torch.Tensor | None = None,
) -> torch.Tensor:
    """y[r] = x[r] @ W(bits[r]).T + bias on a GPU. Arguments and result as the custom op's
    (`qbe.kernels.ops.nested_linear`).

    One kernel reads the canonical buffer; a flat one is in the layout made for GPUs (`tiled.layout`), with faster ones.
    `bits` is read by the kernel only: the launch is the same for every content, so a captured CUDA graph serves them
    all. `original` may lie in pinned host memory; it is read only when some row asks for 16 bits. Rows that ask
    for 16 bits are served by the widest slice when the original was dropped; the engine refuses such a plan before.
    `config` is what a trial launches with; by itself the best one known. `ready` is x quantised for a flat buffer
    (`qbe.kernels.triton.linear.tiled.launch`), if that is made.

    Raises:
        QBEError: x in another dtype than float16, bfloat16 or float32, or an original in pageable host memory.
    """
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise QBEError(f"nested_linear takes float16, bfloat16 or float32 inputs, not {x.dtype}")
    if original is not None and original.device != x.device and not original.is_pinned():
        raise QBEError("the 16-bit original lies in pageable host memory, which a GPU cannot read: pin it first")
    layout = SliceLayout.of(slices)
    n, groups = meta.shape[1:]
    k = x.shape[-1]
    rows = x.reshape(-1, k).contiguous()
    m = rows.shape[0]
    y = x.new_empty(*x.shape[:-1], n, dtype=torch.float32 if float32_output else None)
    if y.numel() == 0:
        return y
    if packed.dim() == 1:
        with torch.cuda.device_of(x):
            tiled_linear(
                rows, packed, bits.contiguous(), original, bias, layout, exponent, y.view(m, n), config, ready,
                batch_invariant,
            )  # fmt: skip
        return y
    blocks = packed.shape[1] * 8 // n // BLOCK
    precision_words = bits.contiguous()
    config = config or PLAIN.config(
        x.device,
        max(m, LEAST_ROWS),
        (n,),
        k,
        layout.slices,
        blocks // groups * BLOCK,
        x.dtype,
        original is not None,
        bias is not None,
        y.dtype != x.dtype,
    )
    splits = config["SPLITS"]
    out = y if splits == 1 else torch.empty(splits, m, n, dtype=torch.float32, device=x.device)
    grid = (-(-n // config["BLOCK_N"]) * -(-m // config["BLOCK_M"]), splits)
    with torch.cuda.device_of(x):  # Triton launches on the current device; does nothing for a CPU tensor
        rows = round_rows(rows, precision_words, blocks // groups * BLOCK)
        nested_linear_kernel[grid](
            rows, packed.view(torch.int32), meta, precision_words, original, bias, out, m, n, k, blocks,
            exponent=exponent, PRECISIONS=layout.precisions, PARTS=_parts(layout), GROUP_BLOCKS=blocks // groups,
            **config,
        )  # fmt: skip
        if splits > 1:
            add_splits_kernel[(m, -(-n // 512))](out, bias, y, m, n, SPLITS=splits, BLOCK_N=512, num_warps=4)
    return y
