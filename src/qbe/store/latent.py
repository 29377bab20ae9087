"""The projection that expands the latents of latent attention, on the queries' side (DeepSeek-V2, section 2.1).

transformers keeps a token's latent and the rotary part of its key in its cache, and makes a key and a value of every
head of them in each step (`expand_kv`). Here they stay as they are. With K and V the parts of `kv_b_proj` that belong
to a head, q . (K latent) = (K^T q) . latent, and V can be multiplied once, with the weighted sum of latents. So the
weight is read once a step at each row's bits, and not once for every token of the context.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from qbe.errors import QBEError
from qbe.store.nested_tensor import NestedTensor


class AbsorbedWeight:
    """`kv_b_proj` of an attention module, as `qbe.kvcache.latent.Absorbed` has it.

    Its products are of 16-bit activations, whatever a row's word says: they are sums over a head, not over inputs that
    share a scale.

    Raises:
        QBEError: the projection is not the one that all of transformers' families have.
    """

    def __init__(self, module: nn.Module) -> None:
        projection = getattr(module, "kv_b_proj", None)
        nope, value = (getattr(module, name, None) for name in ("qk_nope_head_dim", "v_head_dim"))
        known = isinstance(projection, nn.Linear) and projection.bias is None
        if not (known and isinstance(nope, int) and isinstance(value, int)):
            raise QBEError(
                f"{type(module).__name__} expands its latents in a way of its own: QBE cannot run this model"
            )
        self._projection: Any = projection
        self._nope: int = nope
        self._value: int = value

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Queries `[n, heads, T, nope + rope]` as latents meet them, `[n, heads, T, rank + rope]`."""
        nope, rotary = query.split([self._nope, query.shape[3] - self._nope], 3)
        parts = [(at, nope[:, :, at] @ w[:, : self._nope]) for at, w in self._weights(query.shape[2])]
        return torch.cat([_in_place(parts, query.shape[2], 2), rotary], 3)

    def expand(self, found: torch.Tensor) -> torch.Tensor:
        """Sums of latents `[n, T, heads, rank]` as sums of values, `[n, T, heads, v_head_dim]`."""
        parts = [
            (at, (found[:, at].transpose(1, 2) @ w[:, self._nope :].mT).transpose(1, 2))
            for at, w in self._weights(found.shape[1])
        ]
        return _in_place(parts, found.shape[1], 1)

    def _weights(self, rows: int) -> Iterator[tuple[torch.Tensor | slice, torch.Tensor]]:
        """Which of a step's rows read the weight as `[heads, nope + value, rank]`; for each precision among them."""
        weight = self._projection.weight
        if not isinstance(weight, NestedTensor):
            yield slice(None), self._by_head(weight)
            return
        words = weight.bits if weight.bits.shape[0] == 1 else weight.bits[:rows]
        gears = {word: weight.gear_of(word) for word in words.unique().tolist()}
        if len(set(gears.values())) == 1:
            yield slice(None), self._by_head(weight.at_gear(next(iter(gears.values()))))
            return
        for gear in sorted(set(gears.values())):
            of_gear = torch.tensor([w for w, g in gears.items() if g == gear], device=words.device)
            yield torch.isin(words, of_gear).nonzero()[:, 0], self._by_head(weight.at_gear(gear))

    def _by_head(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.unflatten(0, (-1, self._nope + self._value))


def _in_place(parts: list[tuple[torch.Tensor | slice, torch.Tensor]], rows: int, dim: int) -> torch.Tensor:
    """The parts of a step as one tensor, each row of dimension `dim` where it was."""
    first = parts[0][1]
    if len(parts) == 1:
        return first
    shape = (*first.shape[:dim], rows, *first.shape[dim + 1 :])
    whole = first.new_empty(shape)
    for at, part in parts:
        whole.index_copy_(dim, at, part)  # type: ignore[arg-type]
    return whole


def latent_modules(model: nn.Module) -> list[nn.Module]:
    """The attention modules whose cache holds latents."""
    return [m for m in model.modules() if hasattr(m, "expand_kv")]
