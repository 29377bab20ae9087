"""What is known of a model without loading it: its skeleton, its store, its provenance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qbe.compatibility import Situation
from qbe.engine.execution.runner import can_pack
from qbe.engine.memory import Memory, predicted
from qbe.format.layout import SliceLayout
from qbe.hardware import HardwareProfile
from qbe.kvcache.cache import decoder_config
from qbe.kvcache.pages import PAGE_SIZE, page_bytes
from qbe.kvcache.probe import probe
from qbe.models.load import load_config_and_tokenizer, load_skeleton
from qbe.server.settings import Weights
from qbe.sites import FULL_BITS
from qbe.store import checkpoint, provenance, sensitivity_table
from qbe.store.experts import expert_layers
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.nesting import nestable
from qbe.tagger import tag


@dataclass(frozen=True)
class Subject:
    """A model that could be served.

    Attributes:
        path: of its folder or file.
        family: the class of the model.
        parameters: how many numbers it has.
        dtype: of its 16-bit weights.
        context: in tokens; None: no limit.
        chats: whether its tokenizer has a chat template.
        nested: whether the folder has a nested store.
        gears: bits that the store has, or will have, without 16.
        lowest: fewest bits that the linear layers can have on average; None where experts count by use.
        measured: whether sensitivities lie in the folder.
        made: its provenance; None: it has none.
        digest: of its content.
        situation: what options meet, on a CPU.
        kv_bytes: of a token at 16 bits.
    """

    path: Path
    family: str
    parameters: int
    dtype: torch.dtype
    context: int | None
    chats: bool
    nested: bool
    gears: tuple[int, ...]
    lowest: float | None
    measured: bool
    made: dict[str, Any] | None
    digest: str
    situation: Situation
    kv_bytes: int

    def memory(self, profile: HardwareProfile, weights: Weights, here: bool) -> Memory:
        """What an engine with these settings takes on a device, which may be elsewhere."""
        device = torch.device("cpu" if profile.capability is None else "cuda")
        free = None if here else profile.memory_bytes
        return predicted(self.path, device, originals=weights.originals, most_bits=weights.most_bits, free=free)


def subject(path: Path, progress: bool) -> Subject:
    """Reads what there is.

    Args:
        progress: show a bar while digests are computed.

    Raises:
        QBEError: a model that QBE cannot run, or a folder that is damaged.
    """
    made = provenance.check(path, progress=progress) if path.is_dir() else None
    _, tokenizer = load_config_and_tokenizer(path)
    model = load_skeleton(path)
    config, kept, experts = decoder_config(model), probe(model), expert_layers(model)
    dtype = getattr(model.config, "dtype", None) or torch.bfloat16
    nested = checkpoint.is_checkpoint(path)
    slices = checkpoint.read_manifest(path).slices if nested else NestedWeightConfig().slices
    gears = SliceLayout.of(slices).precisions
    table = tag(model)
    narrow, sizes = set(nestable(table)), {s.name: s.shape[0] * s.shape[1] for s in table if s.is_linear}
    bits = sum(size * (gears[0] if name in narrow else FULL_BITS) for name, size in sizes.items())
    packed = can_pack(config) and kept.packs
    paged = any(kept.kv)
    latent = any(shape is not None and shape.latent for shape in kept.kv)
    recurrent = bool(kept.states)
    fixed = packed and paged and not recurrent
    return Subject(
        path=path,
        family=type(model).__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        dtype=dtype,
        context=getattr(config, "max_position_embeddings", None),
        chats=bool(getattr(tokenizer, "chat_template", None)),
        nested=nested,
        gears=tuple(gears),
        lowest=None if experts or not sizes else bits / sum(sizes.values()),
        measured=nested and sensitivity_table.read(path) is not None,
        made=made,
        digest=provenance.content_digest(path, progress=progress),
        situation=Situation(
            alone=not packed, recurrent=recurrent, recurrent_state=any(s.recurrent for s in kept.states),
            attention=paged, experts=bool(experts), latent=latent, fixed_shapes=fixed, drafts=fixed,
        ),
        kv_bytes=page_bytes(kept.kv, dtype) // PAGE_SIZE if paged else 0,
    )  # fmt: skip
