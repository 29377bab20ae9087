"""Which block of the network a module opens: attention, feed-forward, experts, mixer, vision tower and so on.

Recognition is by structure (which parameters a module owns, which children it has, which part of the configuration
it was built from), so a new architecture of a known kind needs no entry here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property
from typing import Any

from torch import nn

from qbe.sites import Role
from qbe.tagger.roles import ATTENTION_NAMES, FFN_NAMES, SSM_OUT_NAMES, STATE_PARAMETERS, matrix_features


class Region(Enum):
    """The kind of block around a module."""

    PLAIN = auto()
    ATTENTION = auto()
    FFN = auto()
    MOE = auto()
    ROUTER = auto()
    EXPERTS = auto()
    MIXER = auto()
    VISION = auto()
    AUDIO = auto()
    PROJECTOR = auto()


# What runs once for each image or sound and never for a token that is being decoded.
ENCODER_SIDE = frozenset({Region.VISION, Region.AUDIO, Region.PROJECTOR})

# Names of transformers' own lookup (`PreTrainedModel.get_encoder`), for towers without a configuration of their own.
_VISION_NAMES = frozenset({"vision_tower", "visual", "vision_model", "vision_encoder", "image_tower"})
_AUDIO_NAMES = frozenset({"audio_tower", "audio_encoder", "speech_encoder"})
# Names of what maps image or sound features to the width of the language model, and of vectors learned for it.
# "merger" is Qwen-VL's, which lives inside the tower.
_PROJECTOR = re.compile(
    "projector|merger|connector|aligner|resampler|multi_modal|modality_proj|language_projection|image_newline"
    "|query_tokens|embed_vision|embed_audio|vision_embed|(image|img|vision|visual|audio).*proj"
)
_LAYER_LISTS = frozenset({"layers", "layer", "h", "blocks", "block"})


@dataclass(frozen=True)
class Experts:
    """Size of a mixture of experts.

    Attributes:
        count: experts in the block.
        active: experts that one token uses; `count` when the model does not say.
    """

    count: int
    active: int


@dataclass(frozen=True)
class Scope:
    """Where the walk stands.

    Attributes:
        region: the nearest recognised block.
        block: the module that opened it; None outside every block.
        layer: index of the decoder layer; None outside the layers.
        experts: of the nearest mixture of experts; None outside.
    """

    region: Region = Region.PLAIN
    block: nn.Module | None = None
    layer: int | None = None
    experts: Experts | None = None


class ModelFacts:
    """What the configuration says about the whole model, looked up once.

    A module without a configuration is allowed; everything then comes from structure and names.
    """

    def __init__(self, model: nn.Module) -> None:
        self.config: Any = getattr(model, "config", None)
        get_text = getattr(self.config, "get_text_config", None)
        self.text: Any = get_text() if callable(get_text) else self.config
        self.input_embedding = _ask(model, "get_input_embeddings")
        self.output_head = _ask(model, "get_output_embeddings")

    @cached_property
    def towers(self) -> dict[type, Region]:
        """Configuration class of each part beside the language model -> its region."""
        towers: dict[type, Region] = {}
        for key in getattr(self.config, "sub_configs", None) or {}:
            part = getattr(self.config, key, None)
            if part is None or type(part) is type(self.text):
                continue
            if any(word in key for word in ("qformer", "perceiver", "projector")):
                towers[type(part)] = Region.PROJECTOR
            elif any(word in key for word in ("vision", "image", "vit", "vq")):
                towers[type(part)] = Region.VISION
            elif any(word in key for word in ("audio", "speech")):
                towers[type(part)] = Region.AUDIO
        return towers


def is_layer_list(name: str, module: nn.Module, place: Scope) -> bool:
    """Whether this is a list of decoder layers: outermost, of composite modules, and named as transformers does."""
    return (
        place.layer is None
        and place.region not in ENCODER_SIDE
        and name in _LAYER_LISTS
        and isinstance(module, nn.ModuleList)
        and all(any(True for _ in child.children()) for child in module)
    )


def enter(facts: ModelFacts, place: Scope, name: str, module: nn.Module) -> Scope:
    """The place inside `module`, whose attribute name is `name`, when its parent stands at `place`."""
    if place.region in ENCODER_SIDE:
        return replace(place, region=Region.PROJECTOR, block=module) if "merger" in name else place
    # Inside a decoder layer the same words name other things (Gemma 3n's `modality_router`).
    if place.layer is None and (side := _encoder_side(facts, name, module)) is not None:
        return replace(place, region=side, block=module)
    if place.region in (Region.EXPERTS, Region.ROUTER):
        return place
    if _is_mixer(module, place):
        return replace(place, region=Region.MIXER, block=module)
    if _is_experts(name, module):
        experts = place.experts or _experts_of(facts, None, module)
        return replace(place, region=Region.EXPERTS, block=module, experts=experts)
    for child_name, child in module.named_children():
        if _is_experts(child_name, child):
            return replace(place, region=Region.MOE, block=module, experts=_experts_of(facts, module, child))
    if place.region is Region.MOE and place.experts is not None and _is_router(name, module, place.experts):
        return replace(place, region=Region.ROUTER, block=module)
    if _is_attention(module):
        return replace(place, region=Region.ATTENTION, block=module)
    if _is_ffn(module):
        return replace(place, region=Region.FFN, block=module)
    return place


def _encoder_side(facts: ModelFacts, name: str, module: nn.Module) -> Region | None:
    config = getattr(module, "config", None)
    # Only a model with its own configuration counts: single attention modules hold one too.
    if config is not None and hasattr(module, "get_input_embeddings") and type(config) in facts.towers:
        return facts.towers[type(config)]
    if name in _VISION_NAMES:
        return Region.VISION
    if name in _AUDIO_NAMES:
        return Region.AUDIO
    return Region.PROJECTOR if _PROJECTOR.search(name) else None


def _is_mixer(module: nn.Module, place: Scope) -> bool:
    """A state-space or convolution mixer: it owns a recurrence's decay, or convolves and projects out again."""
    if place.region is Region.MIXER:
        return False
    convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
    projects = any(name in SSM_OUT_NAMES for name, _ in module.named_children())
    return "A_log" in module._parameters or (convolves and projects)


def _is_experts(name: str, module: nn.Module) -> bool:
    """The container of the routed experts: one 3-D parameter per matrix, or a list of modules."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return name == "experts" and len(module) > 0
    if name == "experts":
        return True
    stacked = any(p is not None and p.ndim == 3 for p in module._parameters.values())
    return stacked and type(module).__name__.endswith("Experts") and "shared" not in name


def _experts_of(facts: ModelFacts, moe: nn.Module | None, experts: nn.Module) -> Experts:
    count = getattr(experts, "num_experts", None)
    if not isinstance(count, int):
        stacked = [p.shape[0] for p in experts.parameters() if p.ndim == 3]
        count = len(experts) if isinstance(experts, nn.ModuleList | nn.ModuleDict) else (stacked or [1])[0]
    owners: list[Any] = [facts.text]
    if moe is not None:
        owners = [moe, *moe.children(), facts.text]
    for owner in owners:
        for key in ("top_k", "num_experts_per_tok", "moe_topk", "moe_k"):
            active = getattr(owner, key, None)
            # `top_k` of a configuration is a sampling setting, never the routing.
            if isinstance(active, int) and 0 < active <= count and not (owner is facts.text and key == "top_k"):
                return Experts(count, active)
    return Experts(count, count)


def _is_router(name: str, module: nn.Module, experts: Experts) -> bool:
    """Scores the experts (one output each), or gates the shared expert (one output)."""
    kind = type(module).__name__.lower()
    if name in ("router", "gate") or "router" in kind or "gating" in kind:
        return True
    features = matrix_features(module)
    return features is not None and features[0] in (1, experts.count)


def _is_attention(module: nn.Module) -> bool:
    roles = {ATTENTION_NAMES.get(n) for n, child in module.named_children() if matrix_features(child)}
    # Layers that reuse another layer's keys and values (Gemma 3n) have only q and o.
    return Role.ATTENTION_QKV in roles or (
        Role.ATTENTION_Q in roles and bool(roles & {Role.ATTENTION_K, Role.ATTENTION_O})
    )


def _is_ffn(module: nn.Module) -> bool:
    roles = {FFN_NAMES.get(n) for n, child in module.named_children() if matrix_features(child)}
    return Role.FFN_DOWN in roles and bool(roles & {Role.FFN_UP, Role.FFN_GATE_UP, Role.FFN_GATE})


def state_shape(mixer: nn.Module | None, owner: nn.Module) -> tuple[int, ...]:
    """Shape of the recurrent state of one sequence.

    Args:
        mixer: the module that opened the mixer region; its attributes come from the configuration.
        owner: the module that owns the recurrence's parameters (the mixer or a part of it).

    Returns:
        `(heads, head_dim, state)` for Mamba-2, `(intermediate, state)` for Mamba, `(value_heads, key_dim, value_dim)`
        for gated delta networks; for a mixer that says nothing of its state, the shape of its decay.
    """
    for keys in (
        ("num_v_heads", "head_k_dim", "head_v_dim"),
        ("num_heads", "head_dim", "ssm_state_size"),
        ("intermediate_size", "ssm_state_size"),
        ("num_heads", "head_dim", "head_dim"),
    ):
        sizes = [getattr(mixer, key, None) for key in keys]
        if all(isinstance(size, int) for size in sizes):
            return tuple(size for size in sizes if isinstance(size, int))
    state = [p for name, p in owner._parameters.items() if p is not None and name in STATE_PARAMETERS]
    return tuple(state[0].shape)


def is_learned_input(parameters: dict[str, nn.Parameter]) -> bool:
    """Whether these are vectors that the encoder side learned, owned by the whole model (LLaVA-NeXT, BLIP-2)."""
    return all(_PROJECTOR.search(key) for key in parameters)


def _ask(model: nn.Module, method: str) -> nn.Module | None:
    """`model.method()` where the model has it; some raise because they have no such module."""
    try:
        part = getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None
    return part if isinstance(part, nn.Module) else None
