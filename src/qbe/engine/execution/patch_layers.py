"""On a GPU: in decoder layers a sum and the norm after it run as one launch, also across the border of two layers.

That is done for classes whose forward is, statement by statement, the pre-norm layer of transformers' Llama, which
Qwen, Mistral, DeepSeek-V3 and many others have, too (`_BODY`). The last sum of a layer is made with the next layer's
norm of it, which finds it made already.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from qbe.engine.execution.patch_projections import norm_and_convert

_BODY = """
residual = hidden_states
hidden_states = self.input_layernorm(hidden_states)
ATTENTION
hidden_states = residual + hidden_states
residual = hidden_states
hidden_states = self.post_attention_layernorm(hidden_states)
hidden_states = self.mlp(hidden_states)
hidden_states = residual + hidden_states
return hidden_states
"""
# Attribute of a tensor: a norm's module and what it makes of the tensor. It is true as long as nobody writes to that.
_NORMED = "normed"

Replace = Callable[[nn.Module, Any], None]


def patch_layers(
    model: nn.Module, norms: Iterable[nn.Module], readers: Mapping[int, nn.Module], replace: Replace
) -> None:
    """Let these norms of `model` run as one launch, and its pre-norm layers take sums along.

    Args:
        norms: modules that are `qbe::rms_norm`.
        readers: `patch_projections`' result.
        replace: puts a function in the place of a module's forward.
    """
    served = set()
    for norm in norms:
        reader = readers.get(len(norm.weight))  # type: ignore[arg-type]
        # Whose words are not known: what depends on them is not made for it. A tuple is no submodule.
        norm.__dict__.update(readers=() if reader is None else (reader,), generic=True)
        replace(norm, _norm)
        served.add(norm)
    for layers in model.modules():
        if not isinstance(layers, nn.ModuleList):
            continue
        fits = [is_pre_norm(type(m)) and {m.input_layernorm, m.post_attention_layernorm} <= served for m in layers]
        for i, layer in enumerate(layers):
            if not fits[i]:
                continue
            attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
            first = getattr(attention, "q_proj", None)
            beside = first.__dict__.get("beside", ()) if first is not None else ()
            layer.input_layernorm.__dict__.update(readers=(first, *beside) if beside else (), generic=False)
            gated = (mlp.gate_proj, mlp.up_proj) if getattr(mlp.__dict__.get("forward"), "is_patch", False) else ()
            layer.post_attention_layernorm.__dict__.update(readers=gated, generic=False)
            following = (layers[i + 1].input_layernorm,) if i + 1 < len(layers) and fits[i + 1] else ()
            layer.__dict__["next_norm"] = following
            replace(layer, _pre_norm_layer)


def is_pre_norm(kind: type[nn.Module]) -> bool:
    """Whether modules of this class run `_BODY`, and give all that they are given to their attention by its name."""
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(kind.forward))).body[0]
    except (OSError, TypeError, SyntaxError):  # it is not a function with a source
        return False
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    named = {a.arg for a in (*arguments.args, *arguments.kwonlyargs)} - {"self"}
    if arguments.kwarg is None or arguments.vararg is not None or arguments.posonlyargs:
        return False
    body = [_without_attention(s, named, arguments.kwarg.arg) for s in function.body if not _is_text(s)]
    return "\n".join(body) == _BODY.strip()


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _without_attention(statement: ast.stmt, named: set[str], rest: str) -> str:
    """The statement; ATTENTION for the call of attention with all that is `named`, and `rest`."""
    if isinstance(statement, ast.Assign) and isinstance(call := statement.value, ast.Call):
        passed = {(k.arg, ast.unparse(k.value)) for k in call.keywords}
        targets = [ast.unparse(t) for t in statement.targets]
        wanted: set[tuple[str | None, str]] = {(n, n) for n in named} | {(None, rest)}
        if ast.unparse(call.func) == "self.self_attn" and not call.args and passed == wanted:
            return "ATTENTION" if targets == ["(hidden_states, _)"] else "?"
    return ast.unparse(statement)


def _served(norm: nn.Module, x: torch.Tensor) -> bool:
    weight = norm._parameters["weight"]
    return not torch.is_grad_enabled() and weight is not None and x.dtype is weight.dtype


def _eps(norm: nn.Module) -> float:
    eps: float = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps  # type: ignore[assignment]
    return eps


def _norm(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    maker, normed = getattr(hidden_states, _NORMED, (None, None))
    if maker is self and normed is not None:
        return normed
    if not _served(self, hidden_states):
        y: torch.Tensor = type(self).forward(self, hidden_states)
        return y
    weight: torch.Tensor = self._parameters["weight"]  # type: ignore[assignment]
    return norm_and_convert(hidden_states, None, weight, _eps(self), self.readers, self.generic)[1]  # type: ignore[arg-type]


def _add_and_norm(
    residual: torch.Tensor, added: torch.Tensor, norm: nn.Module
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Their sum, and what `norm` makes of it."""
    if not _served(norm, residual) or residual.dtype is not added.dtype or residual.shape != added.shape:
        total = residual + added
        return total, norm(total)
    weight: torch.Tensor = norm._parameters["weight"]  # type: ignore[assignment]
    return norm_and_convert(residual, added, weight, _eps(norm), norm.readers, norm.generic)  # type: ignore[arg-type]


def _pre_norm_layer(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if args:
        y: torch.Tensor = type(self).forward(self, hidden_states, *args, **kwargs)
        return y
    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)  # type: ignore[operator]
    hidden_states, _ = self.self_attn(hidden_states=hidden_states, **kwargs)  # type: ignore[operator]
    residual, hidden_states = _add_and_norm(residual, hidden_states, self.post_attention_layernorm)  # type: ignore[arg-type]
    hidden_states = self.mlp(hidden_states)  # type: ignore[operator]
    for following in self.next_norm:  # type: ignore[union-attr]
        total, normed = _add_and_norm(residual, hidden_states, following)
        setattr(total, _NORMED, (following, normed))
        return total
    return residual + hidden_states
