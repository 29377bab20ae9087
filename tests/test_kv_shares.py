"""Who reads which pages, found once for all layers of a decode step (`qbe.kvcache.shares`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine_models import NO_SITES, prompts, request, run
from qbe.engine.core import Core
from qbe.kernels.cuda import decode_attention
from qbe.kernels.ops import paged_attention as attention_ops
from qbe.kvcache.attention import DecodeLayout, attend_decode
from qbe.kvcache.pages import KVShape, PagePool
from qbe.kvcache.shares import Shares
from test_triton_kernel import on_gpu

LAYERS = 3


@pytest.fixture
def pool() -> PagePool:
    shapes = [KVShape(2, 64, 64), KVShape(1, 32, 32), KVShape(2, 64, 64)]
    return PagePool(shapes, 4, torch.float16, torch.device("cpu"))


def test_layers_of_a_shape_are_found_together(pool: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its own window, into what its attention is given; shapes that cut evenly are left out."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(attention_ops, "share_pages", lambda *given: asked.append(given))
    monkeypatch.setattr(decode_attention, "shares", lambda device, rows, heads, *_: heads == 2 and rows > 1)
    shares = Shares(pool, [None, 7, 100])
    assert shares.windows == [0, 7, 100]
    assert not shares.pay(1, 50)
    assert shares.pay(2, 50)
    block_tables, lengths = torch.zeros(2, 50, dtype=torch.long), torch.ones(2, dtype=torch.long)
    shares.find(block_tables, lengths)
    ((head_offsets, windows, given_tables, given_lengths, cuts),) = asked
    assert (head_offsets.shape[0], windows.tolist()) == (2, [0, 100])
    assert (given_tables is block_tables, given_lengths is lengths) == (True, True)
    cuts[1].fill_(5)
    assert shares.cuts[2] is not None
    assert (shares.cuts[2] == 5).all()
    assert (shares.cuts[0] != 5).all()  # type: ignore[union-attr]


@pytest.mark.parametrize(("window", "shared"), [(None, True), (9, False)])
def test_attention_takes_shares_of_its_own_window_only(
    pool: PagePool, window: int | None, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model may call a layer with another window than its configuration has."""
    taken = []
    monkeypatch.setattr(attention_ops, "paged_attention", lambda *given: taken.append(None) or given[0])
    monkeypatch.setattr(attention_ops, "shared_attention", lambda *given, cuts, sinks: taken.append(cuts) or given[0])
    shares = Shares(pool, [None] * LAYERS)
    one = torch.zeros(1, dtype=torch.long)
    cache: Any = SimpleNamespace(pool=pool)
    layout = DecodeLayout(cache, one, one[None], one + 1, [], shares=shares)
    q, k = torch.zeros(1, 4, 1, 64, dtype=torch.float16), torch.zeros(1, 2, 1, 64, dtype=torch.float16)
    attend_decode(layout, 2, q, k, k, 1.0, window, None)
    (found,) = taken
    assert (found is not None) == shared
    assert found is None or found.data_ptr() == shares.cuts[2].data_ptr()  # type: ignore[union-attr]


def test_a_batch_invariant_step_has_an_attention_of_its_own(pool: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_ops, "batch_invariant_attention", lambda *given, sinks: given[0] + 1)
    one = torch.zeros(1, dtype=torch.long)
    cache: Any = SimpleNamespace(pool=pool)
    layout = DecodeLayout(cache, one, one[None], one + 1, [], batch_invariant=True)
    q, k = torch.zeros(1, 4, 1, 64, dtype=torch.float16), torch.zeros(1, 2, 1, 64, dtype=torch.float16)
    assert (attend_decode(layout, 2, q, k, k, 1.0, None, None) == 1).all()


def test_compilers_know_what_the_op_gives() -> None:
    with FakeTensorMode():
        q, k = torch.empty(3, 8, 64), torch.empty(3, 2, 64)
        some = torch.empty(3, dtype=torch.long)
        out = attention_ops.shared_attention(q, k, k[..., :32], *[some] * 6, 1.0, 0, 0.0, cuts=some)
        assert out.shape == (3, 8, 32)
        assert attention_ops.batch_invariant_attention(q, k, k[..., :32], *[some] * 6, 1.0, 0, 0.0).shape == (3, 8, 32)


@on_gpu
@pytest.mark.cuda
@pytest.mark.parametrize("bits", [(), (4, 8, 2, 16)])
def test_answers_are_those_of_attention_that_finds_out_for_itself(
    bits: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From graphs, of several lengths at once."""
    import transformers

    texts, found, calls = prompts(700, 40, 129), [], []
    served, pay = attention_ops.shared_attention, Shares.pay
    monkeypatch.setattr(attention_ops, "shared_attention", lambda *a, **kw: calls.append(None) or served(*a, **kw))
    monkeypatch.setattr(decode_attention, "FEW", 0)  # else so few pages are cut evenly
    decode_attention.parts_for.cache_clear()
    for shared in (False, True):
        monkeypatch.setattr(Shares, "pay", lambda *given, shared=shared: shared and pay(*given))
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=199, hidden_size=256, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=False,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
        core = Core(model, NO_SITES, max_batch_tokens=1024, max_sequences=3, kv_tokens=4096)
        assert core.runner.decode is not None
        assert core.runner.decode.captures
        requests = [request(str(i), t, max_tokens=70) for i, t in enumerate(texts)]
        for r in requests:
            r.blueprint = r.blueprint.with_kv_bits(bits)
        found.append(run(core, *requests))
        assert bool(calls) == shared
    decode_attention.parts_for.cache_clear()
    assert found[0] == found[1]
