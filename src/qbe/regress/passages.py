"""Text that comes with the package: passages whose likelihoods are compared, and what needles are hidden in.

It is not what stores are calibrated on (`qbe.store`), so that no candidate has been fitted to it.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def prose() -> str:
    """All of it; its paragraphs have an empty line between them."""
    return files(__package__).joinpath("suites", "prose.txt").read_text(encoding="utf-8").strip()


def passages(count: int) -> list[str]:
    """So many paragraphs, or all that there are."""
    return prose().split("\n\n")[:count]


def long_passage(characters: int) -> str:
    """So many characters, cut between words; the text begins again where it ends."""
    text = prose()
    whole = "\n\n".join([text] * (1 + characters // len(text)))
    return whole[: whole.rfind(" ", 0, characters + 1)] if len(whole) > characters else whole
