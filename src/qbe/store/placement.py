"""Where a nested model's tensors live: the nested codes on the device, the 16-bit originals there, in host memory or
nowhere."""

from __future__ import annotations

import importlib.util

import torch
from torch import nn

from qbe.errors import QBEError
from qbe.format.codes import CHUNK
from qbe.format.layout import SliceLayout
from qbe.format.packing import of_rows
from qbe.kernels.reference.nested_linear import dequantise
from qbe.store.experts import expert_layers, install, nested_experts, paged_experts, remove, served_on
from qbe.store.nested_experts import NestedExperts, hollow
from qbe.store.nested_linears import nested_linears, set_weight
from qbe.store.nested_tensor import NestedTensor

PLACES = ("none", "host", "device")
MOST_PADDING = 9.5 / 8.75  # of the tiled over the canonical layout: 9.5 bits a weight at the default layout
SMALL = 1 << 17  # bytes of a matrix whose padding does not matter


def place_of(originals: str | None, device: torch.device) -> str:
    """One of `PLACES`; None is the default: nowhere on a GPU, whose memory they would triple, else where they are.

    Raises:
        QBEError: another place.
    """
    if originals is None:
        return "none" if device.type == "cuda" else "host"
    if originals not in PLACES:
        raise QBEError(f"originals can be {', '.join(PLACES[:-1])} or {PLACES[-1]}, not '{originals}'")
    return originals


def place(
    model: nn.Module, device: torch.device, originals: str | None, most_bits: int | None = None, paged: bool = False
) -> None:  # fmt: skip
    """Moves a model to its device; the 16-bit originals of nested sites stay in pinned host memory, or go, if so asked.

    A kernel on a GPU reads pinned memory directly, so a row at 16 bits works either way. An original that is also
    another parameter (a tied embedding) stays one tensor.

    Args:
        originals: as of `place_of`; on the CPU `device` and `host` both mean where they are.
        most_bits: the widest precision of the store that is kept; None keeps all.
        paged: of a GPU: leave out the codes of experts, which residency brings (`qbe.residency.device_slices`).

    Raises:
        QBEError: another place, or bits that the store does not have.
    """
    nested, originals = nested_linears(model), place_of(originals, device)
    for layer in [] if served_on(device) else expert_layers(model):
        remove(layer)  # they run at 16 bits there
    if originals == "none":
        for _, _, weight in nested:
            drop_original(weight)
        for _, matrices in nested_experts(model):
            matrices.drop_original()
    for name, _, weight in nested:
        if most_bits is not None and most_bits not in (have := weight.layout.precisions):
            raise QBEError(f"most_bits is {most_bits}, but the store has {', '.join(map(str, have))}; {name} is of it")
    for layer in expert_layers(model):
        for parameter in layer.parameters:
            if (stack := layer.nested(parameter)) is not None:
                install(layer, parameter, _narrowed_experts(stack, most_bits, device))
    if device.type == "cpu":
        for _, module, weight in nested:
            set_weight(module, narrowed(weight, most_bits, device))
        return
    weights = {name: weight for name, _, weight in nested}
    for _, module, _ in nested:
        module.weight = None  # type: ignore[assignment]  # so that `model.to` leaves it alone
    shapes = {matrices: tuple(matrices.packed.shape) for _, matrices in paged_experts(model)} if paged else {}
    for matrices in shapes:
        matrices.packed = torch.zeros(0, dtype=torch.uint8)
    owners = {p.data_ptr(): name for name, p in model.named_parameters()}
    tied = {n: owners[a] for n, w in weights.items() if (a := _address(w.original)) in owners}
    model.to(device)
    for matrices, shape in shapes.items():
        matrices.packed = hollow(shape, device)
    for _, matrices in nested_experts(model):
        if matrices.original is not None and originals == "host":
            matrices.original = matrices.original.cpu().pin_memory()
    parameters = dict(model.named_parameters())
    for name, module, weight in nested:
        original = weight.original
        if name in tied:
            original = parameters[tied[name]].detach()
        elif original is not None:
            original = original.to(device) if originals == "device" else original.cpu().pin_memory()
        weight = narrowed(weight, most_bits, device)
        packed, meta = device_layout(weight, device)
        moved = NestedTensor(
            packed, meta, weight.bits.to(device), weight.slices,
            weight.group_size, weight.exponent, weight.in_features, weight.logical_dtype, original,
        )  # fmt: skip
        set_weight(module, moved)


def narrowed(weight: NestedTensor, most_bits: int | None, device: torch.device) -> NestedTensor:
    """The weight without the slices above `most_bits`; itself where it has none.

    The widest precision is the one whose scales stand by themselves (`qbe.format.scales`), so that another one has to
    take its place: codes and scales are rounded anew, from the widest there was.
    """
    layout = weight.layout
    if most_bits is None or most_bits >= layout.total_bits:
        return weight
    slices = layout.slices[: layout.precisions.index(most_bits) + 1]
    packed, meta, n = weight.canonical_packed().to(device), weight.meta.to(device), weight.shape[0]
    full = torch.empty(n, weight.in_features, dtype=weight.logical_dtype, device=device)
    step = max(1, CHUNK.get(device.type, CHUNK["cpu"]) // weight.in_features)
    for at in (slice(i, min(i + step, n)) for i in range(0, n, step)):
        some = of_rows(packed, layout, n, at)
        full[at] = dequantise(
            some, meta[:, at].contiguous(), weight.exponent, weight.slices, weight.in_features, layout.total_bits
        )
    there = NestedTensor.from_weight(full, slices, weight.group_size, keep_original=False)
    bits = weight.bits.to(device) if weight.original is not None else there.bits
    return NestedTensor(
        there.packed, there.meta, bits, there.slices, there.group_size, there.exponent, there.in_features,
        weight.logical_dtype, weight.original,
    )  # fmt: skip


def _narrowed_experts(matrices: NestedExperts, most_bits: int | None, device: torch.device) -> NestedExperts:
    if most_bits is None or most_bits >= matrices.layout.total_bits:
        return matrices
    each = [narrowed(matrices.expert(e), most_bits, device) for e in range(len(matrices))]
    return NestedExperts.of(each, matrices.original)


def drop_original(weight: NestedTensor) -> None:
    """Forgets the 16-bit weight, so that the widest gear is the store's."""
    if weight.original is not None:
        weight.original = None
        weight.bits = torch.full_like(weight.bits, weight.gears[-1])


def device_layout(weight: NestedTensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Slices and scales for the device's kernels: tiled where they have such a layout, else canonical.

    The tiled buffer holds the scales too, so their canonical form stays in host memory then.
    """
    packed = weight.packed.to(device)
    if packed.dim() == 1:
        return packed, weight.meta
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        tiled = tile(packed, weight.meta.to(device), weight.layout, weight.in_features, weight.exponent)
        if tiled is not None:
            return tiled, weight.meta.cpu()
    return packed, weight.meta.to(device)


def tiled_size(n: int, k: int, layout: SliceLayout, group_size: int, canonical: int) -> int:
    """Bytes that a weight [n, k] of so many canonical ones will have on a GPU (`device_layout`)."""
    from qbe.kernels.triton.linear.tiled.layout import GROUPS, tiled_bytes

    size = tiled_bytes(n, k, layout, group_size) if group_size in GROUPS else None
    return canonical if size is None or size > max(SMALL, MOST_PADDING * canonical) else size


def tile(
    packed: torch.Tensor, meta: torch.Tensor, layout: SliceLayout, in_features: int, exponent: int
) -> torch.Tensor | None:
    """The tiled buffer of a canonical one (`qbe.kernels.triton.linear.tiled.layout`), uint8 [bytes].

    None where there is none, or where its padding costs more memory than it is worth: 576 inputs would become 768.
    """
    from qbe.kernels.triton.linear.tiled.layout import to_device_layout

    tiled = to_device_layout(packed, meta, layout, in_features, exponent)
    canonical = packed.numel() + meta.numel()
    if tiled is None or tiled.numel() > max(SMALL, MOST_PADDING * canonical):
        return None
    return tiled


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
