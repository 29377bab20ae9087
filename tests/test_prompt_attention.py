"""The Triton kernel of a prompt's attention over sealed pages, against torch's attention page by page."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from qbe.kernels.kv_blocks import sealed_pages
from qbe.kernels.reference.kv_pages import rearrange
from qbe.kvcache.allocator import PageAllocator
from qbe.kvcache.pages import PAGE_SIZE, KVShape, PagePool, pages_for
from qbe.kvcache.prompt import Prompt, attend_by_page
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
    if INTERPRET and dtype == torch.bfloat16:
        pytest.skip("the interpreter cuts bfloat16 instead of rounding it")
    from qbe.kernels.triton.prompt_attention import prompt_attention

    shape = KVShape(2, 40, 24)
    generator = torch.Generator().manual_seed(start)
    total = pages_for(start + count)
    pool = PagePool([shape], 2 * total, dtype, torch.device(DEVICE))
    allocator = PageAllocator(2 * total, pool.full)
    formats = [pool.format((bits[i % len(bits)],), Counter()) for i in range(total)]
    pages = [p for f in formats for p in allocator.allocate(1, f)]
    pool.memory.fill_(255)  # NaN, whatever it is read as
    for i, page in enumerate(pages):
        used = min(PAGE_SIZE, start + count - i * PAGE_SIZE)
        frame = (page.address if page.frame is None else page.frame) // pool.page_bytes
        for memory in (pool.keys[0], pool.values[0]):
            memory[frame, :, :used] = torch.randn(2, used, memory.shape[-1], generator=generator).to(DEVICE, dtype)
    pool.seal(pool.to_seal(pages[: (start + count) // PAGE_SIZE]))
    for page in pages[: sealed_pages(start // PAGE_SIZE)]:
        allocator.seal(page)
    prompt = Prompt.of(0, count, start, pages, torch.device(DEVICE))
    query = torch.randn(count, 6, 40, generator=generator).to(DEVICE, dtype).transpose(0, 1)[None]
    expected = attend_by_page(pool, 0, prompt, query, 0.2, window, softcap)
    memory = pool.memory
    if INTERPRET:  # the pool has sealed its pages as a CPU's kernels read them
        memory = rearrange(memory, pool.words[0], prompt.entries, shape.sizes, dtype.itemsize)
    found = prompt_attention(
        query[0], memory, pool.words[0], prompt.entries, prompt.frames, start, shape.sizes, 0.2, window or 0,
        softcap or 0.0,
    )  # fmt: skip
    torch.testing.assert_close(found[None], expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
