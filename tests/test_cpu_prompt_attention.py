"""The compiled attention of prompts against one that looks each key up and is written out in float32."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kv_samples import PAGE_SIZE, full_pages, prompt_in_pages
from qbe.format.kv_blocks import quantised_pages
from qbe.kernels.cpu import build, dispatch
from qbe.kernels.cpu.attention.prompt import prompt_attention
from qbe.kvcache.pages import KVShape, PagePool
from qbe.kvcache.prompt import PromptSpan
from qbe.sites import KVBits

pytestmark = pytest.mark.skipif(
    build.backend() != "avx512" or not dispatch.multiplies_bfloat16(), reason="needs AVX-512 with bfloat16"
)
SCALING = 0.2
FULL: list[KVBits] = [16]
MIXED: list[KVBits] = [4, 8, 68, 16, 66, 2]
ODD: list[KVBits] = [(2, 16), 4, (8, 68)]


def attended(
    pool: PagePool, prompt: PromptSpan, query: torch.Tensor, window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    shape, head_offsets = pool.shapes[0], pool.head_offsets[0]
    assert shape is not None
    assert head_offsets is not None
    assert dispatch.attends_prompts(query, 0.0)
    where = prompt.block_ids, prompt.staging_pages, prompt.start
    return prompt_attention(query[0], pool.memory, head_offsets, *where, shape.sizes, SCALING, window or 0, sinks)


def written_out(
    pool: PagePool, prompt: PromptSpan, query: torch.Tensor, window: int | None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    quantised, exact = (pool.read(0, block_ids) for block_ids in (prompt.block_ids, prompt.staging_pages))
    rows = []
    for row in range(prompt.count):
        at = prompt.start + row
        boundary = quantised_pages(at // PAGE_SIZE) * PAGE_SIZE  # that far this token sees pages as they are quantised
        begin = max(0, at - window + 1) if window else 0
        past = boundary - prompt.first_staging_page * PAGE_SIZE
        k, v = (
            torch.cat([s[0, :, begin:boundary], e[0, :, past + max(0, begin - boundary) : past + at + 1 - boundary]], 1)
            for s, e in zip(quantised, exact, strict=True)
        )
        q = query[0, :, row].float().unflatten(0, (k.shape[0], -1))
        scores = torch.einsum("hrd,hkd->hrk", q, k.float()) * SCALING
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(*scores.shape[:2], 1)], 2)
        weights = scores.softmax(-1)[..., : k.shape[1]]
        rows.append(torch.einsum("hrk,hkd->hrd", weights, v.float()).flatten(0, 1))
    return torch.stack(rows)


@pytest.mark.parametrize("window", [None, 5, 70])
@pytest.mark.parametrize(
    ("shape", "heads", "start", "count", "bits"),
    [((3, 64, 64), 9, 0, 128, FULL), ((3, 64, 64), 9, 436, 64, FULL), ((4, 40, 24), 4, 99, 1, FULL),
     ((2, 40, 24), 6, 163, 37, FULL), ((1, 128, 96), 8, 0, 65, FULL), ((2, 2, 1), 2, 0, 1, FULL),
     ((3, 64, 64), 9, 0, 330, MIXED), ((2, 40, 24), 6, 290, 100, MIXED), ((2, 40, 24), 4, 470, 140, ODD),
     ((2, 40, 24), 4, 510, 3, ODD), ((1, 80, 80), 5, 64, 64, [4]), ((2, 8, 6), 2, 576, 130, [8, 2])],
)  # fmt: skip
def test_it_is_attention(
    shape: tuple[int, int, int], heads: int, start: int, count: int, bits: Sequence[KVBits], window: int | None
) -> None:
    pool, prompt, query = prompt_in_pages(KVShape(*shape), heads, start, count, bits, torch.bfloat16)
    expected = written_out(pool, prompt, query, window)
    found = attended(pool, prompt, query, window).float()
    # Rounding: of the weights to 2^-9 of themselves, so at most that of the largest value; of the result once more.
    largest = max(float(pool.read(0, e)[1].nan_to_num().abs().max()) for e in (prompt.block_ids, prompt.staging_pages))
    torch.testing.assert_close(found, expected, rtol=2**-8, atol=largest * 2**-9)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("bits", [FULL, MIXED])
def test_sinks(bits: Sequence[KVBits], window: int | None) -> None:
    pool, prompt, query = prompt_in_pages(KVShape(2, 40, 24), 6, 290, 100, bits, torch.bfloat16)
    sinks = torch.tensor([-torch.inf, -2.0, 0.0, 1.0, 3.0, 60.0])
    found, expected = (f(pool, prompt, query, window, sinks) for f in (attended, written_out))
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=2**-6)
    assert found[:, 5].abs().max() < 1e-6


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("bits", [FULL, MIXED])
def test_a_row_does_not_depend_on_how_a_prompt_is_cut(bits: Sequence[KVBits], window: int | None) -> None:
    start, count = 50, 300
    pool, prompt, query = prompt_in_pages(KVShape(2, 64, 48), 6, start, count, bits, torch.bfloat16)
    whole = attended(pool, prompt, query, window)
    for begin, end in ((0, 1), (0, 149), (13, 77), (149, 150), (200, 300)):
        first, pages = start + begin, -(-(start + end) // PAGE_SIZE)
        staging_pages = prompt.staging_pages[
            quantised_pages(first // PAGE_SIZE) - prompt.first_staging_page : pages - prompt.first_staging_page
        ]
        part = PromptSpan(0, end - begin, first, prompt.block_ids[:pages], staging_pages, prompt.formats)
        assert torch.equal(attended(pool, part, query[:, :, begin:end], window), whole[begin:end])


def test_what_is_no_number_shows() -> None:
    pool, prompt, query = prompt_in_pages(KVShape(2, 16, 16), 4, 0, 20, FULL, torch.bfloat16)
    staging_page = int(prompt.staging_pages[0]) // pool.page_bytes
    full_pages(pool, 0)[0][staging_page, 1, 7] = torch.nan
    found = attended(pool, prompt, query)
    assert found[7:, 2:].isnan().all()
    assert found[:, :2].isfinite().all()
    assert found[:7].isfinite().all()


def test_arguments_that_do_not_belong_together() -> None:
    pool, prompt, query = prompt_in_pages(KVShape(2, 16, 16), 4, 100, 20, FULL, torch.bfloat16)
    head_offsets = pool.head_offsets[0]
    assert head_offsets is not None

    def call(
        block_ids: torch.Tensor = prompt.block_ids,
        staging_pages: torch.Tensor = prompt.staging_pages,
        key_dim: int = 16,
    ) -> None:
        prompt_attention(
            query[0], pool.memory, head_offsets, block_ids, staging_pages, 100, (2, key_dim, 16), SCALING, 0
        )

    call()
    for wrong in ({"block_ids": prompt.block_ids[:1]}, {"staging_pages": prompt.staging_pages[:1]}, {"key_dim": 18}):
        with pytest.raises(RuntimeError, match="do not belong together"):
            call(**wrong)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="outside of the KV cache's memory"):
        call(staging_pages=prompt.staging_pages + len(pool.memory))
