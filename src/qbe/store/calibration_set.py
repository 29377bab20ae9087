"""The folder of a calibration set: `passages.jsonl`, one object a line, and `set.json`, which says what they are.

digest      SHA-256 of `passages.jsonl`; a set whose passages are others is refused
passages    how many, and `tokens` of them all
model       whose chat template and tokenizer they went through
sources     each log: name, SHA-256, and what came of it
licences    of the passages, with counts
quotas      for class, language, structure and length: value -> share of the log, and passages taken
left_out    why others were not taken, with counts
masked      kinds of personal data that were replaced, with counts
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qbe.errors import QBEError
from qbe.files import reason
from qbe.store.digests import sha256_of
from qbe.store.draft import writing

NAME, PASSAGES = "set.json", "passages.jsonl"
FORMAT, VERSION = "qbe-calibration-set", 1


@dataclass(frozen=True)
class Passage:
    """One text of a set.

    Attributes:
        text: as the model reads it, chat template and answer included.
        prompt_class: of `qbe.analysis.profile.CLASSES`.
        language: ISO 639-1.
        structure: text, json, xml or tools.
        length: range of its tokens, such as "2k-8k".
        tokens: of the text.
        source: name of the log. licence: as the log or the command says.
    """

    text: str
    prompt_class: str
    language: str
    structure: str
    length: str
    tokens: int
    source: str
    licence: str


@dataclass(frozen=True)
class CalibrationSet:
    """What a folder holds: its passages, their digest, and all of `set.json`."""

    passages: tuple[Passage, ...]
    digest: str
    about: Mapping[str, Any]


def write(folder: Path, passages: Sequence[Passage], about: Mapping[str, Any]) -> dict[str, Any]:
    """Writes a new folder, all of it or nothing; returns what `set.json` says.

    Raises:
        QBEError: the folder exists, or the disk refuses.
    """
    lines = "".join(json.dumps(asdict(p), ensure_ascii=False) + "\n" for p in passages).encode("utf-8", "replace")
    described = {"format": FORMAT, "version": VERSION, "digest": sha256_of(lines), **about}
    with writing(folder) as partial:
        (partial / PASSAGES).write_bytes(lines)
        (partial / NAME).write_text(json.dumps(described, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return described


def read(folder: Path) -> CalibrationSet:
    """A set, compared with its digest.

    Raises:
        QBEError: the folder is none, or its passages are not those that `set.json` is about.
    """
    try:
        about = json.loads((folder / NAME).read_text(encoding="utf-8"))
        lines = (folder / PASSAGES).read_bytes()
    except FileNotFoundError as error:
        name = Path(str(error.filename)).name
        raise QBEError(f"{folder} is no calibration set: it has no {name}; give a text file, or make a set with "
                       "'qbe calibrate build'") from None  # fmt: skip
    except OSError as error:
        raise QBEError(f"the calibration set {folder} cannot be read: {reason(error)}") from error
    except (ValueError, RecursionError) as error:
        raise QBEError(f"{folder / NAME} is damaged ({error}); build the set again") from None
    if not isinstance(about, dict) or (about.get("format"), about.get("version")) != (FORMAT, VERSION):
        version = about.get("version") if isinstance(about, dict) else None
        raise QBEError(f"{folder / NAME} is of version {version}, this QBE reads {VERSION}; build the set again")
    digest = sha256_of(lines)
    if digest != about.get("digest"):
        raise QBEError(f"{folder / PASSAGES} is damaged: its digest is not that in {NAME}; build the set again")
    try:
        passages = tuple(Passage(**json.loads(line)) for line in lines.decode().split("\n") if line)
    except (ValueError, TypeError) as error:
        raise QBEError(
            f"{folder / PASSAGES} holds something that is no passage ({error}); build the set again"
        ) from None
    if not passages:
        raise QBEError(f"the calibration set {folder} is empty; build it from a longer log")
    return CalibrationSet(passages, digest, about)
