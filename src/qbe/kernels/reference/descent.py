"""Reference of `qbe.store.descent`: coordinate descent over the codes and scales of a nested weight, in float64.

What is lowered, for every row w of the weight on its own, is

    sum over precisions b of importance[b] * 4**(b - widest) * (w - q_b) H (w - q_b)

with q_b what is read at b bits and H the second moments of the inputs: the squared error of the layer's outputs on the
calibration text. One code serves all precisions, so each code is chosen for all of them at once: of all codes the one
that makes the sum least while the others stay. Errors that others make are thus compensated in both directions, and
the sum never grows. Before each sweep over the codes, and after the last one, scale and offset of each group and lower
precision are fitted in the same sense and kept where they help as they are stored.

Where it ends depends on where it begins: with codes chosen as GPTQ does (arXiv 2210.17323), one column after the other,
largest second moment first, each given what the columns before it are off by and that those after it will make up for
what they can. Here every precision has targets of its own, and one code is chosen for all of them. This is Babai's
nearest plane (arXiv 2507.18553), for which a Cholesky factor of H is enough. Every round of sweeps begins so, with
the scales that the round before has fitted; a row that is no better at its end stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qbe.format import scales
from qbe.format.layout import SliceLayout

FLAT = 1e-4  # of a group whose codes say nothing that its offset does not say, scale and offset stay


def descend(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    codes: torch.Tensor,
    meta: torch.Tensor,
    exponent: int,
    layout: SliceLayout,
    importance: Sequence[float],
    rounds: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Better codes and meta of a weight.

    Args:
        weight: float [N, K].
        hessian: float [K, K], symmetric; columns whose diagonal is 0 keep their codes.
        codes: uint8 [N, Kp], where to begin if H is not positive definite or a round has no sweeps.
        meta: uint8 [2P, N, G], where to begin; the widest precision's scale and zero point stay.
        importance: of each precision's error, counted in steps of that precision.
        rounds: sweeps over all codes in each of them.

    Returns:
        codes uint8 [N, Kp] and meta uint8 [2P, N, G].
    """
    state = _State(weight.double(), hessian.double(), codes.clone(), meta.clone(), exponent, layout)
    first = succession(state.hessian)
    for sweeps in rounds:
        before, codes, meta = state.error(importance), state.codes.clone(), state.meta.clone()
        if sweeps and first:
            state.begin(importance, *first)
        for _ in range(sweeps):
            state.refit()
            state.choose_codes(importance)
        state.refit()
        worse = state.error(importance) > before
        state.codes[worse], state.meta[:, worse] = codes[worse], meta[:, worse]
    return state.codes, state.meta


def succession(hessian: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The order in which columns are given their first codes, and what each means for those after it.

    Returns:
        int64 [K], columns by falling second moment, and float64 [K, K]: if the i-th of them is off by 1, the j-th
        after it should be less by [i, j], given that all after that one are then the best real numbers. None where H
        is not positive definite.
    """
    order = hessian.diagonal().argsort(descending=True, stable=True)
    back = order.flip(0)
    lower, failed = torch.linalg.cholesky_ex(hessian.double()[back][:, back])
    if failed:
        return None
    return order, (lower / lower.diagonal()).flip(0, 1).contiguous()


def objective(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    codes: torch.Tensor,
    meta: torch.Tensor,
    exponent: int,
    layout: SliceLayout,
) -> torch.Tensor:
    """The error at each precision, (w - q_b) H (w - q_b), float64 [P, N]."""
    state = _State(weight.double(), hessian.double(), codes, meta, exponent, layout)
    errors = [state.weight - state.read(bits) for bits in layout.precisions]
    return torch.stack([(e * (e @ state.hessian)).sum(-1) for e in errors])


class _State:
    def __init__(
        self, weight: torch.Tensor, hessian: torch.Tensor, codes: torch.Tensor, meta: torch.Tensor, exponent: int,
        layout: SliceLayout,
    ) -> None:  # fmt: skip
        self.weight, self.hessian, self.codes, self.meta = weight, hessian, codes, meta
        self.exponent, self.layout, self.widths = exponent, layout, layout.precisions
        self.group = codes.shape[1] // meta.shape[2]

    def prefix(self, bits: int) -> torch.Tensor:
        return (self.codes >> (self.layout.total_bits - bits))[:, : self.weight.shape[1]].double()

    def read(self, bits: int) -> torch.Tensor:
        scale, offset = self.scales(bits)
        return scale * (self.prefix(bits) - offset)

    def scales(self, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and offset of every weight, float64 [N, K]."""
        pair = scales.decode(self.meta, self.exponent, self.layout, bits)
        k = self.weight.shape[1]
        scale, offset = (t.double().repeat_interleave(self.group, 1)[:, :k] for t in pair)
        return scale, offset

    def error(self, importance: Sequence[float]) -> torch.Tensor:
        """What is lowered, float64 [N]."""
        total = torch.zeros(len(self.weight), dtype=torch.float64)
        for b, v in zip(self.widths, importance, strict=True):
            off = self.weight - self.read(b)
            total += v * 4.0 ** (b - self.layout.total_bits) * (off * (off @ self.hessian)).sum(-1)
        return total

    def begin(self, importance: Sequence[float], order: torch.Tensor, factor: torch.Tensor) -> None:
        """Codes for all columns, one after the other (`succession`)."""
        pairs = [self.scales(b) for b in self.widths]
        wanted = [self.weight[:, order] for _ in self.widths]
        for position, j in enumerate(order.tolist()):
            cost = self.cost(j, pairs, [w[:, position] for w in wanted], importance)
            self.codes[:, j] = cost.argmin(1).to(torch.uint8)
            for target, bits, (scale, offset) in zip(wanted, self.widths, pairs, strict=True):
                read = scale[:, j] * ((self.codes[:, j] >> (self.layout.total_bits - bits)) - offset[:, j])
                target[:, position + 1 :] -= (read - self.weight[:, j])[:, None] * factor[position, position + 1 :]

    def choose_codes(self, importance: Sequence[float]) -> None:
        pairs = [self.scales(b) for b in self.widths]
        read = [self.read(b) for b in self.widths]
        for j in range(self.weight.shape[1]):
            curvature = self.hessian[j, j]
            if not curvature > 0:
                continue
            # Where each precision would like to have the weight, all others given.
            wanted = [q[:, j] + (self.weight - q) @ self.hessian[:, j] / curvature for q in read]
            cost = self.cost(j, pairs, wanted, importance)
            old = self.codes[:, j].long()[:, None]
            chosen = torch.where(cost.gather(1, old)[:, 0] > cost.amin(1), cost.argmin(1), old[:, 0])
            self.codes[:, j] = chosen.to(torch.uint8)
            for b, q, (scale, offset) in zip(self.widths, read, pairs, strict=True):
                q[:, j] = scale[:, j] * ((chosen >> (self.layout.total_bits - b)) - offset[:, j])

    def cost(
        self, j: int, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], wanted: Sequence[torch.Tensor],
        importance: Sequence[float],
    ) -> torch.Tensor:  # fmt: skip
        """What each code of column j costs if each precision would like to have `wanted` [N] there, [N, codes]."""
        every = torch.arange(2**self.layout.total_bits)
        cost = torch.zeros(len(self.weight), len(every), dtype=torch.float64)
        for b, v, w, (scale, offset) in zip(self.widths, importance, wanted, pairs, strict=True):
            reached = scale[:, j, None] * ((every >> (self.layout.total_bits - b)) - offset[:, j, None])
            cost += v * 4.0 ** (b - self.layout.total_bits) * (reached - w[:, None]).square()
        return cost

    def refit(self) -> None:
        k = self.weight.shape[1]
        for i, bits in enumerate(self.widths[:-1]):
            shift = self.layout.total_bits - bits
            plain = scales.decode_scale(self.meta[0], self.exponent).double() * 2**shift
            middle = scales.nominal_offset(self.meta[1], shift).double()
            for g in range(self.meta.shape[2]):
                columns = slice(g * self.group, min(k, (g + 1) * self.group))
                q, (scale, offset) = self.read(bits), self.scales(bits)
                pull = ((self.weight - q) @ self.hessian)[:, columns]
                h, s, o = self.hessian[columns, columns], scale[:, columns.start], offset[:, columns.start]
                c = self.prefix(bits)[:, columns] - o[:, None]
                cc, c1, ones = ((c @ h) * c).sum(-1), (c @ h).sum(-1), h.sum()
                bc, b1 = (pull * c).sum(-1), pull.sum(-1)
                determinant = cc * ones - c1 * c1
                ratio = _byte(((s + (bc * ones - b1 * c1) / determinant) / plain[:, g] - 1) * scales.RATIO_STEP)
                wider = plain[:, g] * (1 + ratio / scales.RATIO_STEP)
                up = (b1 - (wider - s) * c1) / ones  # added to the whole group, beside the new scale
                moved = _byte((o - up / wider - middle[:, g]) * scales.OFFSET_STEP)
                new = wider[:, None] * (
                    self.prefix(bits)[:, columns] - (middle[:, g] + moved / scales.OFFSET_STEP)[:, None]
                )
                change = new - q[:, columns]
                better = (change * (2 * pull - change @ h)).sum(-1) > 0
                better &= (ones > 0) & (determinant > FLAT * cc * ones)
                for plane, value in ((2 + 2 * i, ratio), (3 + 2 * i, moved)):
                    byte = (value.nan_to_num().to(torch.int32) & 255).to(torch.uint8)
                    self.meta[plane, :, g] = torch.where(better, byte, self.meta[plane, :, g])


def _byte(x: torch.Tensor) -> torch.Tensor:
    """Rounded, halves away from zero, to what a signed byte holds."""
    return (x.sign() * (x.abs() + 0.5).floor()).clamp(-128, 127)
