"""SmoothQuant (Xiao et al., 2023): outlier channels of activations move into the weights that read them.

Channel j of a site's input is divided by s_j = rms(X_j)**alpha / max|W_j|**(1 - alpha) and column j of the weight is
multiplied by it, rounded to powers of two, so that nothing is computed in another way and the 16-bit model stays what
it is (`qbe.store.folding`). alpha is searched for each place: what counts is the error of the outputs on calibration
text, weights at the precisions of the store and activations of 8 bits together. "Not at all" is among the choices, and
none may make the outputs worse at the lowest precision of the weights alone. Since the scales serve the weights'
rounding as well, those without the weights' term (AWQ, Lin et al., 2024) are among the choices, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qbe.format.codes import quantise
from qbe.format.layout import SliceLayout
from qbe.format.packing import pack
from qbe.kernels.reference.activations import eight_bits
from qbe.kernels.reference.nested_linear import dequantise
from qbe.store.folding import LARGEST, Edge, Fold, apply_exact

ALPHAS = (0.25, 0.5, 0.75, 1.0)
ROWS = 128  # inputs kept of each place, spread over the text
OUTPUTS = 64  # of each weight that errors are computed for, spread over all


@dataclass(frozen=True)
class Inputs:
    """What a place saw: float32 `[rows, channels]` of its inputs, and the root mean square of each channel.

    For the latter all rows are brought to one size, because 8-bit activations give each row scales of its own: a few
    massive rows would hide what the others look like.
    """

    rows: torch.Tensor
    typical: torch.Tensor


def smooth(
    model: nn.Module,
    places: Sequence[Edge],
    tokens: torch.Tensor,
    layout: SliceLayout,
    group_size: int,
    on_place: Callable[[], None] = lambda: None,
) -> list[Fold]:
    """Scales the weights of a model that is about to be nested, in place, without changing what it computes.

    Args:
        model: a transformers causal LM with plain weights.
        places: where it may be scaled (`qbe.store.folding.edges`).
        tokens: int64 [rows, tokens] of calibration text.
        layout, group_size: of the store.
        on_place: called when a place is done (a progress bar).

    Returns:
        the folds that were made; empty where nothing helps.
    """
    seen = _inputs(model, [consumers[0] for _, consumers in places], tokens)
    folds = []
    for source, consumers in places:
        weights = [model.get_submodule(n).weight for n in consumers]
        exponents = best_exponents(seen.pop(consumers[0]), weights, layout, group_size)  # type: ignore[arg-type]
        if exponents is not None:
            folds.append(Fold(source, consumers, exponents))
        on_place()
    return apply_exact(model, folds, tokens)


@torch.inference_mode()
def _inputs(model: nn.Module, names: Sequence[str], tokens: torch.Tensor) -> dict[str, Inputs]:
    seen: dict[str, Inputs] = {}

    def hook(name: str) -> Callable[..., None]:
        def keep(_module: nn.Module, args: Any) -> None:
            seen[name] = inputs_of(args[0])

        return keep

    hooks = [model.get_submodule(n).register_forward_pre_hook(hook(n)) for n in names]
    try:
        model(input_ids=tokens, use_cache=False)
    finally:
        for h in hooks:
            h.remove()
    return seen


def inputs_of(x: torch.Tensor) -> Inputs:
    """What is kept of a place's inputs `[..., channels]`."""
    x = x.flatten(0, -2).float()
    equal = x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
    return Inputs(x[:: max(1, len(x) // ROWS)].clone(), equal.square().mean(0).sqrt())


@torch.inference_mode()
def best_exponents(
    seen: Inputs, weights: Sequence[torch.Tensor], layout: SliceLayout, group_size: int
) -> torch.Tensor | None:
    """The exponents that serve these weights [N, K], which read the same inputs, best.

    Returns:
        int8 [K]; None where plain weights serve as well.
    """
    columns = torch.stack([w.abs().amax(0).float() for w in weights]).amax(0)
    samples = [w[:: max(1, len(w) // OUTPUTS)].float() for w in weights]
    plain = torch.stack([_errors(seen.rows, w, torch.zeros_like(columns), layout, group_size) for w in samples])
    best, least = None, 0.0
    for exponents in _candidates(seen.typical, columns):
        found = [_errors(seen.rows, w, exponents, layout, group_size) for w in samples]
        ratios = torch.stack(found) / plain
        score = float(ratios.log().mean())
        if ratios[:, 0].mean() <= 1 and score < least:
            best, least = exponents.to(torch.int8), score
    return best


def _candidates(typical: torch.Tensor, weights: torch.Tensor) -> Iterator[torch.Tensor]:
    """log2 of the scales, rounded, around 0; channels that are never used keep theirs."""
    used = (typical > 0) & (weights > 0)
    if not used.any():
        return
    x, w = (t.clamp_min(1e-30).log2() for t in (typical, weights))
    for alpha in ALPHAS:
        for beta in {1 - alpha, 0.0}:
            scales = alpha * x - beta * w
            exponents = (scales - scales[used].median()).round().clamp(-LARGEST, LARGEST)
            yield torch.where(used, exponents, 0)


def _errors(
    x: torch.Tensor, weight: torch.Tensor, exponents: torch.Tensor, layout: SliceLayout, group: int
) -> torch.Tensor:
    """Mean squared error of the outputs over their mean square, for each input, with these exponents.

    Returns:
        float [2P + 1]: weights at the P precisions of the store; the same with 8-bit activations; those alone.
    """
    scale = torch.exp2(exponents)
    exact = x @ weight.T
    energy = exact.square().mean(-1).clamp_min(1e-30)
    codes, meta, exponent = quantise(weight * scale, layout, group)
    packed = pack(codes, layout)
    plain, eight = x / scale, eight_bits(x / scale, group)
    widths = [dequantise(packed, meta, exponent, layout.slices, weight.shape[1], b) for b in layout.precisions]
    pairs = [(plain, w) for w in widths] + [(eight, w) for w in widths] + [(eight, weight * scale)]
    return torch.stack([((a @ w.T - exact).square().mean(-1) / energy).mean() for a, w in pairs])
