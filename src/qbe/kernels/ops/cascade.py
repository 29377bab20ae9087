"""The custom op of the cascade: what the attention of layers shows gives a row the weights' bits of the layers after.

It runs between the attention of a layer and the linear layers that read it, and writes to the plan that these read
while they run: within one forward pass, inside a CUDA graph, without asking the host.

Its schema says nothing of that writing. torch.compile would turn a declared write into a new tensor, which the weights,
whose precision words are views of the plan, know nothing of. What orders the op is its result, attention's own:
whoever reads that comes after it, and all later layers do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qbe.blueprint import controller_code
from qbe.kernels.ops.register import register

WHO = controller_code("cascade")  # in the second byte of a row's dynamic precision


def _fake(attended: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(attended)


OP = register(
    "cascade(Tensor attended, Tensor entropy, Tensor lengths, Tensor? rows, Tensor seen, Tensor inner, "
    "Tensor inner_bias, Tensor outer, Tensor outer_bias, Tensor thresholds, Tensor gears, Tensor dynamic_precision, "
    "Tensor precision_words, int point) -> Tensor",
    cpu="qbe.kernels.reference.cascade:cascade",
    cuda="qbe.kernels.triton.rows.cascade:cascade",
    fake=_fake,
)


def cascade(
    attended: torch.Tensor,
    entropy: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor | None,
    seen: torch.Tensor,
    network: Sequence[torch.Tensor],
    thresholds: torch.Tensor,
    gears: torch.Tensor,
    dynamic_precision: torch.Tensor,
    precision_words: torch.Tensor,
    point: int,
) -> torch.Tensor:
    """Sets the precision words of the sites behind one point, for the rows that the cascade controls.

    What is read of attention is each head's entropy over the most that there can be, the logarithm of the tokens seen
    (two at least): those of this point and, from `seen`, of the points before it in the same pass. A row with a head
    that is no number keeps what it has.

    Args:
        attended: `[n, heads, value_dim]`, contiguous, the result of this layer's attention.
        entropy: float32 `[n, heads]`, nats, of the attention weights of this layer (`qbe::paged_attention`).
        lengths: int64 `[n]`, tokens of each sequence with the new one.
        rows: int64 `[n]`, each one's row in the plan; None: the first n, in order.
        seen: float32 `[max_rows, points * heads]`, contiguous; this point's part is written.
        network: inner float32 `[(point + 1) * heads, hidden]`, inner_bias `[hidden]`, outer `[hidden, sites * slices]`,
            outer_bias; what scores are: see `qbe.policies.per_token.TokenRouters`.
        thresholds: float32 `[levels]`, by the level of a row's dynamic precision.
        gears: int32 `[slices + 1]`, the bits with one slice, with two and so on.
        dynamic_precision: int32 `[max_rows]`, as in `qbe.store.plan.Plan`: level in the lowest byte.
        precision_words: int32 `[sites, max_rows]` of these sites; the lowest byte becomes the gear.
        point: number of this point, from 0.

    Returns:
        a copy of `attended`, to be used in its place.
    """
    return torch.ops.qbe.cascade.default(
        attended, entropy, lengths, rows, seen, *network, thresholds, gears, dynamic_precision, precision_words, point
    )
