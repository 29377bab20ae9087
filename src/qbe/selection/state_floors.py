"""Floors of recurrent states: the fewest bits that each layer's may have, as `qbe quantize` found them.

A request asks for one number of state bits. A layer whose floor is higher keeps its floor; where every layer's is, the
request cannot be met.
"""

from __future__ import annotations

from collections.abc import Sequence

from qbe.sites import STATE_BITS, SiteTable


def above_floors(table: SiteTable, state_bits: Sequence[int]) -> tuple[int, ...]:
    """State bits of every layer, raised to the floor of its state where they are below it."""
    floors = [STATE_BITS[0]] * len(state_bits)
    for site in table.states:
        if site.layer is not None and site.layer < len(floors):
            floors[site.layer] = max(floors[site.layer], site.state_floor or STATE_BITS[0])
    return tuple(map(max, state_bits, floors))


def below_floors(table: SiteTable, state_bits: int) -> str:
    """Why no state of the model may have so few bits; after a semicolon what to do instead. Empty where one may."""
    floors = [(site.state_floor or STATE_BITS[0], site.layer) for site in table.states]
    lowest, layer = min(floors, default=(STATE_BITS[0], 0))
    if state_bits >= lowest:
        return ""
    return (
        f"{state_bits} bits are below the floor of every layer's recurrent state, the lowest of which is layer "
        f"{layer}'s with {lowest} bits (measured by 'qbe quantize'); ask for {lowest} or more, or leave it out"
    )
