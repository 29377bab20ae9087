"""Per-token gates of slices while routers are trained, and what the trainings of `mobi`, `tokenwise` and the cascade
share.

A gate is a sigmoid of what a slice is worth to the token, over the threshold, divided by a temperature; hard ones are 0
or 1, as they are served.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from qbe.datasets.items import Item
from qbe.engine.execution.runner import can_pack
from qbe.errors import QBEError
from qbe.kernels.ops.routing import worths_of
from qbe.kvcache.cache import decoder_config
from qbe.learning import distil
from qbe.learning.distil import Batch, RouterNetworks, Student, batches, sliced, solve, split, worth
from qbe.policies.learned import Learned
from qbe.policies.per_token import LEVELS
from qbe.policies.routers import Numbers, RoutedBlock, gear_bits, named
from qbe.sites import SiteTable
from qbe.store.prepare import PreparedModel

CALIBRATED = 48  # steps' worth of tokens whose scores the thresholds for serving are taken from, at most


# The model, its gates, batches, steps, seed, and what to call after each step.
Fit = Callable[["PreparedModel", "Gates", Sequence[Batch], int, int, Callable[[], None]], Mapping[str, Any]]
# The number of a block and the input of its module [texts, tokens, inputs] -> what its router reads, likewise.
Read = Callable[[int, torch.Tensor], torch.Tensor]


def hidden_states(_block: int, x: torch.Tensor) -> torch.Tensor:
    """`Read` of routers that see what their module does."""
    return x


def train_routers(
    fit: Fit, blocks_of: Callable[[SiteTable], Sequence[RoutedBlock]], hidden: int, prepared: PreparedModel,
    items: Sequence[Item], steps: int, seed: int = 0, tick: Callable[[], None] = lambda: None,
    read: Read = hidden_states, texts: Callable[[Sequence[Item]], list[Batch]] | None = None,
) -> Learned:  # fmt: skip
    """Routers of blocks, which begin with what the measured sensitivities say, the same for every token.

    Args:
        fit: trains the routers of the gates on the batches; what it returns is reported, too.
        blocks_of: which sites have a router, together. hidden: units of a router.
        prepared: not yet served by an engine; on its device everything runs.
        items: three quarters are trained on; what is reported is of the others.
        tick: called after each of `steps` steps.
        read: what routers read. texts: makes batches of items; None: of their reference answers.

    Raises:
        QBEError: too few items, a model whose tokens cannot have bits of their own, or one without 16-bit weights.
    """
    if not can_pack(decoder_config(prepared.model)):
        raise QBEError(
            "the tokens of this model cannot have bits of their own (each sequence has a forward of its own): train qaq"
        )
    table, device = prepared.table, next(prepared.model.parameters()).device
    texts = texts or partial(batches, tokenizer=prepared.tokenizer, device=device)
    kept, held = map(texts, split(items, seed))
    blocks = blocks_of(table)
    with sliced(prepared, blocks) as student:
        inputs = _inputs(student, kept[0], len(blocks), read)
        routers = RouterNetworks(inputs, [begin(table, b.sites) for b in blocks], hidden, seed).to(device)
        gates = Gates(table, student, routers, read)
        before = _held_out(gates, held, kept)
    fitted = fit(prepared, gates, kept, steps, seed, tick)
    with sliced(prepared, blocks) as gates.student:
        thresholds = gates.thresholds(kept)
        after = _held_out(gates, held, kept)
    tensors: dict[str, npt.NDArray[Any]] = {
        **named(routers.networks(len(blocks))), "widths": np.array(gear_bits(table)), "thresholds": thresholds,
    }  # fmt: skip
    count = sum(p.numel() for p in routers.parameters())
    about = {
        "texts": len(items), "steps": steps, "seed": seed, "parameters": count, "before": before, "after": after,
        **fitted,
    }  # fmt: skip
    return Learned(tensors, about)


def begin(table: SiteTable, sites: Sequence[int]) -> Numbers:
    """Scores that give each slice of a site its measured worth."""
    worths = [worth(table, [s]) for s in sites]
    return np.concatenate([[w[0], *np.log(np.expm1(-np.diff(w)))] for w in worths])


def _inputs(student: Student, batch: Batch, count: int, read: Read) -> list[int]:
    """Of each block's router."""
    widths = [0] * count

    def note(block: int, x: torch.Tensor) -> None:
        widths[block] = read(block, x).shape[-1]

    student.on_block = note
    student.teacher(batch.tokens, batch.predicted)
    return widths


class Gates:
    """Gates of a student's tokens by routers; tokens that are not routed have what routers begin with.

    Attributes:
        threshold: what slices must be worth more than, float32 [].
        temperature: of the gates. hard: make them 0 or 1.
        share: float32 [slices of all sites], bits that each adds to the average over all blocks' weights.
    """

    def __init__(self, table: SiteTable, student: Student, routers: RouterNetworks, read: Read = hidden_states) -> None:
        self.student, self.routers, self.table, self.read = student, routers, table, read
        self.blocks, self.widths = student.blocks, gear_bits(table)
        self.threshold, self.temperature, self.hard = torch.tensor(0.0), 1.0, False
        device = next(routers.parameters()).device
        steps = np.diff(self.widths)
        sizes = [[table.nested[s].parameters for s in b.sites] for b in self.blocks]
        total = sum(map(sum, sizes))
        self.share = torch.tensor(
            [size * step / total for block in sizes for size in block for step in steps],
            dtype=torch.float32,
            device=device,
        )
        scores = (torch.tensor(begin(table, b.sites), dtype=torch.float32, device=device) for b in self.blocks)
        self._begin = [worths_of(s.unflatten(0, (len(b.sites), -1))) for s, b in zip(scores, self.blocks, strict=True)]
        self._batch: Batch | None = None
        self._worths: list[torch.Tensor] = []

    def divergence(self, batch: Batch, teacher: torch.Tensor) -> torch.Tensor:
        """Of the student with the routers' gates, nats []."""
        self._batch, self._worths = batch, []
        self.student.on_block = self._gate
        return self.student.divergence(batch.tokens, batch.predicted, teacher)

    def _gate(self, block: int, x: torch.Tensor) -> None:
        if self.student.full:
            return
        sites = self.blocks[block].sites
        scores = self.routers.scores(block, self.read(block, x.detach())).unflatten(-1, (len(sites), -1))
        assert self._batch is not None
        worths = torch.where(self._batch.routed[..., None, None], worths_of(scores), self._begin[block])
        self._worths.append(worths[self._batch.routed].flatten(1))
        over = (worths - self.threshold) / self.temperature
        gates = (over > 0).to(x.dtype) if self.hard else over.sigmoid().to(x.dtype)
        for i, site in enumerate(sites):
            self.student.gates[site] = gates[..., i, :]

    def seen(self) -> torch.Tensor:
        """What slices were worth to the batch's tokens, float32 [tokens, slices of all sites]."""
        return torch.cat([w.detach() for w in self._worths], 1)

    def bits(self) -> torch.Tensor:
        """The average over the blocks' weights and the batch's tokens []."""
        over = (torch.cat(self._worths, 1) - self.threshold) / self.temperature
        return self.widths[0] + (over.sigmoid() @ self.share).mean()

    def price(self, worths: torch.Tensor, bits: float) -> float:
        """The threshold at which gates of these [tokens, slices] give that average."""

        def average(price: float) -> float:
            return self.widths[0] + float((((worths - price) / self.temperature).sigmoid() @ self.share).mean())

        return solve(average, bits)

    @torch.no_grad()
    def worths(self, batch: Batch) -> torch.Tensor:
        """As `seen`, of a pass at the threshold."""
        self._batch, self._worths = batch, []
        self.student.full, self.student.on_block = False, self._gate
        self.student.logits(batch.tokens)
        return self.seen()

    @torch.no_grad()
    def thresholds(self, kept: Sequence[Batch]) -> npt.NDArray[np.float32]:
        """For averages that rise evenly from lowest to highest width, float32 [LEVELS], by training's tokens."""
        self.hard = True
        # What tokens look like depends on their bits a little: these are of the threshold that was last in use.
        worths = torch.cat([self.worths(batch) for batch in kept[:: -(-len(kept) // CALIBRATED)]])
        self.hard = False
        return _levels(worths, self.share, self.widths)


def _levels(worths: torch.Tensor, share: torch.Tensor, widths: Sequence[int]) -> npt.NDArray[np.float32]:
    values, order = worths.flatten().sort(descending=True)
    bits = (share.expand_as(worths).flatten()[order].double() / len(worths)).cumsum(0).cpu().numpy()
    wanted = np.linspace(0, widths[-1] - widths[0], LEVELS)
    # Tokens that a text repeats are worth the same but for rounding. A threshold lies in the widest gap of the last
    # half level, where no rounding moves a token across.
    ends = np.searchsorted(bits, wanted).clip(1, len(bits) - 1)
    starts = np.searchsorted(bits, wanted - wanted[1] / 2).clip(1, ends)
    ranked = values.double().cpu().numpy()
    gaps = ranked[:-1] - ranked[1:]
    cuts = [start + gaps[start - 1 : end].argmax() for start, end in zip(starts, ends, strict=True)]
    levels = ((ranked[np.subtract(cuts, 1)] + ranked[cuts]) / 2).astype(np.float32)
    levels[0], levels[-1] = np.inf, -np.inf
    return levels


@torch.no_grad()
def _held_out(gates: Gates, held: Sequence[Batch], kept: Sequence[Batch]) -> list[dict[str, float]]:
    """Bits that held-out texts get at thresholds for `distil.HELD_AT`, and their divergence, nats per token."""
    thresholds, widths = gates.thresholds(kept), gates.widths
    entries = [{"asked": asked, "bits": 0.0, "kl": 0.0} for asked in distil.HELD_AT]
    counted = rows = 0
    gates.hard = True
    for batch in held[:: -(-len(held) // distil.HELD)]:
        teacher, n = gates.student.teacher(batch.tokens, batch.predicted), int(batch.predicted.sum())
        for entry in entries:
            level = round((entry["asked"] - widths[0]) / (widths[-1] - widths[0]) * (LEVELS - 1))
            gates.threshold = torch.tensor(thresholds[level])
            entry["kl"] += float(gates.divergence(batch, teacher)) * n
            entry["bits"] += float(((gates.seen() > gates.threshold).float() @ gates.share).sum())
        counted, rows = counted + n, rows + int(batch.routed.sum())
    gates.hard = False
    return [{"asked": e["asked"], "bits": widths[0] + e["bits"] / rows, "kl": e["kl"] / counted} for e in entries]
