"""Modules of a model that call QBE's ops themselves in steps that are not compiled.

A step of few rows spends as long on torch's calls as on products, on a GPU on its launches. A norm and rotary
embeddings are one op each in place of eight and of fourteen (`qbe.kernels.ops.rms_norm`, `rotary`), wherever a trial
shows that these have the same bits; on a GPU a norm may have another last bit. A nested layer skips the way through
`F.linear` and its tensor subclass on a CPU; on a GPU layers that read the same input are one launch
(`patch_projections`), and so are a sum and the norm after it (`patch_layers`). Whatever they do not serve goes the
model's own way, and so does what is compiled (`unpatched`).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from qbe.kernels.cpu import build
from qbe.kernels.ops import nested_linear as ops
from qbe.kernels.ops.rms_norm import rms_norm
from qbe.kernels.ops.rotary import rotate, rotate_both
from qbe.store.nested_linears import nested_linears
from qbe.store.nested_tensor import NestedTensor

_ROTARY = "apply_rotary_pos_emb"  # the name of the function in transformers' models
SERVED = torch.bfloat16  # of what norms and rotary embeddings take


def patch_modules(model: nn.Module, device: torch.device) -> None:
    """Let the modules of `model`, which is on that device, take them; once, and for good."""
    if device.type == "cuda":
        from qbe.engine.execution.patch_layers import patch_layers
        from qbe.engine.execution.patch_projections import patch_projections

        norms = [m for m in model.modules() if _is_norm(m)]
        patch_layers(model, norms, patch_projections(model, _replace), _replace)
    else:
        for _, layer, _ in nested_linears(model):
            _replace(layer, _linear)
        if build.backend() not in ("avx512", "amx"):  # where the ops would be torch's dozen again
            return
        for module in model.modules():
            if _is_norm(module):
                _replace(module, _norm)
    functions: dict[object, Callable[..., Any] | None] = {}
    for module in model.modules():
        kind = type(module)
        if _takes_rotary(kind):
            if kind not in functions:
                functions[kind] = _with_rotary(kind, device)
            if functions[kind] is not None:
                _replace(module, functions[kind])


def launches(model: nn.Module, device: torch.device) -> Iterator[Callable[[], object]]:
    """Calls that together need every kernel that `patch_modules` tries on a GPU, and those of its merged layers."""
    if device.type != "cuda":
        return
    from qbe.engine.execution.patch_projections import projection_launches

    yield from projection_launches(model)
    kinds: set[object] = set()
    for module in model.modules():
        kind = type(module)
        if kind.__name__.endswith("RMSNorm"):
            yield functools.partial(_is_norm, module)
        if kind not in kinds and _takes_rotary(kind):
            kinds.add(kind)
            yield functools.partial(_with_rotary, kind, device)


@contextmanager
def unpatched(model: nn.Module, rotary: bool = True) -> Iterator[None]:
    """Inside the block `model` has none of them: dynamo follows the modules' own code, which Inductor fuses better.

    Args:
        rotary: rotary embeddings, too. Of many tokens Inductor makes seven passes where the op makes two.
    """
    taken = [m for m in model.modules() if getattr(m.__dict__.get("forward"), "is_patch", False)]
    taken = [m for m in taken if rotary or not getattr(m.forward, "rotates", False)]
    kept = [m.__dict__.pop("forward") for m in taken]
    try:
        yield
    finally:
        for module, forward in zip(taken, kept, strict=True):
            module.forward = forward


def _replace(module: nn.Module, forward: Any) -> None:
    if "forward" not in module.__dict__:
        forward.is_patch = True
        module.forward = types.MethodType(forward, module)  # which is copied with the module


def _takes_rotary(kind: type[nn.Module]) -> bool:
    """Whether modules of this class call transformers' rotary embedding by its name."""
    return isinstance(kind.forward, types.FunctionType) and _ROTARY in kind.forward.__code__.co_names


def _linear(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    weight = self._parameters["weight"]
    assert isinstance(weight, NestedTensor)
    bits, width = weight.bits, x.shape[-1]
    rows = x.numel() // width if width else 0
    fits = width == weight.in_features and x.dtype is weight.logical_dtype and bits.shape[0] >= rows > 0
    if torch.is_grad_enabled() or not fits or weight.packed.dim() == 1:
        return nn.Linear.forward(self, x)
    return ops.nested_linear(
        x, weight.packed, weight.meta, bits[:rows], weight.original, self._parameters["bias"], weight.slices,
        weight.exponent, weight.float32_output,
    )  # fmt: skip


def _eps(module: nn.Module) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _norm(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled() or hidden_states.dtype is not SERVED:
        y: torch.Tensor = type(self).forward(self, hidden_states)
        return y
    return rms_norm(hidden_states, self._parameters["weight"], _eps(self))  # type: ignore[arg-type]


@torch.inference_mode()
def _is_norm(module: nn.Module) -> bool:
    """Whether it is `qbe::rms_norm`."""
    weight, eps = module._parameters.get("weight"), _eps(module)
    if (
        not type(module).__name__.endswith("RMSNorm")
        or weight is None
        or weight.dtype is not SERVED
        or weight.dim() != 1
        or not isinstance(eps, float)
    ):
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, len(weight), generator=generator).to(weight.device, SERVED)
    try:
        expected, found = type(module).forward(module, x), rms_norm(x, weight, eps)
        if weight.device.type == "cuda":
            return torch.allclose(found, expected, rtol=2**-7, atol=0)  # a step of bfloat16
        return torch.equal(found, expected)
    except (RuntimeError, TypeError):  # it is called in another way
        return False


def _with_rotary(kind: type[nn.Module], device: torch.device) -> Callable[..., Any] | None:
    """Its forward with the op in its module's function's place while it runs; None where that is another function."""
    forward: types.FunctionType = kind.forward  # type: ignore[assignment]
    plain = forward.__globals__[_ROTARY]

    def rotary(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        served = all(t.dtype is SERVED for t in (q, k, cos, sin))  # OLMo's cosines are float32
        if rest or named or torch.is_grad_enabled() or not served or cos.shape[-1] != q.shape[-1]:
            rotated: tuple[torch.Tensor, torch.Tensor] = plain(q, k, cos, sin, *rest, **named)
            return rotated
        if q.is_cuda:
            return rotate_both(q, k, cos, sin)
        return rotate(q, cos, sin), rotate(k, cos, sin)  # on a CPU torch calls each without Python in between

    generator = torch.Generator().manual_seed(0)
    sizes = (1, 2, 5, 8), (1, 1, 5, 8), (1, 5, 8), (1, 5, 8)
    given = [torch.randn(size, generator=generator).to(device, SERVED) for size in sizes]
    try:
        with torch.inference_mode():
            same = all(torch.equal(a, b) for a, b in zip(rotary(*given), plain(*given), strict=True))
    except (RuntimeError, TypeError, ValueError):
        same = False
    if not same:
        return None
    names = forward.__globals__

    @functools.wraps(forward)
    def rotating(*args: Any, **kwargs: Any) -> Any:
        # Another thread that runs the same model code meanwhile gets the same bits from either function.
        names[_ROTARY] = rotary
        try:
            return forward(*args, **kwargs)
        finally:
            names[_ROTARY] = plain

    rotating.rotates = True  # type: ignore[attr-defined]
    return rotating
