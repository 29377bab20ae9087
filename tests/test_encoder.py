"""Tier 3: the sentence encoder's hashing, its file and what it is good for."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from qbe.analysis import Analyzer
from qbe.analysis.encoder import ARTEFACT, BUCKETS, DIMENSIONS, Encoder, buckets, default_encoder
from qbe.errors import QBEError

SUMS = (
    "Tom has 3 apples and buys 5 more. How many apples does he have?",
    "Ann had 12 pens and lost 4. How many are left?",
)
CODE = ("Write a Python function that reverses a list.", "Write a Python function that sorts a list of words.")


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=200))
def test_any_text_has_a_vector_of_norm_one(text: str) -> None:
    found, weights = buckets(text)
    assert (np.diff(found) > 0).all()
    assert not len(found) or (found[0] >= 0 and found[-1] < BUCKETS)
    assert np.linalg.norm(weights) == pytest.approx(1 if len(found) else 0, abs=1e-5)
    encoder = default_encoder()
    vector = encoder.encode(text)
    assert vector.dtype == np.float32
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
    cluster, similarity = encoder.nearest(vector)
    assert similarity == pytest.approx(float((encoder.centroids @ vector).max()), abs=1e-6)
    assert 0 <= cluster < len(encoder.names)


def test_buckets_are_those_of_an_obvious_reference() -> None:
    """Words by CRC-32, runs of three and five bytes by multiply and shift, in Python's integers."""
    from zlib import crc32

    text = "How  many?\nHow?"
    counts: dict[int, int] = {}
    hashes = [crc32(w.encode()) for w in ("how", "many", "?", "how", "?")]
    data = b" how many? how? "
    for n in (3, 5):
        for at in range(len(data) - n + 1):
            run = n
            for byte in data[at : at + n]:
                run = (run ^ byte) * 0x9E3779B1 % 2**32
                run ^= run >> 15
            hashes.append(run)
    for h in hashes:
        counts[h % BUCKETS] = counts.get(h % BUCKETS, 0) + 1
    found, weights = buckets(text)
    assert found.tolist() == sorted(counts)
    expected = np.sqrt([counts[b] for b in sorted(counts)])
    assert weights == pytest.approx(expected / np.linalg.norm(expected), rel=1e-5)


def test_case_and_blanks_do_not_count() -> None:
    encoder = default_encoder()
    assert encoder.encode("How  many\napples?") == pytest.approx(encoder.encode("how many apples?"), abs=1e-6)


def test_texts_of_a_kind_are_nearer() -> None:
    sums, code = ([default_encoder().encode(t) for t in texts] for texts in (SUMS, CODE))
    within = min(float(sums[0] @ sums[1]), float(code[0] @ code[1]))
    across = max(float(a @ b) for a in sums for b in code)
    assert within > across + 0.2


def test_tier_three_is_tier_two_and_a_cluster() -> None:
    analyzer, ids = Analyzer(), list(range(20))
    two, three = (analyzer.analyze(SUMS[0], ids, tier=t) for t in (2, 3))
    assert (three.score, three.prompt_class, three.features) == (two.score, two.prompt_class, two.features)
    assert (two.cluster, two.similarity) == (None, None)
    assert three.cluster is not None
    assert three.describe()["cluster"] == three.cluster
    assert -1 <= three.describe()["similarity"] <= 1


def test_the_file_holds_what_it_reached() -> None:
    results = default_encoder().metadata["results"]
    accuracy = results["class_accuracy_nearest_five"]
    assert accuracy["teacher"] > accuracy["student"] > 0.8
    assert results["same_cluster_as_teacher"] > 0.5
    assert len(set(default_encoder().names)) == len(default_encoder().names)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    data = (files("qbe.analysis") / ARTEFACT).read_bytes()
    good = load(data)
    names = {"names": ["x"] * len(good["centroids"])}
    Encoder(good, names)
    for change in (
        {"table": good["table"][1:]},
        {"centroids": good["centroids"][:, 1:]},
        {"scale": np.full(DIMENSIONS, np.nan, np.float32)},
    ):
        with pytest.raises(QBEError, match="does not fit"):
            Encoder({**good, **change}, names)
    with pytest.raises(QBEError, match="damaged"):
        Encoder({k: v for k, v in good.items() if k != "bias"}, names)
    (tmp_path / "cut").write_bytes(data[:1000])
    (tmp_path / "bare").write_bytes(save(good))
    for name, said in (("missing", "can't read"), ("cut", "can't read"), ("bare", "damaged")):
        with pytest.raises(QBEError, match=said):
            Encoder.load(tmp_path / name)
