"""How often each expert is used: counted on a text, kept beside the store, and what sensitivities make of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from qbe.errors import QBEError
from qbe.progress import bar
from qbe.sites import SiteTable
from qbe.store.experts import ExpertLayer, expert_layers, watched
from qbe.store.provenance import write_beside

NAME = "expert_use.json"
PRIOR = 8.0  # tokens for which the mean of a layer's experts stands in what is estimated of one of them

Numbers = npt.NDArray[np.float64]
Way = TypeVar("Way")  # of lowering a site

if TYPE_CHECKING:
    from qbe.store.sensitivity import Sensitivity


@dataclass
class ExpertUse:
    """Counts of a text.

    Attributes:
        tokens: of the text.
        chosen: layer's module of experts -> for each expert how many of the tokens used it.
    """

    tokens: int = 0
    chosen: dict[str, Numbers] = field(default_factory=dict)

    def shares(self, layer: str) -> Numbers:
        """For each expert of a layer the share of tokens that use it; none is 0, as another text may use it."""
        counts = self.chosen[layer]
        even = counts.sum() / max(1, self.tokens) / len(counts)
        return np.minimum(1.0, (counts + even) / (self.tokens + 1))

    def __add__(self, other: ExpertUse) -> ExpertUse:
        """Of both texts, layer by layer of this one."""
        chosen = {layer: counts + other.chosen.get(layer, 0.0) for layer, counts in self.chosen.items()}
        return ExpertUse(self.tokens + other.tokens, chosen)


@contextmanager
def counting(model: nn.Module) -> Iterator[ExpertUse]:
    """Inside, every token that goes through the model is counted."""
    layers, use = expert_layers(model), ExpertUse()
    use.chosen = {layer.name: np.zeros(layer.count) for layer in layers}
    tokens = dict.fromkeys(use.chosen, 0)

    def see(layer: ExpertLayer, ids: torch.Tensor) -> None:
        known = ids[(ids >= 0) & (ids < layer.count)]
        use.chosen[layer.name] += torch.bincount(known.flatten(), minlength=layer.count).cpu().numpy()
        tokens[layer.name] += _tokens(layer, ids)
        use.tokens = max(tokens.values())

    with watched(layers, see):
        yield use


def _tokens(layer: ExpertLayer, ids: torch.Tensor) -> int:
    """Llama 4 gives every token to every expert."""
    return len(ids) // (1 if hasattr(layer.module, "has_gate") else layer.count)


@torch.inference_mode()
def count(model: nn.Module, tokens: torch.Tensor, *, progress: bool = False) -> ExpertUse:
    """Counts int64 [windows, tokens]; nothing where the model has no experts that can be nested."""
    if not expert_layers(model):
        return ExpertUse()
    device = next(model.parameters()).device
    with counting(model) as use, bar("counting experts", len(tokens), progress) as step:
        for window in tokens:
            model(input_ids=window[None].to(device), use_cache=False)
            step()
    return use


def with_use(table: SiteTable, use: ExpertUse | None) -> SiteTable:
    """The table whose experts have these shares."""
    if use is None or not use.tokens:
        return table
    shares = {layer: use.shares(layer).tolist() for layer in use.chosen}
    sites = []
    for site in table:
        of_layer = None if site.expert is None else shares.get(site.name.rsplit(".", 2)[0])
        if of_layer is not None and site.expert is not None and site.expert < len(of_layer):
            site = replace(site, use=of_layer[site.expert])
        sites.append(site)
    return replace(table, sites=tuple(sites))


def stored_use(table: SiteTable) -> dict[str, Numbers]:
    """Layer's module of experts -> the table's share of the tokens that use each; of nested experts only."""
    shares: dict[str, dict[int, float]] = {}
    for site in table.nested:
        if site.expert is not None:
            shares.setdefault(site.name.rsplit(".", 2)[0], {})[site.expert] = site.use
    return {layer: np.array([of[e] for e in sorted(of)]) for layer, of in shares.items()}


def moved(use: ExpertUse, before: Mapping[str, Numbers]) -> float:
    """Share of the choices that are other experts' than before: half the summed differences of the distributions over a
    layer's experts, mean over layers.

    Args:
        before: as `stored_use` has it.
    """
    pairs = [(use.shares(layer), before[layer]) for layer in use.chosen]
    return float(np.mean([np.abs(now / now.sum() - then / then.sum()).sum() / 2 for now, then in pairs]))


def top_tenth(use: ExpertUse) -> float:
    """Share of the choices that go to the tenth of a layer's experts used most, one at least; mean over layers."""
    ordered = [np.sort(counts)[::-1] for counts in use.chosen.values()]
    return float(np.mean([o[: max(1, len(o) // 10)].sum() / max(1.0, o.sum()) for o in ordered]))


def shrunk(damage: Numbers, counts: Numbers, tokens: int, shares: Numbers) -> Numbers:
    """What is to be expected of lowering each expert, from what a short text showed.

    An expert that few of its tokens used is known little of: what lowering it does to a token that uses it is drawn to
    the mean of its layer. That, times how often it is used on the longer text, is its sensitivity.

    Args:
        damage: float64 [experts], mean over all tokens of the short text. counts: how many of them used each.
        tokens: of the short text. shares: `ExpertUse.shares` of the longer one.
    """
    mean = damage.sum() * tokens / max(1.0, counts.sum())
    return (damage * tokens + PRIOR * mean) / (counts + PRIOR) * shares


def scaled(measured: Sensitivity, before: ExpertUse, now: ExpertUse) -> Sensitivity:
    """Sensitivities of experts, which are means over all tokens, when other shares of the tokens use them.

    What lowering an expert does to a token that uses it stays.

    Args:
        before: as it was when they were measured.
    """
    ratio = {
        f"{layer}.{e}": share
        for layer in before.chosen
        for e, share in enumerate(now.shares(layer) / before.shares(layer))
    }

    def of(table: dict[str, dict[Way, float]]) -> dict[str, dict[Way, float]]:
        found = {}
        for name, damages in table.items():
            parameter, _, expert = name.rpartition(".")  # LAYER.PARAMETER.EXPERT
            times = ratio.get(f"{parameter.rpartition('.')[0]}.{expert}", 1.0)
            found[name] = {way: damage * times for way, damage in damages.items()}
        return found

    return replace(
        measured, weights=of(measured.weights), activations=of(measured.activations), native=of(measured.native)
    )


def write(
    folder: Path, use: ExpertUse, about: Mapping[str, Any], served: ExpertUse | None = None
) -> None:  # fmt: skip
    """Writes the counts beside the store, atomically; nothing without experts. Raises QBEError if the disk refuses.

    Args:
        use: of the text on which sensitivities were estimated.
        served: of what was served since.
    """
    if use.chosen:
        tables = {"about": dict(about), **_described(use)}
        if served is not None:
            tables["served"] = _described(served)
        write_beside(folder, NAME, json.dumps(tables) + "\n")


def _described(use: ExpertUse) -> dict[str, Any]:
    chosen = {layer: [round(float(c), 3) for c in counts] for layer, counts in use.chosen.items()}
    return {"tokens": use.tokens, "chosen": chosen}


def read(folder: Path) -> ExpertUse | None:
    """The counts of the text that `write` wrote; None when nothing was.

    Raises:
        QBEError: the file is damaged.
    """
    found = _read(folder)
    return None if found is None else found[0]


def read_served(folder: Path) -> ExpertUse | None:
    """The same of what was served, as far as it was taken over."""
    found = _read(folder)
    return None if found is None else found[1]


def about(folder: Path) -> dict[str, Any]:
    """What the counts are of, as `write` was given it. The file is there and whole."""
    told: dict[str, Any] = json.loads((folder / NAME).read_text()).get("about", {})
    return told


def _read(folder: Path) -> tuple[ExpertUse, ExpertUse | None] | None:
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text())
        use = _counts(raw)
        served = _counts(raw["served"]) if "served" in raw else None
        if served is not None and {n: len(c) for n, c in served.chosen.items()} != {
            n: len(c) for n, c in use.chosen.items()
        }:
            raise ValueError("what was served has other experts")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise QBEError(f"{path} is damaged ({error!r}); quantise the model again") from error
    return use, served


def _counts(raw: Mapping[str, Any]) -> ExpertUse:
    use = ExpertUse(int(raw["tokens"]), {str(n): np.array(c, np.float64) for n, c in raw["chosen"].items()})
    if use.tokens < 1 or not all(c.ndim == 1 and len(c) and np.isfinite(c).all() and (c >= 0).all()
                                 for c in use.chosen.values()):  # fmt: skip
        raise ValueError("a count is no number of at least 0")
    return use
