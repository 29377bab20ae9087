"""Tier 3: a distilled sentence encoder, and the nearest of its centroids.

The student is a linear map of hashed n-grams: the text's words and its runs of three and of five bytes each fall into
one of 16 384 buckets, and the square roots of their counts, scaled to norm 1, multiply a table of 64 numbers a bucket.
It was fitted to what a language model's states say of the text (`scripts/train_encoder.py`). It reads text alone, no
tokens and no model, so that one table of a megabyte serves every model that QBE runs.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from qbe.analysis.features import ends
from qbe.errors import QBEError

ARTEFACT = "encoder.safetensors"
RETRAIN = "make it again with scripts/train_encoder.py"
BUCKETS = 1 << 14
DIMENSIONS = 64
TEXT_CHARS = 4096  # read at either end, which bounds the time
_RUNS = (3, 5)  # bytes
_FACTOR = 0x9E3779B1

_words = re.compile(r"[\w']+|[^\w\s]").findall

Vector = npt.NDArray[np.float32]


def buckets(text: str) -> tuple[npt.NDArray[np.intp], Vector]:
    """The buckets that a text's n-grams fall into, ascending, and their weights, float32 of norm 1."""
    body = ends(text, TEXT_CHARS, TEXT_CHARS).lower()
    hashes = [np.array([crc32(w.encode("utf-8", "surrogatepass")) for w in _words(body)], np.uint32)]
    spaced = f" {' '.join(body.split())} ".encode("utf-8", "surrogatepass")
    data = np.frombuffer(spaced, np.uint8).astype(np.uint32)
    for length in _RUNS:
        n = len(data) - length + 1
        if n > 0 and len(spaced) > 2:
            run = np.full(n, length, np.uint32)
            for at in range(length):  # uint32 wraps around
                run = (run ^ data[at : at + n]) * np.uint32(_FACTOR)
                run ^= run >> np.uint32(15)
            hashes.append(run)
    counts = np.bincount((np.concatenate(hashes) % BUCKETS).astype(np.intp), minlength=BUCKETS)
    found = np.flatnonzero(counts)
    weights = np.sqrt(counts[found]).astype(np.float32)
    return found, weights / np.float32(max(float(np.linalg.norm(weights)), 1e-9))


class Encoder:
    """Text to vector to cluster.

    Attributes:
        centroids: float32 [clusters, DIMENSIONS], of norm 1.
        names: for each cluster a few words that its training prompts had more of than others, for people.
        metadata: how the file was made and what it reached on held-out prompts.
    """

    def __init__(self, tensors: dict[str, npt.NDArray[Any]], metadata: dict[str, Any]) -> None:
        """Checks what the file holds against this code.

        Args:
            tensors: `table` int8 [BUCKETS, DIMENSIONS], `scale` and `bias` float32 [DIMENSIONS] (a number is table x
                scale), `centroids`.
            metadata: with `names`.

        Raises:
            QBEError: it was made for another code, or a number is missing or not finite.
        """
        try:
            self._table, self._scale, self._bias = tensors["table"], tensors["scale"], tensors["bias"]
            self.centroids: Vector = tensors["centroids"]
            self.names = tuple(str(n) for n in metadata["names"])
            self.metadata = metadata
        except (KeyError, TypeError) as e:
            raise QBEError(f"{ARTEFACT} is damaged ({type(e).__name__}: {e}): {RETRAIN}") from e
        shapes = (self._table.shape, self._scale.shape, self._bias.shape, self.centroids.shape)
        wanted = ((BUCKETS, DIMENSIONS), (DIMENSIONS,), (DIMENSIONS,), (len(self.names), DIMENSIONS))
        numbers = (self._scale, self._bias, self.centroids)
        if shapes != wanted or not self.names or not all(np.isfinite(n).all() for n in numbers):
            raise QBEError(f"{ARTEFACT} does not fit this version of qbe, or is damaged: {RETRAIN}")

    @classmethod
    def load(cls, path: Path) -> Encoder:
        """Reads an encoder from a safetensors file.

        Raises:
            QBEError: the file can't be read or does not fit this code.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "np") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
                metadata = json.loads((file.metadata() or {}).get("encoder", "{}"))
        except (OSError, SafetensorError, json.JSONDecodeError) as e:
            raise QBEError(f"can't read the sentence encoder {path}: {e}") from e
        return cls(tensors, metadata)

    def encode(self, text: str) -> Vector:
        """The vector of a text, float32 [DIMENSIONS], of norm 1."""
        found, weights = buckets(text)
        vector = (weights @ self._table[found].astype(np.float32)) * self._scale + self._bias
        return vector / np.float32(max(float(np.linalg.norm(vector)), 1e-9))

    def nearest(self, vector: Vector) -> tuple[int, float]:
        """The centroid with the greatest cosine to a vector of norm 1, and that cosine."""
        cosines = self.centroids @ vector
        best = int(cosines.argmax())
        return best, min(1.0, float(cosines[best]))


@cache
def default_encoder() -> Encoder:
    """The encoder that ships with the package."""
    return Encoder.load(Path(str(files("qbe.analysis") / ARTEFACT)))
