"""The heat map of a blueprint as data: rows are roles, columns are decoder layers. Both renderers draw this."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from qbe.blueprint import Blueprint
from qbe.explain.explanation import Explanation
from qbe.refresh.thresholds import EASY, HARD, moved
from qbe.sites import FULL_BITS, KVBits, KVSite, Role, Site, SiteTable, kv_number_bits

# In the order in which a token meets them.
LABELS: dict[Role, str] = {
    Role.ATTENTION_Q: "q",
    Role.ATTENTION_K: "k",
    Role.ATTENTION_V: "v",
    Role.ATTENTION_QKV: "qkv",
    Role.ATTENTION_O: "o",
    Role.SSM_IN: "ssm_in",
    Role.SSM_OUT: "ssm_out",
    Role.FFN_GATE: "gate",
    Role.FFN_UP: "up",
    Role.FFN_GATE_UP: "gate_up",
    Role.FFN_DOWN: "down",
    Role.OUTPUT_HEAD: "head",
}


@dataclass(frozen=True)
class HeatmapCell:
    """One or more sites of one role in one layer (or outside the layers).

    Attributes:
        sites: each site with its weight bits.
    """

    sites: tuple[tuple[Site, int], ...]

    @property
    def bits(self) -> float:
        """Mean bits over the weights of the cell."""
        return sum(s.parameters * b for s, b in self.sites) / max(1, sum(s.parameters for s, _ in self.sites))


@dataclass(frozen=True)
class KVCell:
    """The key heads of a layer.

    Attributes:
        heads: each with its KV bits.
    """

    heads: tuple[tuple[KVSite, int], ...]

    @property
    def bits(self) -> float:
        """Mean bits over the numbers of the layer's KV cache."""
        return sum(s.numbers * b for s, b in self.heads) / max(1, sum(s.numbers for s, _ in self.heads))


@dataclass(frozen=True)
class HeatMap:
    """A blueprint laid out by role and layer.

    Attributes:
        layers: number of decoder layers, the columns.
        rows: label -> one cell per layer; None where the layer has no such site.
        mean: one cell per layer over all its sites; None where the layer has no nested site.
        kv: one cell per layer of its KV cache; None where the layer has none. Empty when the key heads are not known.
        outside: label -> the cell of nested sites outside the layers, such as the output head.
        gears: precisions that occur in the model's store, ascending; the legend.
        fixed: role -> number of sites that always run at 16 bits.
    """

    layers: int
    rows: dict[str, tuple[HeatmapCell | None, ...]]
    mean: tuple[HeatmapCell | None, ...]
    kv: tuple[KVCell | None, ...]
    outside: dict[str, HeatmapCell]
    gears: tuple[int, ...]
    fixed: dict[str, int]

    @classmethod
    def of(cls, blueprint: Blueprint, table: SiteTable) -> HeatMap:
        """The heat map of a blueprint made for this table."""
        groups: dict[tuple[Role, int | None], list[tuple[Site, int]]] = defaultdict(list)
        by_layer: dict[int, list[tuple[Site, int]]] = defaultdict(list)
        for pair in zip(table.nested, blueprint.weight_bits, strict=True):
            site = pair[0]
            groups[site.role, site.layer].append(pair)
            if site.layer is not None:
                by_layer[site.layer].append(pair)
        kv: dict[int, list[tuple[KVSite, int]]] = defaultdict(list)
        for head in table.kv:
            kv[head.layer].append((head, blueprint.kv_bits_at(head.layer, head.head)))
        layers = max([table.layers, *(i + 1 for i in by_layer)])

        def line(role: Role) -> tuple[HeatmapCell | None, ...]:
            return tuple(_cell(groups.get((role, i), ())) for i in range(layers))

        roles = sorted({role for role, _ in groups}, key=lambda r: (_ORDER.get(r, len(_ORDER)), r))
        return cls(
            layers=layers,
            rows={label(r): line(r) for r in roles if any(cell for cell in line(r))},
            mean=tuple(_cell(by_layer.get(i, ())) for i in range(layers)),
            kv=tuple(KVCell(tuple(kv[i])) if i in kv else None for i in range(layers)) if kv else (),
            outside={label(r): HeatmapCell(tuple(groups[r, None])) for r in roles if (r, None) in groups},
            gears=tuple(sorted({g for s in table.nested for g in s.gears})),
            fixed=dict(Counter(str(s.role) for s in table if not s.nested)),
        )


_ORDER = {role: i for i, role in enumerate(LABELS)}


def label(role: Role) -> str:
    """The short name of a role."""
    return LABELS.get(role, str(role))


def bits_text(bits: float) -> str:
    """Bits for a cell, whole: sites of one cell that differ are shown by their rounded mean."""
    return str(round(bits))


def kv_note(e: Explanation) -> str:
    """Bits of the KV cache in a sentence: average, range, for which context, and by what they were chosen."""
    kinds = _kinds(e.blueprint.kv_bits)
    bits = [kv_number_bits(k) for k in kinds]
    note = f"KV cache {span(bits)} bits"
    if (error := e.blueprint.kv_error) is not None:
        low = set(bits) != {FULL_BITS}
        note += f", read at 16 where an error could exceed {error:.3g} of a head's output" if low else " in any case"
    if bits != kinds:
        return f"{note}, keys in TurboQuant's form"
    if len(set(bits)) > 1:
        note += f", {e.blueprint.average_kv_bits(e.table):.2f} on average"
    if e.blueprint.first_kv_bits is not None:
        note += f", {span([kv_number_bits(k) for k in _kinds(e.blueprint.kv_bits_of(0))])} in the first page"
    if e.context:
        note += f" for up to {e.context:,} tokens"
    return note if e.table.kv_measured or set(bits) == {FULL_BITS} else f"{note}, not measured: by plain rules"


def _kinds(kv_bits: Sequence[KVBits]) -> list[int]:
    """Of all layers and heads."""
    return [b for of_layer in kv_bits for b in (of_layer if isinstance(of_layer, tuple) else (of_layer,))]


def span(bits: Sequence[int]) -> str:
    """One word for a list of bits: `16`, or `4 to 16`."""
    if not bits:
        return "none"
    return str(min(bits)) if min(bits) == max(bits) else f"{min(bits)} to {max(bits)}"


def shares(bits: Sequence[int]) -> str:
    """A list of bits by how many have them: `16 bits`, or `8 bits at 210 sites and 16 at 1`."""
    if len(set(bits)) < 2:
        return f"{span(bits)} bits"
    (first, most), *rest = sorted(Counter(bits).items())
    return f"{first} bits at {most} sites and " + ", ".join(f"{b} at {n}" for b, n in rest)


def activations(e: Explanation) -> str:
    """Bits of the activations, which tokens have more, and where long prompts take the device's own format:
    `8 bits (16 for answer tokens of more than 2.1 nats), long prompts int8 at 75 sites, 44% of the weights`."""
    text, above = shares(e.blueprint.activation_bits), e.table.difficult_entropy
    if above is not None and e.budget.high_precision_tokens and e.blueprint.full_activations is not e.blueprint:
        text += f" (16 for answer tokens of more than {above:.1f} nats)"
    if e.prompt_format is None or e.blueprint.full_activations is e.blueprint:
        return text
    native = e.native_sites
    share = sum(s.parameters for s in native) / e.table.nested_parameters
    return f"{text}, long prompts {e.prompt_format} at {len(native)} sites, {share:.0%} of the weights"


def _refresh_note(e: Explanation) -> str | None:
    """When another blueprint would be chosen while the answer is written; None where nobody asked."""
    if not e.budget.refresh:
        return None
    if e.thresholds is None:
        return None  # refused, or left out
    up, down = (e.budget.average_for(moved(e.profile.score, kind), e.profile.least_bits) for kind in (HARD, EASY))
    t = e.thresholds
    return (
        f"refresh: after {e.pace.count * e.pace.interval} tokens above {t.hard_entropy:.2f} nats and below a margin of "
        f"{t.hard_margin:.1f} to {up:.2f} bits, below {t.easy_entropy:.2f} nats and above {t.easy_margin:.1f} to "
        f"{down:.2f}"
    )


def notes(e: Explanation) -> list[str]:
    """What moves the bits that are drawn, if anything does, and what recurrent states have."""
    return [note for note in (_routed_note(e), _refresh_note(e), _state_note(e)) if note]


def _state_note(e: Explanation) -> str | None:
    """Bits of recurrent states, and which floors raised them; None where all have 32."""
    states, asked = e.blueprint.state_bits, e.budget.state_bits
    if states is None:
        return None
    raised = [str(s.layer) for s in e.table.states if s.layer is not None and asked and states[s.layer] > asked]
    above = f": those of layers {', '.join(raised)} at their floors" if raised else ""
    return f"recurrent states {span(states)} bits{above}"


def _routed_note(e: Explanation) -> str | None:
    """That tokens choose for themselves; None where the blueprint does."""
    if e.blueprint.dynamic_precision is None or e.blueprint.dynamic_precision.by != "routers":
        return None
    return "every token chooses bits of its own as it is read: drawn is the best fixed assignment at their average"


def size(n: float) -> str:
    """Bytes for people, decimal units: `98.2 MB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 999.5 or unit == "TB":
            break
        n /= 1000
    return f"{n:.0f} {unit}" if unit == "B" or n >= 99.95 else f"{n:.3g} {unit}"


def number(value: float) -> str:
    """A feature's value in a few characters: whole numbers whole, others with three digits."""
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.3g}"


def _cell(sites: Sequence[tuple[Site, int]]) -> HeatmapCell | None:
    return HeatmapCell(tuple(sites)) if sites else None
