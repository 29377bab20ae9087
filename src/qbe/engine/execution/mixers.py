"""Recurrent layers in steps that several sequences share.

A step packs the tokens of its sequences into one row `[1, T]`; only attention and recurrent layers mix them. Attention
finds its tokens through pages. A recurrent layer's own code takes sequences beside each other, and gets them so: those
with one new token as a batch `[n, 1]`, every other one by itself, without padding. Each time the layer's cache holds
the states of just these sequences: the pool's own memory where their slots lie at even distances and at full precision,
else a copy that goes back. What its weights read follows its rows, so that each keeps the precision that the plan has
for it. On a CPU a Mamba-2 layer takes new tokens in one op that works on the pool (`qbe.engine.execution.mamba2`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qbe.engine.execution.mamba2 import Mamba2Step, fused_step
from qbe.engine.execution.state_update import updating
from qbe.kvcache.cache import PagedCache
from qbe.kvcache.probe import Mixer
from qbe.kvcache.state_pool import StatePool, StateShape
from qbe.kvcache.state_slots import StateSlot
from qbe.store.nested_linears import nested_linears

_ALIGNED = 4  # int32 of 16 bytes: Triton compiles a kernel for pointers at multiples of them and another for the rest


@dataclass(frozen=True)
class StepPart:
    """A sequence's part of a step: its slot, and its tokens `[start, start + count)` in rows from `row` on."""

    slot: StateSlot
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
        ends: the position of each sequence's last row.
        row_index: their numbers on the device; None where they follow one another.
    """

    rows: Sequence[int]
    slots: Sequence[StateSlot]
    begins: bool
    ends: Sequence[int]
    row_index: torch.Tensor | None

    @classmethod
    def of(cls, parts: Sequence[StepPart], device: torch.device) -> Group:
        """Of parts with a row each, or of one."""
        rows = [row for p in parts for row in range(p.row, p.row + p.count)]
        follow = rows == list(range(rows[0], rows[0] + len(rows)))
        index = None if follow else torch.tensor(rows).to(device, non_blocking=True)
        ends = [p.start + p.count - 1 for p in parts]
        return cls(rows, [p.slot for p in parts], parts[0].start == 0, ends, index)

    @property
    def at(self) -> slice | torch.Tensor:
        """Its rows, as the first dimension of a step's tensors is indexed with them."""
        return slice(self.rows[0], self.rows[0] + len(self.rows)) if self.row_index is None else self.row_index

    def words(self, of_step: torch.Tensor) -> torch.Tensor:
        """Its rows' words of precision among those of the step, `[rows]`."""
        words = of_step[self.at]
        return words if self.row_index is not None or self.rows[0] % _ALIGNED == 0 else words.clone()


@dataclass(frozen=True)
class Places:
    """Where the states of several sequences are, for an op that reads and writes them there.

    Attributes:
        at: int64 `[states, sequences]`, in bytes.
        bits: int32 `[states, sequences]`.
        positions: int32 `[sequences]`, of their tokens.
    """

    at: torch.Tensor
    bits: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, pool: StatePool, slots: Sequence[StateSlot], positions: Sequence[int]) -> Places:
        layouts, states = [pool.layout(slot.bits) for slot in slots], range(len(pool.shapes))
        at = [[slot.at + layout.offsets[i] for slot, layout in zip(slots, layouts, strict=True)] for i in states]
        bits = [[layout.bits[i] for layout in layouts] for i in states]
        return cls(torch.tensor(at), torch.tensor(bits, dtype=torch.int32), torch.tensor(positions, dtype=torch.int32))


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
        self._pool = pool
        self._places: Places | None = None
        self._device, carries = pool.memory.device, dict[type, bool]()
        for mixer in mixers:
            _Patched(self, model.get_submodule(mixer.name), mixer, cache, pool, carries)

    @contextmanager
    def step(self, parts: Sequence[StepPart]) -> Iterator[None]:
        """Inside, the model runs a step of these parts, in the order of their rows."""
        # In the order of their slots, which then oftener follow one another: states are larger than rows.
        single = sorted((p for p in parts if p.count == 1 and p.start > 0), key=lambda p: p.slot.at)
        groups = [Group.of(single, self._device)] if single else []
        groups += [Group.of([p], self._device) for p in parts if p.count > 1 or p.start == 0]
        self.groups, self._places = groups, None
        try:
            yield
        finally:
            self.groups, self.rows = [], None

    def places(self, group: Group) -> Places:
        """Of the states of the step's group of single tokens."""
        if self._places is None:
            self._places = Places.of(self._pool, group.slots, group.ends)
        return self._places


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
        self._owner, self._module, self._forward, self._pool = owner, module, module.forward, pool
        self._updating = updating(module, next(module.parameters()).dtype)
        self._weights = [weight for _, _, weight in nested_linears(module)]
        layer: Any = cache.layers[mixer.layer]  # transformers' own
        self._layer, self._states = layer, [(i, pool.shapes[i]) for i in pool.of_layer(mixer.layer)]
        for _, shape in self._states:
            layer.device, layer.dtype = pool.memory.device, shape.dtype
            if shape.recurrent:
                layer.is_recurrent_states_initialized[shape.index] = True
            else:
                layer.is_conv_states_initialized[shape.index] = True
                layer.conv_kernel_size[shape.index] = shape.size[-1]
        if type(module) not in carries:
            carries[type(module)] = mixer.width is None or self._goes_on(module, mixer.width, cache)
        self._carries = carries[type(module)]
        self._step = self._fused(module, mixer, cache)
        module.forward = self.forward

    def _fused(self, module: nn.Module, mixer: Mixer, cache: PagedCache) -> Mamba2Step | None:
        if mixer.width is None or [shape.recurrent for _, shape in self._states] != [False, True]:
            return None
        of_state, name = self._states[1][1], self._cache_name(module)
        call = functools.partial(_own_forward, name=name, cache=cache)
        return fused_step(module, self._layer, call) if of_state.dtype is torch.float32 else None

    @staticmethod
    def _cache_name(module: nn.Module) -> str:
        names = inspect.signature(module.forward).parameters
        return "cache_params" if "cache_params" in names else "past_key_values"

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        with self._updating():
            return self._forward(*args, **kwargs)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, of a step's rows `[1, T, hidden]`."""
        groups = self._owner.groups
        if not groups:
            return self._plain(hidden_states, *args, **kwargs)
        one = len(groups) == 1 and len(groups[0].slots) == 1
        if one and (groups[0].begins or self._carries) and not self._steps(groups[0]):
            with self._holding(groups[0]):
                return self._plain(hidden_states, *args, **kwargs)
        out: torch.Tensor | None = None
        for group in groups if self._carries else self._one_by_one(groups):
            self._owner.rows = group.rows
            rows = hidden_states[0, group.at].unflatten(0, (len(group.slots), -1))
            with self._reading(group):
                if self._steps(group):
                    mixed = self._decode(group, rows)
                else:
                    with self._holding(group):
                        mixed = self._plain(rows, *args, **kwargs).flatten(0, 1)
            if group.row_index is None and len(group.rows) == hidden_states.shape[1]:
                out = mixed
                break
            if out is None:
                out = mixed.new_empty(hidden_states.shape[1], mixed.shape[1])
            out[group.at] = mixed
        self._owner.rows = None
        assert out is not None
        return out[None]

    def _steps(self, group: Group) -> bool:
        """Whether the fused op takes it: a new token of each of its sequences."""
        return self._step is not None and not group.begins and len(group.rows) == len(group.slots)

    def _decode(self, group: Group, rows: torch.Tensor) -> torch.Tensor:
        assert self._step is not None
        places, module = self._owner.places(group), self._module
        (conv, _), (state, _) = self._states
        projected = module.in_proj(rows)[:, 0]  # type: ignore[operator]
        mixed = self._step(
            projected, self._pool.memory, places.at[conv], places.at[state], places.bits[state], places.positions
        )
        out: torch.Tensor = module.out_proj(mixed[:, None])[:, 0]  # type: ignore[operator]
        return out

    @staticmethod
    def _one_by_one(groups: Sequence[Group]) -> Iterator[Group]:
        for group in groups:
            if group.begins or len(group.rows) == len(group.slots):
                yield group
            else:
                for row in group.rows:
                    yield Group(range(row, row + 1), group.slots, False, group.ends, None)

    @contextmanager
    def _holding(self, group: Group) -> Iterator[None]:
        """Inside, the layer's cache holds the states of these sequences; what it holds afterwards goes to the pool."""
        for number, shape in self._states:
            found = self._of_kind(shape)[shape.index] = self._pool.read(number, group.slots)
            if group.begins:
                found.zero_()
        for index in self._layer.has_previous_state:
            self._layer.has_previous_state[index] = not group.begins
        yield
        for number, shape in self._states:
            self._pool.write(number, group.slots, self._of_kind(shape)[shape.index], group.ends)
            self._of_kind(shape)[shape.index] = None

    def _of_kind(self, shape: StateShape) -> dict[int, Any]:
        kind: dict[int, Any] = self._layer.recurrent_states if shape.recurrent else self._layer.conv_states
        return kind

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
    def _goes_on(self, module: nn.Module, width: int, cache: PagedCache) -> bool:
        """Whether what it makes of two tokens depends on the recurrent state before them."""
        if not any(shape.recurrent for _, shape in self._states):
            return True  # a convolution's inputs are put before the new ones by transformers' cache
        parameter, slot = next(module.parameters()), self._pool.trial
        hidden = torch.linspace(-1, 1, 2 * width).view(1, 2, width).to(parameter.device, parameter.dtype)
        group = Group(range(2), [slot], False, [1], None)
        found = list[torch.Tensor]()
        for before in (0.0, 1.0):
            for number, shape in self._states:
                self._pool.read(number, [slot]).fill_(before if shape.recurrent else 0.0)
            with self._holding(group):
                found.append(self._plain(hidden, **{self._cache_name(module): cache}))
        return not torch.equal(*found)


def _own_forward(module: nn.Module, hidden: torch.Tensor, name: str, cache: PagedCache) -> Any:
    return type(module).forward(module, hidden, **{name: cache})
