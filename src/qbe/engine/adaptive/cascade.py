"""The cascade: the entropy of attention gives a token the bits of later layers' weights, within the same pass.

After the attention of a few layers `qbe::cascade` scores what each slice of the weights up to the next such layer is
worth to a row (`qbe.policies.cascade`) and writes the gears to the plan, from which they are read a moment later. It
acts on the tokens of an answer, each of which is a row of its own; a prompt runs as its blueprint says.

What a row got comes to the host with the token, stays with the sequence, and makes of its blueprint the one that the
token really had: for a token that is computed again after a preemption, and for whoever counts bits.
"""

from __future__ import annotations

import collections.abc
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from qbe.blueprint import Blueprint
from qbe.engine.scheduling.scheduler import ScheduledTokens
from qbe.engine.scheduling.sequence import Sequence
from qbe.engine.scheduling.sequence_state import Move
from qbe.format.kv_blocks import PAGE_SIZE
from qbe.kernels.ops.cascade import cascade
from qbe.policies.cascade import NAME, dynamic_precision, points_of
from qbe.policies.per_token import TokenRouters
from qbe.sites import SiteTable
from qbe.store.plan import Plan


class Cascade:
    """Of one engine.

    Args:
        routers: what was learned.
        sites: the model's.
        plan: of the engine, of one row for each token.
    """

    def __init__(self, routers: TokenRouters, sites: SiteTable, plan: Plan) -> None:
        self.routers, self.sites, self._plan, device = routers, sites, plan, plan.device
        self._points = {layer: point for point, layer in enumerate(points_of(sites))}
        heads = routers.networks[0].inner.shape[0] if routers.networks else 0
        self._seen = torch.zeros(plan.max_rows, len(self._points) * heads, device=device)
        self._networks = [[torch.from_numpy(t).to(device) for t in vars(n).values()] for n in routers.networks]
        self._precision_words = [plan.precision_words[b.sites[0] : b.sites[-1] + 1] for b in routers.blocks]
        self._thresholds = torch.from_numpy(routers.thresholds).to(device)
        self._gears = torch.tensor(routers.widths, dtype=torch.int32, device=device)
        self._copy = torch.zeros(
            plan.precision_words.numel() * plan.precision_words.is_cuda,
            dtype=torch.int32,
            pin_memory=plan.precision_words.is_cuda,
        )
        sizes = np.array([s.parameters for s in sites.nested], np.float64)
        self._shares = sizes / sizes.sum()
        self._average = lru_cache(maxsize=4096)(lambda bits: float(self._shares @ np.array(bits)))
        self._moved = lru_cache(maxsize=4096)(_moved)

    def observe(
        self, layer: int, attended: torch.Tensor, entropy: torch.Tensor, lengths: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """After the attention of a layer, within the pass: `qbe.kvcache.attention.Observe`."""
        point = self._points.get(layer)
        if point is None:
            return attended
        return cascade(
            attended, entropy, lengths, rows, self._seen, self._networks[point], self._thresholds, self._gears,
            self._plan.dynamic_precision, self._precision_words[point], point,
        )  # fmt: skip

    def begin(self, sequence: Sequence) -> None:
        """Give an answer that asks for it dynamic precision, at the level that keeps its average."""
        plain = replace(sequence.blueprint, dynamic_precision=None)
        sequence.blueprint = plain
        sequence.blueprint_history.change(len(sequence.prompt_ids), self.compensated(plain, sequence))
        sequence.cascade.moved = self._moved

    def compensated(self, blueprint: Blueprint, sequence: Sequence) -> Blueprint:
        """The blueprint whose dynamic precision makes up for the bits that a sequence had too many of, or too few.

        None where a refresh has brought it beyond what the routers can give: its tokens then have what it says.
        """
        bits, excess = blueprint.weight_bits, sequence.cascade.excess
        made_up = dynamic_precision(self.routers, self.sites, bits, excess, PAGE_SIZE)
        return replace(blueprint, dynamic_precision=made_up)

    def fetch(self, work: collections.abc.Sequence[ScheduledTokens]) -> Callable[[Sequence], None] | None:
        """Begin to bring what a step that has run gave its rows to the host.

        Returns:
            to be called for each token that the step has computed of an answer, in order, once the device has been
            waited for: the sequence keeps its bits. None where nobody's rows are.
        """
        row_of, own, tokens = dict[tuple[str, int], int](), dict[tuple[str, int], tuple[int, ...]](), 0
        for w in work:
            if w.draft is None and w.count == 1 and w.sequence.cascade.moved is not None:
                row_of[w.sequence.request_id, w.start] = tokens
                if not is_cascaded(w.blueprint):  # what it reads may be shared with others; what it has is its own
                    own[w.sequence.request_id, w.start] = w.blueprint.weight_bits
            tokens += w.count
        if not row_of:
            return None
        precision_words = self._plan.precision_words[:, :tokens]
        if precision_words.is_cuda:
            here = self._copy[: precision_words.numel()].view_as(precision_words)
            here.copy_(precision_words, non_blocking=True)
            precision_words = here
        numbers = precision_words.numpy()

        def keep(sequence: Sequence) -> None:
            place = sequence.request_id, len(sequence.token_ids) - 1
            if place in row_of and len(sequence.token_ids) > len(sequence.prompt_ids):
                bits = own[place] if place in own else numbers[:, row_of[place]] & 255
                self.keep(sequence, np.asarray(bits, np.uint8))

        return keep

    def keep(self, sequence: Sequence, bits: npt.NDArray[np.uint8]) -> None:
        """A token of the answer has gone through the model with these. Where it fills a page the level follows.

        Nowhere else: a step that checks draft tokens ends before, so that none of its rows has a level that another way
        through the same tokens would not have had.
        """
        position, blueprint = len(sequence.token_ids) - 1, sequence.blueprint
        shift = float(self._shares @ bits) - self._average(blueprint.weight_bits)
        sequence.cascade.moves.append(Move(bits.tobytes(), shift))
        sequence.cascade.excess += shift
        if position % PAGE_SIZE == PAGE_SIZE - 1:
            now = self.compensated(blueprint, sequence)
            if now != blueprint:
                sequence.blueprint_history.change(position + 1, now)


def _moved(blueprint: Blueprint, bits: bytes) -> Blueprint:
    """What a token of this blueprint with these weight bits really had: nothing moves it any more."""
    return replace(blueprint, weight_bits=tuple(bits), dynamic_precision=None)


def is_cascaded(blueprint: Blueprint) -> bool:
    """Whether the cascade may move rows of this blueprint."""
    return blueprint.dynamic_precision is not None and blueprint.dynamic_precision.by == NAME
