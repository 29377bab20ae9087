"""What the console says beside requests: who asks, what that key may use at which price, and what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from qbe.server.health.syndromes import LADDER
from qbe.server.keys import Client
from qbe.server.settings import TIER_NAMES, Settings, TierName

if TYPE_CHECKING:
    from qbe.server.observe.observer import Observer


def overview(
    client: Client, settings: Settings, observer: Observer, works: bool, brownout: Callable[[TierName], float]
) -> dict[str, Any]:  # fmt: skip
    """All of it, with what ran and runs, for one client.

    Args:
        works: whether the ledger can be written.
        brownout: how far a tier has sunk to its floor, 0 to 1.
    """
    sunk: dict[str, float] = {tier: brownout(tier) for tier in TIER_NAMES}
    wrong = [
        *warnings(works, observer.settings_refused, sunk, observer.live.refusals()),
        *(
            f"Answers got worse ({cause}), so {LADDER[action].what}."
            for action, cause in observer.health.ladder.taken.items()
        ),
        *_rollout(observer.rollout.describe()),
    ]
    return {
        "brownout": max(sunk.values()), "currency": settings.prices.currency, "energy": observer.energy,
        "key": about(client, settings), "warnings": wrong if client.oversees else [],
        **observer.live.describe(client),
    }  # fmt: skip


def _rollout(found: Mapping[str, Any] | None) -> list[str]:
    """How the canary stands, in a sentence, where somebody should look at it."""
    if found is None:
        return []
    step = f"step {found['step'] + 1} of {len(found['steps'])}, {found['weight']:g} %"
    said = {
        "aborted": f"The candidate was aborted and gets no requests: {found['cause']}.",
        "inconclusive": f"The candidate stays at {step}, because its answers do not show yet whether it is good.",
        "paused": f"The rollout is paused at {step}.",
        "successful": "The candidate answers everything: move it into the settings, and take [rollout] out.",
    }
    return [said[found["phase"]]] if found["phase"] in said else []


def about(client: Client, settings: Settings) -> dict[str, Any]:
    """A client's key: its name, whether it sees others, and its tiers with their bits and prices.

    Prices are per million tokens at 16 bits, with the tier's factor; at b bits b/16 of that is charged.
    """
    prices, tiers = settings.prices, {name: getattr(settings.tiers, name) for name in client.tiers}
    return {
        "name": None if client.key is None else client.name, "operator": client.oversees,
        "tiers": {
            name: {"bits": tier.bits, "ceiling": tier.ceiling, "input": prices.input * tier.price,
                   "cached_input": prices.cached_input * tier.price, "output": prices.output * tier.price}
            for name, tier in tiers.items()
        },
    }  # fmt: skip


def warnings(
    works: bool, settings_refused: str | None, brownout: Mapping[str, float], refusals: Mapping[str, int]
) -> list[str]:  # fmt: skip
    """What whoever runs the server should know now, a sentence each.

    Args:
        works: whether the ledger can be written.
        settings_refused: why the settings file as it is now is not in use.
        brownout: how far each tier has sunk to its floor, 0 to 1.
        refusals: requests of the last five minutes that got an error, by its code.
    """
    sentences = []
    if not works:
        sentences.append("The ledger cannot be written, so nothing is served.")
    if settings_refused is not None:
        sentences.append(f"Older settings are in use, because the file is wrong: {settings_refused}")
    sunk = [f"{tier} {part:.0%}" for tier, part in brownout.items() if part > 0]
    if sunk:
        sentences.append(f"Too much waits, so tiers read fewer bits. On the way to their floors: {', '.join(sunk)}.")
    if refusals:
        count, by_code = sum(refusals.values()), ", ".join(f"{n} {code}" for code, n in refusals.items())
        sentences.append(f"{count} request{'s were' if count > 1 else ' was'} refused within five minutes: {by_code}.")
    return sentences
