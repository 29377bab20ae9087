"""What a store is made on: the built-in text, a user's file, or a set that `qbe calibrate build` wrote.

All are passages. Smoothing, sensitivities and the KV table read segments of equal length, codes read windows. How many
is bounded, so that a long set costs no more than a short one: `Amounts`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qbe.errors import QBEError
from qbe.files import reason
from qbe.store import calibration_set

TOKENS = 32768  # that codes are chosen on, at most
FEWEST = 1024
WINDOW = 1024  # tokens of a forward pass
CHARACTERS = 16  # read for each token: no tokenizer needs as many
HELD_OUT = 64  # tokens of each passage that assignments are checked on
TYPICAL = 6  # characters that hold a token of most texts
_MARK = re.compile(r"^=== \w+\n", re.MULTILINE)
_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are spread evenly however many there are


@dataclass(frozen=True)
class Amounts:
    """Segments, and tokens of each, that are read at most for smoothing, weights' sensitivities and the KV table."""

    smoothing: tuple[int, int]
    sensitivity: tuple[int, int]
    kv: tuple[int, int]


# The built-in text is read whenever a model is nested on first use, so that seconds count. A user who gives a text has
# minutes of work done on it in any case.
BUILT_IN, GIVEN = Amounts((16, 64), (16, 32), (2, 448)), Amounts((32, 96), (32, 32), (2, 896))


@dataclass(frozen=True)
class CalibrationText:
    """Passages that a model is looked at with.

    Attributes:
        name: of the file or folder; None: the built-in text.
        passages: in an order of which every beginning looks like the whole.
        digest: SHA-256 of the file, or of the set's passages.
        amounts: how much of it is read.
        whole: whether passages are pieces of one text, of which codes read the beginning; else codes read an equal part
            of each.
        template: `template_digest` of the tokenizer that a set's passages went through; None: they went through none.
    """

    name: str | None
    passages: tuple[str, ...]
    digest: str
    amounts: Amounts = GIVEN
    whole: bool = False
    template: str | None = None

    @property
    def title(self) -> str:
        """For what is written beside a store, and for messages."""
        return "built-in calibration text" if self.name is None else self.name

    def smoothing(self, tokenizer: Any, model: nn.Module | None = None) -> torch.Tensor:
        """int64 [segments, tokens] that outlier channels are found on."""
        return self.segments(tokenizer, self.amounts.smoothing, model)

    def sensitivity(self, tokenizer: Any, model: nn.Module | None = None) -> torch.Tensor:
        """int64 [segments, tokens] for the sensitivities of weights and activations."""
        return self.segments(tokenizer, self.amounts.sensitivity, model)

    def kv(self, tokenizer: Any, model: nn.Module | None = None) -> torch.Tensor:
        """int64 [segments, tokens] for the KV cache, and for all that wants a longer context; of the longest passages
        first."""
        return self.segments(tokenizer, self.amounts.kv, model, longest=True)

    def segments(
        self, tokenizer: Any, amount: tuple[int, int], model: nn.Module | None = None, longest: bool = False
    ) -> torch.Tensor:
        """An excerpt of each passage in turn as int64 [segments, tokens]; several passages make a segment where they
        are shorter.

        Args:
            amount: segments, and tokens of each; fewer where the text ends or the model's context does.
            model: whose context is not exceeded, and which has to know the tokens.
            longest: passages that fill a segment go first.

        Raises:
            QBEError: a tokenizer that makes next to no tokens of it, or some that `model` does not know.
        """
        count, tokens = amount[0], _within(amount[1], model)
        order = list(range(len(self.passages)))
        if longest:
            order.sort(key=lambda i: len(self.passages[i]) < TYPICAL * tokens)
        return self._tensor(self._rows(tokenizer, count, tokens, order)[0], model)

    def held_out(self, tokenizer: Any, count: int, model: nn.Module | None = None) -> torch.Tensor:
        """int64 [segments, tokens] that `sensitivity` does not read: of the passages after those that it reads, and
        where these are too few from the other half of long ones among those.

        Args:
            count: segments at most; fewer, or none, where the text has no more.

        Raises:
            QBEError: as `segments`.
        """
        read, tokens = self.amounts.sensitivity, _within(HELD_OUT, model)
        used = self._rows(tokenizer, read[0], _within(read[1], model), range(len(self.passages)))[1]
        rows = self._rows(tokenizer, count, tokens, range(used, len(self.passages)))[0]
        rows = [row for row in rows if len(row) == tokens]
        if len(rows) < count:
            long = [i for i in range(used) if len(self.passages[i]) >= 4 * TYPICAL * tokens]
            rows += self._rows(tokenizer, count - len(rows), tokens, long, 0.5)[0]
        rows = [row for row in rows if len(row) == tokens]
        return self._tensor(rows, model) if rows else torch.empty(0, tokens, dtype=torch.int64)

    def _rows(
        self, tokenizer: Any, count: int, tokens: int, order: Sequence[int], shift: float = 0.0
    ) -> tuple[list[list[int]], int]:
        """Up to `count` rows of `tokens` token ids from passages in this order, and how many of them were read; where
        they do not fill one row, that one, shorter."""
        rows, row, used = list[list[int]](), list[int](), 0
        for used, i in enumerate(order, 1):  # noqa: B007
            row = (row + self._excerpt(i, tokenizer, tokens, shift))[:tokens]
            if len(row) == tokens:
                rows, row = [*rows, row], []
            if len(rows) == count:
                break
        return rows or [row], used

    def _tensor(self, rows: list[list[int]], model: nn.Module | None) -> torch.Tensor:
        if len(rows[0]) < 2:
            raise QBEError("the tokenizer of this model turns the calibration text into fewer than 2 tokens")
        found = torch.tensor(rows)
        if model is not None:
            _check_known(int(found.max()), model)
        return found

    def windows(self, tokenizer: Any, context: int) -> torch.Tensor:
        """int64 [windows, tokens] that codes are chosen on.

        Args:
            context: longest input of the model.

        Raises:
            QBEError: fewer than 1024 tokens.
        """
        ids = list[int]()
        for part in self._parts(tokenizer):
            ids += part
            if len(ids) >= TOKENS:
                break
        if len(ids) < FEWEST:
            raise QBEError(f"the calibration text {self.title} has {len(ids)} tokens; give some tens of thousands, "
                           f"at least {FEWEST}")  # fmt: skip
        window = min(WINDOW, context)
        return torch.tensor(ids[: min(len(ids), TOKENS) // window * window]).view(-1, window)

    def _parts(self, tokenizer: Any) -> Iterator[list[int]]:
        if self.whole:
            yield from (_ids(tokenizer, passage) for passage in self.passages)
        else:
            share = -(-TOKENS // len(self.passages))
            yield from (self._excerpt(i, tokenizer, share) for i in range(len(self.passages)))

    def _excerpt(self, i: int, tokenizer: Any, tokens: int, shift: float = 0.0) -> list[int]:
        """Some tokens of a passage; of each passage at another place, because conversations begin alike.

        Args:
            shift: moves that place by this share of the passage.
        """
        passage = self.passages[i]
        start = int(max(0, len(passage) - TYPICAL * tokens) * ((i * _GOLDEN + shift) % 1))
        return _ids(tokenizer, passage[start : start + CHARACTERS * tokens])[:tokens]


def _within(tokens: int, model: nn.Module | None) -> int:
    """So many tokens, or the model's context."""
    if model is None:
        return tokens
    config = model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
    return min(tokens, getattr(config, "max_position_embeddings", None) or tokens)


def template_digest(tokenizer: Any) -> str | None:
    """SHA-256 of a tokenizer's chat template; None where it has none."""
    template = getattr(tokenizer, "chat_template", None)
    return None if not template else hashlib.sha256(repr(template).encode()).hexdigest()


def _ids(tokenizer: Any, text: str) -> list[int]:
    # Not `verbose`: it warns of sequences beyond the model's context.
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _check_known(highest: int, model: nn.Module) -> None:
    known = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if highest >= known:
        raise QBEError(
            f"the tokenizer of this model makes token {highest} of ordinary text, but the model knows 0 to "
            f"{known - 1} only: they belong to different models"
        )


@cache
def built_in() -> CalibrationText:
    """64 passages of eight kinds in turn (`calibration.txt`)."""
    raw = (files("qbe.store") / "calibration.txt").read_bytes()
    passages = tuple(p.strip() for p in _MARK.split(raw.decode())[1:])  # what stands before the first mark is about it
    return CalibrationText(None, passages, hashlib.sha256(raw).hexdigest(), BUILT_IN)


def kinds() -> list[str]:
    """Of the built-in passages, in their order."""
    return [mark[4:-1] for mark in _MARK.findall((files("qbe.store") / "calibration.txt").read_text())]


def open_text(path: Path) -> CalibrationText:
    """A text file, or the folder of a set.

    Raises:
        QBEError: it is neither, cannot be read, is not UTF-8, or a set's passages are not those of its digest.
    """
    if path.is_dir():
        found = calibration_set.read(path)
        texts = tuple(p.text for p in found.passages)
        return CalibrationText(path.resolve().name, texts, found.digest, template=found.about.get("template"))
    if path.suffix == ".jsonl":
        raise QBEError(f"{path} is a log, not a text: make a set of it with 'qbe calibrate build'")
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(TOKENS * CHARACTERS)
        with path.open("rb") as raw:
            digest = hashlib.file_digest(raw, "sha256").hexdigest()
    except OSError as error:
        raise QBEError(f"the calibration text {path} cannot be read: {reason(error)}") from error
    except UnicodeDecodeError as error:
        raise QBEError(f"the calibration text {path} is not valid UTF-8 (byte {error.start}); convert it") from None
    pieces = tuple(text[at : at + 4 * WINDOW] for at in range(0, len(text), 4 * WINDOW)) or ("",)
    return CalibrationText(path.name, pieces, digest, whole=True)
