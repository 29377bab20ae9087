"""What the attention of a layer says of the layers after it: learned for one model (`qbe train cascade`), and its file.

The entropy of a layer's attention, over the most there can be, is compared with quantiles of what was seen. How many
tokens go up and how many down follows from the level of their steering: level 0 sends none up, level 255 none down, so
that the two can be balanced for any blueprint.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qbe.blueprint import Steering
from qbe.errors import QBEError
from qbe.files import make_folder, write_text
from qbe.sites import FULL_BITS, Site, SiteTable

FORMAT = 1
NAME = "cascade.json"
TOP = 255  # the highest level


@dataclass(frozen=True)
class Point:
    """A layer after whose attention the cascade acts.

    Attributes:
        layer: whose attention is looked at; the layers above it are moved.
        sign: 1 where high entropy asks for more bits, -1 where low entropy does.
        quantiles: of the entropy, evenly spaced from the least to the highest that was seen; 0 to 1, as in
            `qbe.sites.KVSite.entropy`, the mean of all heads.
    """

    layer: int
    sign: int
    quantiles: tuple[float, ...]

    def __post_init__(self) -> None:
        if not (isinstance(self.layer, int) and self.layer >= 0 and self.sign in (1, -1)):
            raise ValueError("a point is a layer and a sign")
        if len(self.quantiles) < 2 or not all(isinstance(q, int | float) and math.isfinite(q) for q in self.quantiles):
            raise ValueError("quantiles are two numbers or more")

    def quantile(self, part: float) -> float:
        """Of sign times entropy: what so large a part of all tokens lies below."""
        values = sorted(self.sign * q for q in self.quantiles)
        return float(np.interp(part, np.linspace(0, 1, len(values)), values))


@dataclass(frozen=True)
class CascadeTable:
    """Of one model.

    Attributes:
        points: by layer, ascending.
        share: of the tokens that a point moves, up and down together.
        most: changes in a pass; 0 watches and moves nothing.
        about: how it was learned and what it reached on held-out answers.
    """

    points: tuple[Point, ...]
    share: float
    most: int
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.points and isinstance(self.share, int | float) and 0 < self.share <= 1):
            raise ValueError("there are points, and each moves a share of the tokens")
        if not (isinstance(self.most, int) and self.most >= 0):
            raise ValueError("the changes in a pass are a whole number")

    def thresholds(self, point: Point, level: int) -> tuple[float, float]:
        """Sign times entropy below which a token goes down, and above which it goes up."""
        up, down = self.share * level / TOP, self.share * (1 - level / TOP)
        return point.quantile(down) if down else -math.inf, point.quantile(1 - up) if up else math.inf

    def level(self, up: float, down: float, excess: float, tokens: int) -> int:
        """The level at which rises and falls balance, and a surplus is made up for.

        Args:
            up, down: bits of the average that a token gains and loses at all points together, going up or down.
            excess: bits that the tokens so far had more than their blueprints say, summed.
            tokens: in which that shall be made up for.
        """
        if up + down <= 0:
            return 0
        level = TOP * (down - excess / (tokens * self.share)) / (up + down)
        return round(min(TOP, max(0.0, level)) / 5) * 5  # few levels are few columns of the plan


def step(site: Site, bits: int, up: bool) -> int:
    """The next gear of a site, up or down; nothing moves from or to 16 bits, which is another copy of the weight."""
    gears = [g for g in site.gears if g < FULL_BITS]
    if bits not in gears:
        return bits
    at = gears.index(bits) + (1 if up else -1)
    return gears[at] if 0 <= at < len(gears) else bits


def balanced(table: CascadeTable, sites: SiteTable, bits: Sequence[int]) -> tuple[float, float]:
    """Bits of the average that a token gains by going up, and loses by going down, at all points together."""
    found = []
    for up in (True, False):
        change = sum(
            s.parameters * abs(step(s, b, up) - b) * sum(p.layer < _layer(s) for p in table.points)
            for s, b in zip(sites.nested, bits, strict=True)
        )
        found.append(change / max(1, sites.nested_parameters))
    return found[0], found[1]


def steering(
    table: CascadeTable, sites: SiteTable, bits: Sequence[int], excess: float = 0.0, tokens: int = 64
) -> Steering:
    """For a row that begins with these weight bits. Args: as those of `CascadeTable.level`."""
    return Steering("cascade", table.level(*balanced(table, sites, bits), excess, tokens))


def _layer(site: Site) -> int:
    return -1 if site.layer is None else site.layer


def key_of(sites: SiteTable) -> str:
    """What a table fits: the model's nested sites, their gears and their measured sensitivities."""
    facts = [(s.name, s.layer, s.shape, s.gears, [f"{g}: {k:.6g}" for g, k in sorted(s.sensitivity.items())])
             for s in sites.nested]  # fmt: skip
    return hashlib.blake2b(repr((FORMAT, sites.layers, facts)).encode(), digest_size=16).hexdigest()


def path_of(sites: SiteTable) -> Path:
    """Where the table of a model is kept in the user's cache."""
    from qbe.models import cache_dir

    name = sites.model_name
    called = f"{Path(name).name}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"
    return cache_dir() / "learned" / f"cascade-{called}.json"


def save(table: CascadeTable, sites: SiteTable, path: Path | None = None) -> Path:
    """Writes it; returns where. Raises QBEError when the disk refuses."""
    path = path_of(sites) if path is None else path
    make_folder(path.parent)
    described = {"key": key_of(sites), **asdict(table)}
    write_text(path, json.dumps(described, indent=1, sort_keys=True, allow_nan=False) + "\n")
    return path


def load(sites: SiteTable) -> CascadeTable | None:
    """The user's table of a model, else the one that came with the package; None where neither fits its store.

    Raises:
        QBEError: the user's file is damaged.
    """
    from qbe.store.known import MEASURED

    for path in (path_of(sites), *sorted(MEASURED.glob(f"*/{NAME}"))):
        try:
            found = json.loads(path.read_text("utf-8"))
            if found.pop("key") == key_of(sites):
                points = tuple(Point(p["layer"], p["sign"], tuple(p["quantiles"])) for p in found.pop("points"))
                if max(p.layer for p in points) >= sites.layers:
                    raise ValueError("a point lies behind the last layer")
                return CascadeTable(points, **found)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise QBEError(
                f"{path} is damaged ({type(error).__name__}): delete it, or run 'qbe train cascade' again"
            ) from None
    return None
