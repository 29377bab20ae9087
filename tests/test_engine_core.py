"""The core against transformers' own generate, and what happens to requests in it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import transformers

from engine_models import DEVICE, NO_SITES, VOCABULARY, build, greedy, prompts, request, run
from qbe.engine.core import Core
from qbe.errors import QBEError
from qbe.kvcache.attention import ATTENTION
from qbe.kvcache.pages import PAGE_SIZE

TOKENS = 20
PACKED = ["llama", "qwen3", "mistral-sliding", "gemma2-softcap", "gemma3-text", "mixtral", "gpt-oss", "deepseek-v3",
          "gemma3n"]  # fmt: skip
RECURRENT = ["mamba", "mamba2", "jamba", "bamba", "granite-moe-hybrid", "falcon-h1", "lfm2", "qwen3-next"]
ONE_BY_ONE = ["phi3-longrope"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llama():
    return Core(build("llama"), NO_SITES, max_batch_tokens=16, max_sequences=3, kv_tokens=512)


@pytest.mark.parametrize("name", PACKED + RECURRENT + ONE_BY_ONE)
def test_greedy_ids_equal_transformers_alone_and_together(name: str) -> None:
    model = build(name)
    texts = prompts(5, 1, 40, 17)
    expected = [greedy(model, p, TOKENS) for p in texts]
    assert len({t for e in expected for t in e}) > 3, "a model that always says the same tests nothing"
    core = Core(model, NO_SITES, max_batch_tokens=16, max_sequences=3)
    assert core.runner.packed == (name not in ONE_BY_ONE)
    for i, (p, e) in enumerate(zip(texts, expected, strict=True)):
        assert run(core, request(f"alone {i}", p, max_tokens=TOKENS)) == [e]
    together = run(core, *(request(str(i), p, max_tokens=TOKENS) for i, p in enumerate(texts)))
    assert together == expected
    assert core.scheduler.allocator.free == core.scheduler.allocator.num_pages


def test_answers_stay_the_same_in_fragmented_pages() -> None:
    model = build("mistral-sliding")
    texts = prompts(130, 201, 3, 118)
    expected = [greedy(model, p, TOKENS) for p in texts]
    core = Core(model, NO_SITES, kv_tokens=40 * PAGE_SIZE)
    allocator = core.scheduler.allocator
    held = allocator.allocate(allocator.num_pages)
    assert held is not None
    allocator.release(held[::2])  # no two free pages are neighbours
    requests = [request(str(i), p, max_tokens=TOKENS) for i, p in enumerate(texts)]
    for r in requests:
        core.add(r)
    core.step()
    places = sorted(page.address // allocator.page_bytes for r in requests for page in r.pages)
    assert len(places) == 3 + 4 + 1 + 2
    assert all(b - a > 1 for a, b in pairwise(places))
    while core.has_work():
        core.step()
    assert [r.output_ids for r in requests] == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_those_of_the_plain_model(dtype: torch.dtype) -> None:
    model = build("llama").to(dtype)
    prompt = prompts(33)[0]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt], device=DEVICE)).logits[0, -1].float()
    core = Core(model, NO_SITES)
    r = request("r", prompt, max_tokens=1)
    core.add(r)
    logits = core.runner.step(core.scheduler.schedule()).logits
    assert logits.dtype == torch.float32
    assert logits.shape == (1, VOCABULARY)
    torch.testing.assert_close(logits[0], expected, rtol=0.03, atol=0.03 * expected.abs().max().item())


def test_a_request_that_joins_later_changes_nothing(llama: Core) -> None:
    first, second = prompts(21, 9)
    alone = run(llama, request("a", first, max_tokens=12)) + run(llama, request("b", second, max_tokens=12))
    a, b = request("a", first, max_tokens=12), request("b", second, max_tokens=12)
    llama.add(a)
    for _ in range(6):
        llama.step()
    assert run(llama, b) == alone[1:]
    assert a.output_ids == alone[0]


def test_finish_reasons(llama: Core) -> None:
    prompt = prompts(9)[0]
    free = run(llama, request("a", prompt, max_tokens=12))[0]
    llama.eos_ids = frozenset({free[4]})
    stop = free.index(free[4])
    try:
        stopped, ignoring = request("b", prompt, max_tokens=12), request("c", prompt, max_tokens=12, ignore_eos=True)
        assert run(llama, stopped, ignoring) == [free[: stop + 1], free], "the end token stays among the ids"
        assert (stopped.finish_reason, ignoring.finish_reason) == ("stop", "length")
    finally:
        llama.eos_ids = frozenset()


def test_the_context_ends_an_answer(llama: Core) -> None:
    full = request("a", prompts(250)[0], max_tokens=100)
    assert len(run(llama, full)[0]) == 256 - 250
    assert full.finish_reason == "length"


def test_cancel_frees_pages_at_once(llama: Core) -> None:
    allocator = llama.scheduler.allocator
    running, waiting = request("a", prompts(40)[0], max_tokens=50), request("b", prompts(3)[0])
    llama.add(running)
    llama.step()
    assert allocator.free < allocator.num_pages
    llama.add(waiting)
    assert llama.cancel("a") is running
    assert allocator.free == allocator.num_pages
    assert llama.cancel("b", "stop") is waiting
    assert (running.finish_reason, waiting.finish_reason) == ("cancelled", "stop")
    assert llama.cancel("a") is None
    assert not llama.has_work()
    assert llama.step() == []


@pytest.mark.parametrize("fragmented", [False, True])
def test_logits_that_are_not_numbers_end_only_their_request(fragmented: bool) -> None:
    model = build("llama")
    good = prompts(20)[0]
    expected = [greedy(model, good, 8)]
    bad = next(t for t in range(VOCABULARY) if t not in good + expected[0])
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = float("nan")
    core = Core(model, NO_SITES, kv_tokens=16 * PAGE_SIZE)
    allocator = core.scheduler.allocator
    if fragmented:
        held = allocator.allocate(16)
        assert held is not None
        allocator.release(held[::2])
    poisoned, fine = request("bad", [bad] * 3, max_tokens=8), request("good", good, max_tokens=8)
    assert run(core, poisoned, fine) == [[], *expected]
    assert poisoned.finish_reason == "error"
    assert "not numbers" in (poisoned.error or "")
    assert fine.finish_reason == "length"
    # Its pages are handed on clean.
    assert run(core, *(request(str(i), good, max_tokens=8) for i in range(2))) == expected * 2


def test_a_failing_model_ends_its_requests_and_keeps_the_core_usable(llama: Core) -> None:
    prompt = prompts(5)[0]
    expected = run(llama, request("a", prompt, max_tokens=4))
    hook = llama.model.get_submodule("model.norm").register_forward_hook(lambda *_: 1 / 0)
    broken = request("b", prompt, max_tokens=4)
    llama.add(broken)
    with pytest.raises(ZeroDivisionError):
        llama.step()
    hook.remove()
    assert broken.finish_reason == "error"
    assert not llama.has_work()
    assert run(llama, request("c", prompt, max_tokens=4)) == expected


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt is empty"),
        ([1] * 256, {}, r"256 tokens, but the model's context is 256"),
        ([VOCABULARY], {}, "prompt has token 199, but the model knows 0 to 198"),
        ([-1], {}, "prompt has token -1"),
        ([1], {"logit_bias": {500: 1.0}}, "logit_bias has token 500"),
    ],
)
def test_refused_requests(llama: Core, prompt: list[int], params: dict, message: str) -> None:
    with pytest.raises(QBEError, match=message):
        llama.add(request("a", prompt, **params))
    assert not llama.has_work()


def test_a_request_larger_than_the_cache_is_refused_with_the_numbers() -> None:
    core = Core(build("llama"), NO_SITES, kv_tokens=64)
    with pytest.raises(
        QBEError, match="10 prompt tokens and up to 100 new ones do not fit in the KV cache, which holds 64 tokens"
    ):
        core.add(request("a", prompts(10)[0], max_tokens=100))
    core.add(request("a", prompts(10)[0], max_tokens=54))


def test_models_that_cannot_be_paged_are_refused_when_the_core_is_made() -> None:
    config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=2)
    with pytest.raises(QBEError, match="brings its own attention code"):
        Core(transformers.AutoModelForCausalLM.from_config(config), NO_SITES)


def test_the_model_cannot_be_called_behind_the_core(llama: Core) -> None:
    assert llama.model.config._attn_implementation == ATTENTION
    with pytest.raises(QBEError, match="belongs to an engine"):
        llama.model(torch.tensor([[1, 2]], device=DEVICE))
