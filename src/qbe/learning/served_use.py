"""`qbe quantize --update FOLDER --from-records`: how often experts are used goes from what was served to the store.

Every served token counts as much as one of the calibration text, and half as much for each week that it is older than
the newest one: traffic changes, and a server that rests forgets nothing. What was taken over before is replaced, so
that doing it twice is doing it once. What lowering an expert does to a token that uses it stays as it was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qbe.errors import QBEError
from qbe.records import RecordStore, ServedUse
from qbe.store import checkpoint, expert_use, provenance
from qbe.store.expert_use import ExpertUse

HALF_LIFE_DAYS = 7.0


@dataclass(frozen=True)
class TakenOver:
    """What an update did.

    Attributes:
        served_tokens: in the records, unweighted. days: on which they were served.
        weight: what they count for beside the text, in tokens.
        text_tokens: of the text that the store's use was counted on when it was made.
        moved: share of the tokens' choices that are other experts' by now than in the store before, 0 to 1.
    """

    served_tokens: int
    days: int
    weight: int
    text_tokens: int
    moved: float

    def describe(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        days = f"{self.days} day" + "s" * (self.days > 1)
        return (
            f"use of experts from {self.served_tokens} served tokens ({days}, counting as {self.weight}) beside "
            f"{self.text_tokens} of the text; {self.moved:.1%} of the choices moved"
        )


def take_over(folder: Path, records: RecordStore) -> TakenOver:
    """Writes what the records count of a store's experts beside it; its codes stay.

    Raises:
        QBEError: no store, one without experts, or nothing of it in the records.
    """
    if not checkpoint.is_checkpoint(folder):
        raise QBEError(f"{folder} is not a folder that 'qbe quantize' wrote: give one to --update")
    provenance.check(folder)
    manifest = checkpoint.read_manifest(folder)
    text = expert_use.read(folder)
    if not manifest.experts or text is None:
        raise QBEError(f"{folder} has no nested experts, whose use could be taken over")
    days = records.use_of(checkpoint.identity(manifest))
    if not days:
        raise QBEError(
            f"the records in {records.path} count no experts of {folder}: serve it with records first, or set "
            "QBE_RECORDS to those of the server"
        )
    sizes = {layer: len(counts) for layer, counts in text.chosen.items()}
    if any({layer: len(counts) for layer, counts in day.chosen.items()} != sizes for day in days):
        raise QBEError(f"the records in {records.path} count other experts than those of {folder}; quantise it again")
    before = expert_use.read_served(folder)
    served = aged(days)
    expert_use.write(folder, text, expert_use.about(folder), served)
    known = text if before is None else text + before
    moved = expert_use.moved(text + served, {layer: known.shares(layer) for layer in known.chosen})
    return TakenOver(sum(day.tokens for day in days), len(days), served.tokens, text.tokens, moved)


def aged(days: Sequence[ServedUse]) -> ExpertUse:
    """The sum of the days, each by its age on the last one."""
    weights = [0.5 ** ((days[-1].day - day.day).days / HALF_LIFE_DAYS) for day in days]
    chosen = {
        layer: sum(w * np.array(day.chosen[layer], np.float64) for w, day in zip(weights, days, strict=True))
        for layer in days[-1].chosen
    }
    return ExpertUse(round(sum(w * day.tokens for w, day in zip(weights, days, strict=True))), chosen)
