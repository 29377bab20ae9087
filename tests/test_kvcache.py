"""Pages and the attention that reads them."""

from __future__ import annotations

from collections import Counter
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from kv_samples import full_pages
from qbe.errors import QBEError
from qbe.format.kv_blocks import FORMATS
from qbe.kernels.reference.rotation import rotate
from qbe.kvcache.allocator import Page, PageAllocator, PageFormat
from qbe.kvcache.attention import Span, StepLayout, paged_attention, step
from qbe.kvcache.cache import PagedCache, slot_of
from qbe.kvcache.pages import PAGE_SIZE, KVShape, PagePool, in_runs, pages_for

MIXED = [16, 8, 4, 2, (2, 16), (16, 4)]


def test_pool_shapes_differ_by_layer_and_start_at_16_bits(device: torch.device) -> None:
    pool = PagePool([KVShape(2, 8, 4), None, KVShape(3, 16, 16)], 5, torch.bfloat16, device)
    assert pool.head_offsets[1] is None
    assert pool.full.number == 0
    assert pool.full.nbytes * 6 == pool.memory.numel()
    for layer, heads in ((0, 2), (2, 3)):
        assert (pool.head_offsets[layer][0] % 256).tolist() == [16] * heads
    # No two numbers share a byte.
    parts = [t for layer in (0, 2) for t in full_pages(pool, layer)]
    assert [len(t) for t in parts] == [5 + 1] * 4  # and the spare one
    for i, t in enumerate(parts):
        t.fill_(i + 1)
    for i, t in enumerate(parts):
        assert (t == i + 1).all()


def test_formats_are_remembered_and_numbers_are_used_again(device: torch.device) -> None:
    pool = PagePool([KVShape(3, 8, 8), None] + [KVShape(2, 8, 8)] * 5, 2, torch.float32, device)
    uses: Counter[int] = Counter()
    low = pool.format((4, 16, (2, 8)), uses)
    assert low.bits == ((4, 4, 4), (), (2, 8), *[(16, 16)] * 4)
    assert (low.lowered(0), low.lowered(1), low.lowered(3)) == (True, False, False)
    assert pool.format(((4, 4, 4), 16, (2, 8), 16), uses) is low
    assert pool.format((16,) * 7, uses) is pool.full
    assert (pool.head_offsets[2][low.number] % 256).tolist() == [2, 8]
    uses[low.number] = 1
    choices = product((2, 4, 8), repeat=6)
    for _ in range(600):
        a, *rest = next(choices)
        assert 0 < pool.format((a, 16, *rest), uses).number != low.number
    assert pool.format((4, 16, (2, 8)), uses) is low
    uses.update(range(FORMATS))
    with pytest.raises(QBEError, match="more than 256"):
        pool.format(((2, 4, 8), 16), uses)


@pytest.mark.parametrize("bits", [(3,), (0,), (17,), ((4, 4),), ((4, 4, 5),)])
def test_bits_that_there_are_not_are_refused(bits: tuple) -> None:
    pool = PagePool([KVShape(3, 8, 8)], 1, torch.float32, torch.device("cpu"))
    with pytest.raises(QBEError, match=r"KV bits of layer 0 are .* 2, 4, 8, 16"):
        pool.format(bits, Counter())


def test_sealing_at_one_layer_and_at_all_is_the_same(device: torch.device) -> None:
    shapes = [KVShape(2, 8, 8), KVShape(1, 16, 8), None, KVShape(2, 8, 8)]
    pools = [PagePool(shapes, 4, torch.float32, device) for _ in range(2)]
    found = []
    for pool in pools:
        format = pool.format((4, 2, 16, (8, 2)), Counter())
        pages = PageAllocator(4, pool.full).allocate(2, format)
        g = torch.Generator().manual_seed(0)
        for layer in (0, 1, 3):
            for memory in full_pages(pool, layer):
                memory.copy_(torch.randn(memory.shape, generator=g))
        ids = pool.to_quantise(pages)
        assert ids is not None
        if pool is pools[0]:
            pool.quantise(ids)
        else:
            for layer in (0, 1, 3):
                pool.quantise(ids, layer)
        found.append(pool.memory)
        block_ids = torch.tensor([p.quantised_block_id for p in pages], device=device)
        staging_pages = torch.tensor([p.staging_page for p in pages], device=device)
        for layer in (0, 1, 3):
            for x, y in zip(pool.read(layer, block_ids), pool.read(layer, staging_pages), strict=True):
                assert 0 < float(rotate(x - y).abs().max()) < 1.5, "a step of 2 bits is some 1.2"
    assert torch.equal(*found)


def _reference(q, k, v, own_k, own_v, start, window, softcap, scale):
    """Attention of one sequence written out: q [heads, n, d] at positions start.., k and v [kv_heads, start + n, d] as
    quantised, own_k and own_v at 16 bits, which a token sees of its own page and, but for every eighth, the one
    before."""
    repeat = q.shape[0] // k.shape[0]
    out = []
    for i in range(q.shape[1]):
        at, page = start + i, (start + i) // PAGE_SIZE
        page = PAGE_SIZE * (page if page % 8 == 0 else page - 1)
        keys, values = (torch.cat([a[:, :page], b[:, page : at + 1]], 1).repeat_interleave(repeat, 0)
                        for a, b in ((k, own_k), (v, own_v)))  # fmt: skip
        scores = torch.einsum("hd,hkd->hk", q[:, i], keys) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        first = max(0, at + 1 - (window or 10**6))
        out.append(torch.einsum("hk,hkd->hd", scores[:, first:].softmax(-1), values[:, first:]))
    return torch.stack(out, 1)


@settings(deadline=None, max_examples=60)
@given(
    spans=st.lists(
        st.tuples(
            st.integers(0, 200) | st.integers(400, 600),
            st.sampled_from([1, 1, 1, 2, 19, 150]),
            st.sampled_from([[16], [4], MIXED]),
        ),
        min_size=1, max_size=5,
    ),
    window=st.sampled_from([None, 1, 5, 16, 100]),
    softcap=st.sampled_from([None, 3.0]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_every_sequence_attends_to_its_own_pages(device, spans, window, softcap, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if device.type == "cpu" else torch.float32

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    heads, kv_heads, key_dim, value_dim, scale = 4, 2, 8, 6, 0.3
    total = sum(pages_for(start + n) for start, n, _ in spans)
    pool = PagePool([KVShape(kv_heads, key_dim, value_dim)], 4 * total, dtype, device)
    cache = PagedCache(LlamaConfig(num_hidden_layers=1), pool)
    cache.calls[0] = scale, window, softcap, None  # as after a first step
    allocator = PageAllocator(4 * total, pool.full)
    allocator.release(allocator.allocate(4 * total)[::2])
    module = SimpleNamespace(layer_idx=0, qbe_cache=cache)
    layout_spans, slots, keys, values, queries, row = [], [], [], [], [], 0
    for start, n, bits in spans:
        formats = [pool.format((bits[i % len(bits)],), allocator.uses) for i in range(pages_for(start + n))]
        pages = [p for f in formats for p in allocator.allocate(1, f)]
        k, v, q = (
            random(kv_heads, start + n, key_dim),
            random(kv_heads, start + n, value_dim),
            random(heads, n, key_dim),
        )
        where = torch.tensor([slot_of(pages, p) for p in range(start + n)])
        staging_pages, offsets = where // pool.page_bytes, where % 256
        for memory, states in zip(full_pages(pool, 0), (k, v), strict=True):
            memory[staging_pages[:start], :, offsets[:start]] = states[:, :start].transpose(0, 1)
        quantised = start // PAGE_SIZE if start // PAGE_SIZE % 8 == 0 else start // PAGE_SIZE - 1
        pool.quantise(pool.to_quantise(pages[:quantised]))
        for page in pages[:quantised]:
            allocator.quantise(page)
        layout_spans.append(Span(row, n, start, pages))
        slots.append(where[start:].to(device))
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
        block_ids = [
            p.quantised_block_id if (i + 2) * PAGE_SIZE <= span.end else p.block_id for i, p in enumerate(span.pages)
        ]
        if span.end // PAGE_SIZE % 8 == 0 and span.end >= PAGE_SIZE:
            block_ids[span.end // PAGE_SIZE - 1] = span.pages[span.end // PAGE_SIZE - 1].quantised_block_id
        quantised = [t[0, :, : span.end] for t in pool.read(0, torch.tensor(block_ids, device=device))]
        expected = _reference(q, *quantised, k, v, span.start, window, softcap, scale)
        found = out[0, span.row : span.row + span.count].transpose(0, 1)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # the soft cap path has a float32 softmax


@pytest.mark.parametrize("what", [{"head_mask": torch.ones(2)}, {"position_bias": torch.ones(1)}])
def test_what_attention_cannot_honour_is_named(what: dict[str, torch.Tensor]) -> None:
    pool = PagePool([KVShape(2, 8, 8)], 1, torch.float32, torch.device("cpu"))
    cache = PagedCache(LlamaConfig(num_hidden_layers=1), pool)
    x = torch.zeros(1, 2, 1, 8)
    layout = StepLayout(cache, [Span(0, 1, 0, PageAllocator(1, pool.full).allocate(1))], torch.tensor([0]))
    with step(layout), pytest.raises(QBEError, match=next(iter(what))):
        paged_attention(SimpleNamespace(layer_idx=0, qbe_cache=cache), x, x, x, None, **what)
    with pytest.raises(QBEError, match="belongs to an engine"):
        paged_attention(SimpleNamespace(layer_idx=0), x, x, x, None)


def test_a_decode_step_reads_full_pages_of_one_format_in_a_run_unless_a_window_slides() -> None:
    eight, four = PageFormat(1, 512), PageFormat(2, 256)
    pages = [Page(f, 0, None) for f in (four, eight, four, PageFormat(0, 1024), eight, eight)]
    runs = in_runs(pages, 5, False)
    assert [p.format.number for p in runs] == [0, 1, 1, 2, 2, 1]
    assert runs[-1] is pages[-1], "the open page stays where positions say it is"
    assert in_runs(pages, 5, True) == pages
    pool = PagePool([KVShape(1, 8, 8)], 2, torch.float32, torch.device("cpu"))
    cache = PagedCache(LlamaConfig(num_hidden_layers=1), pool)
    assert not cache.slides
    cache.calls[0] = 1.0, 7, None, None
    assert cache.slides
