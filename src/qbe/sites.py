"""Sites: the places of a model where precision can be set, and their table. Pure data, no torch.

The table is what a policy sees of a model. `qbe.tagger` makes it from a module tree; `qbe.store` fills in gears, bytes
and measured sensitivities.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType

from qbe.reads import TokenReads


class Role(StrEnum):
    """What a site does in the network. The fused forms are for models that store two matrices as one."""

    ATTENTION_Q = "attention_q"
    ATTENTION_K = "attention_k"
    ATTENTION_V = "attention_v"
    ATTENTION_QKV = "attention_qkv"
    ATTENTION_O = "attention_o"
    FFN_GATE = "ffn_gate"
    FFN_UP = "ffn_up"
    FFN_GATE_UP = "ffn_gate_up"
    FFN_DOWN = "ffn_down"
    NORM = "norm"
    EMBEDDING = "embedding"
    OUTPUT_HEAD = "output_head"
    MOE_ROUTER = "moe_router"
    MOE_EXPERT = "moe_expert"
    SSM_IN = "ssm_in"
    SSM_OUT = "ssm_out"
    SSM_STATE = "ssm_state"
    SSM_GATE = "ssm_gate"
    SSM_CONV = "ssm_conv"
    VISION_ENCODER = "vision_encoder"
    PROJECTOR = "projector"
    UNKNOWN = "unknown"


ATTENTION_ROLES = frozenset(
    {Role.ATTENTION_Q, Role.ATTENTION_K, Role.ATTENTION_V, Role.ATTENTION_QKV, Role.ATTENTION_O}
)
FFN_ROLES = frozenset({Role.FFN_GATE, Role.FFN_UP, Role.FFN_GATE_UP, Role.FFN_DOWN})

# Roles whose linear layers go into the nested store. Each of them multiplies one row per token of the batch,
# which is what the plan's rows mean; routers, experts and vision layers see other rows and stay at 16 bits.
NESTABLE_ROLES = ATTENTION_ROLES | FFN_ROLES | {Role.OUTPUT_HEAD, Role.SSM_IN, Role.SSM_OUT}

FULL_BITS = 16
ACTIVATION_GEARS = (8, FULL_BITS)
# Roles whose inputs keep 16 bits. 8 bits at the output head alone cost a quarter of what they cost at all sites
# together (docs/quality.md), and gain nothing: of a prompt the head sees one row.
KEEPS_ACTIVATIONS = frozenset({Role.OUTPUT_HEAD})
# Nats per token that 8-bit activations may cost by the measured sensitivities; a perplexity grows by about that share.
ACTIVATION_LOSS = 1e-3
# The same of sites that multiply long prompts in a GPU's own format. They are those that looked best on the few tokens
# of the calibration text: on other text up to 1.5 times as much was measured (docs/quality.md).
NATIVE_LOSS = ACTIVATION_LOSS / 2
# Roles that multiply a token by no matrix: vectors, a row that is looked up, a state. Averages in bits leave them out.
_NO_MATRIX = frozenset({Role.NORM, Role.EMBEDDING, Role.SSM_STATE})
KV_BITS = (2, 4, 8, FULL_BITS)  # precisions of the KV cache
STATE_BITS = (8, 10, 16, 32)  # of recurrent states (`qbe.format.state_rows`)
STATE_FULL_BITS = 32  # as the model's own code keeps them
TURBO = 64  # added to 2 or 4: that many bits, keys in TurboQuant's form (`qbe.format.kv_blocks`)
TURBO_KINDS = {"turbo2": TURBO | 2, "turbo4": TURBO | 4}  # name in budgets -> what stands for it among KV bits
KVBits = int | tuple[int, ...]  # of a layer: one for all of its key heads, or one for each


def kv_number_bits(kind: int) -> int:
    """Bits of a number, for KV bits that may have `TURBO` added."""
    return kind % TURBO


@dataclass(frozen=True)
class Site:
    """One place where precision can be set.

    Attributes:
        name: dotted path of the module or parameter, e.g. `model.layers.3.mlp.down_proj`.
        role: what it does.
        layer: index of the decoder layer it belongs to; None outside the layers.
        shape: of its weight, `(out_features, in_features)` for a linear layer.
        is_linear: whether it is an `nn.Linear`; only those can be nested.
        gears: weight precisions it can run at, ascending; `(16,)` when it is not in the nested store.
        bytes_at: gear -> bytes read from memory to use this site for one token (scales included); of one expert's
            matrix for a token that uses the expert.
        sensitivity: gear -> KL divergence (nats per token) of the logits when this site alone runs at that gear;
            empty when not measured. Of an expert it is a mean over all tokens, those included that do not use it.
        activation_sensitivity: the same for the precision of its inputs, at 16-bit weights.
        native_sensitivity: format -> the same when this site alone is multiplied in that 8-bit format, inputs and
            weight with a scale per row, as a GPU that has it can do with a long prompt (`SiteTable.native`).
        use: share of the tokens that read it: of experts as counted, or k of E where nobody counted; 0 for what runs
            once for an image or a sound.
        expert: index of the expert that it is a matrix of; None for every other site, and for experts that are not
            nested, whose matrices are one site together.
        state_floor: of a recurrent state, the fewest bits that it may have (`qbe.store.drift_curve`); None where that
            was not profiled.
    """

    name: str
    role: Role
    layer: int | None
    shape: tuple[int, ...]
    is_linear: bool = False
    gears: tuple[int, ...] = (FULL_BITS,)
    bytes_at: Mapping[int, int] = field(default_factory=dict)
    sensitivity: Mapping[int, float] = field(default_factory=dict)
    activation_sensitivity: Mapping[int, float] = field(default_factory=dict)
    native_sensitivity: Mapping[str, float] = field(default_factory=dict)
    use: float = 1.0
    expert: int | None = None
    state_floor: int | None = None

    @property
    def parameters(self) -> int:
        """Number of weights."""
        n = 1
        for d in self.shape:
            n *= d
        return n

    @property
    def read_weights(self) -> float:
        """Weights that a token is multiplied by here, mean over the tokens: what an average in bits is over."""
        return 0.0 if self.role in _NO_MATRIX or len(self.shape) < 2 else self.parameters * self.use

    @property
    def nested(self) -> bool:
        """Whether the weight is in the nested store, so that its precision can be chosen."""
        return self.gears[0] < FULL_BITS

    @property
    def activation_gears(self) -> tuple[int, ...]:
        """Precisions that its inputs can have, ascending."""
        return ACTIVATION_GEARS if self.nested and self.role not in KEEPS_ACTIVATIONS else (FULL_BITS,)


@dataclass(frozen=True)
class KVSite:
    """One key head of one layer: a place where the precision of the KV cache can be set.

    Attributes:
        layer: index of the decoder layer.
        head: of its key heads.
        query_heads: how many of the layer's query heads read it.
        numbers: that it stores for a token, keys and values.
        sensitivity: bits -> KL divergence (nats per token) of the logits when the full pages of this head alone have
            these bits; empty when not measured.
        entropy: of its attention weights over the most that there can be, the logarithm of the tokens seen: 0 for a
            head that looks at one token, 1 for one that looks at all alike. Mean over calibration tokens and query
            heads, and standard deviation of that of one token; None when not measured.
    """

    layer: int
    head: int
    query_heads: int
    numbers: int
    sensitivity: Mapping[int, float] = field(default_factory=dict)
    entropy: tuple[float, float] | None = None


@dataclass(frozen=True)
class TextDifficulty:
    """How hard each token of a text is to predict for a model, in the text's order.

    Attributes:
        entropies: of the tokens' distributions, nats.
        margins: by how much the likeliest token's logit exceeds the next one's.
    """

    entropies: tuple[float, ...]
    margins: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class SiteTable:
    """Every site of a model in module order; immutable, equal only to itself.

    `difficult_entropy` is the entropy of a token's distribution, nats, above which requests with 8-bit activations read
    the token with 16; None when it was not measured.

    The position of a site among the nested ones is its row in the plan and its place in a blueprint.

    Attributes:
        kv: by layer and head; empty as long as nobody has run the model.
        context: the most tokens of a sequence, None where the model names none or nobody has run it.
        text: how hard the built-in text is to predict; None when it was not measured.
    """

    sites: tuple[Site, ...]
    model_name: str = ""
    layers: int = 0
    kv: tuple[KVSite, ...] = ()
    difficult_entropy: float | None = None
    context: int | None = None
    text: TextDifficulty | None = None

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    @cached_property
    def nested(self) -> tuple[Site, ...]:
        """The sites whose precision can change, in plan order."""
        return tuple(s for s in self.sites if s.nested)

    @cached_property
    def unknown(self) -> tuple[Site, ...]:
        """Sites the tagger could not name; they run at 16 bits."""
        return tuple(s for s in self.sites if s.role is Role.UNKNOWN)

    @cached_property
    def nested_parameters(self) -> int:
        """Weights in the nested store."""
        return sum(s.parameters for s in self.nested)

    @cached_property
    def reads(self) -> TokenReads:
        """What a token reads of the weights: over these a budget in average bits is counted."""
        return TokenReads.of(self.sites, FULL_BITS)

    @cached_property
    def measured(self) -> bool:
        """Whether every nested site has a measured sensitivity."""
        return bool(self.nested) and all(s.sensitivity for s in self.nested)

    @cached_property
    def kv_numbers(self) -> int:
        """Numbers that the KV cache holds for a token."""
        return sum(s.numbers for s in self.kv)

    @cached_property
    def kv_measured(self) -> bool:
        """Whether every key head has a measured sensitivity."""
        return bool(self.kv) and all(s.sensitivity for s in self.kv)

    @cached_property
    def digest(self) -> str:
        """32 hex digits that change with the model's sites, their store and what was measured of them.

        Measurements count with six digits, which is what their file keeps. Those of native products do not: no
        blueprint depends on them.
        """

        def rounded(measured: Mapping[int, float]) -> list[str]:
            return [f"{gear}: {kl:.6g}" for gear, kl in sorted(measured.items())]

        sites = [
            (s.name, s.role, s.layer, s.shape, s.gears, sorted(s.bytes_at.items()), rounded(s.sensitivity),
             rounded(s.activation_sensitivity))
            for s in self
        ]  # fmt: skip
        return hashlib.blake2b(repr((self.layers, sites)).encode(), digest_size=16).hexdigest()

    def gears(self) -> tuple[int, ...]:
        """Precisions available at every nested site, ascending."""
        return self._gears

    @cached_property
    def _gears(self) -> tuple[int, ...]:  # policies ask for every query
        common: set[int] | None = None
        for s in self.nested:
            common = set(s.gears) if common is None else common & set(s.gears)
        return tuple(sorted(common or {FULL_BITS}))

    def activations(self, bits: int) -> tuple[int, ...]:
        """For every nested site an activation gear that is not below `bits` (8 or 16).

        It is the lowest one, but for the fewest sites that must keep 16 bits so that the measured divergences of the
        others add up to `ACTIVATION_LOSS` at most.
        """
        gears = [min(g for g in s.activation_gears if g >= bits) for s in self.nested]
        losses = [s.activation_sensitivity.get(g, 0.0) for s, g in zip(self.nested, gears, strict=True)]
        total = sum(losses)
        for i in sorted(range(len(gears)), key=lambda i: -losses[i]):
            if total <= ACTIVATION_LOSS:
                break
            gears[i], total = FULL_BITS, total - losses[i]
        return tuple(gears)

    def native(self, form: str | None, able: Sequence[bool] | None = None) -> tuple[bool, ...]:
        """For every nested site whether long prompts with 8-bit activations are multiplied in this format there.

        Sites are taken by divergence per weight as long as the measured divergences add up to `NATIVE_LOSS` at most. A
        site that was not measured is not among them, and none is without a format.

        Args:
            form: a format of `Site.native_sensitivity`, or None.
            able: for every nested site whether its weight can be multiplied so; None: all can.
        """
        gears = self.activations(min(ACTIVATION_GEARS))
        costs = [
            s.native_sensitivity.get(form, math.inf) if form and can and gear < FULL_BITS else math.inf
            for s, gear, can in zip(self.nested, gears, able or [True] * len(gears), strict=True)
        ]
        taken, total = [False] * len(costs), 0.0
        for i in sorted(range(len(costs)), key=lambda i: costs[i] / self.nested[i].parameters):
            if total + costs[i] <= NATIVE_LOSS:
                taken[i], total = True, total + costs[i]
        return tuple(taken)

    def with_sensitivity(
        self,
        measured: Mapping[str, Mapping[int, float]],
        activations: Mapping[str, Mapping[int, float]] = MappingProxyType({}),
        native: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
    ) -> SiteTable:
        """A copy whose sites carry `measured[site name][gear]`, and the same of activations and of native products."""
        sites = []
        for site in self.sites:
            if site.name in measured:
                site = replace(site, sensitivity=dict(measured[site.name]))
            if site.name in activations:
                site = replace(site, activation_sensitivity=dict(activations[site.name]))
            if site.name in native:
                site = replace(site, native_sensitivity=dict(native[site.name]))
            sites.append(site)
        return replace(self, sites=tuple(sites))

    @cached_property
    def states(self) -> tuple[Site, ...]:
        """The recurrent states, by layer."""
        return tuple(s for s in self.sites if s.role is Role.SSM_STATE and s.layer is not None)

    def with_kv(self, kv: Sequence[KVSite]) -> SiteTable:
        """A copy with these key heads."""
        return replace(self, kv=tuple(kv))
