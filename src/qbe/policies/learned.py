"""Files of learned policies: the matrices that training found, for one model and the store it has.

They lie in the user's cache (`learned`), one for each policy and model. What they were trained for is written in them:
a file of another store, of other measurements or of another analysis is refused, and so is a damaged one.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qbe.errors import QBEError
from qbe.files import make_folder, write_bytes
from qbe.sites import FULL_BITS, SiteTable

FORMAT = {"tokenwise": 2}  # of a policy's tensors, where it is not the first
# Code and trained data of the analysis that learned policies read the results of.
_ANALYSIS = ("classifier.json", "encoder.safetensors", "encoder.py", "features.py", "thresholds.py")
# Version 0.1 took comments into its digest. What that said of an analysis, by what is said of the same one now.
_AS_IN_0_1 = {"a0f5bf310b32c00f00564ce8c33c3573": "b0ba42f14294d470d3c0539991cc7de0"}

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Learned:
    """What training found.

    Attributes:
        tensors: by name.
        about: as JSON: how it was made and what it reached on held-out data.
        checksum: of both, once they are in a file.
    """

    tensors: Mapping[str, Array]
    about: Mapping[str, Any]
    checksum: str = ""


def path_of(policy: str, table: SiteTable) -> Path:
    """The file of a policy for a model, by its hub id or where it lies."""
    from qbe.files import cache_dir

    name = table.model_name
    if (local := Path(name).expanduser()).exists():  # a folder has many names
        name = str(local.resolve())
    called = f"{Path(name).name}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"
    return cache_dir() / "learned" / f"{policy}-{called}.safetensors"


def version_of(policy: str, table: SiteTable) -> str:
    """32 hex digits that change with the model, its store, what was measured of it, the analysis and the policy.

    They do not with the dtype that the model is loaded in, nor with whether the originals are.
    """
    stored = tuple(
        replace(
            s, gears=tuple(sorted({*s.gears, FULL_BITS})),
            bytes_at={g: n for g, n in s.bytes_at.items() if g != FULL_BITS},
        )
        for s in table
    )  # fmt: skip
    facts = (FORMAT.get(policy, 1), policy, replace(table, sites=stored).digest, _analysis())
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def ready() -> None:
    """Raises QBEError where nothing can be kept: told before minutes of training, not after."""
    from qbe.files import cache_dir

    make_folder(cache_dir() / "learned")


def write(policy: str, table: SiteTable, fitted: Learned) -> Path:
    """Keeps what was learned; returns where. Raises QBEError when the disk refuses."""
    from safetensors.numpy import save

    path = path_of(policy, table)
    make_folder(path.parent)
    tensors = {name: np.ascontiguousarray(t) for name, t in fitted.tensors.items()}
    about = json.dumps(dict(fitted.about), sort_keys=True, allow_nan=False)
    metadata = {"version": version_of(policy, table), "about": about, "checksum": _checksum(tensors, about)}
    write_bytes(path, save(tensors, metadata))
    return path


def read(policy: str, table: SiteTable) -> Learned:
    """What was learned for this model.

    Raises:
        QBEError: nothing was, or it was for another store, measurement or analysis than there is now, or the file is
            damaged.
    """
    from safetensors import SafetensorError, safe_open

    path, again = path_of(policy, table), f"run 'qbe train {policy} --model {table.model_name}'"
    subject = f"what '{policy}' has learned ({path.name})"  # a server's clients read this: not where it lies
    if not path.is_file():
        raise QBEError(f"the policy '{policy}' has not been trained for {table.model_name}: {again}")
    try:
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        version, about, checksum = (metadata[k] for k in ("version", "about", "checksum"))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise QBEError(f"{subject} is damaged ({type(error).__name__}): {again} again") from None
    if version != version_of(policy, table):
        raise QBEError(
            f"{subject} was trained for another store or version of qbe than {table.model_name} has now: {again} again"
        )
    if checksum != _checksum(tensors, about):
        raise QBEError(f"{subject} is damaged (its checksum does not fit): {again} again")
    return Learned(tensors, json.loads(about), checksum)


def _checksum(tensors: Mapping[str, Array], about: str) -> str:
    digest = hashlib.blake2b(about.encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(repr((name, str(tensor.dtype), tensor.shape)).encode() + tensor.tobytes())
    return digest.hexdigest()


@cache
def _analysis() -> str:
    """Digest of the analysis; as version 0.1 wrote it down, where it is still the same."""
    digest = hashlib.blake2b(digest_size=16)
    for name in _ANALYSIS:
        read = (files("qbe.analysis") / name).read_bytes()
        digest.update(_without_comments(read.decode()).encode() if name.endswith(".py") else read)
    return _AS_IN_0_1.get(digest.hexdigest(), digest.hexdigest())


def _without_comments(source: str) -> str:
    """Python's lines without docstrings, whole-line and trailing comments, and empty lines: what a program does."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node) is not None:
            text = node.body[0]
            lines[text.lineno - 1 : text.end_lineno] = [""] * ((text.end_lineno or text.lineno) - text.lineno + 1)
    kept = (re.sub(r"(^|  )# .*", "", line).rstrip() for line in lines)
    return "\n".join(line for line in kept if line)
