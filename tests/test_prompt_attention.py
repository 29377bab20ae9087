"""The Triton kernel of a prompt's attention over quantised pages, against torch's attention page by page."""

from __future__ import annotations

import pytest
import torch

from kv_samples import prompt_in_pages
from qbe.kernels.reference.kv_pages import rearrange
from qbe.kvcache.pages import KVShape
from qbe.kvcache.prompt import attend_by_page
from test_triton_kernel import CUDA, DEVICE, INTERPRET, on_device, run_in_interpreter

MIXED = [4, (2, 16), 8, 68, 16, 66, 2]
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.mark.skipif(CUDA or INTERPRET, reason="the tests below run here directly")
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@on_device
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("start", "count", "window", "softcap", "bits"),
    [
        (0, 150, None, None, MIXED),
        (100, 2, None, None, [4]),
        (64, 64, None, 3.0, MIXED),
        (290, 100, 70, None, MIXED),
        (470, 140, None, None, [4, 2]),
        (500, 100, 70, None, MIXED),
        (130, 80, 5, 3.0, [2, 16]),
    ],
)
def test_the_kernel_is_attention_page_by_page(dtype, start, count, window, softcap, bits) -> None:
    """With sinks where the start is a round number."""
    if INTERPRET and dtype == torch.bfloat16:
        pytest.skip("the interpreter cuts bfloat16 instead of rounding it")
    from qbe.kernels.triton.attention.prompt import prompt_attention

    shape = KVShape(2, 40, 24)
    pool, prompt, query = prompt_in_pages(shape, 6, start, count, bits, dtype, DEVICE)
    sinks = None if start % 100 else torch.tensor([-torch.inf, -2.0, 0.0, 1.0, 3.0, 60.0], device=DEVICE)
    expected = attend_by_page(pool, 0, prompt, query, 0.2, window, softcap, sinks)
    memory = pool.memory
    if INTERPRET:  # the pool has quantised its pages as a CPU's kernels read them
        memory = rearrange(memory, pool.head_offsets[0], prompt.block_ids, shape.sizes, dtype.itemsize)
    found = prompt_attention(
        query[0], memory, pool.head_offsets[0], prompt.block_ids, prompt.staging_pages, start, shape.sizes, 0.2,
        window or 0, softcap or 0.0, sinks,
    )  # fmt: skip
    torch.testing.assert_close(found[None], expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
