"""Which kernel of a CPU runs when: the compiled one (nested.c), or torch's own operations.

Everything that is decided by rows, dtypes and what the processor has is decided here. torch_ops.cpp, which calls the
compiled kernel without Python in between, is told the same bounds (`qbe.kernels.cpu.native`). How the compiled kernel
then multiplies (FEW_ALIKE, TILED, FEW_TILED and INT16_ROWS in job.c, dot_tiles.c, nested.c and dot_winograd.c) is its
own.

nested_linear(s)     compiled: fewer rows than `many_rows`, and fewer than `many_full` of them at 16 bits; with AVX-512
                     any number of rows whose result is float32
                     torch: the rows of a precision of which a call has `many_rows`, by a weight made for them, and rows
                     at 16 bits
paged attention,     compiled: float32 and bfloat16
pages                reference: other dtypes, and without a compiler
mamba2_step          compiled: likewise, and rows of a state in whole vectors
nested_experts       as nested_linear, by the rows of each expert
prompt attention     compiled: bfloat16 with AVX-512 and its instructions for bfloat16 (Cascade Lake and Ice Lake lack
                     them), but no tiles (AMX), which torch's own attention uses
"""

from __future__ import annotations

import functools
import sys

import torch

from qbe.format.state_rows import LANES
from qbe.hardware import detect
from qbe.kernels.cpu import build
from qbe.kernels.cpu.geometry import DTYPES, ROW_DTYPES
from qbe.kernels.reference.activations import weight_bits
from qbe.sites import FULL_BITS

# From this many rows on torch's product wins (benchmarks/cpu_crossover.py): at 16 bits, and without VNNI with a weight
# dequantised for it.
MANY_ROWS = {torch.float32: 12, torch.bfloat16: 16}
# The same at 16 bits with AVX-512 and its bfloat16 where torch has no tiles: SmolLM2's layers take 27 ms in place of 33
# at 16 rows, 32 in place of 35 at 24, as much at 30 (one thread of an AMD EPYC with Zen 5).
FULL_ROWS = 24
MOST_STATE = 1024  # numbers of a row of a recurrent state (MOST_STATE in state_rows.c)


def many_rows(dtype: torch.dtype) -> int:
    """From this many rows on the compiled kernel does not serve a call by itself: 0 without one for that dtype."""
    path = build.backend()
    if path in ("amx", "avx512"):
        return sys.maxsize if dtype in ROW_DTYPES else 0
    return 0 if path == "torch" else MANY_ROWS.get(dtype, 0)


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for products of bfloat16."""
    return "bf16" in detect(torch.device("cpu")).extensions


def many_full(dtype: torch.dtype) -> int:
    """The same of rows at 16 bits, which the compiled kernel does not read in float16."""
    wide = build.backend() == "avx512" and dtype is torch.bfloat16 and multiplies_bfloat16()
    return FULL_ROWS if wide else MANY_ROWS.get(dtype, 1)


def multiplies(dtype: torch.dtype) -> bool:
    """Whether rows of this dtype are multiplied as they are; else as float32, rounded once: float16 without AVX-512."""
    return dtype in MANY_ROWS or many_rows(dtype) > 0


def few_enough(bits: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the compiled kernel takes a call with these precision words: fewer rows, and fewer of them at 16 bits."""
    count, full = bits.shape[0], many_full(dtype)
    return count < many_rows(dtype) and (count < full or int((weight_bits(bits) >= FULL_BITS).sum()) < full)


def dequantises(dtype: torch.dtype) -> bool:
    """Whether the compiled kernel writes a nested weight out in this dtype."""
    return build.backend() != "torch" and dtype in ROW_DTYPES


def any_rows_in_float32() -> bool:
    """Whether the compiled kernel takes any number of rows whose result is to be float32."""
    return build.backend() in ("avx512", "amx")


def reads_pages(*dtypes: torch.dtype) -> bool:
    """Whether the compiled kernels serve queries, keys and values of these dtypes; else it is the slow reference."""
    return build.backend() != "torch" and dtypes[0] in DTYPES and all(dtype is dtypes[0] for dtype in dtypes)


def steps_mamba2(dtype: torch.dtype, size: int) -> bool:
    """Whether the compiled kernel steps Mamba-2 layers with states of rows of this size; else it is the reference."""
    return build.backend() != "torch" and dtype in DTYPES and size % LANES == 0 and 0 < size <= MOST_STATE


def attends_prompts(query: torch.Tensor, softcap: float) -> bool:
    """Whether `prompt_attention` takes this; torch's attention, which multiplies tiles where there are any, has the
    rest."""
    return (
        query.dtype is torch.bfloat16
        and query.device.type == "cpu"
        and softcap == 0
        and query.shape[-1] % 2 == 0
        and build.backend() == "avx512"
        and multiplies_bfloat16()
    )


def measures_difficulty(logits: torch.Tensor) -> bool:
    """Whether the compiled kernel reads how hard tokens are to predict from logits `[n, vocabulary]`."""
    in_order = logits.stride(1) == 1 or logits.shape[1] <= 1
    return build.backend() != "torch" and logits.dtype == torch.float32 and in_order
