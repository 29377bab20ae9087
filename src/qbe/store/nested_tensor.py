"""NestedTensor: the weight of a linear layer from which every precision is read (`nested_linears` makes it).

Follows torchao's tensor-subclass structure (`TorchAOBaseTensor`, one tensor per file); it takes the place of
torchao's own AffineQuantizedTensor, which 0.18 removed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torchao.utils import TorchAOBaseTensor

from qbe.compile.backend import register
from qbe.errors import QBEError
from qbe.format.codes import quantise
from qbe.format.gears import DEFAULT_SLICES
from qbe.format.layout import SliceLayout, padded
from qbe.format.packing import pack
from qbe.kernels.cpu import dispatch
from qbe.kernels.cpu.linear import nested as cpu_linear
from qbe.kernels.cuda.dispatch import UNIFORM_ROWS
from qbe.kernels.ops import nested_linear as ops
from qbe.kernels.ops.gradients import without_gradient
from qbe.kernels.reference.nested_linear import dequantise
from qbe.sites import FULL_BITS

if TYPE_CHECKING:
    from qbe.store.nested_linears import NestedWeightConfig


class NestedTensor(TorchAOBaseTensor):
    """A weight [N, K] stored as nested codes; `F.linear` with it reads each row at that row's own bits.

    Tensor data:
        packed: uint8 [total_bits, N*Kp/8], the slices, most significant first (`qbe.format.layout`); on a GPU uint8
            [bytes], the same in the order its kernels read (`qbe.kernels.triton.linear.tiled.layout`).
        meta: uint8 [2P, N, Kp/group_size], scales and offsets (`qbe.format.scales`).
        bits: int32 [rows] or [1]: word of precision of each row of the input (`qbe.kernels.ops.nested_linear`); one
            serves all rows. `set_bits` sets it. An engine binds it to a row of its plan, and a write to the plan
            changes the precision of the next call. Kernels read it while they run and cannot refuse what is not a gear:
            they take its lowest byte, read the original from 16 on (so for 99 and -1 too) and below it the highest
            precision that is not above it, or the lowest.
        original: [N, K] in the model's dtype, what 16 bits mean; None when it was dropped.

    Attributes:
        slices: widths of the slices.
        group_size: inputs that share a scale.
        exponent: scale exponent of the matrix.
        shape, dtype: those of the original weight.
        batch_invariant: as the op's; False where rows of a step share what they read (`qbe.store.shared_rows`).
        uniform: what `bits` holds when whoever wrote it knows that every row of a long step has the same, else None.
            A prompt then needs no kernel that asks each row (`qbe.kernels.triton.linear.tiled.uniform`).
        native: float8_e4m3fn or int8, in which such a prompt is multiplied on a GPU where its activations have 8 bits;
            None, as long as nobody sets it: tiled weights then have 16-bit products, whatever the word says.
        float32_output: results are float32 and not rounded to the model's dtype (`qbe.kernels.ops.nested_linear`), as
            an engine has its logits.
    """

    tensor_data_names = ["packed", "meta", "bits"]  # noqa: RUF012  (torchao's protocol)
    tensor_attribute_names = ["slices", "group_size", "exponent", "in_features", "logical_dtype"]  # noqa: RUF012
    optional_tensor_data_names = ["original"]  # noqa: RUF012
    optional_tensor_attribute_names = ["float32_output"]  # noqa: RUF012

    packed: torch.Tensor
    meta: torch.Tensor
    bits: torch.Tensor
    original: torch.Tensor | None
    slices: list[int]
    group_size: int
    exponent: int
    in_features: int
    logical_dtype: torch.dtype
    float32_output: bool
    batch_invariant: bool = True
    uniform: int | None = None
    native: torch.dtype | None = None

    def __new__(
        cls,
        packed: torch.Tensor,
        meta: torch.Tensor,
        bits: torch.Tensor,
        slices: list[int],
        group_size: int,
        exponent: int,
        in_features: int,
        logical_dtype: torch.dtype,
        original: torch.Tensor | None = None,
        float32_output: bool = False,
    ) -> NestedTensor:
        shape = (meta.shape[1], in_features)
        return torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=logical_dtype, device=packed.device, requires_grad=False
        )

    def __init__(
        self,
        packed: torch.Tensor,
        meta: torch.Tensor,
        bits: torch.Tensor,
        slices: list[int],
        group_size: int,
        exponent: int,
        in_features: int,
        logical_dtype: torch.dtype,
        original: torch.Tensor | None = None,
        float32_output: bool = False,
    ) -> None:
        self.packed, self.meta, self.bits, self.original = packed, meta, bits, original
        self.slices, self.group_size, self.exponent = list(slices), group_size, exponent
        self.in_features, self.logical_dtype, self.float32_output = in_features, logical_dtype, float32_output

    @classmethod
    def from_weight(
        cls,
        weight: torch.Tensor,
        slices: Sequence[int] = DEFAULT_SLICES,
        group_size: int = 64,
        keep_original: bool = True,
    ) -> NestedTensor:
        """Quantises a float weight [N, K]. Raises QBEError for what `qbe.format.codes.quantise` refuses."""
        layout = SliceLayout.of(slices)
        codes, meta, exponent = quantise(weight.detach(), layout, group_size)
        bits = torch.tensor([FULL_BITS if keep_original else layout.total_bits], dtype=torch.int32)
        return cls(
            pack(codes, layout),
            meta,
            bits.to(weight.device),
            list(layout.slices),
            group_size,
            exponent,
            weight.shape[1],
            weight.dtype,
            weight.detach() if keep_original else None,
        )

    @classmethod
    def empty(cls, weight: torch.Tensor, config: NestedWeightConfig) -> NestedTensor:
        """One of the shape that `weight` [N, K] gets by nesting, whose codes are not filled in; on its device."""
        layout, (n, k) = SliceLayout.of(config.slices), weight.shape
        kp = padded(k, config.group_size)

        def uint8(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.uint8, device=weight.device)

        return cls(
            uint8(layout.total_bits, n * kp // 8),
            uint8(2 * len(layout.precisions), n, kp // config.group_size),
            torch.empty(1, dtype=torch.int32, device=weight.device),
            list(layout.slices),
            config.group_size,
            1,
            k,
            weight.dtype,
            weight.detach() if config.keep_original else None,
        )

    def __reduce_ex__(self, _protocol: Any) -> tuple[type[NestedTensor], tuple[Any, ...]]:
        """Pickled as its parts: torch's own way would ask `layout` for the memory layout of a plain tensor."""
        return NestedTensor, (
            self.packed, self.meta, self.bits, self.slices, self.group_size, self.exponent, self.in_features,
            self.logical_dtype, self.original, self.float32_output,
        )  # fmt: skip

    @property
    def layout(self) -> SliceLayout:
        return SliceLayout.of(self.slices)

    @property
    def gears(self) -> tuple[int, ...]:
        """Precisions that can be asked for, ascending; 16 is among them while the original is kept."""
        return (*self.layout.precisions, *((FULL_BITS,) if self.original is not None else ()))

    def set_bits(self, bits: int | Sequence[int]) -> None:
        """Sets the precision of the next calls, with 16-bit activations: one gear, or one for each row of the input.

        It is written where `bits` lies, and graphs that read it there see it, unless another number of rows is given.

        Raises:
            QBEError: a number that is no gear.
        """
        wanted = list(bits) if isinstance(bits, list | tuple) else [bits] * self.bits.shape[0]
        for one in wanted:
            self._check_gear(one)
        precision_words = torch.tensor(wanted, dtype=torch.int32)
        if precision_words.shape == self.bits.shape:
            self.bits.copy_(precision_words)
        else:
            self.bits = precision_words.to(self.bits.device)

    def _check_gear(self, bits: object) -> None:
        if not isinstance(bits, int) or bits not in self.gears:
            have = ", ".join(map(str, self.gears))
            raise QBEError(f"{bits!r} bits are not in this store (it has {have}); choose one of those")

    def dequantise(self, bits: int | None = None) -> torch.Tensor:
        """The weight at `bits` (default: the widest gear), [N, K] in the model's dtype.

        Raises:
            QBEError: a number that is no gear.
        """
        bits = self.gears[-1] if bits is None else bits
        self._check_gear(bits)
        if bits == FULL_BITS:
            assert self.original is not None
            return self.original
        meta = self.meta.to(self.packed.device)  # it is in host memory where the tiled slices hold it too
        weight = dequantise(self.canonical_packed(), meta, self.exponent, self.slices, self.in_features, bits)
        return weight.to(self.logical_dtype)

    def gear_of(self, word: int) -> int:
        """The gear that kernels read where `bits` holds this word."""
        asked = word & 0xFF
        if asked >= FULL_BITS and self.original is not None:
            return FULL_BITS
        return max((b for b in self.layout.precisions if b <= asked), default=self.layout.precisions[0])

    def at_gear(self, bits: int) -> torch.Tensor:
        """`dequantise`, by the compiled kernel where there is one: [N, K] in the model's dtype."""
        if bits == FULL_BITS or self.packed.device.type != "cpu" or not dispatch.dequantises(self.logical_dtype):
            return self.dequantise(bits)
        return cpu_linear.dequantised(
            self.packed, self.meta, bits, self.slices, self.exponent, self.in_features, self.logical_dtype
        )

    def dequantize(self, output_dtype: torch.dtype | None = None) -> torch.Tensor:
        """torchao's name for `dequantise` at the widest gear, in `output_dtype` (default: the model's).

        Raises:
            QBEError: `output_dtype` is something else.
        """
        if output_dtype is not None and not isinstance(output_dtype, torch.dtype):
            raise QBEError(f"output_dtype is a torch.dtype, not {output_dtype!r}; dequantise(bits) reads a precision")
        return self.dequantise().to(output_dtype or self.logical_dtype)

    def canonical_packed(self) -> torch.Tensor:
        """The slices in the canonical layout, uint8 [total_bits, N*Kp/8], whatever layout the device has."""
        if self.packed.dim() == 2:
            return self.packed
        from qbe.kernels.triton.linear.tiled.layout import from_device_layout

        return from_device_layout(self.packed, self.meta.to(self.packed.device), self.layout, self.in_features)

    def bytes_at(self) -> dict[int, int]:
        """Gear -> bytes a read at that gear moves: the slices up to it and the two or four scale planes it needs."""
        plane = self.meta[0].numel()
        bit_plane = self.meta.shape[1] * self.meta.shape[2] * self.group_size // 8
        out = {b: bit_plane * b + plane * (2 if b == self.layout.total_bits else 4) for b in self.gears}
        if self.original is not None:
            out[FULL_BITS] = self.original.numel() * self.original.element_size()
        return out

    @property
    def multiplies_natively(self) -> bool:
        """Whether a long product of it can be one in 8 bits: tiled for a GPU, of a model that is not in float32."""
        return self.packed.dim() == 1 and self.logical_dtype != torch.float32

    def nested_bytes(self) -> int:
        """Bytes on the device of the nested codes and scales, the 16-bit original not counted."""
        tiled = self.packed.dim() == 1
        return self.packed.numel() + (0 if tiled else self.meta.numel())

    def _stable_hash_for_caching(self) -> str:
        """What AOTAutograd's cache knows a graph with this weight by: everything but numbers that kernels read."""
        names, context = self.__tensor_flatten__()
        parts = [(n, t.dtype, t.shape, t.stride(), t.storage_offset(), t.device.type) for n, t in
                 ((n, getattr(self, n)) for n in names)]  # fmt: skip
        return hashlib.sha256(repr((type(self).__name__, context, self.requires_grad, parts)).encode()).hexdigest()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return (
            f"NestedTensor(shape={tuple(self.shape)}, slices={tuple(self.slices)}, group_size={self.group_size}, "
            f"gears={self.gears}, dtype={self.logical_dtype}, device={self.device})"
        )


@NestedTensor.implements(torch.ops.aten.linear.default)
@NestedTensor.implements_torch_function(torch.nn.functional.linear)
def _linear(func: Callable, _types: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    x, weight = args[0], args[1]
    bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
    width = x.shape[-1]
    if width != weight.in_features:
        raise QBEError(
            f"the input has {width} numbers a row, but this layer takes {weight.in_features} "
            f"(input {list(x.shape)}, weight {list(weight.shape)})"
        )
    # Under autocast plain layers take mixed dtypes, too: the result is then in the input's.
    if x.dtype is not weight.logical_dtype and not torch.is_autocast_enabled(x.device.type):
        raise QBEError(
            f"the input is {_name(x.dtype)}, but this layer was nested in {_name(weight.logical_dtype)}: "
            f"convert the input, or convert the model before nesting it"
        )
    rows = x.numel() // width if width else 0
    bits = weight.bits
    bits = bits.expand(rows) if bits.shape[0] == 1 else bits[:rows]
    if rows >= UNIFORM_ROWS and weight.uniform is not None and weight.packed.dim() == 1:
        from qbe.kernels.triton.linear.tiled.uniform import uniform_linear

        y = uniform_linear(
            x, weight.packed, bits, weight.original, bias, weight.slices, weight.exponent, weight.shape[0],
            weight.uniform, weight.native, weight.float32_output,
        )  # fmt: skip
        if y is not None:
            return without_gradient(y, x, weight, bias)
    y = ops.nested_linear(
        x,
        weight.packed,
        weight.meta,
        bits,
        weight.original,
        bias,
        weight.slices,
        weight.exponent,
        weight.float32_output,
        weight.batch_invariant,
    )
    return without_gradient(y, weight)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# So that `torch.load(weights_only=True)` takes a nested state dict once this module is imported; the
# rest of it is tensors and plain values.
torch.serialization.add_safe_globals([NestedTensor])
register()
