"""What `qbe.store.kv_sensitivity` measures of the KV cache, estimated from gradients like the rest of a model.

A key head at fewer bits changes its own query heads' part of what attention puts out, so that one backward pass tells
all heads of all layers (`qbe.store.estimate`). With few draws a head's estimate is noisy: what the draws say of a layer
is one number, divided among heads by the squares of gradient times error, place by place, which are many.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from qbe.format.kv_blocks import PAGE_SIZE
from qbe.sites import FULL_BITS, KVSite
from qbe.store.experts import expert_layers, original_products, tapped
from qbe.store.kv_sensitivity import DERIVED, MEASURED, OtherAttention, Probe, probing
from qbe.store.layerwise import Layerwise, NotLayered, Pass, first

DRAWS = 8  # gradients of a segment in all, as in `qbe.store.estimate`
TOKENS = 16


class _Estimating(Probe):
    """Attention that notes what fewer bits would have changed of it, and what gradients say to that."""

    def __init__(self) -> None:
        super().__init__()
        self.notes = False
        # By attention layer, of which a decoder layer may have several:
        self.product: dict[int, torch.Tensor] = {}  # float64 [texts, widths, kv heads] of the last backward pass
        self.squares: dict[int, torch.Tensor] = {}  # [widths, kv heads] of all: squares place by place

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float,
        window: int | None, softcap: float | None, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        out = super().attend(layer, query, key, value, scaling, window, softcap, sinks)
        if not self.notes:
            return out
        kv_heads = key.shape[1]
        with torch.no_grad():
            wrong = []
            for bits in MEASURED:
                self.bits = {layer: (bits,) * kv_heads}
                wrong.append(super().attend(layer, query, key, value, scaling, window, softcap, sinks) - out)
            self.bits = {}
        change = torch.stack(wrong).unflatten(3, (kv_heads, -1))  # [widths, texts, T, kv, repeat, dim]

        def add(gradient: torch.Tensor) -> None:
            each = (change * gradient.unflatten(2, (kv_heads, -1))).double()
            product, squares = each.sum((2, 4, 5)).transpose(0, 1), each.square().sum((1, 2, 4, 5))
            for sums, more in ((self.product, product), (self.squares, squares)):
                sums[layer] = sums[layer] + more if layer in sums else more

        out.register_hook(add)
        return out


class KVEstimate:
    """Estimates of every key head, from a forward pass and backward ones for `DRAWS` gradients.

    Args:
        tokens: int64 [texts, tokens].
        drawn, zero_sum: as in `qbe.store.estimate`.

    No head is found in a model whose attention is not the common one, or of too short a context to fill two pages.
    """

    def __init__(
        self, walk: Layerwise, tokens: torch.Tensor, generator: torch.Generator,
        drawn: Callable[..., torch.Tensor], zero_sum: Callable[..., torch.Tensor],
    ) -> None:  # fmt: skip
        from qbe.store.estimate import gradient_of_drawn

        self._walk, self._probe, self._found = walk, _Estimating(), {}  # type: ignore[var-annotated]
        self._draws = max(1, DRAWS // len(tokens))
        self._rows = len(tokens) * (tokens.shape[1] - 2 * PAGE_SIZE)  # that see a quantised page
        self._usable = self._rows > 0
        if not self._usable:
            return
        try:
            with probing(walk.model, self._probe):
                self._pass = walk.run(tokens)
                logits, self._pass.logits = self._pass.logits, None
                assert logits is not None
                rows = logits.flatten(0, 1).float()
                p, places = rows.softmax(-1), torch.arange(len(rows), device=rows.device) % tokens.shape[1]
                seen = places >= 2 * PAGE_SIZE
                self._gradients = []
                for _ in range(self._draws):
                    chosen = drawn(p, TOKENS, generator)
                    weights = zero_sum(*chosen.shape, generator, p.device) * seen[:, None]
                    self._gradients.append(gradient_of_drawn(walk, self._pass, rows, chosen, weights))
        except (OtherAttention, NotLayered):
            self._usable = False

    def layer(self, i: int, native: Pass) -> None:
        """Goes back through a layer that is on the device, from the last to the first.

        Args:
            native: another text's pass, with the model's own attention.
        """
        if not self._usable:
            return
        walk, probe, layer = self._walk, self._probe, self._walk.layers[i]
        try:
            with probing(walk.model, probe):
                self._compare(i, native)
                probe.notes, probe.squares = True, {}
                directly: dict[int, torch.Tensor] = {}
                with torch.enable_grad(), tapped(expert_layers(layer), original_products):
                    states = self._pass.hidden(i).detach().requires_grad_()
                    out = self._pass.call(i, layer, states)
                    for draw in range(self._draws):
                        probe.product = {}
                        (self._gradients[draw],) = torch.autograd.grad(
                            out, states, self._gradients[draw], retain_graph=draw + 1 < self._draws
                        )
                        for owner, product in probe.product.items():
                            directly[owner] = directly.get(owner, torch.tensor(0.0)) + product.square().sum(0)
                for owner, squares in probe.squares.items():  # whose keys these are; layers that share them come later
                    before = self._found.get(owner, (0.0, 0.0))
                    self._found[owner] = directly[owner] + before[0], squares + before[1]
        except OtherAttention:
            self._usable = False
        finally:
            probe.notes = False
            self._pass.outputs[i] = self._pass.args[i] = self._pass.kwargs[i] = None  # type: ignore[call-overload]

    def _compare(self, i: int, native: Pass) -> None:
        """Raises OtherAttention where the model's attention does something that the probe does not."""
        kwargs = native.kwargs[i]
        if kwargs.get("attention_mask") is not None:
            native.kwargs[i] = {**kwargs, "attention_mask": None}
        try:
            with torch.no_grad():
                y = native.call(i, self._walk.layers[i], native.hidden(i))
        finally:
            native.kwargs[i] = kwargs
        known = first(native.outputs[i])
        if float((y - known).abs().max()) > 0.02 * float(known.abs().max()):
            raise OtherAttention

    def sites(self) -> tuple[KVSite, ...]:
        """By layer and head, once every layer is done."""
        if not self._usable:
            return ()
        found = []
        for i, (directly, squares) in sorted(self._found.items()):
            heads, kv_heads, key_dim, value_dim = self._probe.shapes[i]
            # How much more than the squares, place by place, comes of a layer: as one number for all heads and widths.
            ratio = (directly / squares.clamp_min(1e-300)).mean()
            damage = (squares * ratio / (2 * self._draws * self._rows)).tolist()
            for head in range(kv_heads):
                kl = {FULL_BITS: 0.0, **{bits: damage[w][head] for w, bits in enumerate(MEASURED)}}
                kl.update({bits: kl[4] * (15 / (2**bits - 1)) ** 2 for bits in DERIVED})
                entropy = self._probe.entropy[i][head]
                found.append(KVSite(i, head, heads // kv_heads, key_dim + value_dim, dict(sorted(kl.items())), entropy))
        return tuple(found)
