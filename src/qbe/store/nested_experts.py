"""NestedExperts: one matrix of every expert of a layer, from which every precision is read.

It takes the place of a parameter `[experts, out, in]` of a transformers module of experts; `qbe.store.experts` puts it
there. Each expert is laid out as `qbe.store.nested_tensor.NestedTensor` is, and has bits of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from qbe.errors import QBEError
from qbe.format.layout import SliceLayout
from qbe.kernels.ops.experts.nested import ExpertMatrices
from qbe.kernels.reference.activations import precision_byte, word_of_byte
from qbe.sites import FULL_BITS
from qbe.store.nested_tensor import NestedTensor

if TYPE_CHECKING:
    from qbe.store.expert_counter import LayerCounter


def hollow(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """A tensor of codes that has this shape and no memory: every byte of it is the same one."""
    return torch.zeros(1, dtype=torch.uint8, device=device).expand(tuple(shape))


class NestedExperts(nn.Module):
    """Weights [E, N, K] stored as nested codes.

    Attributes:
        packed: uint8 [E, total_bits, N*Kp/8]; meta: uint8 [E, 2P, N, G]; exponents: int32 [E]. As in NestedTensor.
        original: [E, N, K] in the model's dtype, what 16 bits mean; None when it was dropped.
        precision: uint8 [R, E], a precision byte of each expert (`qbe.kernels.reference.activations`) for every row of
            a plan; one row where no plan is bound. Kernels read it while they run.
        rows: int32 [tokens], the row of `precision` that each token of a step reads; None: all read the first.
        addresses, page_bytes: where not all codes are on the device (`qbe.residency`), as `ExpertMatrices` has them;
            `packed` then is hollow.
        counter: is told what tokens choose, where an engine counts it (`qbe.store.expert_counter`).
        slices, group_size, in_features, logical_dtype: as of NestedTensor.
    """

    packed: torch.Tensor
    meta: torch.Tensor
    exponents: torch.Tensor
    original: torch.Tensor | None
    precision: torch.Tensor

    def __init__(
        self, packed: torch.Tensor, meta: torch.Tensor, exponents: torch.Tensor, slices: Sequence[int],
        group_size: int, in_features: int, logical_dtype: torch.dtype, original: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.slices, self.group_size = list(slices), group_size
        self.in_features, self.logical_dtype = in_features, logical_dtype
        self.register_buffer("packed", packed)
        self.register_buffer("meta", meta)
        self.register_buffer("exponents", exponents)
        self.register_buffer("original", original)
        full = FULL_BITS if original is not None else self.layout.total_bits
        precision = torch.full((1, len(packed)), full, dtype=torch.uint8, device=packed.device)
        self.register_buffer("precision", precision, persistent=False)
        self.rows: torch.Tensor | None = None
        self.addresses: torch.Tensor | None = None
        self.page_bytes = 0
        self.counter: LayerCounter | None = None

    @classmethod
    def of(cls, matrices: Iterable[NestedTensor], original: torch.Tensor | None) -> NestedExperts:
        """Of each expert's matrix, in order.

        Args:
            original: [E, N, K], contiguous, or None.
        """
        each = list(matrices)
        first = each[0]
        exponents = torch.tensor([m.exponent for m in each], dtype=torch.int32, device=first.packed.device)
        return cls(
            torch.stack([m.packed for m in each]), torch.stack([m.meta for m in each]), exponents, first.slices,
            first.group_size, first.in_features, first.logical_dtype, original,
        )  # fmt: skip

    def __len__(self) -> int:
        return self.packed.shape[0]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, outputs and inputs."""
        return len(self), self.meta.shape[2], self.in_features

    @property
    def layout(self) -> SliceLayout:
        return SliceLayout.of(self.slices)

    @property
    def gears(self) -> tuple[int, ...]:
        """Precisions that can be asked for, ascending; 16 is among them while the original is kept."""
        return (*self.layout.precisions, *((FULL_BITS,) if self.original is not None else ()))

    def set_bits(self, bits: int | Sequence[int], activation_bits: int = FULL_BITS) -> None:
        """Sets the precision of the next calls: one gear, or one for each expert. Raises QBEError for what is none."""
        wanted = [bits] * len(self) if isinstance(bits, int) else list(bits)
        for one in set(wanted) - set(self.gears):
            have = ", ".join(map(str, self.gears))
            raise QBEError(f"{one!r} bits are not in this store (it has {have}); choose one of those")
        bytes_ = torch.tensor([precision_byte(b, activation_bits) for b in wanted], dtype=torch.uint8)
        self.precision.copy_(bytes_.expand_as(self.precision))

    def expert(self, e: int) -> NestedTensor:
        """One expert's matrix: a view, but for its bits, which are those of the plan's first row."""
        return NestedTensor(
            self.packed[e], self.meta[e], word_of_byte(self.precision[:1, e]), self.slices, self.group_size,
            int(self.exponents[e]), self.in_features, self.logical_dtype,
            None if self.original is None else self.original[e],
        )  # fmt: skip

    def matrices(self, bias: torch.Tensor | None) -> ExpertMatrices:
        """As kernels take it."""
        return ExpertMatrices(
            self.packed, self.meta, self.exponents, self.precision, self.original, bias, self.addresses
        )

    def rows_of(self, tokens: int) -> torch.Tensor:
        """int32 [tokens]: which row of `precision` each token of a step reads."""
        if self.rows is None:
            return torch.zeros(tokens, dtype=torch.int32, device=self.packed.device)
        return self.rows[:tokens] if len(self.rows) > 1 or tokens == 1 else self.rows.repeat(tokens)

    def drop_original(self) -> None:
        """Forgets the 16-bit weights, so that the widest gear is the store's."""
        if self.original is not None:
            self.original = None
            self.set_bits(self.gears[-1])

    def bytes_at(self) -> dict[int, int]:
        """Gear -> bytes that a read of one expert moves, as `NestedTensor.bytes_at`."""
        return self.expert(0).bytes_at()

    def nested_bytes(self) -> int:
        """Bytes of codes and scales, the originals not counted."""
        return self.packed.numel() + self.meta.numel() + self.exponents.nbytes

    def extra_repr(self) -> str:
        return f"shape={self.shape}, slices={tuple(self.slices)}, group_size={self.group_size}, gears={self.gears}"
