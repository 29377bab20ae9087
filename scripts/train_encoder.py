"""Trains the sentence encoder of analysis tier 3 and writes `src/qbe/analysis/encoder.safetensors`.

    python scripts/train_encoder.py --model SmolLM2-135M-Instruct.Q4_1.gguf [--data DIR] [--teacher FILE]

The teacher is a language model: the mean of its states over a text's tokens (`encoder_teacher.py`), less the mean of
all texts, in its 64 directions of largest variance. The student, a linear map of hashed n-grams, is fitted to it by
ridge regression, whose strength is the one that does best on a tenth of the training texts. The centroids are those of
spherical k-means over the student's vectors of the training prompts. Held-out prompts choose nothing.

There is no measured blueprint for each query yet, so the clusters are of meaning. What a cluster's queries are given is
data of the blueprint cache, whose cells carry the cluster's number.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from encoder_teacher import Text, teach, texts
from safetensors.numpy import save
from scipy.sparse import csr_matrix
from sklearn.cluster import KMeans
from sklearn.metrics import normalized_mutual_info_score
from sklearn.neighbors import KNeighborsClassifier

from qbe.analysis import encoder as E
from qbe.analysis.classifier import Array
from qbe.files import write_bytes

OUT = Path(__file__).parents[1] / "src/qbe/analysis" / E.ARTEFACT
COMMAND = "python scripts/train_encoder.py --model SmolLM2-135M-Instruct.Q4_1.gguf"
LAYERS = 20  # of the teacher's 30: the last ones turn from meaning to the next word
CLUSTERS = 32
COMMON = 0.1  # of the prompts: a word that more of them have names no cluster
STRENGTHS = (0.3, 1.0, 3.0, 10.0)


def unit(x: Array) -> Array:
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-9)


def targets(states: Array, train: npt.NDArray[np.bool_]) -> tuple[Array, float]:
    """The teacher's vectors, [texts, DIMENSIONS] of norm 1, and the share of the variance that they keep."""
    centred = states - states[train].mean(0)
    values, directions = np.linalg.eigh(np.cov(centred[train].T))
    kept = directions[:, ::-1][:, : E.DIMENSIONS]
    return unit(centred @ kept), float(values[::-1][: E.DIMENSIONS].sum() / values.sum())


def grams(items: list[Text]) -> csr_matrix:
    """The texts' buckets, float32 [texts, BUCKETS]."""
    rows = [E.buckets(t.text) for t in items]
    ends = np.cumsum([0, *(len(found) for found, _ in rows)])
    values, columns = (np.concatenate(parts) for parts in zip(*((w, f) for f, w in rows), strict=True))
    return csr_matrix((values, columns, ends), shape=(len(rows), E.BUCKETS))


def ridge(x: csr_matrix, y: Array, strength: float) -> tuple[Array, Array]:
    """Weights [BUCKETS, DIMENSIONS] and bias of the regression of y [n, DIMENSIONS] on x, in its dual form."""
    bias = y.mean(0)
    kernel = (x @ x.T).toarray() + strength * np.eye(x.shape[0])
    return x.T @ np.linalg.solve(kernel, y - bias), bias


def fit(x: csr_matrix, y: Array) -> tuple[Array, Array, float]:
    """Weights, bias and the strength that did best on a tenth of the texts. Rare n-grams count more (idf)."""
    idf = np.log((1 + x.shape[0]) / (1 + np.bincount(x.indices, minlength=E.BUCKETS)))
    scaled = x.multiply(idf).tocsr()
    tenth = np.random.default_rng(0).random(x.shape[0]) < 0.1

    def agreement(strength: float) -> float:
        weights, bias = ridge(scaled[~tenth], y[~tenth], strength)
        return float((unit(scaled[tenth] @ weights + bias) * y[tenth]).sum(-1).mean())

    strength = max(STRENGTHS, key=agreement)
    weights, bias = ridge(scaled, y, strength)
    return weights * idf[:, None], bias, strength


def names(items: list[Text], labels: npt.NDArray[np.intp]) -> list[str]:
    """For each cluster the three words, no common ones, whose share of its prompts is most above that of all."""
    words = [set(E._words(t.text.lower()[:400])) for t in items]
    everywhere = Counter(w for ws in words for w in ws)
    out = []
    for cluster in range(CLUSTERS):
        mine = [ws for ws, at in zip(words, labels, strict=True) if at == cluster]
        count = Counter(w for ws in mine for w in ws if len(w) > 2)
        shares = {w: everywhere[w] / len(items) for w in count}
        lift = {w: n / len(mine) - shares[w] for w, n in count.items() if n > 1 and shares[w] < COMMON}
        out.append(", ".join(sorted(lift, key=lambda w: (-lift[w], w))[:3]))
    return out


def evaluate(encoder: E.Encoder, items: list[Text], teacher: Array) -> dict[str, Any]:
    """What the encoder reaches on held-out prompts."""
    prompts = [i for i, t in enumerate(items) if t.prompt_class is not None]
    student = np.array([encoder.encode(items[i].text) for i in prompts])
    teacher = teacher[prompts]
    classes = np.array([items[i].prompt_class for i in prompts])
    held = np.array([items[i].held_out for i in prompts])
    clusters, of_teacher = ((v @ encoder.centroids.T).argmax(-1) for v in (student, teacher))
    most = {c: Counter(classes[~held & (clusters == c)]).most_common(1)[0][0] for c in set(clusters[~held])}

    def knn(vectors: Array) -> float:
        found = KNeighborsClassifier(5, metric="cosine").fit(vectors[~held], classes[~held])
        return round(float(found.score(vectors[held], classes[held])), 3)

    by_cluster = np.mean([most.get(c) == k for c, k in zip(clusters[held], classes[held], strict=True)])
    return {
        "held_out_prompts": int(held.sum()),
        "cosine_to_teacher": round(float((student * teacher).sum(-1)[held].mean()), 3),
        "same_cluster_as_teacher": round(float((clusters == of_teacher)[held].mean()), 3),
        "mutual_information_with_teachers_clusters": round(
            float(normalized_mutual_info_score(of_teacher[held], clusters[held])), 3
        ),
        "class_accuracy_nearest_five": {"teacher": knn(teacher), "student": knn(student)},
        "class_accuracy_of_the_clusters_commonest": round(float(by_cluster), 3),
        "clusters_that_held_out_prompts_fall_into": len(set(clusters[held])),
    }


def main() -> None:
    """Asks the teacher where its vectors are missing, fits, evaluates, writes the file and prints its metadata."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file or folder of SmolLM2-135M-Instruct")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("QBE_DATA", "../shared/data")))
    parser.add_argument("--teacher", type=Path, default=Path.home() / ".cache/qbe/encoder_teacher.npy")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)

    items = texts(args.data)
    if not args.teacher.exists():
        args.teacher.parent.mkdir(parents=True, exist_ok=True)
        np.save(args.teacher, teach(items, args.model, LAYERS))
    states = np.load(args.teacher).astype(np.float64)
    if len(states) != len(items):
        raise SystemExit(f"{args.teacher} is of {len(states)} texts, not of these {len(items)}: delete it")
    train = np.array([not t.held_out for t in items])
    teacher, kept = targets(states, train)
    weights, bias, strength = fit(grams([t for t in items if not t.held_out]), teacher[train])

    scale = np.abs(weights).max(0) / 127
    tensors = {
        "table": np.round(weights / scale).astype(np.int8),
        "scale": scale.astype(np.float32),
        "bias": bias.astype(np.float32),
        "centroids": np.zeros((CLUSTERS, E.DIMENSIONS), np.float32),
    }
    metadata: dict[str, Any] = {"names": [""] * CLUSTERS}
    learned = [t for t in items if t.prompt_class is not None and not t.held_out]
    vectors = np.array([E.Encoder(tensors, metadata).encode(t.text) for t in learned])
    means = KMeans(CLUSTERS, n_init=10, random_state=0).fit(vectors)
    tensors["centroids"] = unit(means.cluster_centers_).astype(np.float32)
    metadata = {
        "names": names(learned, (vectors @ tensors["centroids"].T).argmax(-1)),
        "command": COMMAND,
        "teacher": f"SmolLM2-135M-Instruct, states after {LAYERS} layers",
        "teacher_variance_kept": round(kept, 3),
        "texts": int(train.sum()),
        "clustered_prompts": len(learned),
        "ridge": strength,
    }
    metadata["results"] = evaluate(E.Encoder(tensors, metadata), items, teacher)
    write_bytes(args.out, save(tensors, {"encoder": json.dumps(metadata)}))
    print(json.dumps(metadata, indent=1))


if __name__ == "__main__":
    main()
