"""`qbe::route`: a token's hidden state says how many slices of a block's weights it is to be multiplied with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import softplus

from qbe.kernels.ops.register import register


def route(
    x: torch.Tensor,
    network: Sequence[torch.Tensor],
    thresholds: torch.Tensor,
    gears: torch.Tensor,
    sizes: torch.Tensor,
    dynamic_precision: torch.Tensor,
    precision_words: torch.Tensor,
    spent: torch.Tensor,
    who: int,
) -> torch.Tensor:
    """Sets the precision words of one block's sites, for the rows that `who` controls.

    It writes to `precision_words` and `spent`, which its schema does not say: `precision_words` is what nested weights
    hold views of, and a compiler that knew of the write would have to know them all. What orders the write before the
    block's own reads is that these multiply what this returns.

    Args:
        x: [..., K], what the block reads; R rows.
        network: inner float32 or float64 [K, hidden], inner_bias [hidden], outer [hidden, sites * slices], outer_bias:
            see `qbe.policies.per_token.TokenRouters`. Sums are in float64, so that a token's scores do not depend on
            the number of rows.
        thresholds: float32 [levels].
        gears: int32 [slices + 1], the bits with one slice, with two and so on.
        sizes: int64 [sites], weights of each.
        dynamic_precision: int32 [>= R], as in `qbe.store.plan.Plan`: level in the lowest byte.
        precision_words: int32 [sites, >= R]; the lowest byte becomes the gear.
        spent: int64 [slices + 1, >= R]: becomes the block's weights that each row reads at each gear, 0 for other rows.

    Returns:
        A copy of x.
    """
    return torch.ops.qbe.route.default(
        x, *network, thresholds, gears, sizes, dynamic_precision, precision_words, spent, who
    )


def worths_of(scores: torch.Tensor) -> torch.Tensor:
    """What each slice after the first is worth, falling, of scores, both [..., slices]."""
    first = scores[..., :1]
    return torch.cat([first, first - softplus(scores[..., 1:]).cumsum(-1)], -1)


def _route(
    x: torch.Tensor, inner: torch.Tensor, inner_bias: torch.Tensor, outer: torch.Tensor, outer_bias: torch.Tensor,
    thresholds: torch.Tensor, gears: torch.Tensor, sizes: torch.Tensor, dynamic_precision: torch.Tensor,
    precision_words: torch.Tensor, spent: torch.Tensor, who: int,
) -> torch.Tensor:  # fmt: skip
    rows = x.reshape(-1, x.shape[-1])
    count, sites = len(rows), len(sizes)
    hidden = torch.addmm(inner_bias.double(), rows.double(), inner.double()).relu_()
    scores = torch.addmm(outer_bias.double(), hidden, outer.double()).view(count, sites, -1)
    dynamic_precision, precision_words, spent = dynamic_precision[:count], precision_words[:, :count], spent[:, :count]
    ours = (dynamic_precision >> 8) == who
    worth = worths_of(scores).float()
    chosen = (worth > thresholds[(dynamic_precision & 255).long()][:, None, None]).sum(-1).T  # [sites, rows]
    precision_words.copy_(torch.where(ours, (precision_words & ~255) | gears[chosen], precision_words))
    spent.zero_().scatter_add_(0, chosen, sizes[:, None] * ours)
    return x.clone()


def _fake(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x)


OP = register(
    "route(Tensor x, Tensor inner, Tensor inner_bias, Tensor outer, Tensor outer_bias, Tensor thresholds, "
    "Tensor gears, Tensor sizes, Tensor dynamic_precision, Tensor precision_words, Tensor spent, int who) -> Tensor",
    cpu=_route,
    cuda=_route,
    fake=_fake,
)
