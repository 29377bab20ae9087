"""Query analysis: robustness, order of scores, the artefact against the code, and time."""

from __future__ import annotations

import copy
import json
import math
import time
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qbe.analysis import CLASSES, Analyzer, QueryProfile
from qbe.analysis.classifier import Classifier, default_classifier
from qbe.analysis.entropy import SemanticEntropy
from qbe.analysis.features import CUES, FEATURES, cue_counts, extract
from qbe.analysis.thresholds import MARKS
from qbe.errors import QBEError

VOCABULARY = 1000
FACT = "What is the capital of France?"
SUM = "Tom has 3 apples, buys 5 more and gives 2 away. How many are left?"
CODE = "Write a Python function that reverses a linked list."


def ids_of(text: str) -> list[int]:
    """A stand-in for a tokenizer: four characters a token."""
    return [sum(map(ord, text[i : i + 4])) % VOCABULARY for i in range(0, len(text), 4)]


@pytest.fixture(scope="module")
def analyzer() -> Analyzer:
    return Analyzer(torch.randn(VOCABULARY, 48, generator=torch.Generator().manual_seed(0)))


def artefact() -> dict:
    return json.loads((files("qbe.analysis") / "classifier.json").read_text(encoding="utf-8"))


def check(profile: QueryProfile) -> None:
    assert 0 <= profile.score <= 1
    assert profile.prompt_class in CLASSES
    assert all(math.isfinite(v) for v in profile.features.values())
    json.dumps(profile.describe())


@pytest.mark.parametrize("tier", [1, 2, 3])
@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n\t ",
        "🙂",
        "🙂🚀" * 50,
        "\x00\x01\x1b[31m\x7f",
        "\ud800",
        "法国的首都是哪里？",
        "ما هي عاصمة فرنسا؟",
        "?" * 5000,
    ],
)
def test_any_text_has_a_finite_score(analyzer: Analyzer, text: str, tier: int) -> None:
    check(analyzer.analyze(text, ids_of(text), tier=tier))
    check(Analyzer().analyze(text, ids_of(text), tier=tier))


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(max_size=300),
    ids=st.lists(st.integers(-5, VOCABULARY + 5), max_size=80),
    tier=st.sampled_from([None, 1, 2, 3]),
)
def test_arbitrary_text_and_tokens(analyzer: Analyzer, text: str, ids: list[int], tier: int | None) -> None:
    profile = analyzer.analyze(text, ids, tier=tier)
    check(profile)
    assert profile == analyzer.analyze(text, ids, tier=tier), "the same query has the same profile"


def test_a_100k_token_prompt_is_quick(analyzer: Analyzer) -> None:
    text, ids = "some words and 12 numbers { } \n" * 15_000, list(range(VOCABULARY)) * 100
    for tier in (1, 2):
        start = time.perf_counter()
        check(analyzer.analyze(text, ids, tier=tier))
        assert time.perf_counter() - start < 0.25


@pytest.mark.parametrize("tier", [1, 2])
def test_a_short_fact_scores_lowest(analyzer: Analyzer, tier: int) -> None:
    fact, arithmetic, code = (analyzer.analyze(t, ids_of(t), tier=tier) for t in (FACT, SUM, CODE))
    assert fact.score + 0.15 < min(arithmetic.score, code.score)
    assert (arithmetic.prompt_class, code.prompt_class) == ("mathematics", "code")
    assert fact.prompt_class == "question_answering"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Summarize this article in two sentences:\n" + "The council met on Monday to discuss the harbour. " * 20,
            "summarisation",
        ),
        (
            "Return a JSON object with the keys name, age and city for each person:\n" + "Ann, 31, from Oslo. " * 15,
            "structured_output",
        ),
        (
            "Complete this function:\n\ndef add(a, b):\n    '''Add two numbers.'''\n    return " + "x == y; " * 15,
            "code",
        ),
        (
            "A baker sells 12 loaves for $3 each and 30 rolls for $1 each. Half of the rolls are left. " * 3
            + "How much does he earn?",
            "mathematics",
        ),
        ("Hi! I'm feeling lonely today, can we talk? My friend moved away and I miss her. " * 3, "dialogue"),
    ],
)
def test_long_prompts_find_their_class(analyzer: Analyzer, text: str, expected: str) -> None:
    profile = analyzer.analyze(text, ids_of(text))
    assert (profile.tier, profile.prompt_class) == (2, expected)


def test_fast_path_and_forced_tiers(analyzer: Analyzer) -> None:
    assert analyzer.analyze("x", [1] * 31).tier == 1
    assert analyzer.analyze("x", [1] * 32).tier == 2
    assert analyzer.analyze("x", [1] * 31, tier=2).tier == 2
    assert analyzer.analyze("x", [1] * 32, tier=1).tier == 1
    assert Analyzer(fast_path_tokens=8).analyze("x", [1] * 9).tier == 2
    assert Analyzer(tier=3).analyze("x", [1] * 9).tier == 3
    assert Analyzer(tier=3).analyze("x", [1] * 9, tier=1).tier == 1
    with pytest.raises(QBEError, match="no analysis tier 4"):
        analyzer.analyze("x", [1], tier=4)


def test_features_count_what_they_say() -> None:
    text = "List 3 things: {a} and 14,5? Über"
    raw = dict(zip(FEATURES, extract(text, [1, 1, 2, 3], 0.5), strict=True))
    assert raw["tokens"] == 4
    assert raw["vocabulary_diversity"] == 0.75
    assert raw["numbers"] == 2
    assert raw["question_marks"] == 1
    assert raw["semantic_entropy"] == 0.5
    size = len(text.encode())
    assert raw["digit_density"] == pytest.approx(4 / size)
    assert raw["bracket_density"] == pytest.approx(2 / size)
    assert raw["punctuation_density"] == pytest.approx(5 / size)
    assert raw["non_ascii_density"] == pytest.approx(2 / size)
    assert raw["asks_list"] == 1


def test_cue_words_are_read_at_the_ends_only() -> None:
    at = CUES.index("cue_summarisation")
    filler = "the sea was calm and grey. " * 60
    assert cue_counts("Summarize: " + filler)[at] == cue_counts(filler + " TL;DR")[at] == 1
    assert cue_counts(filler + " summarize " + filler)[at] == 0


def test_entropy_orders_repetition_below_variety(analyzer: Analyzer) -> None:
    entropy = analyzer.entropy
    assert entropy is not None
    assert entropy([7] * 50) == 0
    assert entropy([7, 8, 9] * 20) < 0.5
    assert entropy(list(range(200))) > 0.9
    assert entropy([]) == entropy([1]) == entropy([-1, VOCABULARY, 10**9]) == 0


def test_entropy_is_exact_for_two_equal_directions() -> None:
    """Rank-2 embedding whose rows are whitened to a cross: two equal eigenvalues are log 2, the most for rank 2."""
    entropy = SemanticEntropy(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
    assert entropy.rank == 2
    assert entropy([0, 1, 2, 3]) == pytest.approx(1.0, abs=1e-6)
    assert entropy([0, 1, 0, 1]) == pytest.approx(0.0, abs=1e-6)
    p = np.array([0.75, 0.25])  # three times as many tokens along one axis
    expected = -(p * np.log(p)).sum() / np.log(2)
    assert entropy([0, 1] * 3 + [2, 3]) == pytest.approx(expected, abs=1e-5)


def test_entropy_is_the_same_for_any_dtype_and_basis() -> None:
    """Whitening makes it independent of the embedding's scale; bfloat16 changes it little."""
    table = torch.randn(300, 16, generator=torch.Generator().manual_seed(1))
    ids = [*range(40), *range(20)]
    exact = SemanticEntropy(table)(ids)
    assert SemanticEntropy(table * 1000)(ids) == pytest.approx(exact, abs=1e-4)
    assert SemanticEntropy(table.bfloat16())(ids) == pytest.approx(exact, abs=1e-2)


def test_nan_in_the_embedding_is_survived() -> None:
    table = torch.randn(100, 16)
    table[3] = float("nan")
    table[4] = float("inf")
    check(Analyzer(table).analyze("some text", list(range(50))))
    check(Analyzer(torch.zeros(100, 16)).analyze("some text", list(range(50))))


@pytest.mark.parametrize(
    "bad", [torch.zeros(3), torch.zeros(4, 4, dtype=torch.int64), torch.zeros(4, 4, device="meta")]
)
def test_a_bad_embedding_is_refused(bad: torch.Tensor) -> None:
    with pytest.raises(QBEError, match="input embedding"):
        Analyzer(bad)


def test_the_artefact_fits_the_code() -> None:
    a = artefact()
    assert tuple(a["features"]) == FEATURES
    assert tuple(a["marks"]) == MARKS
    assert tuple(a["classes"]) == CLASSES
    results = default_classifier().metadata["results"]
    accuracy = results["class_accuracy_tier_2"]
    assert min(accuracy[c] for c in CLASSES) > 0.7
    rank = results["spearman_with_answer_kl"]
    assert rank["tier 2"] > rank["tier 1"] > rank["baseline: prompt tokens"]


@pytest.mark.parametrize("name", ["features", "classes", "marks"])
def test_an_artefact_for_other_names_is_refused(name: str) -> None:
    a = artefact()
    a[name] = a[name][::-1]
    with pytest.raises(QBEError, match=f"other {name}"):
        Classifier(a)


def test_a_damaged_artefact_is_refused(tmp_path: Path) -> None:
    a = copy.deepcopy(artefact())
    del a["class_weights"]["code"]["tokens"]
    with pytest.raises(QBEError, match="damaged"):
        Classifier(a)
    a = artefact()
    a["score_weights"]["tokens"] = float("nan")
    with pytest.raises(QBEError, match="damaged"):
        Classifier(a)
    with pytest.raises(QBEError, match="can't read"):
        Classifier.load(tmp_path / "missing.json")
    (tmp_path / "cut.json").write_text('{"features": [')
    with pytest.raises(QBEError, match="can't read"):
        Classifier.load(tmp_path / "cut.json")
