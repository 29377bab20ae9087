"""The bytes of an engine on its device, by what they are for: as they are, and predicted from a configuration alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from qbe.engine.devices import reserved
from qbe.engine.scheduling.kv_size import SEQUENCES, default_kv_tokens, state_slots
from qbe.format.layout import SliceLayout, padded
from qbe.kvcache.cache import decoder_config
from qbe.kvcache.pages import page_bytes, pages_for
from qbe.kvcache.probe import probe
from qbe.kvcache.state_pool import StateLayout
from qbe.store.experts import expert_layers, nested_experts, served_on
from qbe.store.nested_experts import NestedExperts
from qbe.store.nested_linears import NestedWeightConfig, nested_linears
from qbe.store.nested_tensor import NestedTensor
from qbe.store.placement import place_of, tiled_size

CPU = torch.device("cpu")  # experts have the canonical layout everywhere

if TYPE_CHECKING:
    from qbe.engine.core import Core


@dataclass(frozen=True)
class Memory:
    """Bytes on the device, and of originals those in host memory, too.

    Attributes:
        weights: of the nested store, and of all that is not nested.
        originals: of 16-bit weights beside nested ones, wherever they are.
        kv: of the KV cache.
        states: of recurrent layers, for all sequences that can run.
        graphs: of captured steps; 0 where it is not known yet.
        workspace: of everything else.
    """

    weights: int
    originals: int
    kv: int
    states: int = 0
    graphs: int = 0
    workspace: int = 0

    def describe(self) -> dict[str, int]:
        """As JSON."""
        return {**asdict(self), "total": sum(asdict(self).values())}

    def line(self) -> str:
        """In a few words."""
        parts = [f"{name} {size / 1e9:.2f}" for name, size in asdict(self).items() if size]
        return f"{', '.join(parts)} GB"


def of_engine(core: Core) -> Memory:
    """What a running engine takes."""
    weights, originals = of_model(core.model)
    weights -= core.residency.absent if core.residency is not None else 0
    kv, states = core.pool.memory.numel(), 0 if core.states is None else core.states.memory.numel()
    if core.device.type != "cuda":
        return Memory(weights, originals, kv, states, 0, core.plan.nbytes)
    graphs = core.graph_bytes
    kept = [w.original for _, _, w in nested_linears(core.model) if w.original is not None]
    kept += [m.original for _, m in nested_experts(core.model) if m.original is not None]
    host = sum(w.nbytes for w in kept if w.is_pinned())
    rest = reserved(core.device) - weights - (originals - host) - kv - states - graphs
    return Memory(weights, originals, kv, states, graphs, max(0, rest))


def of_model(model: nn.Module) -> tuple[int, int]:
    """Bytes of its weights, and of originals beside nested ones; slices that are not on the device are counted, too."""
    nested: list[NestedTensor | NestedExperts] = [weight for _, _, weight in nested_linears(model)]
    nested += [matrices for _, matrices in nested_experts(model)]
    plain = {p.data_ptr(): p.nbytes for p in model.parameters() if not isinstance(p, NestedTensor)}
    others = {w.original.data_ptr(): w.original.nbytes for w in nested if w.original is not None}
    stored = {id(b) for m in nested if isinstance(m, NestedExperts) for b in m.buffers()}
    buffers = sum(b.nbytes for b in model.buffers() if id(b) not in stored)
    own = {at: size for at, size in others.items() if at not in plain}
    return sum(w.nested_bytes() for w in nested) + sum(plain.values()) + buffers, sum(own.values())


def predicted(
    path: Path, device: torch.device, *, originals: str | None = None, most_bits: int | None = None,
    kv_tokens: int | None = None, free: int | None = None,
) -> Memory:  # fmt: skip
    """What an engine on the device will take for the model at `path`, whose weights are not read.

    `graphs` and `workspace` are 0: what they take is known once steps have run, a few hundredths of the whole.

    Args:
        free: bytes of a device that is not here; None: what this one has free.

    Raises:
        QBEError: as `qbe.models.load_model`, of the configuration; a size that no engine takes.
    """
    from qbe.engine.setup import check_sizes
    from qbe.models.load import load_skeleton
    from qbe.store import checkpoint
    from qbe.store.nesting import nestable
    from qbe.tagger import tag

    check_sizes(kv_tokens=kv_tokens)
    model = load_skeleton(path)
    config = getattr(model, "config", None)
    dtype = getattr(config, "dtype", None) or torch.bfloat16
    for experts_of in expert_layers(model):  # torch's grouped product of float32 has no form without numbers
        experts_of.module.forward = lambda hidden_states, *_, **__: hidden_states
    found = probe(model)
    nesting = NestedWeightConfig()
    if checkpoint.is_checkpoint(path):
        manifest = checkpoint.read_manifest(path)
        nesting = NestedWeightConfig(manifest.group_size, manifest.slices)
    layout = SliceLayout.of(nesting.slices)
    if most_bits is not None and most_bits in layout.precisions:
        layout = SliceLayout.of(layout.slices[: layout.precisions.index(most_bits) + 1])
    sites = {f"{name}.weight" for name in nestable(tag(model))}
    stacks = {f"{e.name}.{p}": e for e in expert_layers(model) for p in e.parameters} if served_on(device) else {}
    tied = {id(p): name for name, p in model.named_parameters(remove_duplicate=False) if name not in sites}
    weights = full = 0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in sites:
            weights += nested_size(parameter.shape[0], parameter.shape[1], layout, nesting.group_size, device)
            full += 0 if id(parameter) in tied else parameter.numel() * dtype.itemsize
        elif (layer := stacks.get(name)) is not None:
            experts, n, k = parameter.shape
            n, k = (k, n) if layer.transposed else (n, k)
            weights += experts * nested_size(n, k, layout, nesting.group_size, CPU)
            full += parameter.numel() * dtype.itemsize
        elif tied[id(parameter)] == name:
            weights += parameter.numel() * dtype.itemsize
    weights += sum(b.nbytes for b in model.buffers())
    kept = full if place_of(originals, device) != "none" else 0
    each = page_bytes(found.kv, dtype)
    context = getattr(decoder_config(model), "max_position_embeddings", None)
    on_device = weights + (kept if originals == "device" else 0)
    tokens = kv_tokens if kv_tokens is not None else default_kv_tokens(context, device, each, on_device, free)
    slot = StateLayout(found.states).nbytes
    states = (state_slots(SEQUENCES, device, slot, on_device, free) + 1) * slot if found.states else 0
    return Memory(weights, kept, (pages_for(tokens) + 1) * each if any(found.kv) else 0, states)


def nested_size(n: int, k: int, layout: SliceLayout, group_size: int, device: torch.device) -> int:
    """Bytes of one nested weight [n, k] on the device."""
    kp = padded(k, group_size)
    canonical = layout.total_bits * n * kp // 8 + 2 * len(layout.precisions) * n * (kp // group_size)
    return tiled_size(n, k, layout, group_size, canonical) if device.type == "cuda" else canonical
