"""Speculative decoding (Leviathan et al. 2023) by the model itself: draft tokens come from fewer bits, or are read.

Drafted tokens are rows of a decode step like any other. A draft row runs at a lower blueprint and gives a draft token;
the rows that check draft tokens run at the sequence's own, all of them in one step, and each says what follows the
token before it. What a sequence writes comes from these rows alone, sampled one after the other as if each had been a
step of its own, for as long as what was sampled is what had been drafted. The keys and values of a draft token are
written at draft bits first and overwritten by the row that checks it; what lies behind the last accepted token is
overwritten later.

Draft tokens stay within the page that is being filled and never fill it, so that no page is quantised with one in it.
"""

from __future__ import annotations

import collections.abc
from collections.abc import Callable

import torch

from qbe.engine.sampling.sampler import DraftToken, draw, filtered
from qbe.engine.scheduling.scheduler import ScheduledTokens
from qbe.engine.scheduling.sequence import Sequence
from qbe.engine.speculation.acceptance_statistics import NGRAM_DRAFTER, AcceptanceStats, Costs, Speculation
from qbe.engine.speculation.draft_bits import DraftBits
from qbe.engine.speculation.ngram_proposer import NgramProposer
from qbe.format.kv_blocks import PAGE_SIZE
from qbe.sites import SiteTable

# of a step that checks draft tokens: a CPU gives a row the same bits beside so many others
ROWS = {"cpu": 8, "cuda": 16}
MOST = 7  # draft tokens that are checked at once


class Speculator:
    """Decides for each decode step which sequences draft, and at which bits.

    Args:
        table: the model's sites.
        rows: of a step that checks draft tokens, at most.
        size_of: rows of a step -> rows that run, with those that pad it.

    Attributes:
        drafters: who may draft: `NGRAM_DRAFTER`, and bits below those of a sequence.
        reader: what `NGRAM_DRAFTER` reads.
        acceptance: how own drafts did, by their bits and those of what checks them.
    """

    def __init__(self, table: SiteTable, rows: int, size_of: Callable[[int], int]) -> None:
        self.table, self.rows, self._size_of = table, rows, size_of
        self.costs, self.drafters, self.reader = Costs(), {NGRAM_DRAFTER, *table.gears()}, NgramProposer()
        self.acceptance: dict[tuple[int, int], AcceptanceStats] = {}
        self._gear = NGRAM_DRAFTER  # of the draft steps that run now
        self._done = self._left = 0  # of them
        self._bits = DraftBits(table)

    def extend(self, work: list[ScheduledTokens]) -> list[ScheduledTokens]:
        """The work of a decode step with rows that draft or that check draft tokens; the same work where that would not
        pay.

        A draft step reads fewer bits only if all of its rows do: sequences draft together, or not at all.
        """
        able = [w for w in work if w.sequence.speculation is not None]
        if not able:
            return self.pause(work)
        if self._left and not all(w in able and len(_of(w).draft_tokens) == self._done for w in work):
            self.pause(work)  # somebody is new
        if not self._left and not any(_of(w).draft_tokens for w in able):
            self._choose(work, able)
        if self._left:
            self._done, self._left = self._done + 1, self._left - 1
            return [self._draft(w) for w in work]
        return [row for w in work for row in _checks(w)]

    def pause(self, work: list[ScheduledTokens]) -> list[ScheduledTokens]:
        """The same work: the step that comes neither drafts nor checks."""
        self._left = 0
        for w in work:
            if w.sequence.speculation is not None:
                w.sequence.speculation.drop()
        return work

    def measured(self, work: collections.abc.Sequence[ScheduledTokens], seconds: float) -> None:
        """A decode step with these rows took so long."""
        self.costs.add(self._size_of(len(work)), max(self._bits.average(w.blueprint) for w in work), seconds)

    @torch.inference_mode()
    def draft(self, sequences: collections.abc.Sequence[Sequence], logits: torch.Tensor, best: torch.Tensor) -> None:
        """Take the draft tokens that a draft step gives, each drawn as its sequence draws tokens.

        With a seed a draft token is drawn with the number that will draw the token, so that both are the same where the
        distributions nearly are; without one its distribution is kept, for rejection sampling.

        Args:
            logits: float32 `[n, vocabulary]`. best: their likeliest tokens int64 `[n]`.
        """
        tokens = best.clone()
        drawn = [i for i, s in enumerate(sequences) if not s.params.greedy]
        if drawn:
            chosen = [sequences[i] for i in drawn]
            scores = filtered(logits[drawn], chosen)
            tokens[drawn] = draw(scores, [_generator(s) for s in chosen])
            for s, row in zip(chosen, scores.softmax(-1), strict=True):
                if s.params.seed is None:
                    _of(s).proposals.append(row)
        numbers = torch.where(best >= 0, tokens, -1).tolist()
        for s, token in zip(sequences, numbers, strict=True):
            _of(s).draft_tokens.append(token)
        if min(numbers) < 0:  # the logits were no numbers: what the sequences are worth at their own bits comes next
            self._left = 0
            for s in sequences:
                _of(s).drop()

    def _choose(
        self, work: collections.abc.Sequence[ScheduledTokens], able: collections.abc.Sequence[ScheduledTokens]
    ) -> None:
        """The way to the most tokens a second, by the acceptance so far: none, reading the text, or own drafts."""
        n, bits = len(work), max(self._bits.average(w.blueprint) for w in work)
        usual = self.costs.of(self._size_of(n), bits)
        if usual is None:
            return  # the first step tells what a token costs

        def seconds(rows: int, row_bits: float) -> float:
            """Of a step, hopeful where there was none."""
            return self.costs.of(self._size_of(rows), row_bits) or usual * min(1.0, row_bits / bits)

        fastest, source, count = n / usual, None, 0
        gains = self._read(able) if NGRAM_DRAFTER in self.drafters else []
        written = float(n)
        for k, (gain, _) in enumerate(gains[: max(0, self.rows - n)], 1):
            written += gain
            if written / seconds(n + k, bits) > fastest:
                fastest, source, count = written / seconds(n + k, bits), NGRAM_DRAFTER, k
        most = min(self.rows // n - 1, *map(_room, work)) if len(able) == n else 0
        gears = (g for g in self.drafters if g > NGRAM_DRAFTER)
        own = self._bits.fastest(
            [w.blueprint for w in work], gears, min(MOST, most), lambda gear: self._outcomes(gear, bits).rate, seconds
        )
        if own is not None and own[0] > fastest:
            _, source, count = own
        for (gear, of), outcomes in self.acceptance.items():
            if of == round(bits) and gear != source:
                outcomes.pass_by(n)
        for w in able:
            speculation = _of(w)
            if source is not None:
                speculation.source, speculation.outcomes = source, self._outcomes(source, bits) if source else None
            if source == NGRAM_DRAFTER and speculation.proposed is not None:
                checked = sum(of is speculation for _, of in gains[:count])
                speculation.draft_tokens = [token for token, _ in speculation.proposed.draft_tokens[:checked]]
            elif source is not None and w.sequence.params.seed is not None:
                speculation.generator = torch.Generator()
                speculation.generator.set_state(w.sequence.sampling.generator.get_state())
        self._gear, self._done, self._left = source or NGRAM_DRAFTER, 0, count if source else 0

    def _read(self, able: collections.abc.Sequence[ScheduledTokens]) -> list[tuple[float, Speculation]]:
        """Read for these sequences. Returns the tokens that each draft token adds to what a step writes, the most
        first, and whose it is; those of one sequence in their order."""
        gains = list[tuple[float, Speculation]]()
        for w in able:
            speculation, tokens = _of(w), w.sequence.token_ids
            if speculation.proposed is not None:
                self.reader.learn(speculation.proposed, tokens)
            speculation.proposed, likely = self.reader.propose(speculation.text, tokens, min(MOST, _room(w)))
            gains += [(probability, speculation) for probability in likely]
        return sorted(gains, key=lambda gain: -gain[0])

    def _outcomes(self, drafter: int, bits: float) -> AcceptanceStats:
        return self.acceptance.setdefault((drafter, round(bits)), AcceptanceStats())

    def _draft(self, w: ScheduledTokens) -> ScheduledTokens:
        speculation = _of(w)
        lowered, nbytes = self._bits.lowered(w.blueprint, self._gear)
        speculation.draft_bytes += nbytes
        return ScheduledTokens(w.sequence, w.start + len(speculation.draft_tokens), 1, lowered)


def draft_token_of(sequence: Sequence, number: int) -> DraftToken | None:
    """The draft token of this number, where rejection sampling decides on it."""
    speculation = sequence.speculation
    if speculation is None or number >= len(speculation.proposals):
        return None
    return speculation.draft_tokens[number], speculation.proposals[number]


def _of(owner: ScheduledTokens | Sequence) -> Speculation:
    speculation = (owner.sequence if isinstance(owner, ScheduledTokens) else owner).speculation
    assert speculation is not None
    return speculation


def _generator(sequence: Sequence) -> torch.Generator:
    return _of(sequence).generator or sequence.sampling.generator


def _checks(w: ScheduledTokens) -> list[ScheduledTokens]:
    """The row of a sequence's last token and those of its draft tokens."""
    speculation = w.sequence.speculation
    count = 0 if speculation is None else len(speculation.draft_tokens)
    return [w, *(ScheduledTokens(w.sequence, w.start + 1 + i, 1) for i in range(count))]


def _room(w: ScheduledTokens) -> int:
    """How many draft tokens a sequence may have: they do not fill its page, and leave a place for the token after
    them."""
    return max(0, min(PAGE_SIZE - 2 - w.start % PAGE_SIZE, w.sequence.max_length - len(w.sequence.token_ids) - 1))
