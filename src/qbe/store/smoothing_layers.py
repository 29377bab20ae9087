"""`qbe.store.smoothing` layer by layer, for a model of which the device holds one layer at a time.

All that a fold touches lies within one layer, so that a layer's outputs tell whether a fold changes what the model
computes: they have to stay the same, bit for bit. One forward pass finds the places, the scales and the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from qbe.format.layout import SliceLayout
from qbe.sites import Role, SiteTable
from qbe.store import folding
from qbe.store.folding import Fold
from qbe.store.layerwise import Layerwise, NotLayered, Pass, first
from qbe.store.smoothing import best_exponents, inputs_of


class _Reads:
    """Which linears read a norm's outputs as they are, and what each linear reads, in the layer that runs."""

    def __init__(self, norms: Collection[str], names: Collection[str]) -> None:
        self._norms, self._names = norms, names
        self.clear()

    def clear(self) -> None:
        """Before another layer."""
        self._produced: dict[int, tuple[str, torch.Tensor]] = {}  # by address; kept, so that no other tensor takes it
        self.read: dict[str, dict[str, None]] = {}
        self.inputs: dict[str, torch.Tensor] = {}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Inside, what the model's modules read and return is noted."""
        hooks = []
        for name, module in model.named_modules():
            if not any(True for _ in module.children()):
                hooks.append(module.register_forward_pre_hook(self._before(name)))
            if name in self._norms:
                hooks.append(module.register_forward_hook(self._after(name)))
        try:
            yield
        finally:
            for h in hooks:
                h.remove()

    def _before(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any) -> None:
            for tensor in args:
                if isinstance(tensor, torch.Tensor) and tensor.data_ptr() in self._produced:
                    self.read.setdefault(self._produced[tensor.data_ptr()][0], {})[name] = None
            if name in self._names:
                self.inputs[name] = args[0]

        return hook

    def _after(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                self._produced[output.data_ptr()] = (name, output)

        return hook


def smooth_layers(
    walk: Layerwise, table: SiteTable, names: Collection[str], tokens: torch.Tensor, layout: SliceLayout,
    group_size: int, on_layer: Callable[[], None] = lambda: None,
) -> list[Fold]:  # fmt: skip
    """Scales the weights of a model that is about to be nested, in place, without changing what it computes.

    Args:
        walk: the model, in its own type.
        names: of the linears that may be scaled.
        tokens: int64 [rows, tokens] of calibration text.
        layout, group_size: of the store.
        on_layer: called when a layer is done (a progress bar).

    Returns:
        the folds that were made.

    Raises:
        NotLayered: the model is built otherwise. Nothing has been scaled then.
    """
    model = walk.model
    reads, gated = _Reads({s.name for s in table if s.role is Role.NORM}, names), folding.gated(table, names)
    called = {id(module): name for name, module in model.named_modules()}
    inside = [{called[id(m)] for m in layer.modules()} for layer in walk.layers]
    kept: list[Fold] = []

    def visit(i: int, passed: Pass) -> None:
        seen = [(norm, tuple(users)) for norm, users in reads.read.items() if set(users) <= set(names)]
        places = [
            e for e in seen + gated
            if {e[0], *e[1]} <= inside[i] and e[1][0] in reads.inputs and folding.fits(model, *e)
        ]  # fmt: skip
        inputs = [inputs_of(reads.inputs[users[0]]) for _, users in places]
        folds = []
        for (source, users), x in zip(places, inputs, strict=True):
            weights: list[Any] = [model.get_submodule(n).weight for n in users]
            exponents = best_exponents(x, weights, layout, group_size)
            if exponents is not None:
                folds.append(Fold(source, users, exponents.cpu()))
        before = first(passed.outputs[i]).clone()

        def same() -> bool:
            return torch.equal(passed.call(i, walk.layers[i], passed.hidden(i)), before)

        kept.extend(folding.keep_exact(model, folds, same))
        reads.clear()
        if i:
            passed.outputs[i - 1] = passed.args[i - 1] = passed.kwargs[i - 1] = None  # type: ignore[call-overload]
        on_layer()

    def scaled() -> list[Fold]:
        """Those whose weights were on the device already: of others a copy was scaled, which is gone."""
        return [f for f in kept if model.get_submodule(f.source).weight.device == walk.device]

    try:
        with reads.watching(model):
            walk.run(tokens, visit, head=False)
    except NotLayered:
        folding.apply(model, scaled(), -1)
        raise
    folding.apply(model, [f for f in kept if f not in scaled()])
    return kept
