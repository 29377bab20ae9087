"""What lowering each site alone does to a text or a token, for all sites at once: from gradients of the 16-bit model.

A site at fewer bits adds an error to its outputs, which moves the logits of a token by J error, and to second order the
divergence of the distributions is half the variance of that under the 16-bit model's p. With r drawn so that its
covariance is that of one token drawn from p, half the mean of (r J error)^2 over draws is the same, and r J is what one
backward pass gives every site. So some passes tell all sites' divergences, where measuring takes one for each site. The
estimate is unbiased up to that second order, and noisy: its relative deviation is the square root of 2 over the draws.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn.functional import linear

from qbe.errors import QBEError
from qbe.sites import SiteTable

Numbers = npt.NDArray[np.float64]


Note = Callable[[int, torch.Tensor, torch.Tensor], None]
Run = Callable[[torch.Tensor, torch.Tensor, int, torch.Generator, Note], torch.Tensor]


@contextmanager
def lowered(model: nn.Module, table: SiteTable, gears: Sequence[int], sites: Collection[int]) -> Iterator[Run]:
    """Inside, nested sites multiply their original weights, a plain product that gradients pass.

    Yields `run(tokens, counted, draws, generator, note)`, which runs texts forward once, backward `draws` times and
    returns the logits of the 16-bit model, [texts, tokens, vocabulary]. tokens: int64 [texts, tokens], padded at the
    right; counted: bool likewise, whose logits count; both and the generator on the model's device. `note` is called in
    each pass with the place of a site, its inputs [texts, tokens, inputs], and r J error for each gear, float32 [texts,
    tokens, gears]: half the mean of its square is what a token at that gear does alone; of its sum over tokens, what
    these do together.

    Args:
        model: a transformers causal LM whose nested sites hold NestedTensors with their originals, not yet served.
        gears: below 16 bits. The errors of all are kept while this lasts, so many times the weights' memory.
        sites: the places of nested sites that are asked about.

    Raises:
        QBEError: a nested site lost its 16-bit original.
    """
    noted: list[Note] = []
    modules = dict(model.named_modules())
    changed: list[nn.Module] = []

    def run(
        tokens: torch.Tensor, counted: torch.Tensor, draws: int, generator: torch.Generator, note: Note
    ) -> torch.Tensor:
        noted[:] = [note]
        with torch.enable_grad():
            states = model.get_input_embeddings()(tokens).detach().requires_grad_()  # type: ignore[operator]
            logits: torch.Tensor = model(inputs_embeds=states, use_cache=False).logits
            rows = logits[counted].float()
            p = rows.detach().softmax(-1)
            for draw in range(draws):
                r = torch.randn(p.shape, generator=generator, device=p.device) * p.sqrt()
                r -= p * r.sum(-1, keepdim=True)
                rows.backward(r, retain_graph=draw + 1 < draws)
        return logits.detach()

    def replace(index: int, module: Any) -> None:
        weight, bias = module.weight, module.bias
        original = weight.original
        if original is None:
            raise QBEError(f"{table.nested[index].name} was stored without its 16-bit weight: nothing can be learned")
        wrong = [weight.dequantise(g) - original for g in gears] if index in sites else []

        def forward(x: torch.Tensor) -> torch.Tensor:
            y = linear(x, original, bias)
            if wrong:
                with torch.no_grad():
                    errors = [linear(x, w) for w in wrong]

                def add(gradient: torch.Tensor) -> None:
                    noted[0](index, x.detach(), torch.stack([(gradient.float() * e).sum(-1) for e in errors], -1))

                y.register_hook(add)
            return y

        module.forward = forward
        changed.append(module)

    try:
        with torch.no_grad():
            for i, site in enumerate(table.nested):
                replace(i, modules[site.name])
        yield run
    finally:
        for module in changed:
            del module.forward  # the class's method shows again


def estimate(
    model: nn.Module, table: SiteTable, tokens: torch.Tensor, counted: torch.Tensor, gear: int, draws: int,
    seed: int = 0,
) -> tuple[Numbers, list[torch.Tensor], torch.Tensor]:  # fmt: skip
    """Divergence of each text when one site alone runs at a gear, summed over its counted tokens.

    Args:
        model: as in `lowered`.
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
    sums = torch.zeros(len(table.nested), len(tokens), dtype=torch.float64, device=device)
    activation_stats: list[torch.Tensor] = [torch.empty(0)] * len(table.nested)

    def note(index: int, x: torch.Tensor, product: torch.Tensor) -> None:
        sums[index] += product.sum((1, 2)).double().square()
        if not len(activation_stats[index]):
            mean = torch.where(read[..., None], x.float().square(), 0.0).sum(1) / read.sum(1, keepdim=True)
            activation_stats[index] = mean.cpu()

    generator = torch.Generator(device).manual_seed(seed)
    with lowered(model, table, (gear,), range(len(table.nested))) as run:
        logits = run(tokens, counted, draws, generator, note)
    first = logits[torch.arange(len(tokens), device=device), read.sum(-1) - 1].float()
    entropy = Categorical(logits=first, validate_args=False).entropy()
    return (sums / draws / 2).T.cpu().numpy(), activation_stats, entropy.cpu()
