"""What the sampler says of tokens, and what keeps it from some: logprobs, penalties, constraints."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import byte_tokenizer, tiny_llama
from engine_models import NO_BLUEPRINT
from qbe.budget import Budget
from qbe.engine.engine import Engine, Request
from qbe.engine.sampling.logprobs import logprobs
from qbe.engine.sampling.sampler import Scores, likeliest, sample
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.engine.scheduling.sequence import Sequence
from qbe.errors import QBEError


class Allows:
    """Lets these tokens pass, one after the other, and is complete after the last."""

    def __init__(self, tokens: list[int], vocabulary: int) -> None:
        self.tokens, self.vocabulary, self.error = list(tokens), vocabulary, None if tokens else "nothing is left"

    def allowed(self) -> torch.Tensor:
        found = torch.zeros(self.vocabulary, dtype=torch.bool)
        found[self.tokens[:1]] = True
        return found

    def accept(self, token: int) -> bool:
        assert token == self.tokens.pop(0)
        return not self.tokens


def sequence(constraint: Allows | None = None, answer: tuple[int, ...] = (), **params: object) -> Sequence:
    found = Sequence("a", [0], SamplingParams(**params), NO_BLUEPRINT)  # type: ignore[arg-type]
    found.token_ids += answer
    found.sampling.constraint = constraint
    return found


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 6))
def test_logprobs_are_those_of_a_softmax(seed: int, top: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(3, 7) * 5
    tokens = [0, 3, 6]
    expected = logits.double().log_softmax(-1)
    for row, found in enumerate(logprobs(logits, tokens, [top] * 3)):
        assert found.token == tokens[row]
        assert found.logprob == pytest.approx(float(expected[row, tokens[row]]), abs=1e-5)
        best = expected[row].topk(top)
        assert [t for t, _ in found.top] == best.indices.tolist()
        assert [p for _, p in found.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_they_are_the_models_own_whatever_is_done_to_the_logits() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    expected = logits[0].log_softmax(-1)
    rows = [
        sequence(logprobs=1, logit_bias={0: 100.0}),
        sequence(),
        sequence(Allows([1], 3), logprobs=0, temperature=0.5),
    ]
    assert sample(Scores(logits.clone(), likeliest(logits)), rows) == [0, 2, 1]
    (first,), (third,) = rows[0].sampling.logprobs, rows[2].sampling.logprobs
    assert (first.token, first.logprob) == (0, pytest.approx(float(expected[0])))
    assert first.top == ((2, pytest.approx(float(expected[2]))),)
    assert (third.token, third.logprob, third.top) == (1, pytest.approx(float(expected[1])), ())
    assert not rows[1].sampling.logprobs


def test_penalties_count_the_answers_tokens() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.0]])

    def chosen(answer: tuple[int, ...], **params: float) -> list[int | None]:
        return sample(Scores(logits.clone(), likeliest(logits)), [sequence(answer=answer, **params)])

    assert chosen((1,)) == [1]
    assert chosen((1,), presence_penalty=0.9) == [1]
    assert chosen((1,), presence_penalty=1.1) == [2]
    assert chosen((1,), frequency_penalty=0.6) == [1]
    assert chosen((1, 1), frequency_penalty=0.6) == [2]
    assert chosen((), presence_penalty=2.0, frequency_penalty=2.0) == [1]  # the prompt's tokens do not count


def engine() -> Engine:
    return Engine(tiny_llama(), tokenizer=byte_tokenizer(), policy="uniform", records=False, max_batch_tokens=128)


def run(engine: Engine, *requests: Request) -> list[Sequence]:
    ids = [engine.submit(r) for r in requests]
    sequences = [engine.sequence(i) for i in ids]
    for _ in range(2000):
        if all(map(engine.finished, ids)):
            return sequences
        engine.step()
    raise AssertionError("the engine did not finish")


def test_a_constraint_is_followed_and_ends_the_answer() -> None:
    with engine() as found:
        token_text = [5, 5, 9, 300]
        one, other = run(
            found,
            Request("hello", SamplingParams(max_tokens=9, temperature=1.0, seed=1), constraint=Allows(token_text, 320)),
            Request("hello", SamplingParams(max_tokens=9)),
        )
        assert (one.output_ids, one.finish_reason) == (token_text, "stop")
        assert len(other.output_ids) == 9  # the others of the batch are free
        (none,) = run(found, Request("hello", SamplingParams(), constraint=Allows([], 320)))
        assert (none.finish_reason, none.error, none.output_ids) == ("error", "nothing is left", [])


def test_prompt_logprobs_are_complete_beside_others_and_after_reuse() -> None:
    model, prompt = tiny_llama(), [(7 * i) % 320 for i in range(300)]
    expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    with engine() as found:
        full = Budget(bits=16)
        for _ in range(2):  # the second time its pages are known
            asked = Request(prompt, SamplingParams(max_tokens=2, prompt_logprobs=2, logprobs=1), full)
            one, _ = run(found, asked, Request("beside it", SamplingParams(max_tokens=20), full))
            assert len(one.sampling.prompt_logprobs) == len(prompt) - 1
            for position, said in enumerate(one.sampling.prompt_logprobs):
                assert said.token == prompt[position + 1]
                assert said.logprob == pytest.approx(float(expected[position, said.token]), abs=1e-4)
                assert [t for t, _ in said.top] == expected[position].topk(2).indices.tolist()
            assert [p.token for p in one.sampling.logprobs] == one.output_ids


def test_a_prompt_of_tokens_is_that_of_its_text() -> None:
    with engine() as found:
        ids = found.tokenizer("hello")["input_ids"]
        text, tokens = found.generate("hello"), found.generate(ids)
        assert text.token_ids == tokens.token_ids
        for wrong in ([5000], [-1], []):
            with pytest.raises(QBEError, match="prompt"):
                found.generate(wrong)
