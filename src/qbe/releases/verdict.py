"""Reading a verdict that `qbe regress` wrote, for those who act on it. Without torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from qbe.errors import QBEError
from qbe.files import reason

NAME, ITEMS = "verdict.json", "items.jsonl"
READABLE = 1  # the format of the file
KNOWN = ("pass", "fail", "anomalous", "inconclusive")


@dataclass(frozen=True)
class Verdict:
    """What a release needs to know of it.

    Attributes:
        verdict: one of `KNOWN`.
        because: the gates that decided, where it is no pass.
        digest: of the candidate (`qbe.store.provenance.content_digest`).
        suite: name of what was asked.
        settings: digest of the settings that the candidate was served with; None where it was served elsewhere.
        content: the file itself.
    """

    verdict: str
    because: tuple[str, ...]
    digest: str
    suite: str
    settings: str | None
    content: bytes

    @property
    def sha256(self) -> str:
        """Of the file: 64 hex digits."""
        return hashlib.sha256(self.content).hexdigest()


def read(where: Path) -> Verdict:
    """The verdict in a folder that `qbe regress -o` wrote, or in its `verdict.json`.

    Raises:
        QBEError: there is none, it is damaged, or the items beside it are not those that it is about.
    """
    path = where / NAME if where.is_dir() else where
    try:
        content = path.read_bytes()
    except OSError as error:
        raise QBEError(f"--verdict {where}: '{path}' cannot be read: {reason(error)}") from None
    try:
        found = json.loads(content)
        if found["format"] != READABLE:
            raise QBEError(f"{path} is of format {found['format']}, this QBE reads {READABLE}: run 'qbe regress' again")
        side = found["candidate"]
        because, digest, suite = tuple(map(str, found["because"])), str(side["digest"]), str(found["suite"]["name"])
        settings = None if side["settings"] is None else str(side["settings"])
        verdict, items = str(found["verdict"]), str(found["items_sha256"])
        if verdict not in KNOWN:
            raise ValueError(f"its verdict is {verdict[:40]!r}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise QBEError(f"{path} is no verdict of 'qbe regress' ({error!r}): run it again") from None
    _check_items(path.with_name(ITEMS), items)
    return Verdict(verdict, because, digest, suite, settings, content)


def _check_items(path: Path, expected: str) -> None:
    """An answer or key that was changed afterwards is seen; the file may have been left elsewhere."""
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return
    except OSError as error:
        raise QBEError(f"'{path}' cannot be read: {reason(error)}") from None
    if found != expected:
        raise QBEError(f"{path} does not belong to the verdict beside it: run 'qbe regress' again")
