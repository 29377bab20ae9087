"""Routers inside the forward pass: they move the precision words of rows whose blueprint is a per-token policy's.

A hook before each block's module runs the block's router on what the module reads. It writes to the plan on the device
(`qbe.kernels.ops.routing`), at fixed shapes and without a host wait, so it lies inside CUDA graphs and compiled steps.
A token's bits follow from its own hidden states and its request's threshold. So a page of keys and values is the same
whoever computes it again, and requests share pages as far as blueprints say (`Blueprint.computed_key`).
The output head may be a block, too; it sees the rows whose logits are wanted, which a prompt has fewer of than tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from qbe.blueprint import Blueprint, controller_code, weights_by_bits
from qbe.engine.scheduling.scheduler import ScheduledTokens
from qbe.errors import QBEError
from qbe.kernels.ops.routing import route
from qbe.policies.per_token import TokenRouters
from qbe.policies.routers import blocks_of, gear_bits
from qbe.sites import SiteTable
from qbe.store.plan import Plan

WHO = controller_code("routers")
_Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


class Routing:
    """Routers of one model, in its forward pass until `remove`.

    Args:
        model: whose nested linears are bound to the plan.
        plan: of a column for each token.

    Attributes:
        digest: of the routers.
        spent: int64 [blocks, widths, rows], of the last step: weights of the block that each row read at each width; 0
            everywhere for a row that nobody routed. An output head comes last, and its rows are those that it saw.

    Raises:
        QBEError: a model whose forwards have one column for all tokens.
    """

    def __init__(self, model: nn.Module, plan: Plan, routers: TokenRouters) -> None:
        check_columns(plan)
        self.digest, self.widths, device = routers.digest, routers.widths, plan.device
        self.spent = torch.zeros(
            len(routers.blocks), len(routers.widths), plan.max_rows, dtype=torch.int64, device=device
        )
        thresholds = torch.from_numpy(routers.thresholds).to(device, torch.float32)
        gears = torch.tensor(routers.widths, dtype=torch.int32, device=device)
        # A CPU waits for the bytes, a GPU for the launches that would make float64 of them.
        numbers = torch.float32 if device.type == "cpu" else torch.float64
        self._hooks, self._layers = [], sum(not b.head for b in routers.blocks)
        for i, (block, network) in enumerate(zip(routers.blocks, routers.networks, strict=True)):
            tensors = [torch.from_numpy(t).to(device, numbers) for t in vars(network).values()]
            precision_words = plan.precision_words[block.sites[0] : block.sites[-1] + 1]
            sizes = torch.tensor([plan.table.nested[s].parameters for s in block.sites], device=device)
            dynamic_precision = plan.head_dynamic_precision if block.head else plan.dynamic_precision
            hook = self._hook(tensors, thresholds, gears, sizes, dynamic_precision, precision_words, self.spent[i])
            module = model.get_submodule(block.name)
            self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _hook(
        self, network: list[torch.Tensor], thresholds: torch.Tensor, gears: torch.Tensor, sizes: torch.Tensor,
        dynamic_precision: torch.Tensor, precision_words: torch.Tensor, spent: torch.Tensor,
    ) -> _Hook:  # fmt: skip
        def hook(
            _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            x = args[0] if args else kwargs["hidden_states"]
            x = route(x, network, thresholds, gears, sizes, dynamic_precision, precision_words, spent, WHO)
            return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

        return hook

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def count(self, work: Sequence[ScheduledTokens], head_sees_all: bool) -> None:
        """Add what the step's rows have read to `Sequence.routed`; they are in the order of the work.

        Of a text that is scored, the tokens whose logits are wanted; of an output head, these alone.

        Args:
            head_sees_all: whether it saw every token of the step.
        """
        if all(w.sequence.routed is None for w in work):
            return
        of_layers, of_head = self.spent[: self._layers].sum(0), self.spent[self._layers :].sum(0)
        first = head_rows = 0
        for w in work:
            kept = range(first + w.kept.start - w.start, first + w.kept.stop - w.start)
            tokens = range(first, first + w.count) if w.sequence.sampling.scoring is None else kept
            rows = kept if head_sees_all else range(head_rows, head_rows + len(kept))
            if w.sequence.routed is not None:
                w.sequence.routed[0] += of_layers[:, tokens.start : tokens.stop].sum(1)
                w.sequence.routed[1] += of_head[:, rows.start : rows.stop].sum(1)
            first, head_rows = first + w.count, head_rows + len(kept)


def check_columns(plan: Plan) -> None:
    """Raises QBEError for a model whose forwards have one column for all tokens."""
    if plan.max_rows == 1:
        raise QBEError(
            "this model's tokens cannot have bits of their own (each sequence has a forward of its own): choose "
            "another policy"
        )


def is_routed(blueprint: Blueprint) -> bool:
    """Whether routers move its precision words."""
    return blueprint.dynamic_precision is not None and blueprint.dynamic_precision.by == "routers"


@dataclass(frozen=True)
class Read:
    """What a routed request's tokens read, each on average.

    Attributes:
        weights: bits -> weights, what is not nested included. bytes: as `Blueprint.bytes_per_token`.
    """

    weights: dict[int, float]
    bytes: int

    def average(self, table: SiteTable) -> float:
        """Mean bits over all weights that a token reads."""
        return sum(g * n for g, n in self.weights.items()) / table.reads.weights

    @classmethod
    def of(cls, routed: torch.Tensor, blueprint: Blueprint, table: SiteTable) -> Read | None:
        """From `Sequence.routed` and the blueprint, which says what sites without a router have; None without tokens.
        It waits for the device.
        """
        if not routed.any():
            return None
        weights = weights_by_bits(blueprint, table)
        usual = blueprint.bytes_per_token(table)
        nbytes = float(usual)
        # The layers' blocks, and the head: each has an average of its own, since a prompt's tokens have no logits.
        for head, counts in zip((False, True), routed.tolist(), strict=True):
            sites = {s for block in blocks_of(table, head=True) if block.head == head for s in block.sites}
            total = sum(counts)
            for i in sites if total else ():
                weights[blueprint.weight_bits[i]] -= table.nested[i].parameters
            size = sum(table.nested[s].parameters for s in sites)
            for gear, count in zip(gear_bits(table), counts, strict=True):
                if not count:
                    continue
                weights[gear] = weights.get(gear, 0.0) + size * count / total
                bits = tuple(gear if i in sites else b for i, b in enumerate(blueprint.weight_bits))
                nbytes += (replace(blueprint, weight_bits=bits).bytes_per_token(table) - usual) * count / total
        return cls({g: n for g, n in weights.items() if n}, round(nbytes))
