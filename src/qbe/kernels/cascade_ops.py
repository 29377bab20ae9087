"""The custom op of the cascade: what a layer's attention shows raises or lowers the weights of the layers after it.

It runs between the attention of a layer and the linear layers that read it, and writes to the plan that these read
while they run: within one forward pass, inside a CUDA graph, without a word from the host.

Its schema says nothing of that writing. torch.compile would turn a declared write into a new tensor, which the weights,
whose words are views of the plan, know nothing of. What orders the op is its result, attention's own: whoever reads
that comes after it, and all later layers do.
"""

from __future__ import annotations

import torch

from qbe.blueprint import steerer

WHO = steerer("cascade")  # in the second byte of a row's steering
LEVELS = 256  # of steering, each with thresholds of its own
UP, DOWN = 1, 2  # what a row's word says of a point; 0: it was left alone
POINTS = 15  # that a word of 32 bits has places for
WIDTHS = 32  # weight bits that `steps` tells of; more than there are

_library = torch.library.Library("qbe", "FRAGMENT")
_library.define(
    "cascade(Tensor attended, Tensor entropy, Tensor lengths, Tensor? rows, Tensor words, Tensor steering, "
    "Tensor moves, Tensor thresholds, Tensor steps, Tensor layers, int point, int layer, int sign, int window, "
    "int most) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def cascade(
    attended: torch.Tensor,
    entropy: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor | None,
    words: torch.Tensor,
    steering: torch.Tensor,
    moves: torch.Tensor,
    thresholds: torch.Tensor,
    steps: torch.Tensor,
    layers: torch.Tensor,
    point: int,
    layer: int,
    sign: int,
    window: int,
    most: int,
) -> torch.Tensor:
    """Moves the later layers' weights by one gear for the rows whose attention asks for it.

    A row asks by its mean entropy over heads, over the most that there can be: the logarithm of the tokens seen. Above
    the upper threshold of the row's level it goes up, below the lower one down. Rows that nobody steers, or others than
    the cascade, keep what they have, and so does a row without numbers.

    Args:
        attended: `[n, heads, value_dim]`, contiguous, the result of this layer's attention.
        entropy: float32 `[n, heads]`, nats, of the attention weights of this layer (`qbe::paged_attention`).
        lengths: int64 `[n]`, tokens of each sequence with the new one.
        rows: int64 `[n]`, each one's row in the plan; None: the first n, in order.
        words, steering: int32 `[sites, max_rows]` and `[max_rows]` (`qbe.store.plan.Plan`); words are written.
        moves: int32 `[max_rows]`; written for these rows: two bits for each point, `UP`, `DOWN` or 0, the first one's
            lowest. Point 0 begins it anew.
        thresholds: float32 `[points, LEVELS, 2]`: the lower and the upper one, of sign times entropy.
        steps: uint8 `[sites, 2, WIDTHS]`: for each width of a site's weight the next one down, and up.
        layers: int32 `[sites]`: of each site, -1 where it stays as it is.
        point: number of this place among those that have one, 0 to `POINTS` - 1.
        layer: this one; those above it are moved.
        sign: 1 or -1.
        window: a query sees that many last tokens; 0 means all.
        most: changes in a pass; a row that had so many is left alone.

    Returns:
        a copy of `attended`, to be used in its place.
    """
    return torch.ops.qbe.cascade.default(
        attended, entropy, lengths, rows, words, steering, moves, thresholds, steps, layers, point, layer, sign, window,
        most,
    )  # fmt: skip


@torch.library.register_fake("qbe::cascade", lib=_library)
def _fake(attended: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(attended)


def _cpu(attended: torch.Tensor, *arguments: object) -> torch.Tensor:
    from qbe.kernels.cpu.cascade import cascade as kernel

    return kernel(attended, *arguments)  # type: ignore[arg-type]


def _cuda(attended: torch.Tensor, *arguments: object) -> torch.Tensor:
    from qbe.kernels.triton.cascade import cascade as kernel

    return kernel(attended, *arguments)  # type: ignore[arg-type]


_library.impl("cascade", _cpu, "CPU")
_library.impl("cascade", _cuda, "CUDA")
