"""How far a blueprint's distributions are from the 16-bit model's on the same tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

import torch

from qbe.blueprint import Blueprint
from qbe.engine.adaptive.routing import Read
from qbe.engine.core import Core
from qbe.engine.sampling.row_fidelity import compare_rows, summed_divergence
from qbe.engine.sampling.scoring import Scored, score
from qbe.sites import SiteTable


@dataclass(frozen=True)
class Fidelity:
    """Sums over the tokens of one reference answer.

    Attributes:
        tokens: of the answer.
        kl: divergence from the 16-bit model to this one, nats.
        agreed: tokens at which both find the same next token likeliest.
        loss: negative log likelihood of the answer, nats.
        bits: average over the weights of nested sites and the answer's tokens, where routers chose them; else None.
        bytes_per_token: likewise.
    """

    tokens: int
    kl: float
    agreed: int
    loss: float
    bits: float | None = None
    bytes_per_token: int | None = None

    def describe(self) -> dict[str, float]:
        return asdict(self)


class Teacher:
    """One text under the 16-bit model, whose logits [tokens, vocabulary] are computed once, when the first blueprint is
    compared, and kept in memory as long as this object.

    Args:
        core: serves nobody else meanwhile.
        full: the blueprint of 16 bits.
        prompt, reference: token ids; the prompt has one at least. What is measured is the reference.
        table: the model's sites, with the bytes that are counted.
    """

    def __init__(
        self, core: Core, full: Blueprint, prompt: list[int], reference: list[int], table: SiteTable
    ) -> None:  # fmt: skip
        self.core, self.full, self.ids, self.table = core, full, prompt + reference, table
        self.start, self.targets = len(prompt) - 1, torch.tensor(reference, device=core.device)

    @cached_property
    def logits(self) -> torch.Tensor:
        logits = torch.empty(len(self.targets), self.core.vocabulary, device=self.core.device)

        def keep(position: int, rows: torch.Tensor) -> None:
            begin = position - self.start
            logits[begin : begin + len(rows)] = rows

        self._run(self.full, keep)
        return logits

    def compare(self, blueprint: Blueprint) -> Fidelity:
        """The same text under this blueprint."""
        logits, n = self.logits, len(self.targets)
        measured = torch.zeros(3, n, dtype=torch.float32, device=self.core.device)

        def add(position: int, rows: torch.Tensor) -> None:
            positions = slice(position - self.start, position - self.start + len(rows))
            found = compare_rows(logits[positions], rows, self.targets[positions])
            measured[:, positions] = torch.stack([found.kl, found.agreed, found.loss])

        read = self._run(blueprint, add)
        kl, loss = summed_divergence(measured[0]), summed_divergence(measured[2])
        agreed = float(measured[1].sum())
        if read is None:
            return Fidelity(n, kl, round(agreed), loss)
        return Fidelity(n, kl, round(agreed), loss, read.average(self.table), read.bytes)

    def _run(self, blueprint: Blueprint, take: object) -> Read | None:
        # The last token's logits tell of nothing that is known.
        asked = Scored(self.ids[:-1], blueprint, self.start, take)  # type: ignore[arg-type]
        return score(self.core, [asked], self.table)[0]
