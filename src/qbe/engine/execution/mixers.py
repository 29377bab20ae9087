"""Recurrent layers in steps that several sequences share.

A step packs the tokens of its sequences into one row `[1, T]`; only attention and recurrent layers mix them. Attention
finds its tokens through pages. A recurrent layer's own code takes sequences beside each other, and gets them so: those
with one new token as a batch `[n, 1]`, every other one by itself, without padding. Each time the layer's cache holds
the states of just these sequences: the pool's own memory where their slots follow one another, else a copy that goes
back. What its weights read follows its rows, so that each keeps the precision that the plan has for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qbe.engine.execution.state_update import updating
from qbe.kvcache.cache import PagedCache
from qbe.kvcache.probe import Mixer
from qbe.kvcache.state_pool import StatePool
from qbe.store.nested_linears import nested_linears

_ALIGNED = 4  # int32 of 16 bytes: Triton compiles a kernel for pointers at multiples of them and another for the rest


@dataclass(frozen=True)
class StepPart:
    """A sequence's part of a step: its slot, and its tokens `[start, start + count)` in rows from `row` on."""

    slot: int
    row: int
    start: int
    count: int


@dataclass(frozen=True)
class Group:
    """Rows that go through a mixer in one call.

    Attributes:
        rows: their numbers in the step.
        slots: of their sequences: several with a row each, or one with all of them.
        begins: whether they are the first of their sequence.
        row_index, slot_index: the same on the device; None where they follow one another.
    """

    rows: Sequence[int]
    slots: Sequence[int]
    begins: bool
    row_index: torch.Tensor | None
    slot_index: torch.Tensor | None

    @classmethod
    def of(cls, rows: Sequence[int], slots: Sequence[int], begins: bool, device: torch.device) -> Group:
        def index(numbers: Sequence[int]) -> torch.Tensor | None:
            follow = list(numbers) == list(range(numbers[0], numbers[0] + len(numbers)))
            return None if follow else torch.tensor(numbers).to(device, non_blocking=True)

        return cls(rows, slots, begins, index(rows), index(slots))

    @property
    def at(self) -> slice | torch.Tensor:
        """Its rows, as the first dimension of a step's tensors is indexed with them."""
        return slice(self.rows[0], self.rows[0] + len(self.rows)) if self.row_index is None else self.row_index

    def words(self, of_step: torch.Tensor) -> torch.Tensor:
        """Its rows' words of precision among those of the step, `[rows]`."""
        words = of_step[self.at]
        return words if self.row_index is not None or self.rows[0] % _ALIGNED == 0 else words.clone()


class Mixers:
    """The modules of a model that carry states, whose forwards are ours from now on.

    Args:
        model: its nested weights bound to a plan.
        mixers: of it (`qbe.kvcache.probe`).
        cache: in which they look for their states.
        pool: where these are.

    Attributes:
        groups: of the step that runs; empty: none does, and the modules are the model's own.
        rows: the numbers in the step of the rows that go through a mixer now; None: all of them, or none.
    """

    def __init__(self, model: nn.Module, mixers: Sequence[Mixer], cache: PagedCache, pool: StatePool) -> None:
        self.groups: list[Group] = []
        self.rows: Sequence[int] | None = None
        self._device, carries = pool.memory.device, dict[type, bool]()
        for mixer in mixers:
            _Patched(self, model.get_submodule(mixer.name), mixer, cache, pool, carries)

    @contextmanager
    def step(self, parts: Sequence[StepPart]) -> Iterator[None]:
        """Inside, the model runs a step of these parts, in the order of their rows."""
        # In the order of their slots, which then oftener follow one another: states are larger than rows.
        single = sorted((p for p in parts if p.count == 1 and p.start > 0), key=lambda p: p.slot)
        groups = [Group.of([p.row for p in single], [p.slot for p in single], False, self._device)] if single else []
        for p in parts:
            if p.count > 1 or p.start == 0:
                groups.append(Group.of(range(p.row, p.row + p.count), [p.slot], p.start == 0, self._device))
        self.groups = groups
        try:
            yield
        finally:
            self.groups, self.rows = [], None


class _Patched:
    """A mixer with a forward that takes a step's rows group by group.

    Args:
        owner: knows the groups.
        module: whose forward is replaced.
        carries: of each kind of module whether it goes on from a state when it has several tokens; what is not in it
            yet is tried. Mamba-1's scan begins at zero, so that its later tokens run one after the other.
    """

    def __init__(
        self, owner: Mixers, module: nn.Module, mixer: Mixer, cache: PagedCache, pool: StatePool,
        carries: dict[type, bool],
    ) -> None:  # fmt: skip
        self._owner, self._forward = owner, module.forward
        self._updating = updating(module, next(module.parameters()).dtype)
        self._weights = [weight for _, _, weight in nested_linears(module)]
        layer: Any = cache.layers[mixer.layer]  # transformers' own
        self._layer, self._states = layer, pool.of_layer(mixer.layer)
        for shape, states in self._states:
            layer.device, layer.dtype = states.device, states.dtype
            if shape.recurrent:
                layer.is_recurrent_states_initialized[shape.index] = True
            else:
                layer.is_conv_states_initialized[shape.index] = True
                layer.conv_kernel_size[shape.index] = shape.size[-1]
        if type(module) not in carries:
            carries[type(module)] = mixer.width is None or self._goes_on(module, mixer.width, cache, pool.slots)
        self._carries = carries[type(module)]
        module.forward = self.forward

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        with self._updating():
            return self._forward(*args, **kwargs)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, of a step's rows `[1, T, hidden]`."""
        groups = self._owner.groups
        if not groups:
            return self._plain(hidden_states, *args, **kwargs)
        if len(groups) == 1 and len(groups[0].slots) == 1 and (groups[0].begins or self._carries):
            with self._holding(groups[0]):
                return self._plain(hidden_states, *args, **kwargs)
        out: torch.Tensor | None = None
        for group in groups if self._carries else self._one_by_one(groups):
            self._owner.rows = group.rows
            rows = hidden_states[0, group.at].unflatten(0, (len(group.slots), -1))
            with self._holding(group), self._reading(group):
                mixed = self._plain(rows, *args, **kwargs).flatten(0, 1)
            if out is None:
                out = mixed.new_empty(hidden_states.shape[1], mixed.shape[1])
            out[group.at] = mixed
        self._owner.rows = None
        assert out is not None
        return out[None]

    @staticmethod
    def _one_by_one(groups: Sequence[Group]) -> Iterator[Group]:
        for group in groups:
            if group.begins or len(group.rows) == len(group.slots):
                yield group
            else:
                for row in group.rows:
                    yield Group(range(row, row + 1), group.slots, False, None, None)

    @contextmanager
    def _holding(self, group: Group) -> Iterator[None]:
        """Inside, the layer's cache holds the states of these sequences; what it holds afterwards goes to the pool."""
        first, held = group.slots[0], list[tuple[dict[int, Any], int, torch.Tensor, torch.Tensor]]()
        for shape, states in self._states:
            of_kind = self._layer.recurrent_states if shape.recurrent else self._layer.conv_states
            at = slice(first, first + len(group.slots)) if group.slot_index is None else group.slot_index
            found = of_kind[shape.index] = states[at]
            if group.begins:
                found.zero_()
            held.append((of_kind, shape.index, found, states))
        for index in self._layer.has_previous_state:
            self._layer.has_previous_state[index] = not group.begins
        yield
        for of_kind, i, found, states in held:
            if group.slot_index is not None:
                states[group.slot_index] = of_kind[i]
            elif of_kind[i] is not found:
                found.copy_(of_kind[i])
            of_kind[i] = None

    @contextmanager
    def _reading(self, group: Group) -> Iterator[None]:
        """Inside, the module's weights read at the precisions of these rows of the step."""
        of_step = [weight.bits for weight in self._weights]
        try:
            for weight, words in zip(self._weights, of_step, strict=True):
                weight.bits = group.words(words)
            yield
        finally:
            for weight, words in zip(self._weights, of_step, strict=True):
                weight.bits = words

    @torch.inference_mode()
    def _goes_on(self, module: nn.Module, width: int, cache: PagedCache, slot: int) -> bool:
        """Whether what it makes of two tokens depends on the recurrent state before them."""
        if not any(shape.recurrent for shape, _ in self._states):
            return True  # a convolution's inputs are put before the new ones by transformers' cache
        names, parameter = inspect.signature(module.forward).parameters, next(module.parameters())
        name = "cache_params" if "cache_params" in names else "past_key_values"
        hidden = torch.linspace(-1, 1, 2 * width).view(1, 2, width).to(parameter.device, parameter.dtype)
        group = Group(range(2), [slot], False, None, None)
        found = list[torch.Tensor]()
        for before in (0.0, 1.0):
            for shape, states in self._states:
                states[slot] = before if shape.recurrent else 0.0
            with self._holding(group):
                found.append(self._plain(hidden, **{name: cache}))
        return not torch.equal(*found)
