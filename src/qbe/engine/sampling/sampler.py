"""Chooses each sequence's next token from its logits.

Order: penalties, logit bias, constraint, temperature, top-k, top-p, min-p, then one draw: the order of transformers.
All rows are treated at once, but every step of it depends on its own row alone, and the random number comes from the
sequence's own generator: what a request writes does not depend on what else is in the batch.
"""

from __future__ import annotations

import collections.abc
from typing import NamedTuple

import torch

from qbe.analysis.difficulty import difficulty
from qbe.engine.sampling.constraint import settled
from qbe.engine.sampling.logprobs import logprobs
from qbe.engine.scheduling.sequence import Sequence

_NUCLEUS = (
    1024  # top-p first looks among this many likeliest tokens; the whole vocabulary is sorted only if they fall short
)

_PART = 256  # logits of one part of `likeliest`


def likeliest(logits: torch.Tensor) -> torch.Tensor:  # no inference_mode: AOTAutograd keeps no graph that enters it
    """Each row's likeliest token, int64 `[n]`, the first of equals; -1 where logits `[n, vocabulary]` are no numbers.

    A GPU gives a whole row to one block (28 us for 128 256 logits on an H200), so there it is done in two stages.
    """
    if not logits.is_cuda:
        best, tokens = logits.max(dim=-1)
        return torch.where(torch.isfinite(best), tokens, -1)
    parts = torch.nn.functional.pad(logits, (0, -logits.shape[-1] % _PART), value=-torch.inf)
    best, within = parts.unflatten(-1, (-1, _PART)).max(dim=-1)
    best, part = best.max(dim=-1, keepdim=True)
    return torch.where(torch.isfinite(best), part * _PART + within.gather(-1, part), -1).squeeze(-1)


class Scores(NamedTuple):
    """What a step leaves for the tokens of n rows.

    Attributes:
        logits: float32 `[n, vocabulary]`.
        best: their `likeliest`.
        measured: their `difficulty`, where the step has it.
    """

    logits: torch.Tensor
    best: torch.Tensor
    measured: torch.Tensor | None = None

    def rows(self, indices: list[int]) -> Scores:
        """Those of some rows."""
        measured = None if self.measured is None else self.measured[:, indices]
        return Scores(self.logits[indices], self.best[indices], measured)


DraftToken = tuple[int, torch.Tensor]  # a token, and the distribution float32 `[vocabulary]` that it was drawn from


@torch.inference_mode()
def sample(
    scores: Scores,
    sequences: collections.abc.Sequence[Sequence],
    draft_tokens: collections.abc.Sequence[DraftToken | None] | None = None,
) -> list[int | None]:
    """The next token of each sequence; those that ask for it also get the entropy of the model's distribution, or the
    logarithms of likely tokens.

    Args:
        scores: of n rows; may be overwritten.
        sequences: n of them.
        draft_tokens: of those tokens, where rejection sampling shall take one if it may (`accept`).

    Returns:
        n token ids; None where the logits are not numbers (NaN, infinite, or nothing but -inf, which a constraint may
        leave).
    """
    told = [i for i, s in enumerate(sequences) if s.params.logprobs is not None]
    raw = scores.logits[told] if told else None  # a copy
    tokens = [_settle(s, t) for t, s in zip(_choose(scores, sequences, draft_tokens), sequences, strict=True)]
    if raw is not None:
        valid = [(row, i, t) for row, i in enumerate(told) if (t := tokens[i]) is not None]
        rows = raw[[row for row, _, _ in valid]]
        top = [sequences[i].params.logprobs or 0 for _, i, _ in valid]
        for (_, i, _), told_of_token in zip(valid, logprobs(rows, [t for _, _, t in valid], top), strict=True):
            sequences[i].sampling.logprobs.append(told_of_token)
    return tokens


def _settle(sequence: Sequence, token: int | None) -> int | None:
    """The token, or what its constraint makes of it (`qbe.engine.sampling.constraint.settled`)."""
    constraint = sequence.sampling.constraint
    if token is None or constraint is None:
        return token
    return settled(constraint, token, sequence.max_length - len(sequence.token_ids))


def _choose(
    step: Scores,
    sequences: collections.abc.Sequence[Sequence],
    draft_tokens: collections.abc.Sequence[DraftToken | None] | None,
) -> list[int | None]:
    logits, best, measured = step
    asked = [i for i, s in enumerate(sequences) if s.difficulty.measured]
    if not asked:
        measured = None
    elif measured is None:
        measured = _measure(logits, best, asked)  # before the logits are overwritten
    plain = [i for i, s in enumerate(sequences) if s.params.greedy and not _adjusts(s)]
    chosen_tokens = best
    if len(plain) < len(sequences):
        valid = best >= 0
        logits = adjust(logits, sequences)
        if any(s.sampling.constraint is not None for s in sequences):
            valid = valid & (logits.amax(dim=-1) > -torch.inf)
        tokens = logits.argmax(dim=-1)
        drawn = [i for i, s in enumerate(sequences) if not s.params.greedy]
        if drawn:
            rows = torch.tensor(drawn, device=logits.device)
            chosen = [sequences[i] for i in drawn]
            # Rows without valid logits get harmless ones; their token is not used.
            scores = torch.where(valid[rows, None], logits[rows], torch.zeros_like(logits[rows]))
            scores = filtered(scores, chosen)
            tokens[rows] = draw(scores, [s.sampling.generator for s in chosen])
            for row, i in enumerate(drawn):
                if draft_tokens is not None and (draft_token := draft_tokens[i]) is not None:
                    tokens[i] = accept(scores[row], *draft_token, sequences[i].sampling.generator)
        chosen_tokens = torch.where(valid, tokens, -1)
    if measured is None:
        return [t if t >= 0 else None for t in chosen_tokens.tolist()]  # the step's one wait for the device
    if chosen_tokens is not best:
        measured[0] = chosen_tokens
    numbers, entropies, margins = measured.tolist()  # or this one
    for i in asked:
        sequences[i].difficulty.entropies.append(entropies[i])
        sequences[i].difficulty.margins.append(margins[i])
    return [int(t) if t >= 0 else None for t in numbers]


def _measure(logits: torch.Tensor, best: torch.Tensor, asked: list[int]) -> torch.Tensor:
    """`difficulty`, `[3, n]`, of the rows that ask; on a GPU of all, because to pick some is launches more."""
    if logits.is_cuda or len(asked) == len(logits):
        return difficulty(logits, best)
    measured = best.double().expand(3, -1).clone()
    measured[:, asked] = difficulty(logits[asked], best[asked])
    return measured


def is_likeliest(sequence: Sequence) -> bool:
    """Whether a sequence's next token is `best` and nothing else of the logits is asked for."""
    told = sequence.params.logprobs is not None or sequence.difficulty.measured
    return sequence.params.greedy and not _adjusts(sequence) and not told


def _adjusts(sequence: Sequence) -> bool:
    p = sequence.params
    penalised = p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
    return penalised or bool(p.logit_bias) or sequence.sampling.constraint is not None


def adjust(logits: torch.Tensor, sequences: collections.abc.Sequence[Sequence]) -> torch.Tensor:
    """Logits after penalties and logit bias, -inf where a constraint allows no token, `[n, vocabulary]`; in place."""
    for row, sequence in zip(logits, sequences, strict=True):
        p = sequence.params
        if p.repetition_penalty != 1:
            penalised = torch.where(row < 0, row * p.repetition_penalty, row / p.repetition_penalty)
            row.copy_(torch.where(_seen(sequence, row), penalised, row))
        if (p.presence_penalty or p.frequency_penalty) and sequence.output_ids:
            written, times = torch.tensor(sequence.output_ids, device=row.device).unique(return_counts=True)
            row[written] -= p.presence_penalty + p.frequency_penalty * times
        if p.logit_bias:
            tokens = torch.tensor(list(p.logit_bias), device=row.device)
            row[tokens] += torch.tensor(list(p.logit_bias.values()), dtype=row.dtype, device=row.device)
        if sequence.sampling.constraint is not None:
            row.masked_fill_(~sequence.sampling.constraint.allowed().to(row.device, non_blocking=True), -torch.inf)
    return logits


def _seen(sequence: Sequence, row: torch.Tensor) -> torch.Tensor:
    """bool `[vocabulary]`: tokens of the prompt and the answer. Kept on the sequence, a token is added each step."""
    seen = sequence.sampling.seen
    if seen is None:
        seen = sequence.sampling.seen = torch.zeros(len(row), dtype=torch.bool, device=row.device)
        seen[torch.tensor(sequence.token_ids, device=row.device)] = True
    else:
        seen[sequence.token_ids[-1]] = True
    return seen


def filtered(logits: torch.Tensor, sequences: collections.abc.Sequence[Sequence]) -> torch.Tensor:
    """Logits over temperature, -inf where top-k, top-p or min-p drops a token; `[n, vocabulary]`.

    Tokens are dropped by comparing with a threshold of their row, so ties at it stay together. A row's likeliest token
    always stays.
    """
    device = logits.device

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

    params = [s.params for s in sequences]
    # Subtracting the maximum first keeps the smallest temperatures finite.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / column([p.temperature for p in params])
    vocabulary = logits.shape[-1]

    ks = [min(p.top_k, vocabulary) or vocabulary for p in params]
    if min(ks) < vocabulary:
        likeliest = logits.topk(max(k for k in ks if k < vocabulary), dim=-1).values
        last_kept = torch.tensor([min(k, likeliest.shape[-1]) - 1 for k in ks], device=device)[:, None]
        limit = likeliest.gather(-1, last_kept)
        off = torch.tensor([k == vocabulary for k in ks], device=device)[:, None]
        logits = logits.masked_fill((logits < limit) & ~off, float("-inf"))

    if min(p.top_p for p in params) < 1:
        logits = logits.masked_fill(logits < _nucleus(logits, column([p.top_p for p in params])), float("-inf"))

    if max(p.min_p for p in params) > 0:
        # p >= min_p * p_max is, with the maximum at 0, logit >= log(min_p).
        logits = logits.masked_fill(logits < column([p.min_p for p in params]).log(), float("-inf"))
    return logits


def _nucleus(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The least logit `[n, 1]` of each row's nucleus: the fewest likeliest tokens whose probabilities reach `top_p`."""
    total = logits.logsumexp(dim=-1, keepdim=True)
    for width in (min(_NUCLEUS, logits.shape[-1]), logits.shape[-1]):
        values = logits.topk(width, dim=-1).values
        cumulative = (values - total).exp().cumsum(dim=-1)
        if width == logits.shape[-1] or bool((cumulative[:, -1:] >= top_p).all()):
            break
    # A token stays when the sum before it has not reached top_p yet.
    inside = torch.nn.functional.pad(cumulative[:, :-1], (1, 0)) < top_p
    limit = values.masked_fill(~inside, float("inf")).amin(dim=-1, keepdim=True)
    return torch.where(top_p < 1, limit, float("-inf"))


def draw(logits: torch.Tensor, generators: collections.abc.Sequence[torch.Generator]) -> torch.Tensor:
    """A token for each row of logits `[n, vocabulary]`, drawn with the row's generator; int64 `[n]`.

    One uniform number per row against the cumulative distribution in float64, in the order of the vocabulary.
    """
    uniform = torch.cat([torch.rand(1, generator=g, dtype=torch.float64) for g in generators])
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    point = uniform.to(logits.device, non_blocking=True)[:, None] * cumulative[:, -1:]
    # right=True: the first token whose sum exceeds the point, which has a probability above zero.
    return torch.searchsorted(cumulative, point, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)


def accept(logits: torch.Tensor, draft_token: int, proposal: torch.Tensor, generator: torch.Generator) -> int:
    """A token drawn from logits `[vocabulary]`: the draft token, as often as that keeps their distribution p.

    Rejection sampling (Leviathan et al. 2023, algorithm 1): the draft token stays with probability min(1, p / q); else
    the token is drawn from what p has above q.

    Args:
        proposal: q, float32 `[vocabulary]`, what the draft token was drawn from.
    """
    p, q = logits.double().softmax(-1), proposal.double()
    first, second = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
    if first * float(q[draft_token]) < float(p[draft_token]):
        return draft_token
    above = (p - q).clamp_min_(0).cumsum(-1)
    point = (second * above[-1:]).contiguous()
    return min(int(torch.searchsorted(above, point, right=True)), len(p) - 1)
