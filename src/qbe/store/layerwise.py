"""A model run layer by layer, with one decoder layer on the device at a time.

What is between the layers (embeddings, norms, the output head) is the model's own code: its forward is called, and each
decoder layer is moved to the device when its turn comes. The output head multiplies a part of the vocabulary at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from qbe.store.nested_tensor import NestedTensor
from qbe.store.sensitivity import replay

LOCKED_BYTES = 1 << 20  # of a tensor whose pages are worth locking
HEAD_BYTES = 1 << 26  # of the float32 rows of the output head that are on the device at once


class NotLayered(Exception):
    """The model is no plain chain of decoder layers under an output head."""


@contextmanager
def on(modules: Iterable[nn.Module], device: torch.device, wide: bool = True) -> Iterator[None]:
    """Inside, these modules' own tensors are on the device; nested weights are their originals.

    Args:
        wide: floating ones become float32.

    They come back as they were: what is changed inside is lost.
    """
    nested: list[tuple[Any, nn.Parameter]] = []
    plain: list[tuple[torch.Tensor, torch.Tensor]] = []
    buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
    try:
        for module in modules:
            for name, parameter in module._parameters.items():
                if isinstance(parameter, NestedTensor):
                    if parameter.original is None:
                        raise NotLayered
                    nested.append((module, parameter))
                    module._parameters[name] = nn.Parameter(_moved(parameter.original, device, wide), False)
                elif parameter is not None:
                    plain.append((parameter, parameter.data))
                    parameter.data = _moved(parameter.data, device, wide)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    buffers.append((module, name, buffer))
                    module._buffers[name] = _moved(buffer, device, wide)
        yield
    finally:
        for module, weight in nested:
            module._parameters["weight"] = weight
        for tensor, data in reversed(plain):
            tensor.data = data
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


def _moved(tensor: torch.Tensor, device: torch.device, wide: bool = True) -> torch.Tensor:
    # The copy crosses in its own type: half the bytes.
    there = tensor.detach().to(device)
    return there.float() if wide and there.is_floating_point() else there


@contextmanager
def page_locked(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, a GPU copies the model's weights from host memory at full speed, which it reads many times over.

    A system that does not lock so many pages copies more slowly, and that is all.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.init()
    runtime: Any = torch.cuda.cudart()
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters() if p.is_cpu}
    big = [(at, size) for at, size in storages.items() if size >= LOCKED_BYTES]
    with ThreadPoolExecutor(8) as pool:
        took = list(pool.map(lambda one: int(runtime.cudaHostRegister(*one, 0)) == 0, big))
    try:
        yield
    finally:
        torch.cuda.synchronize(device)
        for (at, _), locked in zip(big, took, strict=True):
            if locked:
                runtime.cudaHostUnregister(at)


Change = tuple[torch.Tensor, torch.Tensor]  # float32 [n, inputs] and int64 [rows, m]: which of them to multiply by


class Head:
    """The output head: all logits, or those of some tokens for each row."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.module: Any = model.get_output_embeddings()  # type: ignore[operator]
        if not isinstance(self.module, nn.Linear):
            raise NotLayered
        own = self.module.weight
        weight: torch.Tensor | None = own.original if isinstance(own, NestedTensor) else own
        if weight is None:
            raise NotLayered
        self.weight, self.device = weight.detach(), device
        self.tokens: torch.Tensor | None = None  # int64 [rows, m]: whose logits are wanted; None: all
        self.change: Change | None = None

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """float32 rows of the weight, [*tokens.shape, inputs]."""
        return _moved(self.weight[tokens.to(self.weight.device)], self.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[..., inputs]` -> `[..., vocabulary]`, or `[..., m]`."""
        x, bias = x.float(), self.module.bias
        if self.tokens is not None:
            rows = self.rows(self.tokens) if self.change is None else self.change[0][self.change[1]]
            y = torch.einsum("rk,rmk->rm", x.flatten(0, -2), rows).view(*x.shape[:-1], -1)
            return y if bias is None else y + _moved(bias, self.device)[self.tokens].view_as(y)
        step = max(1, HEAD_BYTES // (4 * self.weight.shape[1]))
        y = torch.cat([x @ _moved(part, self.device).T for part in self.weight.split(step)], -1)
        return y if bias is None else y + _moved(bias, self.device)


@dataclass
class Pass:
    """A text's way through the layers: how each was called and what it returned."""

    tokens: torch.Tensor
    args: list[tuple[Any, ...]] = field(default_factory=list)
    kwargs: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    logits: torch.Tensor | None = None

    def hidden(self, layer: int) -> torch.Tensor:
        """What the layer reads, `[texts, tokens, hidden]`."""
        return self.args[layer][0] if self.args[layer] else self.kwargs[layer]["hidden_states"]

    def call(self, layer: int, module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's output for other states than it read."""
        args, kwargs = self.args[layer], self.kwargs[layer]
        if args:
            return first(module(hidden, *args[1:], **kwargs))
        return first(module(**{**kwargs, "hidden_states": hidden}))


def first(output: Any) -> torch.Tensor:
    """A layer's states, which it returns alone or first."""
    found = output if isinstance(output, torch.Tensor) else output[0]
    assert isinstance(found, torch.Tensor)
    return found


class Layerwise:
    """A causal LM of transformers with its decoder layers, wherever its weights are.

    Args:
        model: in evaluation mode; its parameters require no gradient.
        layers: its decoder layers, in order (`qbe.store.sensitivity.decoder_layers`).
        device: where everything is computed.
        wide: in float32, else in the model's own type.

    Raises:
        NotLayered: it has no layers, or no linear output head with its 16-bit weight.
    """

    def __init__(self, model: nn.Module, layers: list[nn.Module], device: torch.device, wide: bool = True) -> None:
        if not layers:
            raise NotLayered
        self.model, self.layers, self.device, self.wide = model, layers, device, wide
        self.head = Head(model, device)
        self._embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        apart = {id(m) for top in (*layers, self._embedding, self.head.module) for m in top.modules()}
        self._between = [m for m in model.modules() if id(m) not in apart]

    def run(self, tokens: torch.Tensor, visit: Callable[[int, Pass], None] | None = None, head: bool = True) -> Pass:
        """Runs int64 `[texts, tokens]` through the model; `visit` is called when a layer has run, while it is there.

        Args:
            head: whether logits are wanted.

        Raises:
            NotLayered: something is between two layers.
        """
        passed = Pass(tokens)

        def stepping(i: int, layer: nn.Module) -> Callable[..., Any]:
            own = layer.forward

            def forward(*args: Any, **kwargs: Any) -> Any:
                if len(passed.outputs) != i:
                    raise NotLayered
                vars(layer).pop("forward")  # whoever calls it from here on, `visit` for one, calls the layer itself
                passed.args.append(args)
                passed.kwargs.append(kwargs)
                if i and passed.hidden(i) is not first(passed.outputs[-1]):
                    raise NotLayered
                with on(layer.modules(), self.device, self.wide):
                    passed.outputs.append(own(*args, **kwargs))
                    if visit is not None:
                        visit(i, passed)
                return passed.outputs[-1]

            return forward

        with torch.no_grad(), self._ready(), ExitStack() as stack:
            for i, layer in enumerate(self.layers):
                layer.forward = stepping(i, layer)
                stack.callback(vars(layer).pop, "forward", None)
            self.head.tokens = None if head else torch.zeros(tokens.numel(), 1, dtype=torch.int64)
            stack.callback(setattr, self.head, "tokens", None)
            passed.logits = self.model(input_ids=tokens.to(self._embedding.weight.device), use_cache=False).logits
        if len(passed.outputs) != len(self.layers):
            raise NotLayered
        return passed

    def tail(
        self, passed: Pass, tokens: torch.Tensor, change: Change | None = None, weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits `[rows, m]` of some tokens for each row, from what the last layer returned.

        Args:
            tokens: int64 `[rows, m]`.
            change: what to multiply by in place of the head's own rows.
            weights: float32 `[rows, m]`.

        Returns:
            these, and the gradient of their sum with `weights` with respect to the last layer's states.
        """
        last = passed.outputs[-1]
        states = first(last).detach().requires_grad_(weights is not None)
        outputs = [*passed.outputs[:-1], states if isinstance(last, torch.Tensor) else (states, *last[1:])]
        ids = passed.tokens.to(self._embedding.weight.device)
        with self._ready(), replay(self.layers, outputs), torch.set_grad_enabled(weights is not None):
            self.head.tokens, self.head.change = tokens, change
            try:
                logits = self.model(input_ids=ids, use_cache=False).logits.flatten(0, 1).float()
            finally:
                self.head.tokens = self.head.change = None
            if weights is None:
                return logits, None
            # Here, while what is between the layers is on the device.
            return logits.detach(), torch.autograd.grad((logits * weights).sum(), states)[0]

    def logits(self, passed: Pass, states: torch.Tensor, text: int | None = None) -> torch.Tensor:
        """Logits `[rows, vocabulary]` of other states than the last layer returned, `[texts, tokens, hidden]`.

        Args:
            text: of this one alone; None: of all.
        """
        some = slice(None) if text is None else slice(text, text + 1)
        last, states = passed.outputs[-1], states[some]
        outputs = [*passed.outputs[:-1], states if isinstance(last, torch.Tensor) else (states, *last[1:])]
        ids = passed.tokens[some].to(self._embedding.weight.device)
        with torch.no_grad(), self._ready(), replay(self.layers, outputs):
            logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
            return logits

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """Inside, all but the layers is ready to run: embeddings come out in float32 on the device."""
        hook = self._embedding.register_forward_hook(lambda _m, _a, output: _moved(output, self.device, self.wide))
        self.head.module.forward = self.head.forward
        try:
            with on(self._between, self.device, self.wide):
                yield
        finally:
            hook.remove()
            del self.head.module.forward
