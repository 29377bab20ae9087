"""Pages and the attention that reads them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from qbe.errors import QBEError
from qbe.kvcache.attention import Span, StepLayout, paged_attention, step
from qbe.kvcache.cache import PagedCache
from qbe.kvcache.pages import PAGE_SIZE, KVShape, PageAllocator, PagePool, pages_for

PAGES = 23


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.booleans()), max_size=80))
def test_traffic_never_leaks_or_doubles_a_page(traffic: list[tuple[int, int, bool]]) -> None:
    allocator = PageAllocator(PAGES)
    held: list[list[int]] = []  # one entry per owner
    for count, which, share in traffic:
        if held and share:
            allocator.share(held[which % len(held)])
            held.append(held[which % len(held)])
        elif held and which % 3 == 0:
            allocator.release(held.pop(which % len(held)))
        else:
            free = allocator.free
            pages = allocator.allocate(count)
            assert (pages is None) == (count > free)
            if pages is not None:
                assert len(set(pages)) == count
                assert all(0 <= p < PAGES for p in pages)
                assert not set(pages) & {p for h in held for p in h}
                held.append(pages)
        assert allocator.free == PAGES - len({p for h in held for p in h})
    for pages in held:
        allocator.release(pages)
    assert allocator.allocate(PAGES) == list(range(PAGES))


def test_neighbouring_pages_are_preferred() -> None:
    allocator = PageAllocator(10)
    first, second, third = allocator.allocate(2), allocator.allocate(3), allocator.allocate(2)
    assert (first, second, third) == ([0, 1], [2, 3, 4], [5, 6])
    allocator.release(first)
    assert allocator.allocate(3) == [7, 8, 9]
    allocator.release([5])
    assert allocator.allocate(3) == [0, 1, 5]


def test_double_free_and_sharing_a_free_page_are_errors() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    assert pages is not None
    allocator.release(pages)
    with pytest.raises(ValueError, match="freed twice"):
        allocator.release(pages)
    with pytest.raises(ValueError, match="free and cannot be shared"):
        allocator.share(pages)


def test_pool_shapes_differ_by_layer_and_start_at_16_bits(device: torch.device) -> None:
    pool = PagePool([KVShape(2, 8, 4), None, KVShape(3, 16, 16)], 5, torch.bfloat16, device)
    assert pool.keys[0].shape == (5 + 1, PAGE_SIZE, 2, 8)  # and the spare one
    assert pool.values[0].shape == (5 + 1, PAGE_SIZE, 2, 4)
    assert pool.keys[1] is None
    assert pool.values[2].shape == (5 + 1, PAGE_SIZE, 3, 16)
    assert pool.kv_bits.shape == (3, 3, 5)
    assert pool.kv_bits.dtype == torch.int8
    assert (pool.kv_bits == 16).all()


def _reference(q, k, v, start, window, softcap, scale):
    """Attention of one sequence written out: q [heads, n, d] at positions start.., k and v [kv_heads, start + n, d]."""
    repeat = q.shape[0] // k.shape[0]
    scores = torch.einsum("hqd,hkd->hqk", q, k.repeat_interleave(repeat, 0)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    at = torch.arange(k.shape[1], device=q.device)
    query_at = start + torch.arange(q.shape[1], device=q.device)[:, None]
    seen = (at <= query_at) & (at > query_at - (window or 10**6))
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v.repeat_interleave(repeat, 0)


@settings(deadline=None, max_examples=60)
@given(
    spans=st.lists(st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 1, 2, 19])), min_size=1, max_size=6),
    window=st.sampled_from([None, 1, 5, 16, 40]),
    softcap=st.sampled_from([None, 3.0]),
    fragmented=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_sequence_attends_to_its_own_pages(device, spans, window, softcap, fragmented, seed) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)

    heads, kv_heads, key_dim, value_dim, scale = 4, 2, 8, 6, 0.3
    total = sum(pages_for(start + n) for start, n in spans)
    pool = PagePool([KVShape(kv_heads, key_dim, value_dim)], 2 * total, torch.float64, device)
    cache = PagedCache(LlamaConfig(num_hidden_layers=1), pool)
    allocator = PageAllocator(2 * total)
    if fragmented:
        allocator.release(allocator.allocate(2 * total)[::2])
    module = SimpleNamespace(layer_idx=0, qbe_cache=cache)
    layout_spans, slots, keys, values, queries, row = [], [], [], [], [], 0
    for start, n in spans:
        pages = allocator.allocate(pages_for(start + n))
        k, v, q = (
            random(kv_heads, start + n, key_dim),
            random(kv_heads, start + n, value_dim),
            random(heads, n, key_dim),
        )
        where = torch.tensor([pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(start + n)])
        where = where.to(device)
        for memory, states in zip(cache.memory[0], (k, v), strict=True):
            memory.index_copy_(2, where[:start], states[None, :, :start])
        run = pages[0] if pages[-1] - pages[0] == len(pages) - 1 else None
        layout_spans.append(Span(row, n, start, torch.tensor(pages, device=device), run))
        slots.append(where[start:])
        keys.append(k)
        values.append(v)
        queries.append(q)
        row += n
    new_k = torch.cat([k[:, s.start :] for k, s in zip(keys, layout_spans, strict=True)], 1)[None]
    new_v = torch.cat([v[:, s.start :] for v, s in zip(values, layout_spans, strict=True)], 1)[None]
    with step(StepLayout(cache, layout_spans, torch.cat(slots))):
        k, v = cache.update(new_k, new_v, 0)
        out, _ = paged_attention(
            module, torch.cat(queries, 1)[None], k, v, None, scaling=scale, sliding_window=window, softcap=softcap
        )
    assert out.shape == (1, row, heads, value_dim)
    for span, q, k, v in zip(layout_spans, queries, keys, values, strict=True):
        expected = _reference(q, k, v, span.start, window, softcap, scale)
        found = out[0, span.row : span.row + span.count].transpose(0, 1)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # the soft cap path has a float32 softmax


@pytest.mark.parametrize("what", [{"s_aux": torch.ones(2)}, {"position_bias": torch.ones(1)}])
def test_what_attention_cannot_honour_is_named(what: dict[str, torch.Tensor]) -> None:
    pool = PagePool([KVShape(2, 8, 8)], 1, torch.float32, torch.device("cpu"))
    cache = PagedCache(LlamaConfig(num_hidden_layers=1), pool)
    x = torch.zeros(1, 2, 1, 8)
    layout = StepLayout(cache, [Span(0, 1, 0, torch.tensor([0]), 0)], torch.tensor([0]))
    with step(layout), pytest.raises(QBEError, match=next(iter(what))):
        paged_attention(SimpleNamespace(layer_idx=0, qbe_cache=cache), x, x, x, None, **what)
    with pytest.raises(QBEError, match="belongs to an engine"):
        paged_attention(SimpleNamespace(layer_idx=0), x, x, x, None)
