"""`qbe::numbered_linear`: a layer of nested weights called by its number.

A compiled graph that passes a hundred layers' weights, precision words and shapes at every step spends more on handing
them over than a small product takes. Here they are told once (`number`), and a call names the layer. On a CPU
torch_ops.cpp multiplies without Python in between, as long as no row reads the 16-bit weights; every other call goes to
the layer's own function.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from qbe.kernels.ops.register import register

Run = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]

_KEEP = "keep_linear"  # torch_ops.cpp's alone
_layers: dict[int, Run] = {}
_numbers = itertools.count()


def number(
    run: Run,
    packed: Sequence[torch.Tensor],
    meta: Sequence[torch.Tensor],
    precision_words: Sequence[torch.Tensor],
    slices: Sequence[int],
    exponents: Sequence[int],
) -> int:
    """The number by which `torch.ops.qbe.numbered_linear` knows a layer from now on.

    Args:
        run: (x [..., K], bias [N] or None) -> [..., N] of x's dtype, for any rows.
        packed, meta, slices, exponents: of the layer's parts, as in `qbe.kernels.ops.merged_linear`.
        precision_words: int32 [most rows] for each part, persistent: what is in them when the layer is called counts.
    """
    layer = next(_numbers)
    _layers[layer] = run
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"qbe::{_KEEP}", "CPU"):
        torch.ops.qbe.keep_linear(layer, list(packed), list(meta), list(precision_words), slices, exponents)
    return layer


def release(layer: int) -> None:
    """Forget a layer that no graph will call again: its weights are no longer held here."""
    _layers.pop(layer, None)
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"qbe::{_KEEP}", "CPU"):
        torch.ops.qbe.keep_linear(layer, [], [], [], [], [])


def _run(x: torch.Tensor, bias: torch.Tensor | None, _outputs: int, layer: int) -> torch.Tensor:
    return _layers[layer](x, bias)


def _fake(x: torch.Tensor, _bias: torch.Tensor | None, outputs: int, _layer: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], outputs)


OP = register("numbered_linear(Tensor x, Tensor? bias, int outputs, int layer) -> Tensor", cpu=_run, fake=_fake)
register(
    f"{_KEEP}(int layer, Tensor[] packed, Tensor[] meta, Tensor[] precision_words, int[] slices, int[] exponents) -> ()"
)
