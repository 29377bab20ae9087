"""Decode steps at fixed shapes: what they write is what the packed eager steps write, at every blueprint."""

from __future__ import annotations

import random

import pytest
import torch

from conftest import byte_tokenizer, tiny_llama
from engine_models import NO_SITES, build, greedy, prompts, request, run
from kv_samples import full_pages
from qbe import Engine
from qbe.blueprint import Blueprint
from qbe.engine.core import Core
from qbe.engine.execution.captured import Kind
from qbe.engine.execution.decode import DecodeStep, batch_sizes
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.kvcache import attention
from qbe.kvcache.pages import PAGE_SIZE, pages_for

PACKED = ["llama", "qwen3", "mistral-sliding", "gemma2-softcap", "gemma3-text", "gpt-oss", "deepseek-v3", "gemma3n"]
TOKENS = 20


def fixed(core: Core) -> Core:
    """The core with decode steps at fixed shapes; on a CPU there are none by themselves (and never a graph)."""
    runner = core.runner
    if runner.decode is None:
        largest, pages = core.scheduler.max_sequences, core.pool.num_pages
        runner.decode = DecodeStep(core.model, runner.cache, core.plan, largest, pages, runner._cache_name)
    return core


@pytest.mark.parametrize("name", PACKED)
def test_answers_are_those_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    texts = prompts(5, 1, 140, 57, 130)
    expected = [greedy(model, p, TOKENS) for p in texts]
    core = fixed(Core(model, NO_SITES, max_batch_tokens=64, max_sequences=3, kv_tokens=40 * PAGE_SIZE))
    sizes: list[int] = []
    served = DecodeStep.run
    monkeypatch.setattr(DecodeStep, "run", lambda self, work: sizes.append(len(work)) or served(self, work))
    allocator = core.scheduler.allocator
    held = allocator.allocate(allocator.num_pages)
    assert held is not None
    allocator.release(held[::2])  # no two free pages are neighbours
    # Three rows at most: sequences come and go, and pages and rows change hands.
    counts = [20, 17, 14, 11, 20]
    found = run(core, *(request(str(i), p, max_tokens=counts[i]) for i, p in enumerate(texts)))
    assert found == [e[:n] for e, n in zip(expected, counts, strict=True)]
    assert set(sizes) == {1, 2, 3}


def test_the_sizes_that_have_a_graph() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(6) == [1, 2, 4, 6]
    assert batch_sizes(16) == [1, 2, 4, 8, 16]
    assert batch_sizes(50) == [1, 2, 4, 8, 16, 32, 48, 50]


def test_a_thousand_blueprints_capture_nothing_and_equal_the_eager_steps(device: torch.device) -> None:
    """On a GPU from the graphs that were captured at the start; on a CPU the same step without a graph."""
    engine = Engine(tiny_llama(), tokenizer=byte_tokenizer(), device=device.type, policy="uniform", records=False,
                    max_sequences=5, max_batch_tokens=128)  # fmt: skip
    core = fixed(engine.core)
    decode = core.runner.decode
    assert decode is not None
    captures = decode.captures
    assert captures == (len(batch_sizes(5)) if device.type == "cuda" else 0)
    table, choose = core.table, random.Random(0)
    pointers = [core.plan.precision_words.data_ptr(), decode._inputs.data_ptr(), decode._block_tables.data_ptr()]
    sequences = []
    for i in range(5):
        sequences.append(request(str(i), list(range(3 + 5 * i)), blueprint(table, choose), max_tokens=400))
        core.add(sequences[-1])
    core.step()
    seen = set[tuple[int, ...]]()
    for step in range(340):  # 1 to 5 rows each
        some = sequences[: 1 + step % 5]
        for s in some:
            s.blueprint = blueprint(table, choose)
            seen.add(s.blueprint.weight_bits)
        work = [w for w in core.scheduler.schedule() if w.sequence in some]
        logits, best = (t.clone() for t in decode.run(work)[:2])
        core.plan.forget()
        eager = core.runner._forward(work)
        torch.testing.assert_close(logits, eager, rtol=1e-3, atol=1e-3 * float(eager.abs().max()))
        assert best.tolist() == logits.argmax(-1).tolist()
        for w, token in zip(work, best.tolist(), strict=True):
            w.sequence.token_ids.append(token)
            w.sequence.computed += 1
    assert len(seen) >= 1000
    assert decode.captures == captures
    assert pointers == [
        core.plan.precision_words.data_ptr(),
        decode._inputs.data_ptr(),
        decode._block_tables.data_ptr(),
    ]


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)], ids=str)
def test_a_compiled_step_follows_blueprints_and_equals_the_eager_one(
    device: torch.device, dtype: torch.dtype, near: float
) -> None:
    engine = Engine(tiny_llama().to(dtype), tokenizer=byte_tokenizer(), device=device.type, policy="uniform",
                    records=False, max_sequences=2)  # fmt: skip
    core = engine.core
    decode = core.runner.decode
    assert decode is not None
    core.runner.compile_steps(progress=False)
    if device.type == "cpu":
        assert set(decode._compiled) == {1}
    captures = decode.captures
    s = request("compiled", list(range(20)), blueprint(core.table, random.Random(1)), max_tokens=60)
    core.add(s)
    core.step()
    torch._dynamo.utils.counters.clear()
    for i in range(40):
        s.blueprint = blueprint(core.table, random.Random(i))
        work = core.scheduler.schedule()
        logits, best = (t.clone() for t in decode.run(work)[:2])
        core.plan.forget()
        eager = core.runner._forward(work)
        torch.testing.assert_close(logits, eager, rtol=near, atol=near * float(eager.abs().max()))
        s.token_ids.append(int(best))
        s.computed += 1
    # Its kernels overlap on a GPU: none must read what another is still to write.
    work = core.scheduler.schedule()
    first, *again = [decode.run(work)[0].clone() for _ in range(200)]
    assert all(torch.equal(first, a) for a in again)
    assert decode.captures == captures
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


def blueprint(table, choose: random.Random) -> Blueprint:
    return Blueprint.of("random", table, tuple(choose.choice(s.gears) for s in table.nested))


def test_rows_that_pad_a_batch_touch_nobodys_page() -> None:
    core = fixed(Core(build("llama"), NO_SITES, max_batch_tokens=64, max_sequences=4, kv_tokens=4 * PAGE_SIZE))
    decode = core.runner.decode
    assert decode is not None
    r = request("r", prompts(20)[0], max_tokens=5)
    core.add(r)
    core.step()
    parts = [m for layer in range(len(core.pool.shapes)) for m in full_pages(core.pool, layer)]
    before = [m.clone() for m in parts]
    work = core.scheduler.schedule()
    decode._stage(work, 4)
    with torch.inference_mode(), attention.step(decode._layout(Kind(4))):
        decode._run_model(4)
    spare = core.pool.num_pages
    written = r.pages[20 // PAGE_SIZE].address // core.pool.page_bytes
    assert written != spare
    for memory, old in zip(parts, before, strict=True):
        changed = {p for p in range(memory.shape[0]) if not torch.equal(memory[p], old[p])}
        assert changed <= {written, spare}
        assert written in changed
    assert pages_for(20) == 1


def test_sampling_and_bad_logits_work_on_decode_steps() -> None:
    core = fixed(Core(build("llama"), NO_SITES, max_batch_tokens=64, max_sequences=4))
    seeded = dict(max_tokens=12, temperature=1.0, seed=3)
    alone = run(core, request("a", prompts(9)[0], **seeded))
    assert run(core, request("b", prompts(4)[0], max_tokens=9), request("a", prompts(9)[0], **seeded))[1] == alone[0]
    assert SamplingParams(**seeded).greedy is False
