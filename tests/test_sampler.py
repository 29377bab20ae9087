"""The sampler against transformers' processors, and its independence of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine_models import NO_BLUEPRINT, request
from qbe.engine.sampling import sampler
from qbe.engine.sampling.sampler import Scores, adjust, filtered, likeliest
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.engine.scheduling.sequence import Sequence
from qbe.errors import QBEError

PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 0.7, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 3, 50, 5000]),
        "top_p": st.sampled_from([1.0, 0.95, 0.5, 0.01]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
    }
)


def sample(logits: torch.Tensor, sequences: list[Sequence]) -> list[int | None]:
    return sampler.sample(Scores(logits, likeliest(logits)), sequences)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _oracle(logits: torch.Tensor, prompt: list[int], p: dict[str, Any]) -> torch.Tensor:
    """Log-probabilities `[vocabulary]` that transformers would draw from."""
    steps = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(p["repetition_penalty"])])
    steps.append(TemperatureLogitsWarper(p["temperature"]))
    if p["top_k"]:
        steps.append(TopKLogitsWarper(p["top_k"]))
    if p["top_p"] < 1:
        steps.append(TopPLogitsWarper(p["top_p"]))
    if p["min_p"] > 0:
        steps.append(MinPLogitsWarper(p["min_p"]))
    return steps(torch.tensor([prompt]), logits[None].clone())[0].log_softmax(-1)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(PARAMS, min_size=1, max_size=4), vocabulary=st.sampled_from([7, 100, 3000]), seed=st.integers(0, 99)
)
def test_distributions_equal_transformers(rows: list[dict[str, Any]], vocabulary: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(rows), vocabulary, generator=generator)
    prompts = [torch.randint(0, vocabulary, (5,), generator=generator).tolist() for _ in rows]
    requests = [request(str(i), p, **row) for i, (p, row) in enumerate(zip(prompts, rows, strict=True))]
    ours = filtered(adjust(logits.clone(), requests), requests).log_softmax(-1)
    for row, prompt, params, found in zip(logits, prompts, rows, ours, strict=True):
        torch.testing.assert_close(found, _oracle(row, prompt, params), rtol=1e-4, atol=1e-4)


def test_flat_logits_need_the_whole_vocabulary_for_top_p() -> None:
    logits = 0.01 * torch.randn(1, 5000, generator=torch.Generator().manual_seed(0))
    r = request("a", [1], temperature=1.0, top_p=0.9)
    kept = torch.isfinite(filtered(logits, [r])).sum().item()
    assert 4400 < kept < 4600


def test_greedy_rows_take_the_likeliest_token() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    expected = logits.argmax(-1).tolist()
    assert sample(logits.clone(), [request(str(i), [1]) for i in range(3)]) == expected
    mixed = [request("0", [1]), request("1", [1], temperature=1.0, seed=1), request("2", [1])]
    tokens = sample(logits.clone(), mixed)
    assert [tokens[0], tokens[2]] == [expected[0], expected[2]]
    assert sample(logits.clone(), [request("a", [1], temperature=1e-30, seed=1)] * 3) == expected


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000])
def test_the_likeliest_token_of_any_vocabulary_is_the_first_of_equals(size: int, device: torch.device) -> None:
    torch.manual_seed(size)
    logits = torch.randint(0, 40, (50, size)).float().to(device)
    assert likeliest(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]
    logits[0, -1], logits[1, 0], logits[2] = float("nan"), float("inf"), -float("inf")
    assert likeliest(logits)[:3].tolist() == [-1, -1, -1]


def test_bias_and_penalty_move_greedy_choices() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, 0.0]])
    assert sample(logits.clone(), [request("a", [3], logit_bias={2: 3.5})]) == [2]
    assert sample(logits.clone(), [request("a", [3], logit_bias={0: -1.0})]) == [1]
    assert sample(logits.clone(), [request("a", [0], repetition_penalty=1.2)]) == [1]


def test_the_penalty_covers_tokens_of_the_answer() -> None:
    r = request("a", [3], repetition_penalty=2.0)
    for expected in (0, 1, 0):
        token = sample(torch.tensor([[2.0, 1.9, -1.0, 0.0]]), [r])[0]
        assert token == expected
        r.token_ids.append(token)


def test_a_seed_reproduces_and_no_seed_does_not() -> None:
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0))

    def answer(seed: int | None) -> list[int | None]:
        r = request("a", [1], temperature=1.0, seed=seed)
        return [sample(logits.clone(), [r])[0] for _ in range(12)]

    assert answer(5) == answer(5)
    assert answer(5) != answer(6)
    assert answer(None) != answer(None)


@settings(deadline=None, max_examples=30)
@given(rows=st.lists(PARAMS, min_size=2, max_size=5), seed=st.integers(0, 99))
def test_a_draw_does_not_depend_on_the_batch(rows: list[dict[str, Any]], seed: int) -> None:
    # Logits of half precision have many ties.
    logits = (2 * torch.randn(len(rows), 2000, generator=torch.Generator().manual_seed(seed))).bfloat16().float()

    def requests() -> list[Sequence]:
        return [request(str(i), [1, 2, 3], seed=seed + i, **row) for i, row in enumerate(rows)]

    together = requests()
    alone = requests()
    for _ in range(3):
        expected = [sample(logits[i : i + 1].clone(), [r])[0] for i, r in enumerate(alone)]
        assert sample(logits.clone(), together) == expected


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, float("-inf"), 0.5]])
    r = request("a", [1], temperature=1.5, seed=3)
    n = 4000
    counts = torch.bincount(torch.tensor([sample(logits.clone(), [r])[0] for _ in range(n)]), minlength=6)
    assert counts[4] == 0
    kept = [0, 1, 2, 3, 5]
    expected = (logits[0] / 1.5).softmax(-1)[kept].double()
    assert chisquare(counts[kept].numpy(), (n * expected / expected.sum()).numpy()).pvalue > 1e-3


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_p": 0.9}, {"repetition_penalty": 1.5}])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_give_no_token(params: dict[str, Any], bad: float) -> None:
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    logits[1, 4] = bad
    logits[2] = float("-inf")
    tokens = sample(logits, [request(str(i), [1], **params) for i in range(3)])
    assert tokens[1:] == [None, None]
    assert isinstance(tokens[0], int)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("seed", -1),
        ("seed", "x"),
        ("stop", "text"),
        ("stop", ("",)),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: float("nan")}),
    ],
)
def test_parameters_out_of_range_are_named(name: str, value: Any) -> None:
    with pytest.raises(QBEError, match=f"^{name} is .* must be "):
        SamplingParams(**{name: value})


def test_a_request_keeps_its_prompt() -> None:
    r = Sequence("a", [1, 2], SamplingParams(), NO_BLUEPRINT)
    r.token_ids.append(9)
    assert (r.prompt_ids, r.output_ids, r.remaining) == ([1, 2], [9], 3)
