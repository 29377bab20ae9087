"""The cascade: the entropy of a layer's attention moves the weights of the layers after it, within the same pass.

After the attention of a few layers `qbe::cascade` compares each steered row's entropy with what was learned
(`qbe.store.cascade_table`) and writes the gears of all later layers to the plan, from which they are read a moment
later. It acts on the tokens of an answer, each of which is a row of its own; a prompt runs as its blueprint says.

What a row was moved by is one word of two bits for each point. It comes to the host with the token, stays with the
sequence, and makes of its blueprint the one that the token really had: for a token that is computed again after a
preemption, and for whoever counts bits.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace
from functools import lru_cache

import torch

from qbe.blueprint import Blueprint, Steering
from qbe.engine.scheduler import Work
from qbe.engine.sequence import Sequence
from qbe.kernels.cascade_ops import LEVELS, UP, WIDTHS, cascade
from qbe.kernels.kv_blocks import PAGE_SIZE
from qbe.sites import SiteTable
from qbe.store.cascade_table import CascadeTable, steering, step
from qbe.store.plan import Plan

NAME = "cascade"  # among steerers


class Cascade:
    """Of one engine.

    Args:
        table: what was learned.
        sites: the model's.
        plan: of the engine, of one row for each token.
    """

    def __init__(self, table: CascadeTable, sites: SiteTable, plan: Plan) -> None:
        self.table, self.sites, self._plan, device = table, sites, plan, plan.device
        self._points = {p.layer: (i, p.sign) for i, p in enumerate(table.points)}
        self._moves = torch.zeros(plan.max_rows, dtype=torch.int32, device=device)
        self._copy = torch.zeros(plan.max_rows, dtype=torch.int32, pin_memory=device.type == "cuda")
        limits = [[table.thresholds(p, level) for level in range(LEVELS)] for p in table.points]
        self._thresholds = torch.tensor(limits, dtype=torch.float32, device=device)
        steps = [[[step(s, b, up) for b in range(WIDTHS)] for up in (False, True)] for s in sites.nested]
        self._steps = torch.tensor(steps, dtype=torch.uint8, device=device)
        layers = [-1 if s.layer is None else s.layer for s in sites.nested]
        self._layers = torch.tensor(layers, dtype=torch.int32, device=device)
        self._steering = lru_cache(maxsize=4096)(self._steering_of)
        self._moved = lru_cache(maxsize=4096)(self._moved_by)
        self._average = lru_cache(maxsize=4096)(lambda b: b.average_weight_bits(sites))

    def observe(
        self, layer: int, attended: torch.Tensor, entropy: torch.Tensor, lengths: torch.Tensor,
        rows: torch.Tensor | None, window: int,
    ) -> torch.Tensor:  # fmt: skip
        """After the attention of a layer, within the pass: `qbe.kvcache.attention.Observe`."""
        if layer not in self._points:
            return attended
        point, sign = self._points[layer]
        return cascade(
            attended, entropy, lengths, rows, self._plan.words, self._plan.steering, self._moves, self._thresholds,
            self._steps, self._layers, point, layer, sign, window, self.table.most,
        )  # fmt: skip

    def begin(self, sequence: Sequence) -> None:
        """Let the answer of a request that asks for it be steered, at the level that keeps its average."""
        plain = replace(sequence.blueprint, steering=None)
        sequence.past.append((len(sequence.prompt_ids), plain))
        sequence.blueprint, sequence.moved = self.steered(plain, sequence), self.moved

    def steered(self, blueprint: Blueprint, sequence: Sequence) -> Blueprint:
        """The blueprint with the steering that makes up for the bits that a sequence had too many of, or too few."""
        return replace(blueprint, steering=self._steering(blueprint.weight_bits, round(sequence.excess, 3)))

    def _steering_of(self, bits: tuple[int, ...], excess: float) -> Steering:
        return steering(self.table, self.sites, bits, excess, PAGE_SIZE)

    def moved(self, blueprint: Blueprint, moves: int) -> Blueprint:
        """What a token with this word of moves really had; nobody steers that."""
        return self._moved(blueprint, moves)

    def _moved_by(self, blueprint: Blueprint, moves: int) -> Blueprint:
        bits = list(blueprint.weight_bits)
        for i, point in enumerate(self.table.points):
            move = moves >> 2 * i & 3
            for at, site in enumerate(self.sites.nested if move else ()):
                if site.layer is not None and site.layer > point.layer:
                    bits[at] = step(site, bits[at], move == UP)
        return replace(blueprint, weight_bits=tuple(bits), steering=None)

    def fetch(self, work: Many[Work]) -> Callable[[Sequence], None] | None:
        """Begin to bring the moves of a step that has run to the host.

        Returns:
            to be called for each token that the step has computed of an answer, in order, once the device has been
            waited for: the sequence keeps its moves. None where no row was steered.
        """
        rows, at = dict[tuple[str, int], int](), 0
        for w in work:
            if w.draft is None and w.count == 1 and steers(w.blueprint):
                rows[w.sequence.request_id, w.start] = at
            at += w.count
        if not rows:
            return None
        moves = self._moves
        if moves.is_cuda:
            self._copy[:at].copy_(moves[:at], non_blocking=True)
            moves = self._copy
        found: list[int] = []

        def keep(sequence: Sequence) -> None:
            row = rows.get((sequence.request_id, len(sequence.token_ids) - 1))
            if row is not None:
                found.extend(moves[:at].tolist() if not found else ())
                self.keep(sequence, found[row])

        return keep

    def keep(self, sequence: Sequence, moves: int) -> None:
        """A token of the answer has gone through the model and was moved so. Where it fills a page the level follows.

        Nowhere else: a step that checks guesses ends before, so that none of its rows has a level that another way
        through the same tokens would not have had.
        """
        position, own = len(sequence.token_ids) - 1, sequence.blueprint
        sequence.moves.append(moves)
        sequence.excess += self._average(self.moved(own, moves)) - self._average(own)
        if position % PAGE_SIZE == PAGE_SIZE - 1:
            now = self.steered(own, sequence)
            if now != own:
                sequence.past.append((position + 1, own))
                sequence.blueprint = now


def steers(blueprint: Blueprint) -> bool:
    """Whether the cascade may move rows of this blueprint."""
    return blueprint.steering is not None and blueprint.steering.by == NAME
