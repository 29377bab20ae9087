"""Draft tokens that are read in the text and in what an engine wrote before."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from engine_models import prompts, run
from qbe.engine.speculation import ngram_proposer as reader
from qbe.engine.speculation.ngram_proposer import (
    MIN_PROBABILITY,
    NGRAM_SIZES,
    PRIOR_RATE,
    NgramProposal,
    NgramProposer,
    NgramTable,
)
from test_speculation import READ, at, core_of, request, told


def guessed(own: NgramProposer, tokens: list[int], most: int = 7, text: NgramTable | None = None) -> list[int]:
    found, likely = own.propose(NgramTable() if text is None else text, tokens, most)
    assert found.start == len(tokens)
    assert all(a >= b >= MIN_PROBABILITY for a, b in pairwise(likely))
    return [token for token, _ in found.draft_tokens]


def test_the_text_is_read_for_what_followed_the_longest_match() -> None:
    assert guessed(NgramProposer(), [1, 2, 3, 4]) == []
    assert guessed(NgramProposer(), [1, 2, 3, 4, 9, 1, 2, 3], 4) == [4, 9, 1, 2]
    assert guessed(NgramProposer(), [1, 2, 3, 4, 9, 1, 2, 3, 7, 5, 2, 3], 2) == [7, 5]  # the last place where it stood
    assert guessed(NgramProposer(), [8, 2, 3, 4, 9, 2, 3, 7, 8, 2, 3], 1) == [4]  # unless more stood before it
    assert guessed(NgramProposer(), [1, 2, 1], 0) == []
    assert guessed(NgramProposer(), []) == []


def test_others_are_read_where_the_text_says_nothing() -> None:
    own = NgramProposer()
    guessed(own, [1, 2, 3, 4, 5])
    assert guessed(own, [9, 2, 3], 2) == [4, 5]
    assert guessed(own, [7, 3, 8, 2, 3], 1) == [4]  # two tokens matched there, one here
    assert guessed(own, [2, 3, 8, 2, 3], 1) == [8]
    text = NgramTable()
    guessed(own, [6, 6], text=text)
    guessed(own, [6, 6, 5, 1], text=text)  # only what is new is read
    assert own.memory.after((6, 5, 1)) is None
    assert own.memory.after((6, 5)) == text.after((6, 5)) == 1


def test_what_is_seldom_right_is_not_guessed_for_long_and_is_again_when_it_is() -> None:
    own, noise = NgramProposer(), random.Random(0)
    tokens, text, asked, seen = [0, 1], NgramTable(), [], None
    for i in range(3000):
        if seen is not None:
            own.learn(seen, tokens)
        seen, likely = own.propose(text, tokens, 7)
        asked.append(len(likely))
        tokens.append(noise.randrange(8) if i < 1500 else i % 5)
    assert sum(asked[1400:1500]) < 0.6 * 7 * 100 < sum(asked[2900:])
    assert own.rates[False, 4] > 0.9 > 0.4 > min(own.rates.values())


def test_rates_are_of_guesses_whose_predecessors_were_right() -> None:
    own = NgramProposer()
    own.learn(NgramProposal(2, [(5, (False, 4)), (6, (False, 3)), (7, (True, 2))]), [1, 2, 5, 9, 7])
    assert own.rates[False, 4] > PRIOR_RATE > own.rates[False, 3]
    assert (True, 2) not in own.rates  # nobody knows
    own.learn(NgramProposal(4, [(7, (True, 2)), (8, (True, 1))]), [1, 2, 5, 9, 7])  # the second has not come yet
    assert set(own.rates) == {(False, 4), (False, 3), (True, 2)}


@pytest.mark.parametrize("kept", [40, 400])
def test_memory_is_bounded_and_keeps_the_last(kept: int) -> None:
    memory, tokens = NgramTable(kept), list(range(2000))
    for at_ in range(0, len(tokens), 10):
        memory.read(tokens[: at_ + 10], at_)
        assert len(memory) <= kept + 10 * len(NGRAM_SIZES)
    assert memory.after((1997, 1998)) == 1999
    assert memory.after((1, 2)) is None


def test_an_engine_reads_what_it_wrote_for_others() -> None:
    """The second time a question is answered, most of the answer is read; nothing else is written than without."""
    made = core_of(READ)
    (prompt,) = prompts(20)
    plain = request("p", prompt, at(made), max_tokens=60)
    run(made, plain)
    first, second = (request(n, prompt, at(made), max_tokens=60, speculate=True) for n in "ab")
    run(made, first)
    run(made, second)
    assert first.output_ids == second.output_ids == plain.output_ids
    assert told(second).accepted > max(40, told(first).accepted)
    assert reader.TABLE_SIZE >= len(made.speculator.reader.memory) > 0
