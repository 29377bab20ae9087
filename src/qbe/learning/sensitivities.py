"""What lowering each site alone does to one text, for all sites at once: from gradients of the 16-bit model.

A site at fewer bits adds an error to its outputs, which moves the logits of a token by J error, and to second order the
divergence of the distributions is half the variance of that under the 16-bit model's p. With r drawn so that its
covariance is that of one token drawn from p, half the mean of (r J error)^2 over draws is the same, and r J is what one
backward pass gives every site. So some passes tell all sites' divergences, where measuring takes one for each site. The
estimate is unbiased up to that second order, and noisy: its relative deviation is the square root of 2 over the draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn.functional import linear

from qbe.errors import QBEError
from qbe.sites import SiteTable
from qbe.store.nested_tensor import NestedTensor

Numbers = npt.NDArray[np.float64]


def estimate(
    model: nn.Module, table: SiteTable, tokens: torch.Tensor, counted: torch.Tensor, gear: int, draws: int,
    seed: int = 0,
) -> tuple[Numbers, list[torch.Tensor], torch.Tensor]:  # fmt: skip
    """Divergence of each text when one site alone runs at a gear, summed over its counted tokens.

    Args:
        model: a transformers causal LM whose nested sites hold NestedTensors with their originals, not yet served.
        tokens: int64 [texts, tokens], padded at the right.
        counted: bool [texts, tokens]: whose logits count.
        draws: backward passes.

    Returns:
        nats, float64 [texts, nested sites]; for every nested site the mean square of each channel of its inputs over
        the tokens up to the first counted one, float32 [texts, inputs]; and the entropy of that one's distribution,
        nats, float32 [texts].

    Raises:
        QBEError: a nested site lost its 16-bit original.
    """
    device = next(model.parameters()).device
    tokens, counted = tokens.to(device), counted.to(device)
    read = counted.int().argmax(-1)[:, None] >= torch.arange(tokens.shape[1], device=device)
    found = torch.zeros(draws, len(table.nested), len(tokens), dtype=torch.float64, device=device)
    moments: list[torch.Tensor] = [torch.empty(0)] * len(table.nested)
    draw = [0]
    with torch.enable_grad(), _with_errors(model, table, gear, read, found, moments, draw):
        states = model.get_input_embeddings()(tokens).detach().requires_grad_()  # type: ignore[operator]
        logits = model(inputs_embeds=states, use_cache=False).logits
        rows = logits[counted].float()
        p = rows.detach().softmax(-1)
        first = logits.detach()[torch.arange(len(tokens), device=device), read.sum(-1) - 1].float()
        generator = torch.Generator(device).manual_seed(seed)
        for draw[0] in range(draws):
            r = torch.randn(p.shape, generator=generator, device=device) * p.sqrt()
            r -= p * r.sum(-1, keepdim=True)
            rows.backward(r, retain_graph=draw[0] + 1 < draws)
    entropy = Categorical(logits=first, validate_args=False).entropy()
    return (found.square().mean(0) / 2).T.cpu().numpy(), moments, entropy.cpu()


@contextmanager
def _with_errors(
    model: nn.Module, table: SiteTable, gear: int, read: torch.Tensor, found: torch.Tensor,
    moments: list[torch.Tensor], draw: list[int],
) -> Iterator[None]:  # fmt: skip
    """Inside, nested sites multiply their original weights, a plain product that gradients pass, and add to `found`
    [draws, sites, texts] what each backward pass says of the error that the gear would make.
    """
    modules = dict(model.named_modules())
    changed: list[nn.Module] = []

    def site_forward(at: int, weight: NestedTensor, bias: torch.Tensor | None):  # type: ignore[no-untyped-def]
        original = weight.original
        if original is None:
            raise QBEError(f"{table.nested[at].name} was stored without its 16-bit weight: nothing can be learned")

        def forward(x: torch.Tensor) -> torch.Tensor:
            y = linear(x, original, bias)
            with torch.no_grad():
                error = linear(x, weight.dequantise(gear) - original)
                mean = torch.where(read[..., None], x.float().square(), 0.0).sum(1) / read.sum(1, keepdim=True)
                moments[at] = mean.cpu()

            def add(gradient: torch.Tensor) -> None:
                found[draw[0], at] = (gradient.float() * error).sum((1, 2)).double()

            y.register_hook(add)
            return y

        return forward

    try:
        for at, site in enumerate(table.nested):
            module = modules[site.name]
            module.forward = site_forward(at, module.weight, module.bias)
            changed.append(module)
        yield
    finally:
        for module in changed:
            del module.forward  # the class's method shows again
