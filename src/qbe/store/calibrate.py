"""Codes chosen by what they do to the outputs of a text: every nestable site of a model nested, one after the other.

The text gives the second moments of each site's inputs (its Hessian, as GPTQ has it, but for tokens that count by what
the answer feels of them), in as many passes as their memory needs; `qbe.store.descent` then chooses codes by them, and
`qbe.store.tuning` betters the scales of each precision on the answers of the whole model. Results of single sites, and
of every step of the tuning, are kept in a folder as soon as they are there, so that an interrupted calibration goes on
where it was.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qbe.format.codes import quantise
from qbe.format.layout import SliceLayout
from qbe.format.packing import pack
from qbe.hardware import NumberFormat, detect
from qbe.progress import bar
from qbe.sites import FULL_BITS
from qbe.store import descent, kept
from qbe.store.experts import ExpertLayer, Multiply, install, original_products, tapped
from qbe.store.matrices import Matrices
from qbe.store.nest_experts import assembled
from qbe.store.nested_linears import NestedWeightConfig, set_weight
from qbe.store.nested_tensor import NestedTensor
from qbe.store.tuning import Nested, tune

DAMPING = 0.05  # of the mean of the diagonal, added to it: what the text did not show is not known to be harmless
MOMENTS_BYTES = 2 << 30  # of Hessians that are kept at a time
BLOCK = 192  # columns of a Hessian that are added to at once
SETTINGS = repr((descent.SETTINGS, DAMPING, "tokens by noise at the logits"))  # results that are kept belong to them


def calibrate(
    model: nn.Module,
    names: list[str],
    tokens: torch.Tensor,
    config: NestedWeightConfig,
    keep: Path | None = None,
    *,
    progress: bool,
) -> None:
    """Nests the linears called `names`, and all experts, in place, with codes chosen on a text.

    Sites that the text never reaches, or whose inputs are not all numbers, are rounded plainly, with a warning.

    Args:
        tokens: int64 [windows, tokens].
        keep: folder for the results of single sites; what lies there of this very task is not done again.

    Raises:
        QBEError: a weight that cannot be nested, or a disk that refuses.
    """
    layout = SliceLayout.of(config.slices)
    matrices = Matrices(model)
    names = [*names, *matrices.experts]
    done: dict[str, Nested] = {}
    for name in names:
        if (
            keep is not None
            and (found := _load(keep, name, matrices.weight(name), layout, config.group_size)) is not None
        ):
            done[name] = found
    left = [n for n in names if n not in done]
    plain = []
    with bar("calibrating weights", len(left), progress) as step:
        for some in _batches({n: matrices.inputs(n) for n in left}):
            moments = second_moments(model, some, tokens, progress=progress)
            for name in some:
                weight = matrices.weight(name)
                codes, meta, exponent = quantise(weight.cpu(), layout, config.group_size)
                hessian = damped(moments.get(name))
                if hessian is None:
                    plain.append(name)
                else:
                    codes, meta = descent.descend(weight.cpu(), hessian, codes, meta, exponent, layout)
                done[name] = codes, meta, exponent
                if keep is not None:
                    _save(keep, name, weight, done[name])
                step()
    if plain:
        warnings.warn(f"{len(plain)} sites got no usable inputs from the calibration text and are rounded plainly, "
                      f"{plain[0]} for example", stacklevel=2)  # fmt: skip
    done = tune(model, {n: done[n] for n in names}, layout, tokens, keep, progress=progress)
    for name in names:
        if name not in matrices.experts:
            linear: Any = model.get_submodule(name)
            set_weight(linear, _tensor(linear.weight.detach(), done[name], layout, config))
    without = replace(config, keep_original=False)
    for layer in matrices.layers:
        for parameter in layer.parameters:

            def chosen(e: int, layer: ExpertLayer = layer, parameter: str = parameter) -> NestedTensor:
                return _tensor(layer.weight(parameter, e), done[layer.site(parameter, e)], layout, without)

            install(layer, parameter, assembled(layer, parameter, config, chosen))


def damped(hessian: torch.Tensor | None) -> torch.Tensor | None:
    """A Hessian made safe for inputs that were rare or dead; None where it says nothing."""
    if hessian is None or not torch.isfinite(hessian).all() or not hessian.diagonal().amax() > 0:
        return None
    hessian = hessian / hessian.diagonal().mean()  # in the middle of float32's range, whatever the inputs were
    hessian.diagonal().add_(DAMPING)
    return hessian


def second_moments(
    model: nn.Module, names: list[str], tokens: torch.Tensor, *, progress: bool = False
) -> dict[str, torch.Tensor]:
    """Mean outer product of the inputs of linears and experts on a text, float32 [K, K] on the CPU.

    Those that were never called have none.

    A token counts by how much the answer feels what a site's output is off by there: by the root mean square of what
    comes back to the output of noise at the logits that has the covariance of a drawn next token. Its mean square is
    the Fisher information, the curvature of the answer's divergence, but for the noise; of the curvature itself a few
    tokens would have most.
    """
    sums: dict[str, torch.Tensor] = {}
    seen: list[_Call] = []

    def hook(name: str) -> Callable[..., torch.Tensor]:
        return lambda _module, args, out: saw(name, args[0], out)

    def saw(name: str, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if not out.requires_grad:
            out = out.requires_grad_().clone()  # which others may write to
        seen.append(_Call(name, x.detach().flatten(0, -2)))
        out.register_hook(seen[-1].observe)
        return out

    def watching(layer: ExpertLayer) -> Multiply:
        product = original_products(layer)

        def multiply(parameter: str, e: int, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            y, name = product(parameter, e, x, tokens), layer.site(parameter, e)
            return saw(name, x, y) if name in wanted else y

        return multiply

    device = next(model.parameters()).device
    fast = NumberFormat.BF16 in detect(device).formats  # gradients are noisy anyway
    noise = torch.Generator(device).manual_seed(0)
    learning = [p for p in model.parameters() if p.requires_grad]
    matrices, wanted = Matrices(model), set(names)
    plain = [n for n in names if n not in matrices.experts]
    hooks = [model.get_submodule(n).register_forward_hook(hook(n)) for n in plain]
    taps = ExitStack()
    taps.enter_context(tapped(list(matrices.layers_of(names)), watching))
    try:
        for p in learning:
            p.requires_grad_(False)
        with bar("reading the calibration text", len(tokens), progress) as step:
            for row in tokens:
                with torch.enable_grad(), torch.autocast(device.type, torch.bfloat16, enabled=fast):
                    logits = model(input_ids=row[None].to(device), use_cache=False).logits[0]
                    answer = logits.detach().float().softmax(-1)
                    if logits.requires_grad and torch.isfinite(answer).all():  # else all tokens count alike
                        logits.backward(_curved(answer, noise).to(logits.dtype))
                for call in seen:
                    x = call.weighed()
                    if call.name not in sums:
                        sums[call.name] = x.new_zeros(x.shape[1], x.shape[1])
                    for a in range(0, x.shape[1], BLOCK):  # one half of what is symmetric
                        sums[call.name][a : a + BLOCK, a:].addmm_(x[:, a : a + BLOCK].T, x[:, a:])
                seen.clear()
                step()
    finally:
        taps.close()
        for h in hooks:
            h.remove()
        for p in learning:
            p.requires_grad_()
    return {name: ((total.triu() + total.triu(1).T) / tokens.numel()).cpu() for name, total in sums.items()}


def _curved(answer: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Noise with the covariance diag(p) - p p' of each token's probabilities p, float32 [T, V], the seed's own."""
    noise = torch.randn(answer.shape, generator=generator, device=answer.device).mul_(answer.sqrt())
    return noise.addcmul_(answer, noise.sum(-1, keepdim=True), value=-1)


@dataclass
class _Call:
    """What a site was called with: its name, inputs [T, K] and, once known, how much the answer feels each [T]."""

    name: str
    x: torch.Tensor
    felt: torch.Tensor | None = None

    def observe(self, gradient: torch.Tensor) -> None:
        self.felt = gradient.flatten(0, -2).float().square().mean(-1).sqrt()

    def weighed(self) -> torch.Tensor:
        """The inputs, float32 [T, K], so that their outer products have the tokens' weights, 1 on average."""
        x = self.x.float()
        share = None if self.felt is None else self.felt / self.felt.mean()
        return x if share is None or not torch.isfinite(share).all() else x * share.sqrt()[:, None]


def _batches(inputs: dict[str, int]) -> Iterator[list[str]]:
    """Sites, by name and inputs, in groups whose Hessians fit into memory together."""
    some: list[str] = []
    size = 0
    for name, k in inputs.items():
        if some and size + 4 * k * k > MOMENTS_BYTES:
            yield some
            some, size = [], 0
        some.append(name)
        size += 4 * k * k
    if some:
        yield some


def _tensor(weight: torch.Tensor, nested: Nested, layout: SliceLayout, config: NestedWeightConfig) -> NestedTensor:
    codes, meta, exponent = nested
    bits = torch.tensor([FULL_BITS if config.keep_original else layout.total_bits], dtype=torch.int32)
    return NestedTensor(
        pack(codes, layout).to(weight.device), meta.to(weight.device), bits.to(weight.device), list(layout.slices),
        config.group_size, exponent, weight.shape[1], weight.dtype, weight if config.keep_original else None,
    )  # fmt: skip


def _file(keep: Path, name: str) -> Path:
    return keep / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.safetensors"


def _digest(weight: torch.Tensor) -> str:
    """Of the weight as it is now: a site's result belongs to it, smoothing included."""
    raw = weight.cpu().contiguous().view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()


def _save(keep: Path, name: str, weight: torch.Tensor, nested: Nested) -> None:
    about = {"site": name, "weight": _digest(weight), "exponent": str(nested[2]), "settings": SETTINGS}
    kept.keep(_file(keep, name), {"codes": nested[0], "meta": nested[1]}, about)


def _load(keep: Path, name: str, weight: torch.Tensor, layout: SliceLayout, group_size: int) -> Nested | None:
    """What an earlier calibration left of a site; None when nothing usable is there."""
    found = kept.kept(_file(keep, name))
    if found is None:
        return None
    tensors, about = found
    if (about.get("site"), about.get("settings")) != (name, SETTINGS) or about.get("weight") != _digest(weight):
        return None
    n, k = weight.shape
    groups = -(-k // group_size)
    wanted = {"codes": (n, groups * group_size), "meta": (2 * len(layout.precisions), n, groups)}
    if {part: tuple(t.shape) for part, t in tensors.items()} != wanted:
        return None
    return tensors["codes"], tensors["meta"], int(about["exponent"])
