"""Channels between two layers scaled by powers of two, so that the model computes what it computed, bit for bit.

A norm, or the linear half of a gated product, is divided by 2**e channel by channel, and the columns of all linears
that read it are multiplied by the same. Multiplying by a power of two commutes with every rounding of a floating-point
number that neither overflows nor becomes subnormal: norms, products and sums then give the same bits. Whether a model
is built that way is not looked up but tried: folds that change a single bit of the logits are dropped. (A checkpoint
of another type that is loaded in float16 may lose bits of weights below 2**-14, folded or not.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from qbe.errors import QBEError
from qbe.sites import Role, SiteTable
from qbe.store.folder import AGAIN

LARGEST = 6  # exponents stay within this: float16 and the scales of the codes have little range


@dataclass(frozen=True, eq=False)
class Fold:
    """Scales between one module and those that read it.

    Attributes:
        source: name of the norm or linear whose output channels are divided by 2**exponents.
        consumers: names of the linears whose inputs they are.
        exponents: int8 [channels].
    """

    source: str
    consumers: tuple[str, ...]
    exponents: torch.Tensor


Edge = tuple[str, tuple[str, ...]]  # source and consumers


def edges(model: nn.Module, table: SiteTable, names: Collection[str], tokens: torch.Tensor) -> list[Edge]:
    """Where folds may be possible: norms that only linears among `names` read, and the input of each gated product.

    Args:
        tokens: int64 [rows, tokens], run through the model once.
    """
    norms = {s.name for s in table if s.role is Role.NORM}
    produced: dict[int, tuple[str, torch.Tensor]] = {}  # by address; kept, so that no other tensor takes it
    read: dict[str, dict[str, None]] = {}

    def before(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any) -> None:
            for tensor in args:
                if isinstance(tensor, torch.Tensor) and tensor.data_ptr() in produced:
                    read.setdefault(produced[tensor.data_ptr()][0], {})[name] = None

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                produced[output.data_ptr()] = (name, output)

        return hook

    hooks = []
    for name, module in model.named_modules():
        if not any(True for _ in module.children()):
            hooks.append(module.register_forward_pre_hook(before(name)))
        if name in norms:
            hooks.append(module.register_forward_hook(after(name)))
    try:
        _logits(model, tokens)
    finally:
        for h in hooks:
            h.remove()
    found = [(norm, tuple(users)) for norm, users in read.items() if set(users) <= set(names)]
    return [e for e in found + gated(table, names) if fits(model, *e)]


def gated(table: SiteTable, names: Collection[str]) -> list[Edge]:
    """The linear halves of gated feed-forward blocks, each with the projection that reads the product."""
    blocks: dict[str, dict[Role, str]] = {}
    for site in table:
        if site.name in names and site.role in (Role.FFN_GATE, Role.FFN_UP, Role.FFN_DOWN):
            blocks.setdefault(site.name.rpartition(".")[0], {})[site.role] = site.name
    return [(b[Role.FFN_UP], (b[Role.FFN_DOWN],)) for b in blocks.values() if len(b) == 3]


def fits(model: nn.Module, source: str, consumers: Sequence[str]) -> bool:
    weight = getattr(model.get_submodule(source), "weight", None)
    inputs = {model.get_submodule(c).in_features for c in consumers}
    return isinstance(weight, torch.Tensor) and inputs == {weight.shape[0]}


@torch.no_grad()
def apply(model: nn.Module, folds: Sequence[Fold], sign: int = 1, without: Collection[str] = ()) -> None:
    """Scales the weights of a model, in place; `sign` -1 takes it back. Of modules in `without` only the bias is."""
    for fold in folds:
        for tensor, scale in _parts(model, fold, sign, without):
            tensor.mul_(scale)


def _parts(
    model: nn.Module, fold: Fold, sign: int, without: Collection[str] = ()
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every tensor that a fold scales, and what by."""
    source: Any = model.get_submodule(fold.source)
    parts = []
    for tensor in (None if fold.source in without else source.weight, getattr(source, "bias", None)):
        if tensor is not None:
            down = _powers(fold.exponents, -sign, tensor)
            parts.append((tensor, down[:, None] if tensor.dim() == 2 else down))
    for name in (n for n in fold.consumers if n not in without):
        consumer: Any = model.get_submodule(name)
        parts.append((consumer.weight, _powers(fold.exponents, sign, consumer.weight)))
    return parts


def _powers(exponents: torch.Tensor, sign: int, like: torch.Tensor) -> torch.Tensor:
    ones = torch.ones(exponents.shape, device=like.device)
    return torch.ldexp(ones, sign * exponents.to(like.device, torch.int32)).to(like.dtype)


@torch.inference_mode()
def apply_exact(model: nn.Module, folds: Sequence[Fold], tokens: torch.Tensor) -> list[Fold]:
    """Applies those folds that change no bit of the logits of `tokens` [rows, tokens]; returns them."""
    reference = _logits(model, tokens)
    return keep_exact(model, folds, lambda: torch.equal(_logits(model, tokens), reference))


def keep_exact(model: nn.Module, folds: Sequence[Fold], same: Callable[[], bool]) -> list[Fold]:
    """Applies those folds after which `same` says that nothing has changed; returns them."""

    def keep(some: Sequence[Fold]) -> list[Fold]:
        if not some:
            return []
        if all(_reversible(model, fold) for fold in some):
            apply(model, some)
            if same():
                return list(some)
            apply(model, some, -1)
        half = len(some) // 2
        return keep(some[:half]) + keep(some[half:]) if half else []

    return keep(folds)


def _reversible(model: nn.Module, fold: Fold) -> bool:
    """Whether no weight overflows or becomes subnormal."""
    return all(torch.equal(t * scale / scale, t) for t, scale in _parts(model, fold, 1))


def save_folds(path: Path, folds: Sequence[Fold]) -> None:
    """Writes the exponents, int8 `<source>`; the manifest names the consumers."""
    save_file({f.source: f.exponents.cpu().contiguous() for f in folds}, path)


def load_folds(path: Path, consumers: Mapping[str, tuple[str, ...]], model: nn.Module) -> list[Fold]:
    """The folds that were written, source -> names of its consumers, checked against the model.

    Raises:
        QBEError: the file is damaged or does not fit the model.
    """
    try:
        with safe_open(path, framework="pt") as stored:
            folds = [Fold(source, names, stored.get_tensor(source)) for source, names in consumers.items()]
    except (SafetensorError, OSError) as error:
        raise QBEError(f"{path} is damaged ({error}); {AGAIN}") from error
    modules = dict(model.named_modules())
    for fold in folds:
        if fold.exponents.dtype is not torch.int8 or bool((fold.exponents.to(torch.int32).abs() > LARGEST).any()):
            raise QBEError(f"{path} is damaged: exponents of {fold.source}; {AGAIN}")
        channels = getattr(getattr(modules.get(fold.source), "weight", None), "shape", (None,))[0]
        inputs = {getattr(modules.get(name), "in_features", None) for name in fold.consumers}
        if inputs | {channels} != {len(fold.exponents)}:
            raise QBEError(f"{path} does not fit the model: {fold.source}; {AGAIN}")
    return folds


def _logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=tokens, use_cache=False).logits
