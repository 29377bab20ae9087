"""An answer that was given, scored by the widest gear: in steps of its own, between which it can be left and gone on
with.

Its tokens go through the model twice: at the bits that each of them had (its blueprints, refreshes, the KV bits of its
pages, tokens of high precision), as they would after a preemption, and at the widest gears with a KV cache of 16 bits.
Whole distributions are compared. What the answer read beyond what was asked, because it shared steps (`rows="shared"`),
is not repeated: what is scored is what it was owed.
"""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass
from typing import Any

import torch

from qbe.analysis.difficulty import difficulty
from qbe.blueprint import Blueprint
from qbe.engine.adaptive.activation_statistics import ActivationStats, largest_inputs
from qbe.engine.core import Core
from qbe.engine.sampling.row_fidelity import RowFidelity, compare_rows, summed_divergence
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.engine.scheduling.sequence import Priority, Sequence
from qbe.engine.scheduling.sequence_state import Scoring
from qbe.errors import QBEError
from qbe.kvcache.allocator import Page
from qbe.pictures.placed import PlacedPicture
from qbe.selection.blueprint_history import BlueprintHistory
from qbe.sites import SiteTable

OPENING = 8  # tokens in which an answer's way is decided (Qi et al. 2024, "Safety Alignment Should Be Made More Than
# Just a Few Tokens Deep")
WINDOW = 32  # tokens whose divergence and difficulty are told together (`qbe.refresh.thresholds`)
LAST = Priority(math.inf, "flex")


@dataclass(frozen=True)
class AnswerScore:
    """Of an answer's tokens, or of some in a row.

    Attributes:
        tokens: how many were scored.
        first: the number of the first of them in the answer.
        kl: divergence from the widest gear to what was served, nats a token.
        top1: share of the tokens at which both find the same one likeliest.
        flip_margin: mean over the others of how much the widest gear prefers its own likeliest token, nats; None where
            there are none.
        opening_kl: `kl` of the first eight tokens of the answer; None where the first was not scored.
        behind: for each token, by how much it was behind the likeliest of what was served, nats.
        reference_bits: of the widest gear, averaged over the weights.
        windows: for each whole window of 32 tokens its `kl`, and mean entropy (nats) and margin (logits) of what was
            served (`qbe.analysis.difficulty`).
        inputs: with what the reference read of the prompt: for each nested site the root mean square of its input's
            largest channel; None where that was not seen. Of `inputs_tokens`.
    """

    tokens: int
    first: int
    kl: float
    top1: float
    flip_margin: float | None
    opening_kl: float | None
    behind: tuple[float, ...]
    reference_bits: float
    windows: tuple[tuple[float, float, float], ...] = ()
    inputs: tuple[float | None, ...] = ()
    inputs_tokens: int = 0

    def describe(self) -> dict[str, Any]:
        """As a record keeps it."""
        rounded = {"kl": self.kl, "top1": self.top1, "flip_margin": self.flip_margin}
        return {
            "tokens": self.tokens, "first": self.first,
            **{name: None if value is None else round(value, 6) for name, value in rounded.items()},
            "reference_bits": round(self.reference_bits, 4),
            "windows": [[round(value, 6) for value in window] for window in self.windows],
        }  # fmt: skip


def widest(table: SiteTable) -> Blueprint:
    """The widest gear of every site that is loaded, and a KV cache of 16 bits."""
    return Blueprint.of("widest", table, [site.gears[-1] for site in table.nested])


class AnswerScoring:
    """Scores one answer on a core that serves nobody else while it steps.

    Args:
        served: the finished request.
        tokens: of the answer that are scored at most; of a longer one so many in a row.
        at: in [0, 1), where in a longer one these begin.
        inputs: whether to see what sites read of the prompt (`AnswerScore.inputs`); an interruption gives that up.

    Raises:
        QBEError: a text that cannot be run here.
    """

    def __init__(self, core: Core, served: Sequence, tokens: int, at: float = 0.0, inputs: bool = False) -> None:
        self._core, self._served = core, served
        written = len(served.output_ids)
        self._count = min(tokens, written)
        self._first = int(at * (written - self._count + 1))
        self._start = len(served.prompt_ids) - 1 + self._first
        self._ids = served.token_ids[: self._start + self._count]
        if not self._count:
            raise QBEError("there is no token of the answer to score")
        if served.cascade.moved is not None:
            raise QBEError("the cascade moved the bits of its tokens, which is not done again")
        if not core.scheduler.chunked and len(self._ids) > core.scheduler.max_batch_tokens:
            raise QBEError("the model reads a text in one step, which would hold up whoever comes")
        self._targets = torch.tensor(served.token_ids[self._start + 1 : self._start + 1 + self._count])
        # In main memory: the device's belongs to answers.
        self._logits = torch.empty(self._count, core.vocabulary)
        self._measured = torch.empty(7, self._count)  # four of `RowFidelity`; how far behind the token was; difficulty
        self._widest, self._again = widest(core.table), True  # at the bits that it had
        self._stats = ActivationStats.of(core.table) if inputs else None
        self._running: Sequence | None = None
        self._pages: list[Page] = []  # of the reference
        self._done = 0  # rows of this pass

    def step(self) -> AnswerScore | None:
        """Runs one step; the score, once that was the last.

        Raises:
            QBEError: the answer cannot be scored here: it does not fit in the cache, or its logits are no numbers.
        """
        if self._running is None:
            self._running = self._replay() if self._again else self._reference()
            self._core.add(self._running)
        running = self._running
        self._core.step()
        self._core.scheduler.last = []  # nobody's tokens, for whoever counts
        if running.finish_reason is None:
            return None
        if running.finish_reason == "error":
            raise QBEError(running.error or "the model failed")
        self._running, self._done = None, 0
        if self._again:
            self._again = False
            return None
        self._core.scheduler.allocator.forget(self._pages)
        return self._score()

    def leave(self) -> None:
        """Give up what it holds of the engine; `step` goes on where it was."""
        if self._running is not None:
            self._core.cancel(self._running.request_id)
            self._core.scheduler.last = []
            self._running, self._stats = None, self._stats if self._again else None

    def _sequence(self, blueprint: Blueprint) -> Sequence:
        """The text, to be computed as after a preemption."""
        served = self._served
        params = SamplingParams(max_tokens=self._first + self._count, temperature=0, ignore_eos=True)
        sequence = Sequence(uuid.uuid4().hex, served.prompt_ids, params, blueprint)
        sequence.token_ids = list(self._ids)
        sequence.pictures = tuple(PlacedPicture(p.picture, p.places) for p in served.pictures)  # made rows of anew
        sequence.mrope = served.mrope
        sequence.priority, sequence.paging.cache_salt = LAST, served.paging.cache_salt
        return sequence

    def _replay(self) -> Sequence:
        served = self._served
        sequence, history = self._sequence(served.blueprint), served.blueprint_history
        sequence.blueprint_history = BlueprintHistory(history.last, list(history.earlier), list(history.prefix))
        sequence.paging.quantised_bits = list(served.paging.quantised_bits)
        sequence.difficulty.high_precision_positions = set(served.difficulty.high_precision_positions)
        sequence.sampling.scoring = Scoring(self._start + self._done, self._keep)
        return sequence

    def _reference(self) -> Sequence:
        sequence = self._sequence(self._widest)
        # Its pages are at more bits than most ask for, and nobody asked for them: they are found by this answer alone.
        sequence.paging.cache_salt = b"scored " + self._served.request_id.encode()
        sequence.activation_stats = self._stats
        sequence.sampling.scoring = Scoring(self._start + self._done, self._compare)
        return sequence

    def _rows(self, position: int, rows: torch.Tensor) -> tuple[slice, torch.Tensor]:
        begin = position - self._start
        self._done = begin + len(rows)
        return slice(begin, self._done), rows

    def _keep(self, position: int, rows: torch.Tensor) -> None:
        where, rows = self._rows(position, rows)
        self._logits[where] = rows.cpu()

    def _compare(self, position: int, rows: torch.Tensor) -> None:
        assert self._running is not None
        self._pages = list(self._running.pages)
        where, rows = self._rows(position, rows)
        served, targets = self._logits[where].to(rows.device), self._targets[where].to(rows.device)
        found = compare_rows(rows, served, targets)
        behind = served.max(-1).values - served.gather(-1, targets[:, None]).squeeze(-1)
        _, *hard = difficulty(served, served.argmax(-1))
        self._measured[:, where] = torch.stack([*found, behind, *(each.to(behind) for each in hard)]).cpu()

    def _score(self) -> AnswerScore:
        *rows, behind, entropy, margin = self._measured
        found, n = RowFidelity(*rows), self._count
        flips = n - int(found.agreed.sum())
        opening = found.kl[: OPENING - self._first]
        return AnswerScore(
            n, self._first, summed_divergence(found.kl) / n, 1 - flips / n,
            float(found.margin.sum()) / flips if flips else None,
            summed_divergence(opening) / len(opening) if self._first == 0 else None,
            tuple(behind.tolist()), self._widest.average_weight_bits(self._core.table),
            _windows(found.kl, entropy, margin), largest_inputs(self._stats),
            0 if self._stats is None else self._stats.tokens,
        )  # fmt: skip


def _windows(*of_tokens: torch.Tensor) -> tuple[tuple[float, float, float], ...]:
    """Means over whole windows of numbers for each token; windows with a number that is none are left out."""
    whole = len(of_tokens[0]) // WINDOW * WINDOW
    means = torch.stack(of_tokens)[:, :whole].view(len(of_tokens), -1, WINDOW).double().mean(-1)
    return tuple((float(kl), float(e), float(m)) for kl, e, m in means[:, means.isfinite().all(0)].T)
